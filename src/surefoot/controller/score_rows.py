"""A rollout as the trainer's packing reads it."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Ints, Mask, Rollout


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
