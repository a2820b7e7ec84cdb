"""What a step does with its rollouts, whoever sampled them and whenever: score, assign credit, update.

Consumes scored rollouts; produces trained weights, the samples, and metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..algorithms.aggregate import Denominators
from ..algorithms.credit import assign_credit
from ..algorithms.kl import next_coef
from ..algorithms.objective import PolicyObjective, ValueObjective
from ..algorithms.warmup import advance
from ..records import Floats, Metric, Rollout, Sample, Scores, merge_metrics
from ..train.api import TrainEngine, UpdateReport
from .run_parts import Run


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """What a step's learning leaves. `version` is of the new weights; None: the actor's are what they were."""

    version: int | None
    samples: list[Sample]
    trainer_logprobs: list[Floats | None]  # of the first pass
    metrics: dict[str, Metric]


def learn(run: Run, number: int, rollouts: Sequence[Rollout]) -> Learnt:
    """Train on a step's rollouts.

    Raises:
        Interrupted: A signal came before the first update.
        RunError: A loss is not finite, or a process failed.
    """
    engines, trackers, progress = run.engines, run.trackers, run.progress
    with trackers.phase("score"):
        scores = score(run, rollouts)
        samples, metrics = assign_credit(rollouts, scores, run.ready.algorithm, progress.kl_coef)
    run.stop.check()
    explained = metrics.get("critic/explained_variance")
    progress.warmup, actor_trains, message = advance(
        progress.warmup, run.ready.config.algorithm, explained.value if explained else None, number
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
    metrics["warmup/actor_trains"] = Metric(float(actor_trains))
    progress.kl_coef = steer_kl(run, metrics, len(rollouts))
    return Learnt(number if actor_trains else None, samples, trainer_logprobs, metrics)


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
