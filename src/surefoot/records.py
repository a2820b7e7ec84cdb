"""One training step as data: each stage is a type, and a stage's record holds all that the stages before it made.

Rows live here, on the controller, as numpy arrays of their own length. Shapes are written behind the fields:
`[L]` is one entry per token of the whole trajectory (prompt and response), `[P]` one per prompt token.

Token convention, the same everywhere: index t speaks of the token at t. `logprobs[t]` is
log p(token_ids[t] | token_ids[:t]); `values[t]` is the critic's estimate of the state before token t is chosen;
`loss_mask[t]` is 1 where the policy chose token t. Off the mask these columns are 0 and nothing reads them.

Example:
    A prompt of 3 tokens and a response of 2: L = 5, loss_mask = [0, 0, 0, 1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "tool_limit", "aborted"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of data, rendered and tokenised once.

    `id` is unique per data row and the same in every run over the same data. `text` is what the ids were encoded
    from. `extra` reaches the rewards untouched; `source` is the data source's name (verl: `data_source`).
    """

    id: str
    token_ids: Ints  # [P]
    text: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Reward:
    """What the reward functions said of one rollout.

    `score` None means that no function could judge it: the row is left out of baselines and of the loss.
    `parts` holds each function's own, unweighted number (None: that function abstained or failed).
    """

    score: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled trajectory. `response` is the decoded model text, for rewards and people; ids are what is trained.

    `counts` is what its program counted; the step's sums are the metrics `rollout/NAME`.
    """

    prompt: Prompt
    sample_index: int
    token_ids: Ints  # [L]
    loss_mask: Mask  # [L]
    logprobs: Floats  # [L], of the distribution that was sampled from
    policy_version: Ints  # [L]
    finish_reason: FinishReason
    response: str
    reward: Reward | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_model_tokens(self) -> int:
        """How many tokens the policy chose."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the trainer's models say of one rollout. None means that this run has no such model.

    `old_logprobs` is None when a step makes one single update: the old policy is then the policy itself, and the
    update's own forward pass gives its log-probabilities.
    """

    old_logprobs: Floats | None = None  # [L]
    ref_logprobs: Floats | None = None  # [L]
    values: Floats | None = None  # [L]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the losses read of one rollout. `prompt_length` is P: samples of one prompt share their first P tokens.

    `weight` is the row's weight in every loss and in its denominators; 0 leaves the row out of both.
    """

    group: str
    prompt_length: int
    token_ids: Ints  # [L]
    loss_mask: Mask  # [L]
    rollout_logprobs: Floats  # [L]
    old_logprobs: Floats | None  # [L], None as in Scores
    ref_logprobs: Floats | None  # [L]
    values: Floats | None  # [L]
    advantages: Floats  # [L]
    returns: Floats | None  # [L]
    weight: float = 1.0

    @property
    def num_model_tokens(self) -> int:
        """How many tokens the policy chose."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that merges rightly over micro-batches and ranks: a mean carries its weight.

    Example:
        Metric(2.0, weight=3) and Metric(4.0, weight=1) merge to 2.5 with weight 4.
    """

    value: float
    weight: float = 1.0
    kind: Literal["mean", "sum", "max", "min"] = "mean"

    def merge(self, other: Metric) -> Metric:
        """Return the metric of both parts together."""
        assert self.kind == other.kind
        if self.kind == "sum":
            return Metric(self.value + other.value, self.weight + other.weight, "sum")
        if self.kind != "mean":
            pick = max if self.kind == "max" else min
            return Metric(pick(self.value, other.value), self.weight + other.weight, self.kind)
        weight = self.weight + other.weight
        if weight == 0:
            return self
        # A part of weight 0 may hold anything, NaN included; it must not leak.
        total = sum(m.value * m.weight for m in (self, other) if m.weight)
        return Metric(total / weight, weight)


def merge_metrics(parts: list[dict[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches, updates or ranks into one."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
