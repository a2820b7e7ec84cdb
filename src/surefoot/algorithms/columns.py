"""What the losses read of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RunError


@dataclass(frozen=True, slots=True, eq=False)
class LossColumns:
    """The columns of one micro-batch, flat over model tokens `[T]`; all float32 on one device.

    `old_logprobs_T` is None when a step makes one single update: the old policy is then the policy itself.
    `names`, when given, says which prompt each row belongs to; errors repeat it.
    """

    cu_seqlens: Tensor  # [S + 1], int64
    weight_S: Tensor  # 0: the row is left out
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None  # before the step's updates
    returns_T: Tensor | None = None
    names: tuple[str, ...] = ()

    def require_finite(self, **computed_T: Tensor | None) -> None:
        """Refuse NaN and infinity in any of these columns or in `computed_T`, rows that are left out included.

        Raises:
            RunError: `loss-not-finite`, naming column, row and token.
        """
        named = computed_T | {
            "rollout log-probability": self.rollout_logprobs_T,
            "advantage": self.advantages_T,
            "old log-probability": self.old_logprobs_T,
            "reference log-probability": self.ref_logprobs_T,
            "old value": self.values_T,
            "return": self.returns_T,
        }
        columns = {name: column.detach() for name, column in named.items() if column is not None}
        # One transfer to the host for all columns; which one it was matters only when there is one.
        if bool(torch.stack([column.isfinite().all() for column in columns.values()]).all()):
            return
        name, column = next((n, c) for n, c in columns.items() if not bool(c.isfinite().all()))
        position = int(column.isfinite().logical_not().nonzero()[0])
        row = int(torch.searchsorted(self.cu_seqlens, position, right=True)) - 1
        token = position - int(self.cu_seqlens[row])
        prompt = f" (prompt {self.names[row]})" if self.names else ""
        raise RunError(
            "loss-not-finite",
            f"the {name.replace('_', ' ')} of row {row}{prompt} of the micro-batch, model token {token}, is not finite",
            got=float(column[position]),
            want="a finite number",
        )
