"""GPU memory of a pool where training and sampling take turns: pure arithmetic on what was measured.

Trained roles come up first and rehearse a step on the longest rows, so their peak is a measurement. The sampler's cache
then gets what is left: a number of bytes, and no fraction that somebody guessed. It cannot be done in another order,
because the cache's size is an input of the engine's start and the rehearsal's result is an input of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """What one training process was seen to take on its device, in bytes.

    `peak` is the most that the allocator held in the rehearsal, `resident` what stays between updates, `context` what
    the driver and other libraries hold beside it.
    """

    total: int
    peak: int
    resident: int
    context: int


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """What a sampler takes on each of its devices beside the cache, in bytes, and the most cache it can use.

    `asleep` is what it cannot give back while it sleeps.
    """

    weights: int
    working: int
    asleep: int
    full_cache: int
    least_cache: int


def kv_cache_bytes(
    devices: Sequence[TrainMemory], needs: EngineNeeds, reserve: int, sleeps: bool, total: int | None = None
) -> int:
    """Bytes of KV cache for each device of a sampler.

    Args:
        devices: What training took on the devices that it shares; none: the sampler has them for itself.
        needs: The sampler's.
        reserve: Bytes that nobody gets.
        sleeps: The sampler gives its memory back while the trainer works, and the trainer its working memory while the
            sampler does. Otherwise both stay.
        total: Size of a device that is not shared.

    Raises:
        UserError: `gpu-too-small`: not even one row of full length would fit, or training would not fit beside a
            sampler that sleeps.
    """
    room = (
        min((d.total - d.context - (d.resident if sleeps else d.peak) for d in devices), default=total or 0) - reserve
    )
    cache = min(needs.full_cache, room - needs.weights - needs.working)
    if cache < needs.least_cache:
        raise UserError(
            "gpu-too-small",
            "after training's share there is no room for the cache of a single row of full length",
            key="rollout.sampling.max_response_length",
            got=f"{_gib(cache)} left of {_gib(room)} after {_gib(needs.weights)} of weights and "
            f"{_gib(needs.working)} of working memory",
            want=f"at least {_gib(needs.least_cache)}",
            hint="A smaller train.max_tokens_per_microbatch, placement.offload_idle, more GPUs, or a pool of its own "
            "for rollout make room.",
        )
    for d in devices:
        if sleeps and d.context + d.peak + needs.asleep + reserve > d.total:
            raise UserError(
                "gpu-too-small",
                "training's peak does not fit beside the sampler, even while that sleeps",
                key="train.max_tokens_per_microbatch",
                got=f"{_gib(d.peak)} measured on the longest rows + {_gib(needs.asleep)} of a sleeping sampler",
                want=f"at most {_gib(d.total - d.context - reserve)} together",
            )
    return cache


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"
