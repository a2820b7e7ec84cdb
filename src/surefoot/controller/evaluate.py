"""Held-out evaluation: mean score, pass@k, length and truncation, on prompts and sampling of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from ..config.run import EvalRunConfig
from ..records import Prompt, Rollout
from ..seeds import derive_seed
from .sampling import RolloutCollector


async def evaluate(
    collector: RolloutCollector, prompts: Sequence[Prompt], config: EvalRunConfig, run_seed: int
) -> tuple[dict[str, float], list[Rollout]]:
    """Return `eval/...` metrics and the rollouts behind them.

    The seeds do not depend on the step: the same weights give the same evaluation, whenever it is made.
    """
    collected = await collector.collect(
        prompts,
        config.sampling,
        config.samples_per_prompt,
        lambda prompt_id, sample, turn: derive_seed(run_seed, "eval", prompt_id, sample, turn),
    )
    return eval_metrics(collected.rollouts, config), collected.rollouts


def eval_metrics(rollouts: Sequence[Rollout], config: EvalRunConfig) -> dict[str, float]:
    """Reduce scored rollouts. A row whose reward abstained counts as not passed, and is left out of the mean score."""
    scores = [r.reward.score for r in rollouts if r.reward is not None and r.reward.score is not None]
    metrics = {
        "eval/rows": float(len(rollouts)),
        "eval/unscored": float(len(rollouts) - len(scores)),
        "eval/truncated": fmean(r.finish_reason == "length" for r in rollouts),
        "eval/length_mean": fmean(r.num_model_tokens for r in rollouts),
    }
    if scores:
        metrics["eval/score"] = fmean(scores)
    groups: dict[str, list[bool]] = defaultdict(list)
    sources: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for rollout in rollouts:
        score = rollout.reward.score if rollout.reward is not None else None
        passed = score is not None and score >= config.pass_score
        groups[rollout.prompt.id].append(passed)
        sources[rollout.prompt.source][rollout.prompt.id].append(passed)
    for k in config.pass_at:
        metrics[f"eval/pass@{k}"] = fmean(pass_at_k(len(g), sum(g), k) for g in groups.values())
        if len(sources) > 1:
            for name, members in sources.items():
                metrics[f"eval/{name}/pass@{k}"] = fmean(pass_at_k(len(g), sum(g), k) for g in members.values())
    return metrics


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased chance that one of k samples passes: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
