"""The seam between the controller and whatever samples tokens, and what a rollout program gets to see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..config.rollout import SamplingConfig
from ..records import Floats, Ints, Prompt, Rollout

if TYPE_CHECKING:
    from ..data.template import Template
    from ..sync.parcel import Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One continuation to sample. The engine never sees text, and never cuts `token_ids`."""

    id: str
    token_ids: Ints  # [P]
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The tokens sampled for one request, the stop token included."""

    token_ids: Ints  # [N]
    logprobs: Floats  # [N], of the distribution sampled from (after temperature and filters)
    policy_version: Ints  # [N], the weights that sampled each token
    finish_reason: Literal["stop", "length", "aborted"]


class WeightSource(Protocol):
    """A trainer's weights, as an engine with weights of its own takes them."""

    def parcels(self) -> AsyncIterator[Parcel]:
        """Publish the weights bucket by bucket; a bucket is gone when the next is asked for."""
        ...


class InferenceEngine(Protocol):
    """Samples continuations, many at once. Implementations pass `tests/rollout/contract.py`."""

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one continuation. The same request on the same weights gives the same tokens, whatever else runs."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, with finish reason `aborted`."""
        ...

    async def update_weights(self, source: WeightSource | None, version: int) -> None:
        """Take new weights; an engine on the trainer's own modules has them already, and its source is None.

        Tokens sampled from now on carry `version`.
        """
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give memory back while the trainer works: 1 drops the KV cache, 2 also the engine's own weights."""
        ...

    async def wake(self) -> None:
        """Be ready to generate again."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ProgramContext:
    """What a rollout program may use beside the prompt and the engine."""

    template: Template
    """Encodes what a program puts between the policy's turns; `template.tokenizer` decodes."""
    sampling: SamplingConfig
    num_samples: int
    seed: Callable[[int, int], int]
    """`seed(sample_index, turn)` -> the seed of that request."""


RolloutProgram = Callable[[Prompt, InferenceEngine, ProgramContext], Awaitable[list[Rollout]]]
"""An async function that returns `context.num_samples` rollouts of one prompt, unscored."""
