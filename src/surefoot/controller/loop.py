"""The synchronous loop: sample, judge, score, assign credit, update; record; evaluate and save when it is time.

Consumes prompts from the sampler, produces metrics, rollout files and checkpoints; each step waits for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from ..algorithms.aggregate import Denominators
from ..algorithms.credit import assign_credit
from ..algorithms.kl import next_coef
from ..algorithms.objective import PolicyObjective, ValueObjective
from ..algorithms.warmup import advance
from ..config.run import EvalRunConfig
from ..errors import RunError
from ..records import Floats, Metric, Prompt, Rollout, Sample, Scores, merge_metrics
from ..seeds import derive_seed
from ..tracking.api import Alarm
from ..tracking.hub import Trackers
from ..tracking.metrics import flatten
from ..tracking.run_folder import RunFolder
from ..train.api import TrainEngine, UpdateReport
from .evaluate import evaluate
from .parts import Engines, Progress
from .preflight import Preflight
from .resume import Saver
from .sampling import Collected, RolloutCollector
from .signals import Interrupted, StopSignal


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run that is ready to go: all parts are up."""

    ready: Preflight
    engines: Engines
    collector: RolloutCollector
    trackers: Trackers
    folder: RunFolder
    saver: Saver
    stop: StopSignal
    progress: Progress


async def train(run: Run) -> None:
    """Run all steps that are left, and save the last.

    Raises:
        Interrupted: A signal came; the state of the last whole step is saved.
        RunError: The run failed, or an alarm ended it. The state of the last whole step is saved, unless it failed
            amid an update.
    """
    config, progress = run.ready.config, run.progress
    run.stop.defer()
    progress.cursor = run.ready.sampler.state_dict()
    try:
        await make_up_evaluation(run)
        while progress.step < config.train.steps:
            await step(run, progress.step + 1)
            run.stop.check()
    except Exception as error:
        if not progress.updating and getattr(error, "code", None) != "disk-full":
            run.ready.sampler.load_state_dict(progress.cursor)  # the unfinished step's prompts come again
            run.saver.save_once(run.engines, progress)
        raise
    run.saver.save_once(run.engines, progress)


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


async def step(run: Run, number: int) -> None:
    """Make one step; when it returns, the step is recorded and counted."""
    config, engines, trackers, progress = run.ready.config, run.engines, run.trackers, run.progress
    prompts = [run.ready.prompts.prompts[i] for i in run.ready.sampler.next_batch()]
    collected = await run.stop.unless_requested(sample(run, prompts, number))
    rollouts = collected.rollouts
    with trackers.phase("sync"):
        await engines.begin_training()
    with trackers.phase("score"):
        scores = score(run, rollouts)
        samples, metrics = assign_credit(rollouts, scores, run.ready.algorithm, progress.kl_coef)
    run.stop.check()
    explained = metrics.get("critic/explained_variance")
    progress.warmup, actor_trains, message = advance(
        progress.warmup, config.algorithm, explained.value if explained else None, number
    )
    if message:
        trackers.message(message)
    progress.updating = True  # a signal waits until the step is whole
    with trackers.phase("update"):
        if engines.critic is not None:
            metrics |= update_critic(run, engines.critic, samples)
        trainer_logprobs: list[Floats | None] = [s.old_logprobs for s in samples]
        if actor_trains:
            actor_metrics, fresh = update_actor(run, samples)
            metrics |= actor_metrics
            trainer_logprobs = [
                old if old is not None else new for old, new in zip(trainer_logprobs, fresh, strict=True)
            ]
    with trackers.phase("sync"):
        await engines.begin_sampling(number if actor_trains else None)
    metrics["warmup/actor_trains"] = Metric(float(actor_trains))
    progress.kl_coef = steer_kl(run, metrics, len(rollouts))
    progress.step, progress.cursor, progress.updating = number, run.ready.sampler.state_dict(), False
    await record(run, number, collected, samples, trainer_logprobs, metrics)


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
            lambda prompt_id, index, turn: derive_seed(config.seed, "rollout", number, prompt_id, index, turn),
            generated,
        )
    finally:
        entered.pop().__exit__(None, None, None)


def score(run: Run, rollouts: Sequence[Rollout]) -> list[Scores]:
    """Ask the models what the algorithm needs to know, and nothing more.

    With a single update a step the old policy is the policy itself, and the update's own forward pass tells its
    log-probabilities.
    """
    train = run.ready.config.train
    several = train.updates_per_step * train.passes_per_step > 1
    return run.engines.score(rollouts, want_old=several, want_reference=run.ready.algorithm.needs_reference)


def minibatches(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Split samples by prompt into `count` minibatches, as even as the prompts allow. Returns indices."""
    groups: dict[str, list[int]] = {}
    for index, one in enumerate(samples):
        groups.setdefault(one.group, []).append(index)
    members = list(groups.values())
    bounds = [round(i * len(members) / count) for i in range(count + 1)]
    return [[i for g in members[a:b] for i in g] for a, b in pairwise(bounds) if b > a]


def update_actor(run: Run, samples: Sequence[Sample]) -> tuple[dict[str, Metric], list[Floats | None]]:
    """Train the policy. Returns `actor/...` metrics and the trainer's log-probabilities of the first pass.

    A row whose gradient is zero whatever the model says (no advantage, and nothing but the policy loss) is counted in
    the denominators and not computed.
    """
    config, algorithm = run.ready.config, run.ready.algorithm
    objective = PolicyObjective(algorithm)
    idle_rows_matter = algorithm.needs_entropy_grad or algorithm.kl.where == "loss"
    logprobs: list[Floats | None] = [None] * len(samples)
    reports: list[UpdateReport] = []
    for _ in range(config.train.passes_per_step):
        for batch in minibatches(samples, config.train.updates_per_step):
            kept = [i for i in batch if samples[i].weight > 0]
            active = [i for i in kept if idle_rows_matter or samples[i].advantages.any()]
            if not active:
                run.engines.actor.skip_update()
                continue
            counts = denominators_of([samples[i] for i in kept])
            report = run.engines.actor.update([samples[i] for i in active], objective, counts)
            reports.append(with_idle_rows(report, sum(samples[i].num_model_tokens for i in kept)))
            for i, output in zip(active, report.outputs, strict=True):
                logprobs[i] = output if logprobs[i] is None else logprobs[i]
    metrics = {f"actor/{name}": metric for name, metric in merge_metrics([r.all_metrics for r in reports]).items()}
    several = config.train.passes_per_step * config.train.updates_per_step > 1
    if several and reports and "ratio_gap" in reports[0].metrics:  # a single update has ratio 1 by definition
        metrics["actor/first_ratio_gap"] = reports[0].metrics["ratio_gap"]
    wanted = config.train.passes_per_step * config.train.updates_per_step
    metrics["actor/empty_updates"] = Metric(float(wanted - len(reports)), kind="sum")
    return metrics | phase_metrics("actor", reports), logprobs


def with_idle_rows(report: UpdateReport, tokens: int) -> UpdateReport:
    """Let rows that were not computed count in the losses, where each of them is 0."""
    metrics = dict(report.metrics)
    for name in ("loss", "policy_loss"):
        metrics[name] = metrics[name].merge(Metric(0.0, tokens - metrics[name].weight))
    return replace(report, metrics=metrics)


def update_critic(run: Run, critic: TrainEngine, samples: Sequence[Sample]) -> dict[str, Metric]:
    """Train the critic. Returns `critic/...` metrics."""
    config = run.ready.config
    assert config.critic is not None
    limit = config.rollout.sampling.max_response_length
    objective = ValueObjective(run.ready.algorithm.aggregation, config.critic.value_clip, limit)
    reports: list[UpdateReport] = []
    for _ in range(config.critic.passes_per_step):
        for batch in minibatches(samples, config.train.updates_per_step):
            kept = [samples[i] for i in batch if samples[i].weight > 0]
            if kept:
                reports.append(critic.update(kept, objective, denominators_of(kept)))
    metrics = {f"critic/{name}": metric for name, metric in merge_metrics([r.all_metrics for r in reports]).items()}
    return metrics | phase_metrics("critic", reports)


def denominators_of(samples: Sequence[Sample]) -> Denominators:
    """Count the whole minibatch."""
    return Denominators.of([s.num_model_tokens for s in samples], [s.weight for s in samples])


def phase_metrics(role: str, reports: Sequence[UpdateReport]) -> dict[str, Metric]:
    """Seconds of forward, backward and optimizer, for the record."""
    parts = [
        {f"seconds/{role}_{name}": Metric(value, kind="sum") for name, value in r.seconds.items()} for r in reports
    ]
    return merge_metrics(parts)


def steer_kl(run: Run, metrics: dict[str, Metric], num_rollouts: int) -> float:
    """The next step's KL factor, from this step's KL per sequence."""
    if (seen := metrics.get("kl/per_sequence")) is None:
        return run.progress.kl_coef
    return next_coef(run.ready.config.algorithm.kl, run.progress.kl_coef, seen.value, num_rollouts)


async def held_out(run: Run) -> dict[str, float]:
    """Evaluate; returns `eval/...` metrics."""
    ready = run.ready
    assert ready.config.eval is not None
    assert ready.eval_prompts is not None
    with run.trackers.phase("eval"):
        metrics, _ = await evaluate(run.collector, ready.eval_prompts.prompts, ready.config.eval, ready.config.seed)
    run.collector.rewards.metrics()  # what judging cost here is no part of the next step's
    return metrics


async def record(
    run: Run,
    number: int,
    collected: Collected,
    samples: Sequence[Sample],
    trainer_logprobs: Sequence[Floats | None],
    metrics: dict[str, Metric],
) -> None:
    """Write everything that is known of the step, evaluate and save when it is time, and ring the alarms."""
    config, trackers, rollouts = run.ready.config, run.trackers, collected.rollouts
    if collected.failures:
        metrics["rollout/failed_prompts"] = Metric(len(collected.failures), kind="sum")
        prompt_id, error = next(iter(collected.failures.items()))
        count = len(collected.failures)
        trackers.message(f"step {number}: the rollout program failed on {count} prompts; on {prompt_id}: {error}")
    every = config.tracking.rollouts_every
    if every and number % every == 0:
        alarm = run.folder.write_rollouts(number, rollouts, [s.advantages for s in samples], trainer_logprobs)
        if alarm:
            trackers.alarm(alarm)
    row = flatten(metrics | run.collector.rewards.metrics())
    times = trackers.clock.lap()
    seconds, tokens = times["time/step"], sum(len(r.token_ids) for r in rollouts)
    row["throughput/tokens_per_second"] = tokens / seconds
    row["throughput/sampled_tokens_per_second"] = sum(r.num_model_tokens for r in rollouts) / times["time/generate"]
    evaluation: dict[str, float] = {}
    try:
        if wants_evaluation(config.eval, number, config.train.steps):
            with suppress(Interrupted):  # the step itself is whole; the caller sees the signal at its next check
                evaluation = await run.stop.unless_requested(held_out(run))
                evaluation |= {"time/eval": trackers.clock.lap()["time/step"]}
    finally:  # an evaluation that failed is made up when the run goes on
        alarms = trackers.log(number, row | times | evaluation)
    if rollouts:
        trackers.sample(number, rollouts[number % len(rollouts)])
    if config.checkpoint.every and number % config.checkpoint.every == 0:
        run.saver.save_once(run.engines, run.progress)
        trackers.clock.lap()  # saving is no part of the next step's time
    _end_if_asked(run, alarms)


def _end_if_asked(run: Run, alarms: Sequence[Alarm]) -> None:
    for alarm in alarms:
        if run.trackers.ends_run(alarm):
            raise RunError("alarm-stop", f"{alarm.code}: {alarm.message}", key="alarms.stop_on")
