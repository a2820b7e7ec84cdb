"""The verbs `train` and `eval`: bring the parts up, run, and leave nothing behind, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..checkpoint.resume import Resume, find_resume
from ..config import RunConfig, to_yaml
from ..data.findings import findings
from ..errors import UserError
from ..rewards.runner import RewardRunner
from ..tracking.hub import Trackers
from ..tracking.run_folder import RunFolder
from . import loop, loop_async
from .evaluate import evaluate
from .parts import Engines, Progress, load_engines, load_sampler, make_collector, pick_device
from .preflight import Preflight, check_parts, preflight
from .process import prepare_process
from .resume import Saver, restore
from .run_parts import Run
from .signals import Interrupted, StopSignal
from .watchdog import Watchdog


def run_training(config: RunConfig) -> dict[str, Any]:
    """Train as configured, or go on with a run that was interrupted. Returns the summary.

    Raises:
        UserError: Something that the user can mend; nothing was trained.
        Interrupted: A signal came; the state of the last whole step is saved.
        RunError: The run failed.
    """
    prepare_process(config)
    with StopSignal() as stop:
        return train_ready(preflight(config), stop)


def train_ready(ready: Preflight, stop: StopSignal) -> dict[str, Any]:
    """Train what `preflight` has nothing against; see `run_training`."""
    config = ready.config
    with ExitStack() as stack:
        folder = RunFolder(config.output_dir, config.name)
        stack.callback(folder.close)
        resume = find_resume(folder.checkpoints, config.checkpoint.resume, folder.used)
        trackers = Trackers(config.tracking, config.alarms, folder)
        watchdog = stack.enter_context(Watchdog(config.stall_limit, stop, trackers.message))
        trackers.on_phase = watchdog.beat
        rewards = stack.enter_context(RewardRunner(config.rewards, pick_device(config).type))
        engines = stack.enter_context(bring_up(ready, folder, watchdog))
        watchdog.beat()
        return asyncio.run(_train(ready, folder, trackers, rewards, engines, stop, watchdog, resume))


@contextmanager
def bring_up(ready: Preflight, folder: RunFolder, watchdog: Watchdog) -> Iterator[Engines]:
    """Load the models where the placement says, and let them go afterwards."""
    if ready.config.placement == "local":
        engines = load_engines(ready)
        watchdog.counters = lambda: {"here": engines.progress()}
        yield engines
        return
    from .ray_parts import ray_engines

    with ray_engines(ready, folder.path / "logs", watchdog) as engines:
        yield engines


async def _train(
    ready: Preflight,
    folder: RunFolder,
    trackers: Trackers,
    rewards: RewardRunner,
    engines: Engines,
    stop: StopSignal,
    watchdog: Watchdog,
    resume: Resume,
) -> dict[str, Any]:
    config = ready.config
    progress = Progress(kl_coef=config.algorithm.kl.coef)
    if resume.checkpoint is not None:
        progress = await restore(resume.checkpoint, engines, ready.sampler)
    elif engines.link is not None:
        await engines.begin_sampling(0)  # the sampler read the weights from disk; from here on they are proved
    resumed = progress.step if resume.checkpoint is not None else None
    changes = folder.write_config(to_yaml(config))
    trackers.start(config.name, config.train.steps, config.model_dump(mode="json"), facts(ready, engines), resumed)
    lines = [*findings(ready.prompts, ready.eval_prompts, ready.template), *resume.ignored]
    if resume.checkpoint is not None:
        lines.append(f"going on after step {progress.step}, from {resume.checkpoint.path}")
        lines += [f"changed since then: {change}" for change in changes]
        if progress.step >= config.train.steps:
            lines.append(
                f"nothing is left to do: {progress.step} steps are done and train.steps is {config.train.steps}"
            )
    for line in lines:
        trackers.message(line)
    saver = Saver(folder.checkpoints, config, resumed)
    collector = make_collector(ready, engines.sampler, rewards, watchdog.beat)
    run = Run(ready, engines, collector, trackers, folder, saver, stop, progress)
    try:
        await (loop_async.train if config.rollout.max_staleness else loop.train)(run)
    except (Interrupted, KeyboardInterrupt, asyncio.CancelledError):
        trackers.finish("interrupted", _more(config, folder))
        raise
    except BaseException:
        trackers.finish("failed")
        raise
    else:
        return trackers.finish("finished", _more(config, folder))
    finally:
        await engines.sampler.close()


def run_evaluation(config: RunConfig, model: str | None) -> dict[str, float]:
    """Evaluate `model`, or the configuration's own, on the `eval` block. Returns `eval/...` metrics.

    Raises:
        UserError: There is no `eval` block, or anything that `run_training` would refuse.
    """
    prepare_process(config)
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": model, "lora": None})})
    with ExitStack() as stack:
        stack.enter_context(StopSignal())
        ready = check_parts(config)
        if ready.eval_prompts is None:
            raise UserError(
                "config-conflict", "there is nothing to evaluate on", key="eval", want="a section with sources"
            )
        prompts, settings = ready.eval_prompts.prompts, config.eval
        rewards = stack.enter_context(RewardRunner(config.rewards, pick_device(config).type))
        sampler = load_sampler(ready)

        async def work() -> dict[str, float]:
            assert settings is not None
            collector = make_collector(ready, sampler, rewards)
            try:
                metrics, _ = await evaluate(collector, prompts, settings, config.seed)
            finally:
                await sampler.close()
            return metrics

        return asyncio.run(work())


def facts(ready: Preflight, engines: Engines) -> dict[str, str]:
    """Lines about the run, for people."""
    config = ready.config
    total, trained = engines.actor.num_parameters()
    how = "all weights" if trained == total else f"LoRA, {_count(trained)} trained"
    train = config.train
    return {
        "model": f"{config.model.path} ({_count(total)} parameters, {how}, {config.model.dtype})",
        "algorithm": f"{ready.algorithm.name}, {train.prompts_per_step} x {train.samples_per_prompt} rollouts a step",
        "data": ", ".join(f"{s.name} ({s.stop - s.start} prompts)" for s in ready.prompts.sources),
        "device": str(engines.device),
    } | (
        {"start-up": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in engines.startup.items())}
        if engines.startup
        else {}
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f} M" if parameters >= 1e7 else f"{parameters / 1e3:.0f} K"


def _more(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    return {"next": f"surefoot export {folder.path} --to {config.name}-model"}
