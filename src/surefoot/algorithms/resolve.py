"""Configuration -> `Algorithm`, and every contradiction that can be seen before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..config.algorithm import AlgorithmConfig
from ..config.run import RunConfig
from ..errors import UserError, nearest
from .kl import SOUND
from .table import ADVANTAGES, POLICY_LOSSES, PRESETS, ROW_KEYS, Algorithm, preset_settings


def fill(config: AlgorithmConfig, steps: int | None = None) -> AlgorithmConfig:
    """Return the section with every key that the algorithm reads filled in; keys it doesn't read stay null.

    Filling twice changes nothing, so a run folder's resolved file can be run again.

    Raises:
        UserError: A name that is in no table (`algorithm-unknown`).
    """
    _known("algorithm.name", config.name, PRESETS)
    _known("algorithm.advantage", config.advantage, ADVANTAGES)
    _known("algorithm.policy_loss", config.policy_loss, POLICY_LOSSES)
    update: dict[str, Any] = {
        key: value
        for key, value in preset_settings(config.name, config.advantage, config.policy_loss).items()
        if getattr(config, key) is None
    }
    if config.kl.where != "none" and config.kl.estimator is None:
        update["kl"] = config.kl.model_copy(update={"estimator": SOUND[config.kl.where][0]})
    if steps is not None and config.critic_warmup == "auto" and config.auto_warmup.max_steps is None:
        update["auto_warmup"] = config.auto_warmup.model_copy(update={"max_steps": max(1, steps // 2)})
    return config.model_copy(update=update)


def resolve(run: RunConfig) -> Algorithm:
    """Put preset, tables and configuration together.

    Raises:
        UserError: An unknown name, or keys that contradict each other or that this algorithm would ignore. Each
            message names the keys.
    """
    filled = fill(run.algorithm)
    algorithm = _build(filled, run.rollout.sampling.max_response_length)
    _check_ignored(run.algorithm, filled)
    _check_kl(filled)
    _check_samples(algorithm, run)
    _check_critic(algorithm, run)
    return algorithm


def _build(filled: AlgorithmConfig, max_response_length: int) -> Algorithm:
    rows = {key: getattr(filled, key) for key in ROW_KEYS if getattr(filled, key) is not None}
    assert filled.advantage
    assert filled.policy_loss
    assert filled.aggregation
    assert filled.whiten_advantages is not None
    return Algorithm(
        name=filled.name,
        advantage=filled.advantage,
        policy_loss=filled.policy_loss,
        aggregation=filled.aggregation,
        whiten_advantages=filled.whiten_advantages,
        paper=PRESETS[filled.name].paper,
        max_response_length=max_response_length,
        entropy_coef=filled.entropy_coef,
        kl=filled.kl,
        kl_estimator=filled.kl.estimator or "k3",
        mask_truncated=filled.mask_truncated,
        importance_cap=filled.importance_cap,
        **rows,
    )


def _known(key: str, name: str | None, table: Mapping[str, object]) -> None:
    if name is None or name in table:
        return
    near = nearest(name, table)
    raise UserError(
        "algorithm-unknown",
        "no such entry in the table",
        key=key,
        got=name,
        want=", ".join(table),
        hint=f"Did you mean `{near}`?" if near else "`surefoot algorithms` shows what each of them is.",
    )


def _check_ignored(config: AlgorithmConfig, filled: AlgorithmConfig) -> None:
    assert filled.advantage
    assert filled.policy_loss
    read = {*ADVANTAGES[filled.advantage].settings, *POLICY_LOSSES[filled.policy_loss].settings}
    for key in ROW_KEYS:
        if key not in read and getattr(config, key) is not None:
            raise UserError(
                "algorithm-key-ignored",
                f"neither advantage `{filled.advantage}` nor policy loss `{filled.policy_loss}` reads this key",
                key=f"algorithm.{key}",
                got=getattr(config, key),
                want="null",
            )
    if config.critic_warmup != "auto":
        _ignored("algorithm.auto_warmup", config.auto_warmup, "algorithm.critic_warmup", config.critic_warmup, "auto")


def _check_kl(filled: AlgorithmConfig) -> None:
    kl = filled.kl
    if kl.where == "none":
        return _ignored("algorithm.kl", kl, "algorithm.kl.where", "none", "reward or loss", except_for=("where",))
    if kl.controller == "fixed":
        steered = ("where", "coef", "estimator", "controller")
        _ignored("algorithm.kl", kl, "algorithm.kl.controller", "fixed", "adaptive", except_for=steered)
    elif kl.where == "loss":
        raise UserError(
            "config-conflict",
            "the adaptive controller steers the penalty in the reward; in the loss the factor is fixed",
            key="algorithm.kl.controller",
            got="adaptive with algorithm.kl.where: loss",
            want="algorithm.kl.where: reward, or algorithm.kl.controller: fixed",
        )
    elif kl.coef == 0:
        raise UserError(
            "config-conflict",
            "the adaptive controller multiplies this factor, and from 0 it never moves",
            key="algorithm.kl.coef",
            got=0,
            want="more than 0, or algorithm.kl.controller: fixed",
        )
    if kl.estimator not in SOUND[kl.where]:
        raise UserError(
            "kl-estimator-place",
            f"in the {kl.where} this estimator's gradient does not pull towards the reference",
            key="algorithm.kl.estimator",
            got=f"{kl.estimator} with algorithm.kl.where: {kl.where}",
            want=" or ".join(SOUND[kl.where]),
            hint="Leave the key out to take the right one.",
        )
    return None


def _check_samples(algorithm: Algorithm, run: RunConfig) -> None:
    if algorithm.needs_group and run.train.samples_per_prompt == 1:
        raise UserError(
            "group-of-one",
            f"algorithm.name `{algorithm.name}` compares the samples of one prompt with each other, and "
            "train.samples_per_prompt is 1: every advantage would be 0",
            key="algorithm.name / train.samples_per_prompt",
            got=f"{algorithm.name} / 1",
            want="train.samples_per_prompt of 2 or more, or an algorithm.name whose advantage needs no group",
        )


def _check_critic(algorithm: Algorithm, run: RunConfig) -> None:
    warmup = run.algorithm.critic_warmup
    if algorithm.needs_critic and run.critic is None:
        raise UserError(
            "critic-missing",
            f"advantage `{algorithm.advantage}` reads a critic's values, and there is no `critic` section",
            key="critic",
            want="a `critic` section (`critic: {}` takes the defaults), or another algorithm.advantage",
        )
    if algorithm.needs_critic:
        return _check_warmup(run)
    if run.critic is not None:
        raise UserError(
            "critic-unused",
            f"advantage `{algorithm.advantage}` reads no values: the critic would be trained for nothing",
            key="critic",
            want="no `critic` section, or algorithm.advantage: gae",
        )
    if warmup:
        raise UserError(
            "critic-unused",
            f"advantage `{algorithm.advantage}` has no critic to warm up",
            key="algorithm.critic_warmup",
            got=warmup,
            want=0,
        )
    return None


def _check_warmup(run: RunConfig) -> None:
    """A warm-up that outlasts the run would end it in order, with the actor as it was."""
    warmup = run.algorithm.critic_warmup
    key, steps = ("critic_warmup", warmup) if warmup != "auto" else ("auto_warmup.max_steps", None)
    steps = run.algorithm.auto_warmup.max_steps if steps is None else steps
    if steps is not None and steps >= run.train.steps:
        raise UserError(
            "config-conflict",
            f"the run has {run.train.steps} steps (train.steps): the actor might never train",
            key=f"algorithm.{key}",
            got=steps,
            want=f"less than {run.train.steps}",
        )


def _ignored(
    section: str, config: BaseModel, switch: str, got: object, want: str, except_for: tuple[str, ...] = ()
) -> None:
    """Refuse keys of a section that differ from their defaults while a switch turns them off."""
    for key, info in type(config).model_fields.items():
        value = getattr(config, key)
        if key not in except_for and value != info.default:
            raise UserError(
                "algorithm-key-ignored",
                f"nothing reads this key while {switch} is {got}",
                key=f"{section}.{key}",
                got=value,
                want=f"{switch}: {want}, or leave the key out",
            )
