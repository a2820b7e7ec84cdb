"""The whole configuration on one screen. A section a file; each key's meaning stands under it there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .algorithm import AlgorithmConfig
from .base import NonNegative, NonNegativeFloat, Section
from .data import DataConfig, Source
from .model import CriticConfig, ModelConfig
from .placement import PlacementConfig
from .rewards import RewardsConfig
from .rollout import EvalSamplingConfig, RolloutConfig
from .tracking import AlarmsConfig, TrackingConfig
from .train import CheckpointConfig, EvalConfig, TrainConfig


class EvalRunConfig(EvalConfig):
    """Held-out evaluation."""

    sources: list[Source] = Field(min_length=1)
    """Prompts to evaluate on; make them other rows than the training's."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling of evaluation; greedy unless you say otherwise."""


class RunConfig(Section):
    """One run: `surefoot train FILE [key.sub=value ...]`."""

    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """Name of the run and of its folder."""
    output_dir: str = "runs"
    """Where run folders go: the run writes to `output_dir/name`."""
    seed: NonNegative = 0
    """Every random stream is derived from this."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one."""
    threads: NonNegative = 0
    """CPU threads of the trainer; 0 takes all cores that this process may use."""
    stall_limit: NonNegativeFloat = 1800.0
    """Seconds in which nothing at all may happen (no rollout done, no micro-batch computed) before the run says who
    waits for whom and ends with exit code 3; 0 waits for ever."""
    placement: Literal["local"] | PlacementConfig = "local"
    """`local` is one process without Ray; a section with `type: ray` spreads the models over processes and GPUs."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    critic: CriticConfig | None = None
    eval: EvalRunConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    alarms: AlarmsConfig = AlarmsConfig()
