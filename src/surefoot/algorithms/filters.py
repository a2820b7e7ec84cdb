"""Which rows and groups teach nothing: pure helpers of credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..records import FinishReason


def truncated(finish_reasons: Sequence[FinishReason]) -> Tensor:
    """True where a response hit the length limit: `[R]`."""
    return torch.tensor([reason == "length" for reason in finish_reasons], dtype=torch.bool)


def zero_variance_groups(scores_R: Tensor, group_R: Tensor) -> Tensor:
    """True for each group whose scores are all equal: `[groups]`.

    A score of NaN (the reward abstained) does not count; a group with one score or none has nothing to compare, so it
    is True.
    """
    groups = int(group_R.max()) + 1 if len(group_R) else 0
    scored_R = ~scores_R.isnan()
    high = scores_R.new_full((groups,), -torch.inf)
    high = high.scatter_reduce(0, group_R, scores_R.where(scored_R, -torch.inf), "amax")
    low = scores_R.new_full((groups,), torch.inf)
    low = low.scatter_reduce(0, group_R, scores_R.where(scored_R, torch.inf), "amin")
    return high <= low
