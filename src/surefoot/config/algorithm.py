"""`algorithm`: the objective. A name picks a row of the table; each key left out takes that row's value."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "abs", "k2", "k3"]


class KlConfig(Section):
    """Distance to the reference model."""

    where: Literal["none", "reward", "loss"] = "none"
    """Subtract it from each token's reward, add it to the loss, or leave it out (no reference model is loaded)."""
    coef: NonNegativeFloat = 0.001
    """Factor; the start value under the adaptive controller."""
    estimator: KlEstimator | None = None
    """Per-token estimate (Schulman 2020): k1 = log-ratio, abs, k2 = half its square, k3 = never negative and unbiased.
    Left out: k1 in the reward, where no other has the KL's gradient; k3 in the loss, where k2 and abs are allowed too
    and k1, whose gradient has mean zero, is not (arXiv:2510.01555)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep the factor, or steer it towards `target` (Ziegler et al. 2019, arXiv:1909.08593)."""
    target: PositiveFloat = 6.0
    """KL per sequence, in nats, that the adaptive controller steers to."""
    horizon: Positive = 10000
    """Samples over which the adaptive controller moves."""


class AutoWarmupConfig(Section):
    """When `critic_warmup: auto` lets the actor start."""

    explained_variance: float = Field(default=0.2, gt=0, lt=1)
    """The critic must explain this share of the variance of the rewards to come, on rollouts it has not trained on."""
    patience: Positive = 2
    """... for so many steps in a row."""
    max_steps: Positive | None = None
    """Stop the run when the critic is not ready after so many steps; left out: half of `train.steps`."""


class AlgorithmConfig(Section):
    """The objective. Keys left out (null) take the preset's value; the resolved file in the run folder shows all."""

    name: str = "grpo"
    """A preset: `surefoot algorithms` lists them."""
    advantage: str | None = None
    """Advantage estimator."""
    policy_loss: str | None = None
    """Policy loss."""
    aggregation: Aggregation | None = None
    """How token losses become one number. Denominators are of the whole minibatch, however it is cut."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped below 1 - clip_low ..."""
    clip_high: PositiveFloat | None = None
    """... and above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of negative advantages, as a multiple of their size (arXiv:1912.09729). A large number turns it
    off."""
    normalize_by_std: bool | None = None
    """Divide group advantages by the group's standard deviation."""
    whiten_advantages: bool | None = None
    """Shift and scale the step's token advantages to mean 0 and variance 1."""
    gamma: Fraction | None = None
    """Discount per token."""
    lam: Fraction | None = None
    """GAE's lambda."""
    entropy_coef: NonNegativeFloat = 0.0
    """Entropy bonus; at 0 no entropy is in the backward pass."""
    kl: KlConfig = KlConfig()
    """Distance to the reference model."""
    critic_warmup: NonNegative | Literal["auto"] = 0
    """Steps in which only the critic learns and the actor's weights stay bit for bit as they are; `auto` watches the
    critic and decides."""
    auto_warmup: AutoWarmupConfig = AutoWarmupConfig()
    """Bounds of `critic_warmup: auto`."""
    mask_truncated: bool = False
    """Leave responses that hit the length limit out of the loss and its denominators. Their scores still count in the
    group's baseline."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Truncated importance sampling: weight each token by min(p_trainer / p_engine, cap), which corrects for the
    sampling engine's arithmetic; null turns it off."""
