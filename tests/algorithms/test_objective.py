"""The objectives: what they sum, how they are cut, where their gradient goes, what they log."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from surefoot.algorithms.aggregate import AGGREGATIONS, Denominators
from surefoot.algorithms.columns import LossColumns
from surefoot.algorithms.objective import PolicyObjective, ValueObjective
from surefoot.errors import RunError
from surefoot.records import merge_metrics
from tests.algorithms.runs import algorithm, random_columns, take

EVERYTHING: dict[str, Any] = {"kl": {"where": "loss", "coef": 0.3}, "entropy_coef": 0.2, "importance_cap": 1.2}


def counts_of(columns: LossColumns) -> Denominators:
    return Denominators.of(columns.cu_seqlens.diff().tolist(), columns.weight_S.tolist())


def one_row(*logprobs: float, **columns: Any) -> tuple[Tensor, LossColumns]:
    """A single row; columns that are not given are the log-probabilities themselves, and advantage 1."""
    values = torch.tensor(logprobs, dtype=torch.float64)
    row = LossColumns(
        cu_seqlens=torch.tensor([0, len(values)]),
        weight_S=torch.ones(1),
        rollout_logprobs_T=values,
        advantages_T=torch.ones_like(values),
        old_logprobs_T=values,
    )
    given_columns = {key: torch.tensor(value, dtype=torch.float64) for key, value in columns.items()}
    return values.clone().requires_grad_(), dataclasses.replace(row, **given_columns)


def test_the_loss_by_hand() -> None:
    # Two tokens, ratio 1.1 and 1; advantages 1 and -2; engine's probability 2/3 of the trainer's old one at the first.
    # policy: -1.1 * 1.5 and 2 * 1.     KL (k2): 0.5 * 0.1^2 and 0.5 * 0.3^2.   entropy 1 and 3.
    # token mean: (-1.65 + 2) / 2 = 0.175; KL (0.005 + 0.045) / 2 = 0.025; entropy 2.
    # total 0.175 + 0.4 * 0.025 - 0.01 * 2 = 0.165
    logprobs, columns = one_row(
        -1.0,
        -2.0,
        old_logprobs_T=[-1.0 - math.log(1.1), -2.0],
        rollout_logprobs_T=[-1.0 - math.log(1.1) - math.log(1.5), -2.0],
        ref_logprobs_T=[-1.1, -1.7],
        advantages_T=[1.0, -2.0],
    )
    chosen = algorithm(entropy_coef=0.01, kl={"where": "loss", "coef": 0.4, "estimator": "k2"})
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64)
    loss, metrics = PolicyObjective(chosen)(logprobs, entropy, columns, Denominators.of([2]))
    assert loss.item() == pytest.approx(0.165)
    expected = {
        "loss": 0.165,
        "policy_loss": 0.175,
        "kl_loss": 0.025,
        "kl_ref": 0.025,
        "entropy": 2.0,
        "ratio": 1.05,
        "ratio_gap": 0.05,
        "clip_low": 0.0,
        "clip_high": 0.0,
        "approx_kl": -math.log(1.1) / 2,
        "approx_kl_k3": (0.1 - math.log(1.1)) / 2,
        "engine_gap": math.log(1.5) / 2,
        "engine_gap_max": math.log(1.5),
        "engine_kl": (0.5 - math.log(1.5)) / 2,
        "importance_weight": 1.25,
        "importance_capped": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name].value == pytest.approx(value), name
        assert metrics[name].weight == 2


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    weights=st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=6, max_size=6),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
    critic=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(
    lengths: list[int], places: list[int], weights: list[float], mode: Any, critic: bool, seed: int
) -> None:
    count = len(lengths)
    out, entropy, columns = random_columns(lengths, weights[:count], seed)
    counts = counts_of(columns)
    objective = ValueObjective(mode, 0.2, 16) if critic else PolicyObjective(algorithm(aggregation=mode, **EVERYTHING))
    inputs = (out,) if critic else (out, entropy)

    def run(rows: list[int]) -> tuple[Tensor, dict[str, Any]]:
        index, part = take(columns, rows)
        return objective(out[index], None if critic else entropy[index], part, counts)

    whole, whole_metrics = run(list(range(count)))
    whole_grads = torch.autograd.grad(whole, inputs)
    parts = [run([i for i in range(count) if places[i] == place]) for place in sorted(set(places[:count]))]
    total = torch.stack([loss for loss, _ in parts]).sum()
    assert_close(total, whole, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(total, inputs), whole_grads, strict=True):
        assert_close(got, want, rtol=1e-12, atol=1e-12)
    merged = merge_metrics([metrics for _, metrics in parts])
    assert merged.keys() == whole_metrics.keys()
    for name, metric in whole_metrics.items():
        assert merged[name].weight == metric.weight
        if metric.weight:
            assert merged[name].value == pytest.approx(metric.value, rel=1e-12, abs=1e-12), name


def test_the_loss_of_several_updates_is_their_mean() -> None:
    objective = ValueObjective("token-mean", None)
    reports = []
    for error in (1.0, 3.0):
        values, columns = one_row(0.0, values_T=[0.0], returns_T=[error])
        reports.append(objective(values, None, columns, Denominators.of([1]))[1])
    assert merge_metrics(reports)["loss"].value == pytest.approx((0.5 + 4.5) / 2)


def test_rows_left_out_change_nothing() -> None:
    logprobs, entropy, columns = random_columns([3, 2, 4], [1.0, 0.0, 1.0], seed=1)
    # The row that is left out would have the largest gap.
    columns.rollout_logprobs_T[3:5] -= 7
    objective = PolicyObjective(algorithm(**EVERYTHING))
    counts = counts_of(columns)
    loss, metrics = objective(logprobs, entropy, columns, counts)
    index, without = take(columns, [0, 2])
    assert counts == counts_of(without)
    alone, alone_metrics = objective(logprobs[index], entropy[index], without, counts)
    assert_close(loss, alone)
    assert metrics.keys() == alone_metrics.keys()
    for name, metric in metrics.items():
        assert metric.value == pytest.approx(alone_metrics[name].value), name
        assert metric.weight == alone_metrics[name].weight
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient[3:5] == 0).all()


def test_a_minibatch_with_every_row_left_out_has_loss_zero() -> None:
    logprobs, entropy, columns = random_columns([3, 2], [0.0, 0.0], seed=2)
    loss, metrics = PolicyObjective(algorithm(**EVERYTHING))(logprobs, entropy, columns, counts_of(columns))
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()
    assert all(math.isfinite(metric.value) and metric.weight == 0 for metric in metrics.values())


def test_gradient_flows_through_the_new_policy_alone() -> None:
    logprobs, entropy, columns = random_columns([3, 2], [1.0, 1.0], seed=3)
    names = ("rollout_logprobs_T", "advantages_T", "old_logprobs_T", "ref_logprobs_T")
    leaves = {name: getattr(columns, name).detach().requires_grad_() for name in names}
    columns = dataclasses.replace(columns, **leaves)
    loss, _ = PolicyObjective(algorithm(**EVERYTHING))(logprobs, entropy, columns, counts_of(columns))
    loss.backward()
    assert logprobs.grad is not None
    assert entropy.grad is not None
    for name, leaf in leaves.items():
        assert leaf.grad is None, name


def test_the_importance_weight_scales_the_gradient_and_has_none() -> None:
    # The trainer gives the first token 1.5 times the engine's probability, the second 9 times: capped at 2.
    engine = [-1.0 - math.log(1.5), -2.0 - math.log(9.0)]
    gradients: list[Tensor] = []
    for cap in (None, 2.0):
        logprobs, columns = one_row(-1.0, -2.0, rollout_logprobs_T=engine)
        loss, metrics = PolicyObjective(algorithm(importance_cap=cap))(logprobs, None, columns, Denominators.of([2]))
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
        assert ("importance_weight" in metrics) == (cap is not None)
    assert_close(gradients[1], gradients[0] * torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert metrics["importance_weight"].value == pytest.approx(1.75)
    assert metrics["importance_capped"].value == pytest.approx(0.5)


def test_without_an_entropy_bonus_the_entropy_is_logged_and_in_no_graph() -> None:
    logprobs, entropy, columns = random_columns([3], [1.0], seed=4)
    objective = PolicyObjective(algorithm())
    assert not objective.algorithm.needs_entropy_grad
    loss, metrics = objective(logprobs, entropy, columns, counts_of(columns))
    loss.backward()
    assert entropy.grad is None
    assert metrics["entropy"].value == pytest.approx(entropy.mean().item())
    without, metrics = objective(logprobs, None, columns, counts_of(columns))
    assert without == loss
    assert "entropy" not in metrics
    assert algorithm(entropy_coef=0.1).needs_entropy_grad


def test_the_entropy_bonus_raises_the_entropy() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    entropy = -(logp.exp() * logp).sum()
    row, columns = one_row(0.0, advantages_T=[0.0])
    loss, _ = PolicyObjective(algorithm(entropy_coef=0.1))(row, entropy.reshape(1), columns, Denominators.of([1]))
    (gradient,) = torch.autograd.grad(loss, logits)
    after = (logits - 0.1 * gradient).detach().log_softmax(0)
    assert -(after.exp() * after).sum() > entropy


def test_a_single_update_is_on_policy_by_construction() -> None:
    logprobs, columns = one_row(-1.0, -2.0)
    columns = dataclasses.replace(columns, old_logprobs_T=None)
    loss, metrics = PolicyObjective(algorithm())(logprobs, None, columns, Denominators.of([2]))
    assert metrics["ratio"].value == 1
    assert metrics["ratio_gap"].value == 0
    assert metrics["clip_low"].value == metrics["clip_high"].value == 0
    # The gradient is REINFORCE's: -advantage / tokens.
    assert_close(torch.autograd.grad(loss, logprobs)[0], torch.tensor([-0.5, -0.5], dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_one_step_on_the_kl_lowers_the_kl(estimator: str) -> None:
    generator = torch.Generator().manual_seed(5)
    ref = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    logits = (ref + 0.5 * torch.randn(8, generator=generator, dtype=torch.float64)).requires_grad_()
    logp = logits.log_softmax(0)
    tokens = torch.multinomial(logp.detach().exp(), 2000, replacement=True, generator=generator)
    sampled = logp[tokens]
    columns = LossColumns(
        cu_seqlens=torch.tensor([0, 2000]),
        weight_S=torch.ones(1),
        rollout_logprobs_T=sampled.detach(),
        advantages_T=torch.zeros(2000, dtype=torch.float64),
        ref_logprobs_T=ref[tokens],
    )
    chosen = algorithm(kl={"where": "loss", "coef": 1.0, "estimator": estimator})
    loss, _ = PolicyObjective(chosen)(sampled, None, columns, Denominators.of([2000]))
    (gradient,) = torch.autograd.grad(loss, logits)

    def kl(x: Tensor) -> float:
        logx = x.detach().log_softmax(0)
        return (logx.exp() * (logx - ref)).sum().item()

    assert kl(logits - 0.2 * gradient) < kl(logits)


def test_kl_in_the_reward_is_logged_and_not_in_the_loss() -> None:
    logprobs, columns = one_row(-1.0, ref_logprobs_T=[-2.0], advantages_T=[0.0])
    chosen = algorithm(kl={"where": "reward", "coef": 0.5})
    loss, metrics = PolicyObjective(chosen)(logprobs, None, columns, Denominators.of([1]))
    assert loss.item() == 0
    assert metrics["kl_ref"].value == pytest.approx(1.0)
    assert "kl_loss" not in metrics


@pytest.mark.parametrize(
    "column", ["rollout_logprobs_T", "advantages_T", "old_logprobs_T", "ref_logprobs_T", "values_T", "returns_T"]
)
@pytest.mark.parametrize(("bad", "token"), [(math.nan, 0), (math.inf, 1)])
def test_a_column_that_is_not_finite_names_row_and_token(column: str, bad: float, token: int) -> None:
    logprobs, entropy, columns = random_columns([3, 2, 4], [1.0, 0.0, 1.0], seed=6)
    spoilt = getattr(columns, column).clone()
    spoilt[3 + token] = bad
    columns = dataclasses.replace(columns, **{column: spoilt}, names=("a", "b", "c"))
    with pytest.raises(RunError, match=rf"row 1 \(prompt b\) .* token {token},") as caught:
        PolicyObjective(algorithm())(logprobs, entropy, columns, counts_of(columns))
    assert caught.value.code == "loss-not-finite"
    with pytest.raises(RunError, match="row 1"):
        ValueObjective("token-mean", 0.2)(logprobs, None, columns, counts_of(columns))


def test_a_model_output_that_is_not_finite_names_row_and_token() -> None:
    logprobs, entropy, columns = random_columns([3, 2], [1.0, 1.0], seed=7)
    bad = logprobs.detach().clone()
    bad[2] = math.nan
    with pytest.raises(RunError, match="log probability of row 0 of the micro-batch, model token 2"):
        PolicyObjective(algorithm())(bad, entropy, columns, counts_of(columns))
    with pytest.raises(RunError, match="value of row 0"):
        ValueObjective("token-mean", 0.2)(bad, None, columns, counts_of(columns))


def test_the_critics_loss_and_metrics_by_hand() -> None:
    values, columns = one_row(1.0, 0.5, values_T=[0.0, 0.5], returns_T=[2.0, 0.0])
    loss, metrics = ValueObjective("token-mean", 0.2)(values, None, columns, Denominators.of([2]))
    # First token: held at 0.2, error 1.8; second: unmoved, error 0.5.
    assert loss.item() == pytest.approx((0.5 * 1.8**2 + 0.5 * 0.5**2) / 2)
    expected = {"loss": loss.item(), "value": 0.75, "error": 0.75, "clip": 0.5}
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(expected)
