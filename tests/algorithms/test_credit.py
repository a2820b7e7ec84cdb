"""Credit: where the reward lands, who is left out, and what is logged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.algorithms.aggregate import Denominators
from surefoot.algorithms.credit import assign_credit
from surefoot.errors import RunError
from surefoot.records import Rollout, Scores
from tests.algorithms.runs import algorithm, rollout


def credit(rollouts: list[Rollout], kl_coef: float = 0.0, scores: list[Scores] | None = None, **keys: Any):
    chosen = algorithm(**keys)
    blank = [Scores() for _ in rollouts] if scores is None else scores
    return assign_credit(rollouts, blank, chosen, kl_coef)


def with_values(rollouts: list[Rollout], *values: list[float]) -> list[Scores]:
    return [Scores(values=np.array(v, np.float32)) for _, v in zip(rollouts, values, strict=True)]


def test_group_advantages_by_hand() -> None:
    rollouts = [
        rollout([0, 1, 1], 1.0, "a"),
        rollout([0, 1], 0.0, "b"),
        rollout([0, 1, 1, 1], 0.0, "a"),
        rollout([0, 0, 1], 4.0, "b"),
    ]
    samples, _ = credit(rollouts, normalize_by_std=False)
    assert [s.advantages.tolist() for s in samples] == [[0, 0.5, 0.5], [0, -2], [0, -0.5, -0.5, -0.5], [0, 0, 2]]
    assert [s.group for s in samples] == ["a", "b", "a", "b"]
    assert [s.prompt_length for s in samples] == [1, 1, 1, 2]
    assert all(s.returns is None and s.weight == 1 for s in samples)
    assert all(s.advantages.dtype == np.float32 for s in samples)


def test_the_score_is_the_reward_of_the_last_model_token() -> None:
    # After the last model token comes a tool's answer that the policy never replied to.
    row = rollout([0, 1, 1, 0, 1, 0, 0], 5.0, finish_reason="tool_limit")
    scores = with_values([row], [0.0] * 7)
    (sample,), _ = credit([row], scores=scores, name="ppo", gamma=0.5, whiten_advantages=False)
    # With gamma 1/2 the returns of the model's tokens show where the reward of 5 lies: on index 4.
    assert sample.returns is not None
    assert sample.returns.tolist() == [0, 1.25, 2.5, 0, 5, 0, 0]


def test_the_return_crosses_a_tools_tokens() -> None:
    row = rollout([1, 1, 0, 0, 1, 1, 0], 1.0)
    samples, _ = credit([row], name="reinforce_plus_plus", whiten_advantages=False)
    assert samples[0].advantages.tolist() == [1, 1, 0, 0, 1, 1, 0]


@given(masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_rewards_sum_to_the_score_and_nothing_lies_off_the_mask(masks: list[list[int]]) -> None:
    rollouts = [rollout(mask, score=float(i + 1)) for i, mask in enumerate(masks)]
    samples, _ = credit(rollouts, name="reinforce_plus_plus", gamma=1.0, whiten_advantages=False)
    for i, (mask, sample) in enumerate(zip(masks, samples, strict=True)):
        # Undiscounted, every model token sees the whole score, once.
        assert sample.advantages.tolist() == [float(i + 1) * on for on in mask]
        assert sample.weight == float(any(mask))


def test_a_reward_that_abstained_leaves_its_row_out() -> None:
    rollouts = [rollout([0, 1], score) for score in (1.0, 0.0, None, 1.0)]
    samples, metrics = credit(rollouts, normalize_by_std=False)
    advantages = [s.advantages[1] for s in samples]
    assert advantages == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])
    assert [s.weight for s in samples] == [1, 1, 0, 1]
    assert metrics["reward/mean"].value == pytest.approx(2 / 3)
    assert metrics["reward/mean"].weight == 3
    assert metrics["reward/unscored"].value == 1
    assert metrics["advantage/rows_left_out"].value == 1
    counts = Denominators.of([s.loss_mask.sum() for s in samples], [s.weight for s in samples])
    assert counts == Denominators(tokens=3, sequences=3)


def test_a_step_without_any_score_trains_nothing_and_logs_no_nan() -> None:
    samples, metrics = credit([rollout([0, 1, 1], None), rollout([0, 1], None)])
    assert all(s.weight == 0 and not s.advantages.any() for s in samples)
    assert all(np.isfinite(metric.value) for metric in metrics.values())


def test_a_rollout_without_model_tokens_costs_its_own_row_only() -> None:
    rollouts = [rollout([0, 1], 1.0), rollout([0, 0], 9.0, finish_reason="aborted"), rollout([0, 1], 0.0)]
    samples, _ = credit(rollouts, normalize_by_std=False)
    assert [s.weight for s in samples] == [1, 0, 1]
    assert [s.advantages.tolist() for s in samples] == [[0, 0.5], [0, 0], [0, -0.5]]


def test_truncated_responses_leave_loss_and_denominators_but_not_the_baseline() -> None:
    rollouts = [rollout([0, 1, 1], 1.0), rollout([0, 1, 1, 1], 0.0, finish_reason="length")]
    kept, metrics = credit(rollouts, normalize_by_std=False)
    assert [s.weight for s in kept] == [1, 1]
    assert metrics["rollout/truncated"].value == 0.5
    masked, metrics = credit(rollouts, normalize_by_std=False, mask_truncated=True)
    assert [s.weight for s in masked] == [1, 0]
    assert masked[0].advantages.tolist() == [0, 0.5, 0.5]
    assert not masked[1].advantages.any()
    assert metrics["rollout/truncated"].value == 0.5


def test_whitening_sees_only_the_model_tokens_that_are_trained() -> None:
    rollouts = [
        rollout([0, 1, 1], 1.0),
        rollout([0, 1, 0, 0, 1], 5.0),
        rollout([0, 1], 100.0, finish_reason="length"),
        rollout([0, 1], None),
    ]
    samples, _ = credit(rollouts, name="reinforce_plus_plus", mask_truncated=True)
    # The advantages 1, 1, 5, 5: mean 3, sample variance 16 / 3.
    unit = 2 / np.sqrt(16 / 3)
    assert samples[0].advantages.tolist() == pytest.approx([0, -unit, -unit])
    assert samples[1].advantages.tolist() == pytest.approx([0, unit, 0, 0, unit])
    assert not samples[2].advantages.any()
    assert not samples[3].advantages.any()


def test_kl_in_the_reward_is_paid_at_model_tokens_only() -> None:
    # log p - log q is 0.5 at every index, a tool's included; the factor is 0.2.
    row = rollout([0, 1, 0, 1], 1.0)
    scores = [Scores(old_logprobs=np.full(4, -1.0, np.float32), ref_logprobs=np.full(4, -1.5, np.float32))]
    kl = {"where": "reward", "coef": 0.2}
    samples, metrics = credit(
        [row], kl_coef=0.2, scores=scores, name="reinforce_plus_plus", whiten_advantages=False, kl=kl
    )
    assert samples[0].advantages.tolist() == pytest.approx([0, 1 - 0.1 - 0.1, 0, 1 - 0.1])
    assert metrics["kl/per_token"].value == pytest.approx(0.5)
    assert metrics["kl/per_sequence"].value == pytest.approx(1.0)
    assert metrics["kl/coef"].value == 0.2
    assert metrics["reward/mean"].value == 1.0


def test_kl_in_the_reward_reaches_the_groups_baseline() -> None:
    # Both score 1; the second pays 0.2 * (0.5 + 0.5), so its total is 0.2 lower: advantages +-0.1.
    rollouts = [rollout([0, 1, 1], 1.0), rollout([0, 1, 1], 1.0)]
    scores = [
        Scores(old_logprobs=np.full(3, -1.0, np.float32), ref_logprobs=np.full(3, ref, np.float32))
        for ref in (-1.0, -1.5)
    ]
    kl = {"where": "reward", "coef": 0.2}
    samples, _ = credit(rollouts, kl_coef=0.2, scores=scores, normalize_by_std=False, kl=kl)
    assert samples[0].advantages.tolist() == pytest.approx([0, 0.1, 0.1])
    assert samples[1].advantages.tolist() == pytest.approx([0, -0.1, -0.1])


def test_kl_in_the_reward_falls_back_to_the_engines_logprobs() -> None:
    row = rollout([0, 1], 1.0, logprobs=[0, -1.0])
    scores = [Scores(ref_logprobs=np.array([0, -3.0], np.float32))]
    kl = {"where": "reward", "coef": 0.1}
    samples, _ = credit([row], kl_coef=0.1, scores=scores, name="reinforce_plus_plus", whiten_advantages=False, kl=kl)
    assert samples[0].advantages[1] == pytest.approx(1 - 0.1 * 2)


def test_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    row = rollout([0, 1], 1.0)
    scores = [Scores(ref_logprobs=np.array([0, -3.0], np.float32))]
    kl = {"where": "loss", "coef": 0.1, "estimator": "k2"}
    samples, metrics = credit(
        [row], kl_coef=99.0, scores=scores, name="reinforce_plus_plus", whiten_advantages=False, kl=kl
    )
    assert samples[0].advantages[1] == 1
    assert metrics["kl/per_token"].value == pytest.approx(4.5)
    assert metrics["kl/coef"].value == 0.1


def test_gae_for_a_critic_by_hand() -> None:
    # One row, model tokens at 1 and 3 around a tool's. gamma 1, lambda 0.5, values 0.2 and 0.6, score 1.
    #   delta_3 = 1 - 0.6 = 0.4;  delta_1 = 0.6 - 0.2 = 0.4;  A_3 = 0.4;  A_1 = 0.4 + 0.5 * 0.4 = 0.6
    row = rollout([0, 1, 0, 1], 1.0)
    scores = with_values([row], [9.0, 0.2, 9.0, 0.6])
    samples, metrics = credit([row], scores=scores, name="ppo", lam=0.5, whiten_advantages=False)
    assert samples[0].advantages.tolist() == pytest.approx([0, 0.6, 0, 0.4])
    assert samples[0].returns is not None
    assert samples[0].returns.tolist() == pytest.approx([0, 0.8, 0, 1.0])
    assert metrics["critic/value_mean"].value == pytest.approx(0.4)
    assert metrics["critic/return_mean"].value == pytest.approx(0.9)


def test_explained_variance_is_of_what_really_came() -> None:
    # With lambda 0 GAE's own targets are the critic's next values: a critic that knows nothing but agrees with itself
    # would explain them. Against the rewards it is worse than a constant.
    rollouts = [rollout([0, 1, 1, 1, 1], score) for score in (0.0, 1.0)]
    scores = with_values(rollouts, [0, 1, 1, 1, 1], [0, 0, 0, 0, 0])
    _, metrics = credit(rollouts, scores=scores, name="ppo", lam=0.0, whiten_advantages=False)
    # Returns 0 x4 and 1 x4; errors -1 x4 and 1 x4: variance four times as large.
    assert metrics["critic/explained_variance"].value == pytest.approx(-3.0)
    good = with_values(rollouts, [0, 0, 0, 0, 0], [0, 1, 1, 1, 1])
    _, metrics = credit(rollouts, scores=good, name="ppo")
    assert metrics["critic/explained_variance"].value == pytest.approx(1.0)
    same = [rollout([0, 1], 1.0), rollout([0, 1], 1.0)]
    _, metrics = credit(same, scores=with_values(same, [0, 0.3], [0, 0.4]), name="ppo")
    assert "critic/explained_variance" not in metrics


def test_advantage_metrics_are_of_the_tokens_that_are_trained() -> None:
    rollouts = [rollout([0, 1, 1, 1], 1.0), rollout([0, 1], 0.0), rollout([0, 1], None)]
    _, metrics = credit(rollouts, normalize_by_std=False)
    assert metrics["advantage/mean"].value == pytest.approx((3 * 0.5 - 0.5) / 4)
    assert metrics["advantage/mean"].weight == 4
    assert metrics["advantage/min"].value == -0.5
    assert metrics["advantage/max"].value == 0.5
    assert metrics["reward/zero_variance_groups"].value == 0


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_what_lies_off_the_mask_is_never_read(name: str) -> None:
    masks = [[0, 1, 0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0, 0]]
    rollouts = [rollout(mask, float(i), logprobs=[-1.0] * len(mask)) for i, mask in enumerate(masks)]

    def run(junk: float) -> tuple[list[list[float]], dict[str, float]]:
        def column(mask: list[int], value: float) -> Any:
            return np.where(np.array(mask, bool), value, junk).astype(np.float32)

        scores = [Scores(column(m, -1.0), column(m, -1.2), column(m, 0.3) if name == "ppo" else None) for m in masks]
        kl = {"where": "reward", "coef": 0.1}
        samples, metrics = credit(rollouts, kl_coef=0.1, scores=scores, name=name, kl=kl)
        return [s.advantages.tolist() for s in samples], {key: m.value for key, m in metrics.items()}

    assert run(0.0) == run(1e6)
    assert run(0.0) == run(float("nan"))


@pytest.mark.parametrize("field", ["values", "old_logprobs", "ref_logprobs"])
def test_a_score_that_is_not_finite_names_its_row(field: str) -> None:
    rollouts = [rollout([0, 1, 1], 1.0, "a"), rollout([0, 1, 1], 0.0, "b")]
    fine = {name: np.zeros(3, np.float32) for name in ("values", "old_logprobs", "ref_logprobs")}
    scores = [Scores(**fine), Scores(**(fine | {field: np.array([0, 0, np.nan], np.float32)}))]
    with pytest.raises(RunError, match="sample 0 of prompt b") as caught:
        credit(rollouts, kl_coef=0.1, scores=scores, name="ppo", kl={"where": "reward", "coef": 0.1})
    assert caught.value.code == "loss-not-finite"


def test_a_step_without_rollouts_is_empty() -> None:
    assert credit([])[0] == []
