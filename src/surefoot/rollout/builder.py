"""One trajectory, put together turn by turn: what was sampled and what was put between, each with its own mask.

Example:
    row = RolloutBuilder(prompt, sample_index, context)
    completion = await row.sample(engine)
    row.add_context(context.template.next_turn(messages, completion.token_ids, [tool_message], prompt.tools))
    await row.sample(engine)
    return row.build()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..records import FinishReason, Floats, Ints, Prompt, Rollout
from .api import Completion, InferenceEngine, ProgramContext, Request
from .stopping import decode


class RolloutBuilder:
    """Collects a trajectory's tokens. What is sent to the engine is what is trained on: there is one list of ids."""

    def __init__(self, prompt: Prompt, sample_index: int, context: ProgramContext) -> None:
        self._prompt = prompt
        self._sample_index = sample_index
        self._context = context
        self._turns: list[Completion] = []
        self._counts: Counter[str] = Counter()
        # (token_ids, the completion they are, or None for context)
        self._segments: list[tuple[Ints, Completion | None]] = [(prompt.token_ids, None)]

    @property
    def token_ids(self) -> Ints:
        """The conversation so far `[L]`."""
        return np.concatenate([ids for ids, _ in self._segments])

    @property
    def num_left(self) -> int:
        """Tokens left of `max_response_length`, which bounds all that follows the prompt."""
        return self._context.sampling.max_response_length - (len(self.token_ids) - len(self._prompt.token_ids))

    async def sample(self, engine: InferenceEngine) -> Completion:
        """Let the policy take a turn, and append it. With no tokens left the turn is empty, its reason `length`."""
        nothing = np.empty(0, np.int32)
        completion = Completion(nothing, np.empty(0, np.float32), nothing, "length")
        if self.num_left > 0:
            turn = len(self._turns)
            seed = self._context.seed(self._sample_index, turn)
            sampling = self._context.sampling.model_copy(update={"max_response_length": self.num_left})
            # The seed makes the id unique among steps that run at the same time.
            name = f"{self._prompt.id}/{self._sample_index}/{turn}/{seed:x}"
            completion = await engine.generate(Request(name, self.token_ids, sampling, seed))
        self._turns.append(completion)
        if len(completion.token_ids):
            self._segments.append((completion.token_ids, completion))
        return completion

    def add_context(self, token_ids: Ints | Sequence[int]) -> None:
        """Append tokens that the policy reads and did not choose: separators, tool output, user turns."""
        self._segments.append((np.asarray(token_ids, np.int32), None))

    def count(self, name: str) -> None:
        """Count something that happened, such as `tool_errors`: the step's sum is the metric `rollout/NAME`."""
        self._counts[name] += 1

    def build(self, finish_reason: FinishReason | None = None) -> Rollout:
        """Return the trajectory up to its last sampled token; without a reason of yours, with the last turn's.

        Raises:
            AssertionError: No turn was sampled.
        """
        assert self._turns, "a rollout has at least one sampled turn"
        while len(self._segments) > 1 and self._segments[-1][1] is None:
            self._segments.pop()
        tokenizer = self._context.template.tokenizer
        return Rollout(
            prompt=self._prompt,
            sample_index=self._sample_index,
            token_ids=self.token_ids,
            loss_mask=np.concatenate([np.full(len(ids), turn is not None) for ids, turn in self._segments]),
            logprobs=self._column([turn.logprobs if turn else None for _, turn in self._segments], np.float32),
            policy_version=self._column(
                [turn.policy_version if turn else None for _, turn in self._segments], np.int32
            ),
            finish_reason=finish_reason or self._turns[-1].finish_reason,
            response="\n".join(decode(tokenizer, turn.token_ids.tolist(), skip_special=True) for turn in self._turns),
            counts=dict(self._counts),
        )

    def _column(self, parts: list[Floats | Ints | None], dtype: type) -> np.ndarray:
        return np.concatenate(
            [
                np.zeros(len(ids), dtype) if part is None else part
                for (ids, _), part in zip(self._segments, parts, strict=True)
            ]
        )
