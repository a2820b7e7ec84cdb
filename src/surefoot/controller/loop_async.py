"""The asynchronous loop: sampling runs ahead of training, by at most `rollout.max_staleness` steps.

Consumes the same prompts in the same steps as the synchronous loop: a step trains on its own prompts, all of them,
however long they took; so slow prompts keep their share, and nothing is thrown away or asked twice. What changes is
when a step's prompts may start: as soon as the weights in use are those of `max_staleness` steps before the ones that
it will train. No token that is trained on is older than that, whatever happens. New weights go to the sampler between
two of its steps; rows under way go on with them, and each token carries the version that sampled it.

Waits for: a step's rollouts. Unblocked by: the weights of a step arriving at the sampler, which lets the prompts of
one more step start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..records import Metric, Rollout
from .learn import learn
from .record import finish_step, keeping_state, make_up_evaluation
from .run_parts import Run
from .sampling import Collected, step_seed

T = TypeVar("T")


async def train(run: Run) -> None:
    """Run all steps that are left, and save the last. Rollouts under way when it ends are asked again on resume.

    Raises:
        Interrupted: A signal came; the state of the last whole step is saved.
        RunError: As in the synchronous loop.
    """
    async with keeping_state(run), running_ahead(run) as ahead:
        await make_up_evaluation(run)
        while run.progress.step < run.ready.config.train.steps:
            await step(run, ahead, run.progress.step + 1)
            run.stop.check()


async def step(run: Run, ahead: RunAhead, number: int) -> None:
    """Make one step, while the prompts of the next ones are being sampled."""
    ahead.start_up_to(number + run.ready.config.rollout.max_staleness)
    with run.trackers.phase("wait"):
        collected, cursor = await run.stop.unless_requested(ahead.take(number))
    current = run.engines.sampler.version
    learnt = await ahead.in_thread(lambda: learn(run, number, collected.rollouts))
    learnt.metrics.update(staleness_metrics(collected.rollouts, current))
    if "actor/engine_gap" in learnt.metrics:  # here it is mostly that of the older policy; the probe has the engine's
        learnt.metrics["actor/policy_gap"] = learnt.metrics.pop("actor/engine_gap")
    more = number + 1 + run.ready.config.rollout.max_staleness
    await finish_step(run, number, collected, learnt, cursor, lambda: ahead.start_up_to(more))


@dataclass(slots=True, eq=False)
class RunAhead:
    """The steps whose prompts are being sampled, and the thread that trains meanwhile."""

    run: Run
    thread: ThreadPoolExecutor
    started: int
    under_way: dict[int, tuple[asyncio.Task[Collected], dict[str, Any]]] = field(default_factory=dict[int, Any])

    def start_up_to(self, number: int) -> None:
        """Start to sample the prompts of all steps up to this one that the run still has."""
        run = self.run
        config, sampler = run.ready.config, run.ready.sampler
        while self.started < min(number, config.train.steps):
            self.started += 1
            prompts = [run.ready.prompts.prompts[i] for i in sampler.next_batch()]
            work = run.collector.collect(
                prompts, config.rollout.sampling, config.train.samples_per_prompt, step_seed(config.seed, self.started)
            )
            self.under_way[self.started] = (asyncio.create_task(work), sampler.state_dict())

    async def take(self, number: int) -> tuple[Collected, dict[str, Any]]:
        """Wait for a step's rollouts; with them comes the prompt sampler's state after its prompts."""
        task, cursor = self.under_way[number]
        collected = await task
        del self.under_way[number]
        return collected, cursor

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what blocks beside the event loop, in which sampling and judging go on."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


@asynccontextmanager
async def running_ahead(run: Run) -> AsyncIterator[RunAhead]:
    """Afterwards no request is open."""
    # A thread of our own: the event loop would wait for its own threads when a second signal wants to end at once.
    ahead = RunAhead(run, ThreadPoolExecutor(1, "train"), run.progress.step)
    try:
        yield ahead
    finally:
        tasks = [task for task, _ in ahead.under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ahead.thread.shutdown(wait=False, cancel_futures=True)


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, Metric]:
    """Return by how many versions the sampled tokens are older than the weights that they train.

    Example:
        Tokens of versions 3, 4 and 4 that train version 4: mean 1/3, max 1.
    """
    ages = np.concatenate([version - r.policy_version[r.loss_mask] for r in rollouts] or [np.empty(0)])
    if not len(ages):
        return {}
    mean, largest = Metric(float(ages.mean()), len(ages)), Metric(float(ages.max()), kind="max")
    return {"rollout/staleness_mean": mean, "rollout/staleness_max": largest}
