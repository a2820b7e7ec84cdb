"""The synchronous loop: sample, judge, score, assign credit, update; record; evaluate and save when it is time.

Consumes prompts from the sampler, produces metrics, rollout files and checkpoints; each step waits for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import Prompt
from .learn import learn
from .record import finish_step, keeping_state, make_up_evaluation
from .run_parts import Run
from .sampling import Collected, step_seed


async def train(run: Run) -> None:
    """Run all steps that are left, and save the last.

    Raises:
        Interrupted: A signal came; the state of the last whole step is saved.
        RunError: The run failed, or an alarm ended it. The state of the last whole step is saved, unless it failed
            amid an update.
    """
    async with keeping_state(run):
        await make_up_evaluation(run)
        while run.progress.step < run.ready.config.train.steps:
            await step(run, run.progress.step + 1)
            run.stop.check()


async def step(run: Run, number: int) -> None:
    """Make one step; when it returns, the step is recorded and counted."""
    prompts = [run.ready.prompts.prompts[i] for i in run.ready.sampler.next_batch()]
    collected = await run.stop.unless_requested(sample(run, prompts, number))
    with run.trackers.phase("sync"):
        await run.stop.unless_failed(run.engines.begin_training())
    learnt = learn(run, number, collected.rollouts)
    await finish_step(run, number, collected, learnt, run.ready.sampler.state_dict())


async def sample(run: Run, prompts: Sequence[Prompt], number: int) -> Collected:
    """Generate and judge a step's rollouts; judging overlaps with generation and is timed where it is waited for."""
    config = run.ready.config
    phases = [run.trackers.phase("generate"), run.trackers.phase("reward")]
    phases[0].__enter__()
    entered = [phases[0]]

    def generated() -> None:
        entered.pop().__exit__(None, None, None)
        phases[1].__enter__()
        entered.append(phases[1])

    try:
        return await run.collector.collect(
            prompts,
            config.rollout.sampling,
            config.train.samples_per_prompt,
            step_seed(config.seed, number),
            generated,
        )
    finally:
        entered.pop().__exit__(None, None, None)
