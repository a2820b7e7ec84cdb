"""KL estimators, where each may be used, and the controller."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from surefoot.algorithms.kl import ESTIMATORS, SOUND, estimate, next_coef
from surefoot.config.algorithm import KlConfig
from tests.algorithms.verl_cases import cases, tensor

NAMES_IN_VERL = {"kl": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def test_estimates_by_hand() -> None:
    # log p = -1, log q = -3: the policy likes the token e^2 times better than the reference.
    p, q = torch.tensor([-1.0]), torch.tensor([-3.0])
    expected = {"k1": 2.0, "abs": 2.0, "k2": 2.0, "k3": math.exp(-2) - 1 + 2}
    for name, value in expected.items():
        assert estimate(p, q, name).item() == pytest.approx(value)  # type: ignore[arg-type]
    swapped = {"k1": -2.0, "abs": 2.0, "k2": 2.0, "k3": math.exp(2) - 1 - 2}
    for name, value in swapped.items():
        assert estimate(q, p, name).item() == pytest.approx(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e4, -20.0, -11.0, 0.0, 3.0, 20.0, 1e4])
def test_value_and_gradient_are_finite_and_the_reference_gets_none(name: str, log_ratio: float) -> None:
    p = torch.tensor([log_ratio], requires_grad=True)
    q = torch.zeros(1, requires_grad=True)
    value = estimate(p, q, name)  # type: ignore[arg-type]
    value.sum().backward()
    assert value.isfinite().all()
    assert p.grad is not None
    assert p.grad.isfinite().all()
    assert q.grad is None


@pytest.mark.parametrize("case", cases("kl"))
def test_estimates_equal_verl(case: dict) -> None:
    p = tensor(case["inputs"]["logprob"]).requires_grad_()
    value = estimate(p, tensor(case["inputs"]["ref_logprob"]), NAMES_IN_VERL[case["kwargs"]["kl_penalty"]])  # type: ignore[arg-type]
    assert_close(value, tensor(case["outputs"]["kl"]), rtol=1e-9, atol=1e-9)
    value.sum().backward()
    assert p.grad is not None
    assert_close(p.grad, tensor(case["grads"]["logprob"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", cases("kl_reward"))
def test_the_penalty_in_the_reward_equals_verl(case: dict) -> None:
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    penalty = case["kwargs"]["kl_ratio"] * estimate(inputs["old_log_prob"], inputs["ref_log_prob"], "k1")
    assert_close(inputs["token_level_scores"] - penalty, tensor(case["outputs"]["rewards"]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", cases("kl_controller"))
def test_the_adaptive_controller_equals_verl(case: dict) -> None:
    start = case["kwargs"]
    config = KlConfig(
        where="reward",
        controller="adaptive",
        coef=start["init_kl_coef"],
        target=start["target_kl"],
        horizon=start["horizon"],
    )
    coef = config.coef
    for (kl, samples), expected in zip(case["inputs"]["updates"], case["outputs"]["values"], strict=True):
        coef = next_coef(config, coef, kl, samples)
        assert coef == pytest.approx(expected, rel=1e-9)


def test_the_adaptive_controller_by_hand() -> None:
    config = KlConfig(where="reward", controller="adaptive", coef=0.1, target=6.0, horizon=1000)
    # 6.6 is 10 % over the target: the factor grows by 10 % * 100 / 1000.
    assert next_coef(config, 0.1, 6.6, 100) == pytest.approx(0.1 * 1.01)
    # Far over or under the target it moves by 20 % at most.
    assert next_coef(config, 0.1, 600.0, 100) == pytest.approx(0.1 * 1.02)
    assert next_coef(config, 0.1, 0.0, 100) == pytest.approx(0.1 * 0.98)
    assert next_coef(KlConfig(where="reward", coef=0.1), 0.1, 600.0, 100) == 0.1


def _gradients(logits: Tensor, q: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Expected gradient, over tokens drawn from p, of the KL itself, of an estimate in the loss, and in the reward."""
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q)).sum(), logits, retain_graph=True)
    value = estimate(logp, q, name)  # type: ignore[arg-type]
    (in_loss,) = torch.autograd.grad((p * value).sum(), logits, retain_graph=True)
    (in_reward,) = torch.autograd.grad((p * value.detach() * logp).sum(), logits)
    return exact, in_loss, in_reward


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_sound_estimators_pull_towards_the_reference(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(0)
    logits = (q + 0.05 * torch.randn(12, generator=generator, dtype=torch.float64)).requires_grad_()
    exact, in_loss, in_reward = _gradients(logits, q, name)

    def pull(gradient: Tensor) -> float:
        """Component along the KL's own gradient, as a fraction of it."""
        return (gradient @ exact / (exact @ exact)).item()

    if name == "k1":
        assert in_loss.abs().max() < 1e-12, "in the loss it pulls nowhere"
        assert_close(in_reward, exact)
    else:
        assert pull(in_loss) > 0.5
        assert abs(pull(in_reward)) < 0.5
    if name == "k2":
        assert_close(in_loss, exact)
    if name == "k3":
        assert abs(pull(in_reward)) < 0.1, "in the reward it vanishes near the reference"
    assert (name in SOUND["reward"]) == (name == "k1")
    assert (name in SOUND["loss"]) == (name != "k1")
