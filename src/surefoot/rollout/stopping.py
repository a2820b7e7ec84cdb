"""When a response ends: end-of-sequence ids, stop ids, stop strings, the length limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ..config.rollout import SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopRules:
    """The stop conditions of one request.

    A stop string is looked for in the text of the response alone, wherever token borders fall; the text that matched
    stays in the response.
    """

    def __init__(
        self, sampling: SamplingConfig, eos_token_ids: Iterable[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._ids = frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)
        self._limit = sampling.max_response_length
        self._stop = tuple(s for s in sampling.stop if s)
        self._tokenizer = tokenizer
        # A token is at least one byte of the text, and a sequence cut open may open with a broken character.
        self._window = max((len(s.encode()) for s in self._stop), default=0) + 8

    def reason(self, generated: Sequence[int]) -> Literal["stop", "length"] | None:
        """Say whether the response ends with its last token. Called after every token."""
        if generated[-1] in self._ids or (self._stop and self._ends_in_stop(generated)):
            return "stop"
        return "length" if len(generated) >= self._limit else None

    def _ends_in_stop(self, generated: Sequence[int]) -> bool:
        if not _may_complete(self._tokenizer, generated[-1], self._stop):
            return False
        text = decode(self._tokenizer, generated[-self._window :])
        return any(s in text for s in self._stop)


@lru_cache(maxsize=1 << 16)
def _may_complete(tokenizer: PreTrainedTokenizerBase, token: int, stop: tuple[str, ...]) -> bool:
    """Whether a stop string can end within this token: cheap, and true in doubt."""
    text = decode(tokenizer, [token])
    # White space at a sequence's start may be swallowed, and a part of a character has no text of its own.
    return "�" in text or not text or any(s[-1].isspace() or s[-1] in text for s in stop)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip_special: bool = False) -> str:
    """Ids to text, nothing tidied up."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
