"""`tracking` and `alarms`: what is shown, written, and shouted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ..errors import CODES, nearest
from .base import Fraction, NonNegative, Positive, PositiveFloat, Section

TrackerName = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrackingConfig(Section):
    """Trackers. `metrics.jsonl` is always written. A tracker that fails at the start stops the run; later none does."""

    trackers: list[TrackerName] = Field(default_factory=lambda: ["console"])
    """Which trackers, beside the jsonl file."""
    project: str = "surefoot"
    """Project name for wandb, mlflow, swanlab and trackio."""
    rollouts_every: NonNegative = 1
    """Write the rollouts of every so many steps to parquet; 0 writes none."""


class AlarmsConfig(Section):
    """Thresholds of the alarms. Each is said once, with the key to look at; those in `stop_on` end the run."""

    stop_on: list[str] = Field(default_factory=lambda: ["alarm-nan"])
    """Alarm codes that end the run (exit code 3, state saved)."""
    window: Positive = 3
    """Steps in a row that a condition must hold."""
    truncated_fraction: Fraction = 0.95
    """Nothing to learn: this share of responses cut at the limit."""
    zero_variance_fraction: Fraction = 1.0
    """Nothing to learn: this share of groups whose rewards are all equal."""
    entropy_floor: PositiveFloat = 0.01
    """Entropy collapse: nats per token."""
    entropy_growth: PositiveFloat = 3.0
    """Entropy explosion: multiple of the first steps' entropy."""
    first_ratio_gap: PositiveFloat = 0.01
    """Mean |ratio - 1| at the first update of a step, where it should be 0."""
    engine_gap: PositiveFloat = 0.1
    """Mean |log-probability of the engine - of the trainer|."""
    kl_limit: PositiveFloat = 10.0
    """KL to the reference, nats per token."""
    explained_variance: float = -0.5
    """Critic worse than this after its warm-up."""
    explained_variance_drop: PositiveFloat = 0.5
    """Critic's explained variance this far below its best."""
    length_growth: PositiveFloat = 2.0
    """Reward hacking hint: mean response length over this multiple of its start while held-out accuracy falls."""
    throughput_drop: Fraction = 0.5
    """Throughput below this share of the run's best."""

    @field_validator("stop_on")
    @classmethod
    def _known_codes(cls, codes: list[str]) -> list[str]:
        known = [code for code in CODES if code.startswith("alarm-")]
        for code in codes:
            if code not in known:
                near = nearest(code, known)
                raise ValueError(
                    f"no alarm is called `{code}`; "
                    + (f"did you mean `{near}`?" if near else f"known: {', '.join(known)}")
                )
        return codes
