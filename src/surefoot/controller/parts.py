"""The parts of a run on one machine: one process, the actor's own modules sample, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..algorithms.warmup import WarmupState
from ..config import RunConfig
from ..records import Rollout, Scores
from ..rewards.runner import RewardRunner
from ..rollout.embedded import EmbeddedEngine
from ..seeds import derive_seed
from ..train.engine import TrainEngine
from ..train.model import load_critic, load_policy, load_reference
from .preflight import Preflight
from .sampling import RolloutCollector
from .score_rows import ScoreRow


@dataclass(slots=True)
class Progress:
    """What the loop itself carries from step to step, beside the engines' state.

    `cursor` is the sampler's state after the last whole step. `updating` is true while a step changes weights: what
    stands then is no state to go on from.
    """

    step: int = 0
    kl_coef: float = 0.0
    warmup: WarmupState = field(default_factory=WarmupState)
    cursor: dict[str, Any] = field(default_factory=dict[str, Any])
    updating: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Engines:
    """The models of a run. None: this algorithm has no such model."""

    actor: TrainEngine
    critic: TrainEngine | None
    reference: TrainEngine | None  # None also when the reference is the actor with its adapters off
    sampler: EmbeddedEngine
    device: torch.device

    def score(self, rollouts: Sequence[Rollout], want_old: bool, want_reference: bool) -> list[Scores]:
        """Ask the actor, the reference and the critic about each rollout."""
        rows = [ScoreRow.of(rollout) for rollout in rollouts]
        nothing = [None] * len(rows)
        old = self.actor.logprobs(rows) if want_old else nothing
        ref = nothing
        if want_reference:
            ref = self.reference.logprobs(rows) if self.reference else self.actor.logprobs(rows, reference=True)
        values = self.critic.values(rows) if self.critic else nothing
        return [Scores(o, r, v) for o, r, v in zip(old, ref, values, strict=True)]


def pick_device(config: RunConfig) -> torch.device:
    """`auto` is the GPU when there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def load_engines(ready: Preflight) -> Engines:
    """Load every model, lightest use first: frozen, then trained, then the sampler on the actor's own weights.

    Raises:
        UserError: A model cannot be loaded.
    """
    config, algorithm = ready.config, ready.algorithm
    device = pick_device(config)
    torch.manual_seed(derive_seed(config.seed, "torch"))
    train, updates = config.train, config.train.steps * config.train.updates_per_step
    temperature = config.rollout.sampling.temperature
    reference = None
    if algorithm.needs_reference and config.model.lora is None:
        reference = TrainEngine(load_reference(config.model, device), train, temperature=temperature)
    critic = None
    if algorithm.needs_critic:
        assert config.critic is not None
        critic = TrainEngine(
            load_critic(config.critic, config.model, device),
            train,
            peak_rate=config.critic.learning_rate,
            total_updates=updates * config.critic.passes_per_step,
            compile_blocks=config.model.compile,
        )
    policy = load_policy(config.model, device)
    actor = TrainEngine(
        policy,
        train,
        temperature=temperature,
        peak_rate=train.optimizer.learning_rate,
        total_updates=updates * train.passes_per_step,
        want_entropy=algorithm.needs_entropy_grad,
        compile_blocks=config.model.compile,
    )
    return Engines(actor, critic, reference, _sampler(ready, policy, device), device)


def load_sampler(ready: Preflight) -> EmbeddedEngine:
    """Load the policy alone, to sample from it."""
    device = pick_device(ready.config)
    return _sampler(ready, load_policy(ready.config.model, device).requires_grad_(False), device)


def _sampler(ready: Preflight, policy: nn.Module, device: torch.device) -> EmbeddedEngine:
    rows = ready.config.rollout.max_concurrent_rows
    return EmbeddedEngine(policy, ready.tokenizer, ready.stop_ids, rows, device)


def make_collector(ready: Preflight, engine: EmbeddedEngine, rewards: RewardRunner) -> RolloutCollector:
    """Tie the sampler, the program and the rewards together."""
    return RolloutCollector(engine, ready.program, ready.template, rewards)
