"""Rollouts in, scored rollouts out: each reward runs where it should, and each failure costs its own row."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ..config.rewards import ModelReward, RewardsConfig, RewardSpec
from ..records import Metric, Reward, Rollout
from .api import Outcome, RewardFunction, RewardItem, evaluate, evaluate_async
from .judge import Judge
from .loop import BatchThread, LoopBlocked, LoopThread
from .pool import WorkerPool
from .table import REWARDS, build, names
from .worker import Setup

_PATIENCE = 5.0  # Seconds for which the loop of the async rewards may at least stand still on a busy machine.


@dataclass(frozen=True, slots=True)
class Part:
    """One reward at work. `judge` takes one item, or all items of a step when `batch`; it returns as many outcomes."""

    name: str
    spec: RewardSpec
    batch: bool
    judge: Callable[[list[RewardItem]], Awaitable[list[Outcome]]]

    def applies(self, item: RewardItem) -> bool:
        """Whether the row's source is one that this reward judges."""
        return self.spec.sources is None or item.source in self.spec.sources


class RewardRunner:
    """Owns the worker processes, threads and models of a run's rewards. Used from one event loop at a time.

    Example:
        with RewardRunner(config.rewards) as runner:
            scored = await runner.score(rollouts)
    """

    def __init__(self, config: RewardsConfig, device: str = "cpu") -> None:
        """`device`: where reward models run. Nothing is started or loaded yet but users' functions.

        Raises:
            UserError: A user's function cannot be loaded.
        """
        self._config = config
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._loop = LoopThread(max(_PATIENCE, config.timeout_seconds))
        self._judges: list[Judge] = []
        self._models: dict[int, BatchThread] = {}
        self._pooled: dict[bool, dict[int, RewardSpec]] = {True: {}, False: {}}  # locked down or not
        self._parts = [
            self._part(index, spec, name)
            for index, (spec, name) in enumerate(zip(config.functions, names(config.functions), strict=True))
        ]
        self._pools = {
            locked: WorkerPool(Setup(specs, config.timeout_seconds, locked), config.workers)
            for locked, specs in self._pooled.items()
            if specs
        }

    def start(self) -> None:
        """Start the worker processes, which get ready in the background, and load reward models.

        Raises:
            UserError: A reward model cannot be loaded.
        """
        for pool in self._pools.values():
            pool.start()
        for index, spec in enumerate(self._config.functions):
            if isinstance(spec, ModelReward):
                from .model import RewardModel

                model = RewardModel(spec, f"rewards.functions.{index}", self._device)
                self._models[index] = BatchThread(model.score, most=8 * spec.batch_size)

    def close(self) -> None:
        """End all processes and threads. No child is left."""
        for pool in self._pools.values():
            pool.close()
        for model in self._models.values():
            model.close()
        self._models.clear()
        self._loop.close(self._close_judges)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> ScoringStep:
        """Return a step to which rollouts are added as they finish; scoring starts as they come."""
        return ScoringStep(self._parts, self._seconds)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with their rewards, in the same order.

        Raises:
            RunError: `reward-worker`, when the workers cannot start. Nothing that one row does raises.
        """
        step = self.begin()
        for rollout in rollouts:
            step.add(rollout)
        return await step.finish()

    def metrics(self) -> dict[str, Metric]:
        """Return what judging cost since the last call: seconds of each reward, summed over rows, and workers lost.

        What the rewards were is `tracking.metrics.rollout_metrics`' affair.
        """
        spent = {f"reward/seconds/{name}": Metric(seconds, kind="sum") for name, seconds in self._seconds.items()}
        self._seconds.clear()
        lost = 0
        for pool in self._pools.values():
            lost, pool.replaced = lost + pool.replaced, 0
        return spent | {"reward/workers_lost": Metric(lost, kind="sum")}

    def _part(self, index: int, spec: RewardSpec, name: str) -> Part:
        kind = REWARDS[spec.type]
        if kind.place == "model":
            return Part(name, spec, False, lambda items: self._ask_model(index, items))
        in_pool = kind.place in ("verifier", "worker") and self._config.workers > 0
        if in_pool and spec.type != "python":
            return self._pooled_part(index, spec, name, locked=kind.place == "verifier")
        function = build(spec, self._config.timeout_seconds)
        if isinstance(function.call, Judge):
            self._judges.append(function.call)
            return Part(name, spec, False, lambda items: self._in_loop(function, items, None))
        if function.is_async:
            return Part(name, spec, function.batch, self._async_judge(function, spec))
        if in_pool:
            return self._pooled_part(index, spec, name, locked=False)
        return Part(name, spec, function.batch, _inline(function))

    def _pooled_part(self, index: int, spec: RewardSpec, name: str, locked: bool) -> Part:
        self._pooled[locked][index] = spec
        batch = spec.type == "python" and spec.batch

        async def judge(items: list[RewardItem]) -> list[Outcome]:
            return await asyncio.wrap_future(self._pools[locked].submit(index, items))

        return Part(name, spec, batch, judge)

    def _async_judge(
        self, function: RewardFunction, spec: Any
    ) -> Callable[[list[RewardItem]], Awaitable[list[Outcome]]]:
        """Return a user's async function, at most `concurrency` calls of it under way: in the loop's thread, or,
        without workers, in the caller's loop and without a time limit, where a debugger stops."""
        slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        debugging = self._config.workers == 0
        limit = None if debugging else self._config.timeout_seconds

        async def call(items: list[RewardItem]) -> list[Outcome]:
            loop = asyncio.get_running_loop()
            if loop not in slots:
                slots.clear()
                slots[loop] = asyncio.Semaphore(spec.concurrency)
            async with slots[loop]:
                return await evaluate_async(function, items, limit)

        return call if debugging else lambda items: self._guarded(lambda: call(items), items)

    async def _in_loop(self, function: RewardFunction, items: list[RewardItem], limit: float | None) -> list[Outcome]:
        return await self._guarded(lambda: evaluate_async(function, items, limit), items)

    async def _guarded(self, make: Callable[[], Any], items: list[RewardItem]) -> list[Outcome]:
        try:
            return await self._loop.run(make)
        except LoopBlocked:
            text = (
                "an async reward blocks its event loop: it computes or waits without `await`; make it a plain function"
            )
            return [Outcome(error=text)] * len(items)

    async def _ask_model(self, index: int, items: list[RewardItem]) -> list[Outcome]:
        return [await asyncio.wrap_future(self._models[index].submit(item)) for item in items]

    async def _close_judges(self) -> None:
        for judge in self._judges:
            await judge.aclose()


def _inline(function: RewardFunction) -> Callable[[list[RewardItem]], Awaitable[list[Outcome]]]:
    async def judge(items: list[RewardItem]) -> list[Outcome]:
        return evaluate(function, items)

    return judge


class ScoringStep:
    """The scoring of one step's rollouts, started while others are still being generated.

    Consumes rollouts by `add`, in any number and at any time, within a running event loop. `finish` waits for what was
    started, calls the batch functions with all rows, and produces the rollouts in the order in which they were added.
    """

    def __init__(self, parts: Sequence[Part], seconds: dict[str, float]) -> None:
        self._parts = parts
        self._seconds = seconds
        self._rollouts: list[Rollout] = []
        self._items: list[RewardItem] = []
        self._tasks: dict[tuple[int, int], asyncio.Future[list[Outcome]]] = {}  # (row, part)

    def add(self, rollout: Rollout) -> None:
        """Start judging a rollout."""
        row, item = len(self._items), RewardItem.of(rollout)
        self._rollouts.append(rollout)
        self._items.append(item)
        for index, part in enumerate(self._parts):
            if part.applies(item) and not part.batch:
                self._tasks[row, index] = asyncio.ensure_future(part.judge([item]))

    async def finish(self) -> list[Rollout]:
        """Return all rollouts with their rewards, in the order of `add`.

        Raises:
            RunError: As `RewardRunner.score`.
        """
        batches = {index: self._batch(part) for index, part in enumerate(self._parts) if part.batch}
        running = [*self._tasks.values(), *(task for _, task in batches.values())]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
        found = {(row, index): task.result()[0] for (row, index), task in self._tasks.items()}
        for index, (rows, task) in batches.items():
            found |= {(row, index): outcome for row, outcome in zip(rows, task.result(), strict=True)}
        for (_, index), outcome in found.items():
            self._seconds[self._parts[index].name] += outcome.seconds
        abstained = Outcome()
        rewards = [
            combine(self._parts, [found.get((row, i), abstained) for i in range(len(self._parts))], row)
            for row in range(len(self._items))
        ]
        return [replace(rollout, reward=reward) for rollout, reward in zip(self._rollouts, rewards, strict=True)]

    def _batch(self, part: Part) -> tuple[list[int], asyncio.Future[list[Outcome]]]:
        rows = [row for row, item in enumerate(self._items) if part.applies(item)]
        items = [self._items[row] for row in rows]
        return rows, asyncio.ensure_future(part.judge(items) if rows else _nothing())


async def _nothing() -> list[Outcome]:
    return []


def combine(parts: Sequence[Part], outcomes: Sequence[Outcome], row: int) -> Reward:
    """Return one row's reward: the weighted sum over the parts that did not abstain.

    An error of a part with a weight leaves the row without a score: half a sum would be another reward. `row` is for
    the error's text.

    Example:
        Weights 1 and 0.5, values 1.0 and abstained: score 1.0. Both abstained: None.
    """
    shown: dict[str, float | None] = {}
    errors: list[str] = []
    terms: list[float] = []
    spoiled = False
    for part, outcome in zip(parts, outcomes, strict=True):
        shown[part.name] = outcome.value
        shown |= {f"{part.name}/{name}": value for name, value in outcome.parts.items()}
        if outcome.error is not None:
            errors.append(f"{part.name} (row {row}): {outcome.error}")
            spoiled = spoiled or part.spec.weight != 0
        elif outcome.value is not None and part.spec.weight != 0:
            terms.append(part.spec.weight * outcome.value)
    score = None if spoiled or not terms else sum(terms)
    if score is not None and not math.isfinite(score):
        score, errors = None, [*errors, f"the weighted sum (row {row}) is {score}"]
    return Reward(score, shown, "; ".join(errors) or None)
