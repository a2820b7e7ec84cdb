"""The parts of a run on one machine: one process, the actor's own modules sample, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..algorithms.table import Algorithm
from ..algorithms.warmup import WarmupState
from ..config import RunConfig
from ..records import Metric, Rollout, Scores
from ..rewards.runner import RewardRunner
from ..rollout.api import InferenceEngine
from ..rollout.embedded import EmbeddedEngine
from ..seeds import derive_seed
from ..train.api import TrainEngine
from ..train.engine import ModuleEngine
from ..train.model import load_critic, load_policy, load_reference
from ..train.shard import Shards
from .preflight import Checked, Preflight, Role, roles_of
from .sampling import RolloutCollector
from .score_rows import ScoreRow


@dataclass(slots=True)
class Progress:
    """What the loop itself carries from step to step, beside the engines' state.

    `cursor` is the sampler's state after the last whole step. `version` is of the actor's weights: the step that made
    them. `updating` is true while a step changes weights: what
    stands then is no state to go on from.
    """

    step: int = 0
    kl_coef: float = 0.0
    warmup: WarmupState = field(default_factory=WarmupState)
    cursor: dict[str, Any] = field(default_factory=dict[str, Any])
    version: int = 0
    updating: bool = False


class Link(Protocol):
    """What is between a trainer and a sampler that have their own weights, and perhaps one GPU."""

    async def begin_training(self) -> None:
        """The sampler makes room."""
        ...

    async def begin_sampling(self, version: int | None) -> dict[str, Metric]:
        """The trainer makes room; the sampler gets the weights of `version`, unless None says that it has them.

        Returns:
            `sync/...` metrics.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Engines:
    """The models of a run. None: this algorithm has no such model."""

    actor: TrainEngine
    critic: TrainEngine | None
    reference: TrainEngine | None  # None also when the reference is the actor with its adapters off
    sampler: InferenceEngine
    device: torch.device
    link: Link | None = None  # None: the sampler works on the actor's own weights
    startup: Mapping[str, float] = field(default_factory=dict[str, float])  # seconds by part
    progress: Callable[[], int] = lambda: 0  # grows with whatever this process computes

    async def begin_training(self) -> None:
        """Sampling is done for now: what shares memory with the trainer makes room."""
        if self.link is not None:
            await self.link.begin_training()

    async def begin_sampling(self, version: int | None) -> dict[str, Metric]:
        """Training is done for now. `version` is of the weights when they changed, or None. See `Link`."""
        if self.link is not None:
            return await self.link.begin_sampling(version)
        if version is not None:
            await self.sampler.update_weights(None, version)
        return {}

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
    engines = {role: load_engine(role, config, algorithm, device) for role in roles_of(config, algorithm)}
    sampler = _sampler(ready, engines["actor"].model, device)

    def progress() -> int:
        return sampler.steps_done + sum(engine.packs_done for engine in engines.values())

    return Engines(
        engines["actor"], engines.get("critic"), engines.get("reference"), sampler, device, progress=progress
    )


def load_engine(
    role: Role, config: RunConfig, algorithm: Algorithm, device: torch.device, shards: Shards | None = None
) -> ModuleEngine:
    """Load one role's model into this process, or this process's share of it.

    Raises:
        UserError: The model cannot be loaded.
    """

    def load(where: torch.device, empty: bool) -> nn.Module:
        if role == "actor":
            return load_policy(config.model, where, empty)
        if role == "reference":
            return load_reference(config.model, where, empty)
        assert config.critic is not None
        return load_critic(config.critic, config.model, where, empty)

    train, updates = config.train, config.train.steps * config.train.updates_per_step
    keys: dict[str, Any] = {}
    if role == "actor":
        keys["peak_rate"], keys["total_updates"] = train.optimizer.learning_rate, updates * train.passes_per_step
        keys["want_entropy"] = algorithm.needs_entropy_grad
    if role == "critic":
        assert config.critic is not None
        keys["peak_rate"] = config.critic.learning_rate
        keys["total_updates"] = updates * config.critic.passes_per_step
    if role != "reference":
        keys["compile_blocks"] = config.model.compile
    if role != "critic":
        keys["temperature"] = config.rollout.sampling.temperature
    whole = None
    if shards is not None and shards.first:
        whole = load(torch.device("cpu"), empty=False)
    model = load(device, empty=shards is not None)
    return ModuleEngine(model, train, shards=shards, whole=whole, **keys)


def load_sampler(ready: Checked) -> EmbeddedEngine:
    """Load the policy alone, to sample from it."""
    device = pick_device(ready.config)
    return _sampler(ready, load_policy(ready.config.model, device).requires_grad_(False), device)


def _sampler(ready: Checked, policy: nn.Module, device: torch.device) -> EmbeddedEngine:
    rows = ready.config.rollout.max_concurrent_rows
    return EmbeddedEngine(policy, ready.tokenizer, ready.stop_ids, rows, device)


def make_collector(
    ready: Checked, engine: InferenceEngine, rewards: RewardRunner, beat: Callable[[], None] = lambda: None
) -> RolloutCollector:
    """Tie the sampler, the program and the rewards together. `beat` is called when a prompt is done."""
    return RolloutCollector(engine, ready.program, ready.template, rewards, beat)
