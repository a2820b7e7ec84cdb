"""Policy and value losses per token: hand-worked numbers, recorded numbers of verl, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from surefoot.algorithms.aggregate import Denominators, aggregate
from surefoot.algorithms.losses import importance_weight, ppo_clip, value_loss
from tests.algorithms.verl_cases import Packed, cases, tensor


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def policy(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float]:
    """Loss and d loss / d logprob at one ratio, clipped to 0.8 .. 1.3."""
    logprobs = f64(math.log(ratio) - 1).requires_grad_()
    loss, _ = ppo_clip(logprobs, f64(-1), f64(advantage), 0.2, 0.3, dual_clip)
    loss.sum().backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


def test_ppo_clip_by_hand() -> None:
    # Inside the clip the loss is -A * ratio, and d ratio / d logprob is the ratio itself.
    assert policy(1.1, 2) == pytest.approx((-2.2, -2.2))
    # A good token that is already likely enough: held at 1.3, no gradient.
    assert policy(1.5, 2) == pytest.approx((-2.6, 0))
    # A good token that has become unlikely: free to come back.
    assert policy(0.5, 2) == pytest.approx((-1.0, -1.0))
    # A bad token that is already unlikely enough: held at 0.8.
    assert policy(0.5, -2) == pytest.approx((1.6, 0))
    # A bad token that has become likely: pushed down with all its ratio ...
    assert policy(5.0, -2) == pytest.approx((10, 10))
    # ... unless the dual clip bounds the loss at 3 * |A|.
    assert policy(5.0, -2, dual_clip=3) == pytest.approx((6, 0))
    assert policy(2.0, -2, dual_clip=3) == pytest.approx((4, 4))
    # The dual clip leaves good tokens alone.
    assert policy(1.1, 2, dual_clip=3) == pytest.approx((-2.2, -2.2))


def test_what_ppo_clip_logs() -> None:
    ratios = f64(1.0, 1.5, 0.5, 0.5, 5.0)
    _, stats = ppo_clip(ratios.log(), torch.zeros(5), f64(1, 1, 1, -1, -1), 0.2, 0.3, 3.0)
    assert_close(stats["ratio"], ratios)
    assert_close(stats["ratio_gap"], f64(0, 0.5, 0.5, 0.5, 4))
    assert stats["clip_high"].tolist() == [False, True, False, False, False]
    assert stats["clip_low"].tolist() == [False, False, False, True, False]
    assert stats["clip_dual"].tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("log_ratio", [0.0, 1e-3, 19.9, 20.0, 21.0, 1e4, 3e38, math.inf])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_clip_is_finite_at_any_log_ratio(
    log_ratio: float, sign: int, advantage: float, dual_clip: float | None
) -> None:
    logprobs = torch.tensor([sign * log_ratio], requires_grad=True)
    loss, _ = ppo_clip(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2, dual_clip)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_policy_gradient_flows_through_the_new_logprobs_alone() -> None:
    new, old, advantages = (f64(0.1, -0.2).requires_grad_() for _ in range(3))
    loss, stats = ppo_clip(new, old, advantages, 0.2, 0.2, 3.0)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.abs().sum() > 0
    assert old.grad is None
    assert advantages.grad is None
    assert not any(column.requires_grad for column in stats.values())


def test_importance_weight_by_hand() -> None:
    old = f64(-1, -1, -1, 0).requires_grad_()
    weight = importance_weight(old, f64(-1, -1 - math.log(1.5), -1 - math.log(9), -1000), cap=2.0)
    assert_close(weight, f64(1, 1.5, 2, 2))
    assert not weight.requires_grad


def test_value_loss_by_hand() -> None:
    values = f64(1.0, 1.0, 0.3).requires_grad_()
    # Old values 0, 0.9, 0.2, clip 0.2; returns 0, 0, 1.
    #   1: held at 0.2, error^2 max(1, 0.04) = 1     loss 0.5, gradient 1
    #   2: within the clip, error^2 1                loss 0.5, gradient 1
    #   3: within the clip, error^2 0.49             loss 0.245, gradient -0.7
    loss, stats = value_loss(values, f64(0, 0.9, 0.2), f64(0, 0, 1), clip=0.2)
    assert_close(loss, f64(0.5, 0.5, 0.245))
    assert stats["clip"].tolist() == [False, False, False]
    loss.sum().backward()
    assert values.grad is not None
    assert_close(values.grad, f64(1, 1, -0.7))
    # It has moved 0.8 towards the return of 1, further than it may: held at 0.2, no gradient.
    moved = f64(0.8).requires_grad_()
    loss, stats = value_loss(moved, f64(0), f64(1), clip=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.5 * 0.8**2)
    assert moved.grad == 0
    assert stats["clip"].tolist() == [True]
    assert value_loss(moved, f64(0), f64(1), clip=None)[0].item() == pytest.approx(0.5 * 0.2**2)


def test_value_gradient_flows_through_the_new_values_alone() -> None:
    new, old, returns = (f64(0.1, -0.2).requires_grad_() for _ in range(3))
    value_loss(new, old, returns + 1, 0.2)[0].sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("case", cases("policy"))
def test_ppo_clip_equals_verl(case: dict) -> None:
    inputs, kwargs = case["inputs"], case["kwargs"]
    packed = Packed(inputs["response_mask"])
    logprobs = packed.flat(inputs["log_prob"]).requires_grad_()
    old, advantages = packed.flat(inputs["old_log_prob"]), packed.flat(inputs["advantages"])
    clips = kwargs["clip_ratio_low"], kwargs["clip_ratio_high"], kwargs["clip_ratio_c"]
    loss_T, stats = ppo_clip(logprobs, old, advantages, *clips)
    if "rollout_is_weights" in inputs:
        loss_T = loss_T * packed.flat(inputs["rollout_is_weights"])
    info = kwargs["global_batch_info"]
    rows = int(packed.full_rows.sum())
    counts = Denominators(info.get("batch_num_tokens", len(loss_T)), info.get("global_batch_size", rows))
    norm = info.get("loss_scale_factor") or packed.mask.shape[1]
    loss = aggregate(loss_T, packed.cu_seqlens, kwargs["loss_agg_mode"], counts, norm=norm) * info.get("dp_size", 1)
    # verl adds 1e-8 to each row's token count under seq-mean-token-mean.
    assert_close(loss, tensor(case["outputs"]["loss"]), rtol=1e-7, atol=1e-10)
    loss.backward()
    assert logprobs.grad is not None
    assert_close(logprobs.grad, packed.flat(case["grads"]["log_prob"]), rtol=1e-7, atol=1e-10)
    theirs = case["outputs"]["metrics"]
    clipped = (stats["clip_low"] | stats["clip_high"]).double().mean().item()
    assert clipped == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-7)
    assert stats["clip_dual"].double().mean().item() == pytest.approx(theirs["actor/pg_clipfrac_lower"], rel=1e-7)
    assert (old - logprobs).mean().item() == pytest.approx(theirs["actor/ppo_kl"], rel=1e-7)


@pytest.mark.parametrize("case", cases("value"))
def test_value_loss_equals_verl(case: dict) -> None:
    inputs, kwargs = case["inputs"], case["kwargs"]
    packed = Packed(inputs["response_mask"])
    values = packed.flat(inputs["vpreds"]).requires_grad_()
    old, returns = packed.flat(inputs["values"]), packed.flat(inputs["returns"])
    loss_T, stats = value_loss(values, old, returns, kwargs["cliprange_value"])
    counts = Denominators(len(loss_T), int(packed.full_rows.sum()))
    mode = kwargs["loss_agg_mode"]
    loss = aggregate(loss_T, packed.cu_seqlens, mode, counts, norm=packed.mask.shape[1])
    assert_close(loss, tensor(case["outputs"]["loss"]), rtol=1e-7, atol=1e-10)
    loss.backward()
    assert values.grad is not None
    assert_close(values.grad, packed.flat(case["grads"]["vpreds"]), rtol=1e-7, atol=1e-10)
    assert_close(stats["clip"].double().mean(), tensor(case["outputs"]["clipfrac"]), rtol=1e-7, atol=0)
    if kwargs["cliprange_value"] > 1e6:
        assert_close(value_loss(values, old, returns, None)[0], loss_T)
