"""Presets, overrides, and contradictions that are refused before a model is loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from surefoot.algorithms.resolve import fill, resolve
from surefoot.algorithms.table import ADVANTAGES, POLICY_LOSSES, PRESETS, render_table
from surefoot.config.algorithm import AlgorithmConfig
from surefoot.config.load import build_config
from surefoot.errors import UserError
from tests.algorithms.runs import run_config


def refused(algorithm: dict[str, Any], **sections: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(run_config(algorithm, **sections))
    return caught.value


def sections_for(name: str) -> dict[str, Any]:
    return {"critic": {}} if ADVANTAGES[str(PRESETS[name].settings["advantage"])].needs_critic else {}


def test_presets_are_what_they_say() -> None:
    ppo = resolve(run_config({"name": "ppo"}, critic={}))
    assert (ppo.advantage, ppo.policy_loss, ppo.aggregation) == ("gae", "ppo_clip", "token-mean")
    assert (ppo.gamma, ppo.lam, ppo.clip_low, ppo.clip_high, ppo.dual_clip) == (1.0, 1.0, 0.2, 0.2, 3.0)
    assert ppo.whiten_advantages
    assert ppo.needs_critic
    assert not ppo.needs_group
    grpo = resolve(run_config())
    assert (grpo.name, grpo.advantage, grpo.normalize_by_std) == ("grpo", "group_relative", True)
    assert not grpo.whiten_advantages
    assert grpo.needs_group
    assert not grpo.needs_critic
    assert not grpo.needs_reference
    assert not grpo.needs_entropy_grad
    dr_grpo = resolve(run_config({"name": "dr_grpo"}, rollout={"sampling": {"max_response_length": 77}}))
    assert not dr_grpo.normalize_by_std
    assert dr_grpo.aggregation == "seq-mean-token-sum-norm"
    assert dr_grpo.max_response_length == 77
    plus = resolve(run_config({"name": "reinforce_plus_plus"}, train={"steps": 3, "samples_per_prompt": 1}))
    assert (plus.advantage, plus.whiten_advantages, plus.needs_group) == ("discounted_return", True, False)


def test_keys_of_the_file_override_the_preset() -> None:
    keys = {
        "aggregation": "seq-mean-token-mean",
        "clip_high": 0.28,
        "dual_clip": 10.0,
        "normalize_by_std": False,
        "whiten_advantages": True,
        "entropy_coef": 0.01,
        "mask_truncated": True,
        "importance_cap": None,
    }
    got = resolve(run_config(keys))
    assert {key: getattr(got, key) for key in keys} == keys
    assert got.clip_low == 0.2
    mixed = resolve(run_config({"name": "dr_grpo", "advantage": "gae", "lam": 0.9}, critic={}))
    assert (mixed.advantage, mixed.lam, mixed.gamma, mixed.needs_critic) == ("gae", 0.9, 1.0, True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_file_can_be_run_again(name: str) -> None:
    first = run_config({"name": name, "kl": {"where": "loss"}}, **sections_for(name))
    filled = fill(first.algorithm)
    assert fill(filled) == filled
    again = build_config(first.model_dump(mode="json") | {"algorithm": filled.model_dump(mode="json")})
    assert resolve(again) == resolve(first)
    assert filled.kl.estimator == "k3"
    # Keys that this algorithm reads have values, and only those.
    read = {*ADVANTAGES[filled.advantage or ""].settings, *POLICY_LOSSES[filled.policy_loss or ""].settings}
    for key in ("gamma", "lam", "normalize_by_std", "clip_low", "clip_high", "dual_clip"):
        assert (getattr(filled, key) is not None) == (key in read)


def test_filling_drops_what_a_preset_says_of_a_replaced_row() -> None:
    filled = fill(AlgorithmConfig(name="dr_grpo", advantage="gae"))
    assert filled.normalize_by_std is None
    assert filled.gamma == 1.0


@pytest.mark.parametrize(
    ("keys", "key", "near"),
    [
        ({"name": "grop"}, "algorithm.name", "grpo"),
        ({"advantage": "group_relativ"}, "algorithm.advantage", "group_relative"),
        ({"policy_loss": "ppo-clip"}, "algorithm.policy_loss", "ppo_clip"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(keys: dict[str, Any], key: str, near: str) -> None:
    error = refused(keys)
    assert (error.code, error.key) == ("algorithm-unknown", key)
    assert near in (error.hint or "")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_a_group_baseline_with_one_sample_is_refused_naming_both_keys(name: str) -> None:
    error = refused({"name": name}, train={"steps": 1, "samples_per_prompt": 1})
    assert error.code == "group-of-one"
    assert "algorithm.name" in str(error)
    assert "train.samples_per_prompt" in str(error)


def test_a_critic_must_be_there_exactly_when_it_is_used() -> None:
    assert refused({"name": "ppo"}).code == "critic-missing"
    assert refused({"name": "grpo"}, critic={}).code == "critic-unused"
    for warmup in (5, "auto"):
        error = refused({"critic_warmup": warmup})
        assert (error.code, error.key) == ("critic-unused", "algorithm.critic_warmup")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ppo", "normalize_by_std", True),
        ("ppo", "normalize_by_std", False),
        ("grpo", "gamma", 0.9),
        ("grpo", "lam", 1.0),
        ("reinforce_plus_plus", "lam", 0.9),
        ("reinforce_plus_plus", "normalize_by_std", True),
    ],
)
def test_a_key_that_the_algorithm_would_ignore_is_refused(name: str, key: str, value: object) -> None:
    error = refused({"name": name, key: value}, **sections_for(name))
    assert (error.code, error.key) == ("algorithm-key-ignored", f"algorithm.{key}")


@pytest.mark.parametrize(
    ("keys", "key", "switch"),
    [
        ({"kl": {"coef": 0.1}}, "algorithm.kl.coef", "algorithm.kl.where"),
        ({"kl": {"estimator": "k2"}}, "algorithm.kl.estimator", "algorithm.kl.where"),
        ({"kl": {"controller": "adaptive"}}, "algorithm.kl.controller", "algorithm.kl.where"),
        ({"kl": {"where": "reward", "target": 2.0}}, "algorithm.kl.target", "algorithm.kl.controller"),
        ({"kl": {"where": "loss", "horizon": 5}}, "algorithm.kl.horizon", "algorithm.kl.controller"),
        ({"auto_warmup": {"patience": 9}}, "algorithm.auto_warmup.patience", "algorithm.critic_warmup"),
    ],
)
def test_a_key_behind_a_switch_that_is_off_is_refused(keys: dict[str, Any], key: str, switch: str) -> None:
    error = refused(keys)
    assert (error.code, error.key) == ("algorithm-key-ignored", key)
    assert switch in str(error)


def test_the_adaptive_controller_is_for_the_reward() -> None:
    error = refused({"kl": {"where": "loss", "controller": "adaptive"}})
    assert error.code == "config-conflict"
    assert "algorithm.kl.controller" in str(error)
    assert "algorithm.kl.where" in str(error)
    assert refused({"kl": {"where": "reward", "controller": "adaptive", "coef": 0.0}}).key == "algorithm.kl.coef"
    good = {"where": "reward", "controller": "adaptive", "target": 2.0, "horizon": 100}
    assert resolve(run_config({"kl": good})).kl.target == 2.0


@pytest.mark.parametrize(
    ("where", "estimator"), [("loss", "k1"), ("reward", "k2"), ("reward", "k3"), ("reward", "abs")]
)
def test_an_estimator_whose_gradient_pulls_nowhere_is_refused(where: str, estimator: str) -> None:
    error = refused({"kl": {"where": where, "estimator": estimator}})
    assert error.code == "kl-estimator-place"
    assert estimator in str(error)


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_the_estimator_left_out_is_the_sound_one(where: str, estimator: str) -> None:
    got = resolve(run_config({"kl": {"where": where}}))
    assert got.kl_estimator == estimator
    assert got.needs_reference


def test_a_warm_up_that_outlasts_the_run_is_refused() -> None:
    train = {"steps": 20}
    error = refused({"name": "ppo", "critic_warmup": 20}, critic={}, train=train)
    assert (error.code, error.key) == ("config-conflict", "algorithm.critic_warmup")
    assert "train.steps" in str(error)
    keys = {"name": "ppo", "critic_warmup": "auto", "auto_warmup": {"max_steps": 20}}
    assert refused(keys, critic={}, train=train).key == "algorithm.auto_warmup.max_steps"
    left_out = fill(run_config({"name": "ppo", "critic_warmup": "auto"}, critic={}).algorithm, steps=20)
    assert left_out.auto_warmup.max_steps == 10
    keys = {"name": "ppo", "critic_warmup": "auto", "auto_warmup": {"max_steps": 19}}
    assert resolve(run_config(keys, critic={}, train=train)).needs_critic


def test_the_table_shows_every_preset() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(render_table())
    text = console.export_text()
    for name, preset in PRESETS.items():
        assert name in text
        assert preset.paper in text
        assert str(preset.settings["advantage"]) in text
    assert "clip_low=0.2" in text
    assert "needs a critic" in text
    assert "…" not in text, "cut off at 80 columns"
