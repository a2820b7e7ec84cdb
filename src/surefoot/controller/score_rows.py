"""A rollout as the trainer's packing reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..records import Ints, Mask, Rollout
from ..rollout.api import Completion, Request


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """Ids and mask of one rollout; its group is its prompt."""

    group: str
    prompt_length: int
    token_ids: Ints  # [L]
    loss_mask: Mask  # [L]

    @classmethod
    def of(cls, rollout: Rollout) -> ScoreRow:
        """View a rollout."""
        prompt = rollout.prompt
        return cls(prompt.id, len(prompt.token_ids), rollout.token_ids, rollout.loss_mask)

    @classmethod
    def of_completion(cls, request: Request, completion: Completion) -> ScoreRow:
        """A request and its answer, as one row."""
        length = len(request.token_ids)
        ids = np.concatenate([request.token_ids, completion.token_ids])
        return cls(request.id, length, ids, np.arange(len(ids)) >= length)
