"""What is written of a step, its evaluation when that is due, and its checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from ..config.run import EvalRunConfig
from ..errors import RunError
from ..records import Metric
from ..tracking.api import Alarm
from ..tracking.metrics import flatten
from .evaluate import evaluate
from .learn import Learnt
from .run_parts import Run
from .sampling import Collected
from .signals import Interrupted


@asynccontextmanager
async def keeping_state(run: Run) -> AsyncIterator[None]:
    """Save the state when the steps are done, and when they end early; that of the last whole step.

    Raises:
        Interrupted: A signal came.
        RunError: The run failed, or an alarm ended it. Amid an update there is no state to save.
    """
    run.stop.defer()
    run.progress.cursor = run.ready.sampler.state_dict()
    try:
        yield
    except Exception as error:
        if not run.progress.updating and getattr(error, "code", None) != "disk-full":
            run.saver.save_once(run.engines, run.progress)
        raise
    run.saver.save_once(run.engines, run.progress)


async def finish_step(
    run: Run,
    number: int,
    collected: Collected,
    learnt: Learnt,
    cursor: dict[str, Any],
    delivered: Callable[[], None] = lambda: None,
) -> None:
    """Count a step that was learnt; bring the weights to the sampler; record, evaluate and save when it is time.

    Args:
        run: The run.
        number: Of the step.
        collected: Its rollouts.
        learnt: What was learnt from them.
        cursor: The prompt sampler's state after the step's prompts.
        delivered: Called when the sampler has the weights.

    Raises:
        RunError: An alarm ends the run (`alarm-stop`), a file that it cannot do without did not fit, or a sampler
            failed. The step counts all the same.
    """
    progress = run.progress
    progress.step, progress.cursor, progress.updating = number, cursor, False
    progress.version = progress.version if learnt.version is None else learnt.version
    config, trackers = run.ready.config, run.trackers
    evaluation: dict[str, float] = {}
    metrics: dict[str, Metric] = {}
    times: dict[str, float] = {}
    try:
        with trackers.phase("sync"):
            metrics = await run.stop.unless_failed(run.engines.begin_sampling(learnt.version))
        delivered()
        write_rollouts(run, number, collected, learnt)
        times = trackers.clock.lap()
        if wants_evaluation(config.eval, number, config.train.steps):
            with suppress(Interrupted):  # the step itself is whole; the caller sees the signal at its next check
                evaluation = await run.stop.unless_requested(held_out(run))
                evaluation |= {"time/eval": trackers.clock.lap()["time/step"]}
    finally:  # an evaluation that failed is made up when the run goes on
        metrics |= learnt.metrics | failure_metrics(run, number, collected) | run.collector.rewards.metrics()
        row = flatten(metrics) | step_times(collected, times or trackers.clock.lap())
        alarms = trackers.log(number, row | evaluation)
    if rollouts := collected.rollouts:
        trackers.sample(number, rollouts[number % len(rollouts)])
    if config.checkpoint.every and number % config.checkpoint.every == 0:
        run.saver.save_once(run.engines, run.progress)
        trackers.clock.lap()  # saving is no part of the next step's time
    _end_if_asked(run, alarms)


def write_rollouts(run: Run, number: int, collected: Collected, learnt: Learnt) -> None:
    """Write the step's rollout file, when it is time."""
    every = run.ready.config.tracking.rollouts_every
    if every and number % every == 0:
        advantages = [sample.advantages for sample in learnt.samples]
        alarm = run.folder.write_rollouts(number, collected.rollouts, advantages, learnt.trainer_logprobs)
        if alarm:
            run.trackers.alarm(alarm)


def failure_metrics(run: Run, number: int, collected: Collected) -> dict[str, Metric]:
    """Say which prompts the program failed on, and count them."""
    if not collected.failures:
        return {}
    prompt_id, error = next(iter(collected.failures.items()))
    count = len(collected.failures)
    run.trackers.message(f"step {number}: the rollout program failed on {count} prompts; on {prompt_id}: {error}")
    return {"rollout/failed_prompts": Metric(count, kind="sum")}


def step_times(collected: Collected, times: dict[str, float]) -> dict[str, float]:
    """The step's seconds by phase, and the tokens in them."""
    rollouts, seconds = collected.rollouts, times["time/step"]
    sampling = times.get("time/generate", seconds)  # running ahead, it takes the whole step
    return times | {
        "throughput/tokens_per_second": sum(len(r.token_ids) for r in rollouts) / seconds,
        "throughput/sampled_tokens_per_second": sum(r.num_model_tokens for r in rollouts) / sampling,
    }


def wants_evaluation(config: EvalRunConfig | None, step: int, steps: int) -> bool:
    """Whether the weights after `step` of `steps` are evaluated."""
    if config is None:
        return False
    return config.before_training if step == 0 else step == steps or bool(config.every and step % config.every == 0)


async def make_up_evaluation(run: Run) -> None:
    """Evaluate the weights that the run begins with, or that it was interrupted at before they were evaluated."""
    config, number, rows = run.ready.config, run.progress.step, run.trackers.rows
    here = rows[-1] if rows and rows[-1]["step"] == number else None
    if not wants_evaluation(config.eval, number, config.train.steps) or (here is not None and "eval/rows" in here):
        return
    metrics = await run.stop.unless_requested(held_out(run))
    times = run.trackers.clock.lap()
    if here is not None:
        run.trackers.amend(metrics | {"time/eval": times["time/step"]})
    elif number == 0:
        run.trackers.log(0, metrics | times)


async def held_out(run: Run) -> dict[str, float]:
    """Evaluate; returns `eval/...` metrics."""
    ready = run.ready
    assert ready.config.eval is not None
    assert ready.eval_prompts is not None
    with run.trackers.phase("eval"):
        metrics, _ = await evaluate(run.collector, ready.eval_prompts.prompts, ready.config.eval, ready.config.seed)
    run.collector.rewards.metrics()  # what judging cost here is no part of the next step's
    return metrics


def _end_if_asked(run: Run, alarms: Sequence[Alarm]) -> None:
    for alarm in alarms:
        if run.trackers.ends_run(alarm):
            raise RunError("alarm-stop", f"{alarm.code}: {alarm.message}", key="alarms.stop_on")
