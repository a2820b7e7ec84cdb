"""One number from token losses: by hand, against verl, and however the minibatch is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from surefoot.algorithms.aggregate import AGGREGATIONS, Denominators, aggregate
from tests.algorithms.verl_cases import Packed, cases, tensor


def test_each_mode_by_hand() -> None:
    # Rows [1, 2, 3] and [4]; norm 10.
    loss, cu = torch.tensor([1.0, 2, 3, 4]), torch.tensor([0, 3, 4])
    counts = Denominators.of([3, 1])
    assert counts == Denominators(tokens=4, sequences=2)
    assert Denominators.of([3, 0, 1]) == counts, "a row without tokens is no sequence"
    expected = {
        "token-mean": 10 / 4,
        "token-sum": 10,
        "seq-mean-token-sum": (6 + 4) / 2,
        "seq-mean-token-mean": (2 + 4) / 2,
        "seq-mean-token-sum-norm": (6 + 4) / 2 / 10,
    }
    assert set(expected) == set(AGGREGATIONS)
    for mode, value in expected.items():
        assert aggregate(loss, cu, mode, counts, norm=10).item() == pytest.approx(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_a_token_mean_is_not_a_mean_of_micro_batch_means(parts: list[list[int]]) -> None:
    # Three tokens with loss 4 and nine with loss 0: 12 / 12 = 1, however they are cut. A mean of means gives 2.
    rows = [torch.full((3,), 4.0, requires_grad=True), torch.zeros(9, requires_grad=True)]
    counts = Denominators.of([3, 9])
    total = torch.zeros(())
    for part in parts:
        lengths = [len(rows[i]) for i in part]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        total = total + aggregate(torch.cat([rows[i] for i in part]), cu, "token-mean", counts)
    total.backward()
    assert total.item() == pytest.approx(1.0)
    for row in rows:
        assert row.grad is not None
        assert_close(row.grad, torch.full_like(row, 1 / 12))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_row_that_is_left_out_is_in_no_denominator(mode: str) -> None:
    # A: 4 tokens with loss 2, kept. B: 6 tokens, over-long, left out (with a loss that must not leak).
    loss = torch.tensor([2.0] * 4 + [float("inf")] * 6)
    cu, weight = torch.tensor([0, 4, 10]), torch.tensor([1.0, 0.0])
    counts = Denominators.of([4, 6], [1.0, 0.0])
    assert counts == Denominators(tokens=4, sequences=1)
    both = aggregate(loss, cu, mode, counts, weight, norm=8)  # type: ignore[arg-type]
    alone = aggregate(loss[:4], cu[:2], mode, Denominators.of([4]), norm=8)  # type: ignore[arg-type]
    assert both == alone
    if mode in ("token-mean", "seq-mean-token-mean"):
        assert both.item() == 2.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_minibatch_gives_zero_with_a_graph(mode: str) -> None:
    loss = torch.tensor([2.0, 3.0], requires_grad=True)
    counts = Denominators.of([2], [0.0])
    value = aggregate(loss, torch.tensor([0, 2]), mode, counts, torch.zeros(1))  # type: ignore[arg-type]
    value.backward()
    assert value.item() == 0
    assert loss.grad is not None
    assert (loss.grad == 0).all()
    nothing = torch.zeros(0, requires_grad=True)
    assert aggregate(nothing, torch.tensor([0]), mode, Denominators.of([])).item() == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases("aggregate"))
def test_aggregate_equals_verl(case: dict) -> None:
    kwargs = case["kwargs"]
    packed = Packed(case["inputs"]["loss_mask"])
    loss_T = packed.flat(case["inputs"]["loss_mat"]).requires_grad_()
    rows = int(packed.full_rows.sum())
    counts = Denominators(kwargs.get("batch_num_tokens", len(loss_T)), kwargs.get("global_batch_size", rows))
    norm = kwargs.get("loss_scale_factor") or packed.mask.shape[1]
    value = aggregate(loss_T, packed.cu_seqlens, kwargs["loss_agg_mode"], counts, norm=norm)
    value = value * kwargs.get("dp_size", 1)
    # verl adds 1e-8 to each row's token count under seq-mean-token-mean.
    assert_close(value, tensor(case["outputs"]["loss"]), rtol=1e-8, atol=1e-10)
    value.backward()
    assert loss_T.grad is not None
    assert_close(loss_T.grad, packed.flat(case["grads"]["loss_mat"]), rtol=1e-7, atol=1e-10)


def cut(rows: list[Tensor], places: list[int]) -> list[list[int]]:
    """Row numbers by the micro-batch (of whatever rank) that each was put in."""
    return [[i for i, place in enumerate(places) if place == where] for where in sorted(set(places))]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    places=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_any_cut_sums_to_the_whole(
    lengths: list[int], places: list[int], weights: list[float], mode: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, generator=generator, dtype=torch.float64, requires_grad=True) for n in lengths]
    weight = torch.tensor(weights[: len(rows)], dtype=torch.float64)
    counts = Denominators.of(lengths, weight.tolist())

    def part(members: list[int]) -> Tensor:
        cu = torch.tensor([0, *(lengths[i] for i in members)]).cumsum(0)
        return aggregate(torch.cat([rows[i] for i in members]), cu, mode, counts, weight[members], norm=16)  # type: ignore[arg-type]

    whole = part(list(range(len(rows))))
    whole_grads = torch.autograd.grad(whole, rows)
    pieces = torch.stack([part(members) for members in cut(rows, places[: len(rows)])]).sum()
    assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(pieces, rows), whole_grads, strict=True):
        assert_close(got, want, rtol=1e-12, atol=1e-12)
