"""`rollout`: how the policy is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class SamplingConfig(Section):
    """The distribution that tokens are drawn from. Log-probabilities are always of this distribution."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits, in the sampler and in every log-probability of the trainer. 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: NonNegative = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: Fraction = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    max_response_length: Positive = 512
    """Most new tokens of a response."""
    stop: list[str] = Field(default_factory=list[str])
    """Strings that end a response; the matched text stays in it."""
    stop_token_ids: list[int] = Field(default_factory=list[int])
    """Token ids that end a response, beside the model's own end-of-sequence ids."""


class EvalSamplingConfig(SamplingConfig):
    """Sampling of evaluation: greedy unless you say otherwise."""

    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 takes the likeliest token."""


class EmbeddedConfig(Section):
    """The engine that samples from the trainer's own modules: one process, no second copy of the weights."""

    type: Literal["embedded"]


class VllmConfig(Section):
    """vLLM in processes of its own, with its own copy of the weights. Needs `placement: {type: ray}`."""

    type: Literal["vllm"] = "vllm"
    tensor_parallel_size: Positive = 1
    """GPUs of one replica. As many replicas are started as the pool's GPUs allow."""
    max_num_seqs: NonNegative = 0
    """Rows that one replica decodes together; 0 takes `rollout.max_concurrent_rows`, shared over the replicas."""
    max_num_batched_tokens: NonNegative = 0
    """Tokens that one step computes at most, prompts included; 0 leaves it to vLLM."""
    kv_cache_memory_bytes: NonNegative = 0
    """Bytes of KV cache on each GPU; 0 computes it from what training was seen to take."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM's own way to size the cache, as a share of the GPU, for those who insist; blind to the trainer."""
    memory_reserve_bytes: NonNegative = 2 * 2**30
    """Bytes of each GPU that nobody gets."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Give memory back while the trainer works. `auto`: only when both do not fit at the same time."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, samples slower."""
    compile: bool = False
    """Let vLLM compile the model with torch.compile. The start took 24 s longer for a model of 0.5B on an H200, and
    decoding through CUDA graphs, which are on either way, was no faster."""
    per_request_seeds: bool = True
    """A random stream for each row, so that a run can be repeated. Costs vLLM a small kernel per row and token."""
    bucket_bytes: Positive = 1 << 29
    """Size of the buckets in which weights are synced: a sync takes one of each side, and one more for the proof."""
    probe_every: NonNegative = 20
    """Every so many syncs, compare log-probabilities of a few rows between engine and trainer; 0 only at the start."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean |difference| of log-probabilities that passes; left out: 0.001 in float32, 0.05 in bfloat16."""
    engine_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """More of vLLM's own `AsyncEngineArgs`, passed on as they are."""


EngineConfig = Annotated[EmbeddedConfig | VllmConfig, Field(discriminator="type")]


class RolloutConfig(Section):
    """The sampling engine and the program that drives it."""

    engine: Literal["auto"] | EngineConfig = "auto"
    """`auto` is `embedded` in one process and `vllm` under Ray."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    max_concurrent_rows: Positive = 64
    """How many rows decode together; waiting rows take the place of those that stop."""
    max_staleness: NonNegative = 0
    """How many steps sampling may run ahead of training, on GPUs of its own; no trained token is older than so many
    updates. 0: they take turns, and every token is the current policy's."""
    program: str = "single_turn"
    """`single_turn`, or your own async function as `package.module:function` or `file.py:function`."""
    program_params: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the program."""
