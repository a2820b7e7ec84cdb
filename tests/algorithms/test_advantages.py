"""Advantages and returns: hand-worked numbers, recorded numbers of verl, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from surefoot.algorithms.advantages import discounted_returns, explained_variance, gae, group_relative, whiten
from tests.algorithms.verl_cases import Packed, cases, tensor

NAN = math.nan


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_gae_by_hand() -> None:
    # gamma = 0.9, lambda = 0.5, so gamma * lambda = 0.45. Two rows: three tokens, one token.
    rewards = f64(0, 0, 1, 2)
    values = f64(0.5, 0.4, 0.2, 1.5)
    # Row 1, from its end:
    #   delta_2 = 1 + 0.9 * 0   - 0.2 =  0.8     A_2 = 0.8
    #   delta_1 = 0 + 0.9 * 0.2 - 0.4 = -0.22    A_1 = -0.22 + 0.45 * 0.8  =  0.14
    #   delta_0 = 0 + 0.9 * 0.4 - 0.5 = -0.14    A_0 = -0.14 + 0.45 * 0.14 = -0.077
    # Row 2: delta = 2 - 1.5 = 0.5; nothing of row 1 leaks into it or out of it.
    advantages, returns = gae(rewards, values, torch.tensor([0, 3, 4]), gamma=0.9, lam=0.5)
    assert_close(advantages, f64(-0.077, 0.14, 0.8, 0.5))
    assert_close(returns, f64(0.423, 0.54, 1.0, 2.0))


def test_gae_with_lambda_one_is_return_minus_value_and_with_zero_the_td_error() -> None:
    rewards, values, cu = f64(1, 2, 3, 4, 5), f64(0.1, 0.2, 0.3, 0.4, 0.5), torch.tensor([0, 2, 5])
    assert_close(gae(rewards, values, cu, 0.9, 1.0)[0], discounted_returns(rewards, cu, 0.9) - values)
    td_errors = f64(1 + 0.9 * 0.2 - 0.1, 2 - 0.2, 3 + 0.9 * 0.4 - 0.3, 4 + 0.9 * 0.5 - 0.4, 5 - 0.5)
    assert_close(gae(rewards, values, cu, 0.9, 0.0)[0], td_errors)


def test_discounted_returns_by_hand() -> None:
    # Row 1: 1 + 0.5 * (0 + 0.5 * 4) = 2;  0 + 0.5 * 4 = 2;  4.   Row 2: 3 + 0.5 * 2 = 4;  2.
    returns = discounted_returns(f64(1, 0, 4, 3, 2), torch.tensor([0, 3, 5]), 0.5)
    assert_close(returns, f64(2, 2, 4, 4, 2))


def test_estimators_give_no_gradient_to_the_critic() -> None:
    values = f64(0.5, 0.4).requires_grad_()
    advantages, returns = gae(f64(0, 1), values, torch.tensor([0, 2]), 1.0, 0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    decay=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_rows_are_scanned_as_if_alone(lengths: list[int], decay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    expected: list[float] = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        row: list[float] = []
        total = 0.0
        for reward in reversed(rewards[start:end].tolist()):
            total = reward + decay * total
            row.insert(0, total)
        expected += row
    assert_close(discounted_returns(rewards, cu, decay), f64(*expected))


def test_group_relative_by_hand() -> None:
    # Group 0: scores 1, 0, 0, 1: mean 1/2, sample variance (4 * 1/4) / 3 = 1/3, deviation 0.57735.
    # Group 1: scores 2, 5: mean 3.5, variance 2 * 2.25 / 1 = 4.5, deviation 2.12132. The rollouts come interleaved.
    scores, group = f64(1, 2, 0, 0, 5, 1), torch.tensor([0, 1, 0, 0, 1, 0])
    assert_close(group_relative(scores, group, normalize_by_std=False), f64(0.5, -1.5, -0.5, -0.5, 1.5, 0.5))
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.5 / (math.sqrt(4.5) + 1e-6)
    assert_close(group_relative(scores, group, normalize_by_std=True), f64(a, -b, -a, -a, b, a))


@pytest.mark.parametrize("normalize", [False, True])
def test_a_score_that_abstained_is_in_no_baseline(normalize: bool) -> None:
    # [1, 0, None, 1]: the baseline is 2/3 over three rows (1/2 if None counted as 0).
    advantages = group_relative(f64(1, 0, NAN, 1), torch.zeros(4, dtype=torch.int64), normalize)
    scale = 1 / (math.sqrt((2 / 9 - 1 / 9 + 1 / 9 + 4 / 9) / 2) + 1e-6) if normalize else 1
    assert_close(advantages, f64(1 / 3 * scale, -2 / 3 * scale, 0, 1 / 3 * scale))
    assert advantages[2] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 0.7, 1e4, -2.3])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_scores_give_exactly_zero(dtype: torch.dtype, score: float, normalize: bool) -> None:
    scores = torch.tensor([score] * 7 + [NAN], dtype=dtype)
    advantages = group_relative(scores, torch.zeros(8, dtype=torch.int64), normalize)
    assert advantages.dtype == dtype
    assert (advantages == 0).all()


def test_a_group_with_one_score_or_none_gives_zero() -> None:
    advantages = group_relative(f64(5, NAN, NAN, 7), torch.tensor([0, 0, 1, 2]), normalize_by_std=True)
    assert (advantages == 0).all()
    assert group_relative(f64(), torch.zeros(0, dtype=torch.int64), True).shape == (0,)


def test_whiten_by_hand() -> None:
    # Mean 2, sample variance (1 + 0 + 1) / 2 = 1.
    assert_close(whiten(f64(1, 2, 3)), f64(-1, 0, 1))
    assert (whiten(torch.tensor([0.1] * 9)) == 0).all()
    assert (whiten(f64(3)) == 0).all()


def test_explained_variance_by_hand() -> None:
    returns = f64(0, 0, 1, 1)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(f64(0.5, 0.5, 0.5, 0.5), returns) == 0
    # Errors 0, 0, 2, 2 vary four times as much as the returns.
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, f64(1, 1, 1, 1)) is None
    assert explained_variance(f64(1), f64(2)) is None


@pytest.mark.parametrize("case", cases("gae"))
def test_gae_equals_verl(case: dict) -> None:
    packed = Packed(case["inputs"]["response_mask"])
    rewards, values = (packed.flat(case["inputs"][name]) for name in ("token_level_rewards", "values"))
    advantages, returns = gae(rewards, values, packed.cu_seqlens, **case["kwargs"])
    assert_close(whiten(advantages), packed.flat(case["outputs"]["advantages"]), rtol=1e-7, atol=1e-9)
    assert_close(returns, packed.flat(case["outputs"]["returns"]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", cases("grpo"))
def test_group_relative_equals_verl_but_for_groups_of_one(case: dict) -> None:
    packed = Packed(case["inputs"]["response_mask"])
    names = case["inputs"]["index"]["data"]
    numbers = sorted(set(names))
    scores = tensor(case["inputs"]["token_level_rewards"]).sum(1)
    group = torch.tensor([numbers.index(name) for name in names])
    ours = group_relative(scores, group, case["kwargs"]["norm_adv_by_std_in_grpo"])
    # verl hands a group of one its raw score as advantage: a baseline of 0 for that row alone. Here it is 0.
    alone = torch.tensor([names.count(name) == 1 for name in names])
    assert (ours[alone] == 0).all()
    compare = packed.spread(~alone)
    theirs = packed.flat(case["outputs"]["advantages"])
    assert_close(packed.spread(ours)[compare], theirs[compare], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", cases("reinforce_plus_plus"))
def test_discounted_returns_equal_verl(case: dict) -> None:
    packed = Packed(case["inputs"]["response_mask"])
    gamma = float(case["kwargs"]["config"].partition("=")[2])
    returns = discounted_returns(packed.flat(case["inputs"]["token_level_rewards"]), packed.cu_seqlens, gamma)
    assert_close(returns, packed.flat(case["outputs"]["returns"]), rtol=1e-9, atol=1e-9)
    assert_close(whiten(returns), packed.flat(case["outputs"]["advantages"]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", cases("whiten"))
def test_whiten_equals_verl(case: dict) -> None:
    packed = Packed(case["inputs"]["mask"])
    ours = whiten(packed.flat(case["inputs"]["values"]))
    assert_close(ours, packed.flat(case["outputs"]["masked_whiten"]), rtol=1e-9, atol=1e-9)


def test_the_return_crosses_tool_tokens() -> None:
    # Mask [1, 1, 0, 0, 1, 1, 0], reward 1 at index 5: the model's tokens before and after the tool's all see it.
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    rewards = f64(0, 0, 0, 0, 0, 1, 0)
    full = torch.zeros(7, dtype=torch.float64)
    full[mask] = discounted_returns(rewards[mask], torch.tensor([0, 4]), gamma=1.0)
    assert full.tolist() == [1, 1, 0, 0, 1, 1, 0]
