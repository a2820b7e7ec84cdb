"""The parts of a run on a cluster: train groups and sampler replicas, brought up in an order that nobody has to know.

Trained roles first, the lightest first; they rehearse a step, so their peak is measured; then the samplers start with a
cache of as many bytes as are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ..config.placement import PlacementConfig
from ..records import Metric, Prompt
from ..rollout.api import Request
from ..rollout.probe import check, compare, probe_sampling
from ..rollout.vllm_engine import VllmSettings
from ..seeds import derive_seed
from .cluster import Slot, connect, reserve
from .engine_needs import engine_needs, longest_row
from .fanout import gather, poll
from .memory import TrainMemory, kv_cache_bytes
from .parts import Engines
from .placement import Plan, engine_of, plan
from .preflight import Preflight, Role, roles_of
from .process import available_cores
from .rollout_worker import RolloutWorker
from .sampler_group import SamplerGroup
from .score_rows import ScoreRow
from .train_group import GroupEngine, TrainGroup
from .train_worker import RankPlace, TrainWorker
from .watchdog import Watchdog

PROBE_PROMPTS = 32  # some 500 tokens: in bfloat16 the mean over 64 was off by a quarter
ANSWER_WITHIN = 5.0  # seconds, when the watchdog asks


@contextmanager
def ray_engines(ready: Preflight, logs: Path, watchdog: Watchdog) -> Iterator[Engines]:
    """Bring everything up; afterwards end it and give everything back.

    Raises:
        UserError: The cluster does not have what is asked for, or a model cannot be loaded.
        RunError: A process failed.
    """
    config = ready.config
    placement = cast(PlacementConfig, config.placement)
    roles = roles_of(config, ready.algorithm)
    layout = plan(config, roles)
    clock = Laps()
    check = watchdog.check
    with connect(placement), reserve(layout, placement) as slots:
        clock.lap("cluster")
        samplers = _start_samplers(layout, slots[layout.rollout], logs)  # their imports overlap with all that follows
        groups = {name: _start_group(ready, layout, name, slots[name], logs, check) for name in layout.training}
        watch(watchdog, groups, samplers)
        for group in groups.values():
            group.connect()
        engines: dict[Role, GroupEngine] = {}
        for name, members in layout.training.items():
            for role in members:
                engines[cast(Role, role)] = groups[name].load(cast(Role, role))
        clock.lap("trainer")
        measured = {name: group.rehearse() for name, group in groups.items()}
        clock.lap("rehearsal")
        sleeps = _start_engines(ready, layout, engines["actor"], measured, samplers, logs, check)
        clock.lap("sampler")
        sampler = SamplerGroup(samplers, logs)
        watch(watchdog, groups, samplers, sampler)
        actors = next(groups[name] for name, members in layout.training.items() if "actor" in members)
        sharing = [groups[layout.rollout]] if layout.colocated else []
        link = RayLink(ready, sampler, actors, engines["actor"], sharing, sleeps)
        yield Engines(
            engines["actor"],
            engines.get("critic"),
            engines.get("reference"),
            sampler,
            torch.device("cpu"),
            link,
            clock.seconds,
        )


class Laps:
    """Seconds of what comes one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """What went on since the last lap was this."""
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


def _start_samplers(layout: Plan, slots: Sequence[Slot], logs: Path) -> dict[str, Any]:
    """A process for each replica, on the first of its bundles; it sees the GPUs of all."""
    workers: dict[str, Any] = {}
    for number in range(layout.replicas):
        mine = slots[number * layout.replica_size : (number + 1) * layout.replica_size]
        name = f"sampler-{number}"
        gpus = ",".join(slot.gpus for slot in mine if slot.gpus) or None
        log = logs.absolute() / f"{name}.log"
        workers[name] = mine[0].start(name, RolloutWorker, log, gpus=gpus, max_concurrency=8192)
    return workers


def _start_group(
    ready: Preflight, layout: Plan, pool: str, slots: Sequence[Slot], logs: Path, check: Callable[[], None]
) -> TrainGroup:
    placement = cast(PlacementConfig, ready.config.placement)
    workers: dict[str, Any] = {}
    for rank, slot in enumerate(slots):
        name = f"{pool}-{rank}"
        place = RankPlace(
            rank=rank,
            world=len(slots),
            threads=ready.config.threads or max(1, int(slot.cpus) if slot.gpus else available_cores() // len(slots)),
            parallel=placement.parallel,
            offload_idle=placement.offload_idle,
            log=logs.absolute() / f"{name}.log",
            same_gpu=slot.gpus is not None and layout.rollout == pool,
        )
        workers[name] = slot.start(name, TrainWorker, place, ready.config, ready.algorithm)
    return TrainGroup(workers, ready.config.train, placement.parallel.sequence, logs, check)


def _start_engines(
    ready: Preflight,
    layout: Plan,
    actor: GroupEngine,
    measured: Mapping[str, Sequence[TrainMemory]],
    samplers: Mapping[str, Any],
    logs: Path,
    check: Callable[[], None],
) -> bool:
    """Size the caches and start all replicas at once. Returns whether they sleep while the trainer works."""
    config, settings = ready.config, engine_of(ready.config)
    rows = settings.max_num_seqs or -(-config.rollout.max_concurrent_rows // layout.replicas)
    needs = engine_needs(ready, actor.num_parameters()[0], rows, settings.tensor_parallel_size)
    sizes = gather({name: worker.device_bytes.remote() for name, worker in samplers.items()}, logs, check)
    sleeps, cache = False, needs.full_cache
    if sizes[0]:
        devices = measured[layout.rollout] if layout.colocated else []
        reserve_bytes = settings.memory_reserve_bytes

        def size(asleep: bool) -> int:
            return kv_cache_bytes(devices, needs, reserve_bytes, asleep, min(sizes))

        sleeps = settings.sleep == "always" or (
            settings.sleep == "auto" and layout.colocated and not _fits_awake(devices, needs.full_cache, size)
        )
        cache = size(sleeps)
    start = VllmSettings(
        model=ready.model_path,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        max_length=longest_row(ready),
        max_rows=rows,
        eos_token_ids=ready.stop_ids,
        seed=derive_seed(config.seed, "engine"),
        config=settings,
        kv_cache_bytes=settings.kv_cache_memory_bytes or cache,
        sleeps=sleeps,
        stream=config.rollout.max_staleness > 0,
    )
    calls = {
        name: worker.start.remote(replace(start, seed=derive_seed(config.seed, "engine", name)))
        for name, worker in samplers.items()
    }
    gather(calls, logs, check)
    return sleeps


def watch(
    watchdog: Watchdog,
    groups: Mapping[str, TrainGroup],
    samplers: Mapping[str, Any],
    sampler: SamplerGroup | None = None,
) -> None:
    """Tell the watchdog whom to ask."""
    trainers = {name: worker for group in groups.values() for name, worker in group.workers.items()}

    def counters() -> dict[str, int]:
        return poll({name: worker.progress.remote() for name, worker in trainers.items()}, ANSWER_WITHIN)

    def report() -> Iterator[str]:
        for name, ids in (sampler.open_requests() if sampler else {}).items():
            if ids:
                yield f"{name} has not answered {len(ids)} requests: {', '.join(ids[:3])}{' ...' if ids[3:] else ''}"
        everyone = trainers | dict(samplers)
        stacks = poll({name: worker.stacks.remote() for name, worker in everyone.items()}, ANSWER_WITHIN)
        for name in everyone:
            for line in stacks.get(name, "does not answer").splitlines():
                yield f"{name}: {line}"

    watchdog.counters, watchdog.report = counters, report


def _fits_awake(devices: Sequence[TrainMemory], full: int, size: Any) -> bool:
    """Whether a full cache fits beside training's peak: then nobody has to make room for anybody."""
    from ..errors import UserError

    try:
        return not devices or size(False) >= full
    except UserError:
        return False


@dataclass(slots=True, eq=False)
class RayLink:
    """Turns between trainer and sampler, and the weights' way from one to the other; see `parts.Link`."""

    ready: Preflight
    sampler: SamplerGroup
    source: TrainGroup
    actor: GroupEngine
    sharing: Sequence[TrainGroup]  # groups on the sampler's own devices
    sleeps: bool
    syncs: int = 0

    async def begin_training(self) -> None:
        """The sampler makes room."""
        if self.sleeps:
            await self.sampler.sleep(2)

    async def begin_sampling(self, version: int | None) -> dict[str, Metric]:
        """The trainer makes room, the sampler gets the weights, and every so often proves that it computes with them.

        Returns:
            `sync/probe_gap` when it did: the mean |difference| of log-probabilities between engine and trainer.

        Raises:
            RunError: `weights-not-delivered`, `engine-trainer-gap`.
        """
        if self.sleeps:
            for group in self.sharing:
                await group.rest()
            await self.sampler.wake(weights_only=True)
        if version is None and not self.sleeps:
            return {}
        version = self.sampler.version if version is None else version
        await self.sampler.update_weights(self.source, version)
        if self.sleeps:
            await self.sampler.wake()
        every = engine_of(self.ready.config).probe_every
        self.syncs += 1
        if self.syncs == 1 or (every and (self.syncs - 1) % every == 0):
            return {"sync/probe_gap": Metric(await self.probe(version))}
        return {}

    async def probe(self, version: int) -> float:
        """Sample a few rows and let the trainer score them; see `begin_sampling`."""
        from asyncio import gather as together

        config = self.ready.config
        prompts: Sequence[Prompt] = self.ready.prompts.prompts[:PROBE_PROMPTS]
        sampling = probe_sampling(config.rollout.sampling)
        requests = [
            Request(f"probe/{i}/0/{version}", p.token_ids, sampling, derive_seed(config.seed, "probe", version, i))
            for i, p in enumerate(prompts)
        ]
        answers = await together(*(self.sampler.generate(request) for request in requests))
        rows = [ScoreRow.of_completion(r, a) for r, a in zip(requests, answers, strict=True)]
        scored = self.actor.logprobs(rows)
        own = [numbers[row.loss_mask] for numbers, row in zip(scored, rows, strict=True)]
        gap = compare(answers, own)
        check(gap, config.model.dtype, engine_of(config).probe_tolerance, version)
        return gap.mean
