"""Everything that can be refused before a model is loaded, in the order of what is cheapest to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ..algorithms.resolve import fill, resolve
from ..algorithms.table import Algorithm
from ..config import RunConfig
from ..config.data import Source
from ..config.rollout import VllmConfig
from ..data.holdout import hold_out
from ..data.load import PromptSet, load_prompts
from ..data.pretrained import load_tokenizer, resolve_model, stop_token_ids
from ..data.sampler import PromptSampler
from ..data.template import Template, make_template
from ..errors import UserError
from ..rewards.check import check_rewards
from ..rewards.table import answers_required
from ..rollout.api import RolloutProgram
from ..rollout.programs import load_program
from .process import available_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Role = Literal["actor", "critic", "reference"]


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """All that sampling needs beside the model, and that nothing speaks against."""

    config: RunConfig  # with the preset's values filled in
    algorithm: Algorithm
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    template: Template
    stop_ids: tuple[int, ...]
    program: RolloutProgram
    eval_prompts: PromptSet | None


@dataclass(frozen=True, slots=True, eq=False)
class Preflight(Checked):
    """A run that nothing speaks against, as far as can be known without its models."""

    prompts: PromptSet
    sampler: PromptSampler


def preflight(config: RunConfig) -> Preflight:
    """Check a configuration against itself, its files, its data and its functions.

    Raises:
        UserError: The first thing that is wrong, with the key to change.
    """
    checked = check_parts(config)
    config = checked.config
    prompts = _load(config, config.data.sources, checked.template, "data.sources")
    if config.eval is not None and config.eval.hold_out and checked.eval_prompts is not None:
        prompts = hold_out(prompts, checked.eval_prompts)
    sampler = PromptSampler.over(prompts, config.train.prompts_per_step, config.seed, config.data.shuffle)
    parts = {field.name: getattr(checked, field.name) for field in fields(checked)}
    return Preflight(**parts, prompts=prompts, sampler=sampler)


def check_parts(config: RunConfig) -> Checked:
    """Check all but the training data, which evaluation alone does not read.

    Raises:
        UserError: The first thing that is wrong, with the key to change.
    """
    algorithm = resolve(config)
    config = config.model_copy(update={"algorithm": fill(config.algorithm, config.train.steps)})
    _check_batches(config)
    _check_device(config)
    _check_placement(config, algorithm)
    check_rewards(config)
    program = load_program(config.rollout)
    model_path = resolve_model(config.model.path)
    tokenizer = load_tokenizer(model_path, config.model.chat_template, config.model.trust_remote_code)
    stop_ids = stop_token_ids(model_path, tokenizer)
    _check_positions(config, model_path)
    template = make_template(tokenizer, config.data.template_kwargs, stop_ids)
    eval_prompts = _load(config, config.eval.sources, template, "eval.sources") if config.eval is not None else None
    return Checked(config, algorithm, model_path, tokenizer, template, stop_ids, program, eval_prompts)


def _load(config: RunConfig, sources: Sequence[Source], template: Template, key: str) -> PromptSet:
    need_answer = answers_required(config.rewards)
    return load_prompts(sources, template, config.data.max_prompt_length, config.data.truncation, need_answer, key)


def _check_batches(config: RunConfig) -> None:
    train = config.train
    if train.prompts_per_step % train.updates_per_step:
        fits = [n for n in range(1, train.prompts_per_step + 1) if train.prompts_per_step % n == 0]
        near = min(fits, key=lambda n: abs(n - train.updates_per_step))
        raise UserError(
            "config-conflict",
            "train.prompts_per_step must be a multiple of it, so that minibatches are of equal size",
            key="train.updates_per_step",
            got=f"{train.updates_per_step} updates of {train.prompts_per_step} prompts",
            hint=f"Nearest that fits: train.updates_per_step={near}",
        )
    longest = config.data.max_prompt_length + config.rollout.sampling.max_response_length
    if config.rollout.program == "single_turn" and longest > train.max_tokens_per_microbatch:
        raise UserError(
            "config-conflict",
            "the longest row does not fit into one micro-batch",
            key="train.max_tokens_per_microbatch",
            got=train.max_tokens_per_microbatch,
            want=f"at least data.max_prompt_length + rollout.sampling.max_response_length = {longest}",
        )
    if config.rollout.sampling.temperature == 0:
        raise UserError(
            "config-bad-value",
            "training needs samples that differ; 0 is greedy, and is for evaluation only",
            key="rollout.sampling.temperature",
            got=0,
            want="a number above 0",
        )
    _check_filters(config)
    _check_staleness(config)
    if config.eval and max(config.eval.pass_at) > config.eval.samples_per_prompt:
        raise UserError(
            "config-conflict",
            "pass@k needs at least k samples of each prompt",
            key="eval.pass_at",
            got=f"{config.eval.pass_at} with eval.samples_per_prompt: {config.eval.samples_per_prompt}",
            want=f"eval.samples_per_prompt of at least {max(config.eval.pass_at)}",
        )


def _check_filters(config: RunConfig) -> None:
    """The trainer's log-probabilities are of the whole distribution; a filtered sampler's are not."""
    sampling = config.rollout.sampling
    filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    used = [name for name, on in filters.items() if on]
    if used and config.algorithm.importance_cap is not None:
        raise UserError(
            "config-conflict",
            "with a filtered sampler the importance weights would correct for the filter, not for arithmetic",
            key=f"rollout.sampling.{used[0]}",
            got=f"{used[0]} with algorithm.importance_cap: {config.algorithm.importance_cap}",
            want="no filter in training (top_p: 1, top_k: 0, min_p: 0), or algorithm.importance_cap: null",
        )


def _check_staleness(config: RunConfig) -> None:
    """Running ahead takes two places that work at the same time, and a correction for the older policy."""
    if not config.rollout.max_staleness:
        return
    if config.placement == "local":
        raise UserError(
            "config-conflict",
            "one process samples or trains; to run ahead, sampling needs GPUs of its own",
            key="rollout.max_staleness",
            got=f"{config.rollout.max_staleness} with placement: local",
            want="0, or placement: {type: ray, ...} with a pool for rollout",
        )
    if config.algorithm.importance_cap is None:
        raise UserError(
            "config-conflict",
            "tokens of an older policy need their importance weights",
            key="algorithm.importance_cap",
            got=f"null with rollout.max_staleness: {config.rollout.max_staleness}",
            want="a cap, such as 2.0",
        )


def _check_positions(config: RunConfig, model_path: str) -> None:
    """A row that is longer than the model's positions fails at the first prompt of full length: refuse it now."""
    text = _text_config(model_path, config.model.trust_remote_code, "model.path")
    if config.critic is not None and config.critic.path is not None:
        critic = _text_config(resolve_model(config.critic.path, "critic.path"), False, "critic.path")
        if critic.vocab_size != text.vocab_size:
            raise UserError(
                "config-conflict",
                "the critic reads the actor's token ids, so both need the same vocabulary",
                key="critic.path",
                got=f"{critic.vocab_size} tokens",
                want=f"{text.vocab_size} tokens, as {config.model.path} has",
            )
    positions = getattr(text, "max_position_embeddings", None)
    samplings = {"rollout": config.rollout.sampling} | ({"eval": config.eval.sampling} if config.eval else {})
    for section, sampling in samplings.items():
        longest = config.data.max_prompt_length + sampling.max_response_length
        if positions is not None and longest > positions:
            raise UserError(
                "config-conflict",
                "with data.max_prompt_length a row can be longer than the model's positions reach",
                key=f"{section}.sampling.max_response_length",
                got=f"{config.data.max_prompt_length} + {sampling.max_response_length} = {longest} tokens",
                want=f"at most {positions} in all",
            )


def _text_config(path: str, trust_remote_code: bool, key: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as error:
        raise UserError("model-unusable", f"its config.json cannot be read: {error}", key=key, got=path) from error


def _check_placement(config: RunConfig, algorithm: Algorithm) -> None:
    """What the pools and roles say must fit together, before a cluster is asked for anything."""
    if config.placement != "local":
        from .placement import plan

        plan(config, roles_of(config, algorithm))
    elif isinstance(config.rollout.engine, VllmConfig):
        raise UserError(
            "config-conflict",
            "vLLM runs in processes of its own, and one process has none",
            key="rollout.engine.type",
            got="vllm with placement: local",
            want="embedded, or placement: {type: ray, ...}",
        )


def roles_of(config: RunConfig, algorithm: Algorithm) -> list[Role]:
    """The models that a run trains or scores with, lightest use first. With LoRA the actor is its own reference."""
    roles: list[Role] = []
    if algorithm.needs_reference and config.model.lora is None:
        roles.append("reference")
    if algorithm.needs_critic:
        roles.append("critic")
    return [*roles, "actor"]


def _check_device(config: RunConfig) -> None:
    cores = available_cores()
    if config.threads > cores and config.placement == "local":
        raise UserError(
            "config-bad-value",
            "more threads than cores wait for each other, and a step takes many times as long",
            key="threads",
            got=config.threads,
            want=f"at most the {cores} cores that this process may use; 0 takes all of them",
        )
    if config.device == "cuda" and config.placement == "local":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "no-gpu", "no CUDA device is visible to PyTorch", key="device", got="cuda", want="auto or cpu"
            )
