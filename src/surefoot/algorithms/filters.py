"""Which rows of a step teach something: pure helpers of credit assignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..records import FinishReason


def truncated(finish_reasons: Sequence[FinishReason]) -> Tensor:
    """True where a response hit the length limit: `[R]`. A response that reached the tool limit did not."""
    return torch.tensor([reason == "length" for reason in finish_reasons], dtype=torch.bool)


def kept(judged_R: Tensor, truncated_R: Tensor, mask_truncated: bool) -> Tensor:
    """True where a rollout takes part in losses and denominators: `[R]`.

    Args:
        judged_R: It has a score, and a model token to put it on.
        truncated_R: Its response hit the length limit.
        mask_truncated: Leave those out.
    """
    return judged_R & ~truncated_R if mask_truncated else judged_R
