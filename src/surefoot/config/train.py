"""`train`: batch words, optimizer, memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW with float32 master weights, and its schedule. Shared by actor and critic, but for the learning rate."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of the actor."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's two decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over all updates of the run."""
    warmup_steps: NonNegative = 0
    """Updates over which the rate rises from 0."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip the gradient's global norm to this."""


class TrainConfig(Section):
    """One step: `prompts_per_step` x `samples_per_prompt` rollouts, then `updates_per_step` optimizer updates."""

    steps: Positive
    """How many steps the run has."""
    prompts_per_step: Positive = 8
    """Prompts a step (verl: `train_batch_size`)."""
    samples_per_prompt: Positive = 8
    """Rollouts of each prompt, the group of GRPO (verl: `rollout.n`)."""
    updates_per_step: Positive = 1
    """Minibatches: the step's rollouts are split by prompt into so many updates (verl: by `ppo_mini_batch_size`)."""
    passes_per_step: Positive = 1
    """How many times the actor sees the step's rollouts (verl: `ppo_epochs`)."""
    max_tokens_per_microbatch: Positive = 16384
    """Most tokens in one forward and backward pass on one GPU: the one memory knob. It never changes the result."""
    share_prefixes: bool = True
    """Compute the prompt once for all samples of a group, in training too. Exact; off only to measure its worth."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""


class CheckpointConfig(Section):
    """What is saved, and whether a run goes on from it."""

    every: NonNegative = 20
    """Save every so many steps; 0 saves only at the end and when the run is interrupted or fails between updates."""
    keep_last: Positive = 2
    """How many to keep. An old one goes only after the new one is whole; one that holds a file `KEEP` never does."""
    resume: str = "auto"
    """`auto` goes on from the run's newest whole one, `never` refuses a used folder, a path takes that checkpoint."""


class EvalConfig(Section):
    """Held-out evaluation with its own prompts and sampling."""

    every: NonNegative = 0
    """Evaluate every so many steps; 0 only before and after training."""
    before_training: bool = True
    """Evaluate the untrained model too, so that there is something to compare with."""
    samples_per_prompt: Positive = 1
    """Responses per prompt."""
    pass_at: list[Positive] = Field(default_factory=lambda: [1], min_length=1)
    """Report pass@k (unbiased, arXiv:2107.03374) for these k. A response passes when its score reaches `pass_score`."""
    hold_out: bool = True
    """Leave prompts that the evaluation has out of training; their number is said."""
    pass_score: float = 1.0
    """The score from which a response counts as right."""
