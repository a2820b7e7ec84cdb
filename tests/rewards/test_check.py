"""What is refused before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.config.load import build_config
from surefoot.errors import UserError
from surefoot.rewards.check import check_rewards
from surefoot.rewards.table import answers_required
from tests.rewards.helpers import config, python

SUMS = {"type": "reasoning_gym", "task": "chain_sum"}
JUDGE = {"type": "judge", "base_url": "http://localhost:1/v1", "model": "m", "prompt": "{response}"}


def check(*functions: dict[str, Any], sources: list[dict[str, Any]] | None = None, evaluation: Any = None) -> None:
    values = {
        "model": {"path": "m"},
        "data": {"sources": sources or [SUMS]},
        "rewards": {"functions": list(functions)},
        "train": {"steps": 1},
    }
    check_rewards(build_config(values | ({"eval": {"sources": evaluation}} if evaluation else {})))


def refusal(*functions: dict[str, Any], **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check(*functions, **options)
    return caught.value


def test_good_rewards_of_every_kind_pass():
    kinds = [
        {"type": "reasoning_gym", "sources": ["chain_sum"]}, {"type": "math"}, {"type": "exact", "extract": "a(b)"},
        {"type": "regex", "pattern": "x"}, {"type": "length", "limit": 10, "buffer": 10}, {"type": "code"}, JUDGE,
        python("length"), python("half", name="half", params={"factor": 1}), python("compute_score", name="verl"),
        python("compute_scores", name="verl batch", batch=True, params={"bonus": 1}),
    ]  # fmt: skip
    check(*kinds, evaluation=[SUMS])


@pytest.mark.parametrize(
    ("function", "key", "text"),
    [
        ({"type": "regex", "pattern": "(a"}, "pattern", "no valid regular expression"),
        ({"type": "exact", "extract": "[z"}, "extract", "no valid regular expression"),
        ({**JUDGE, "pattern": "*"}, "pattern", "no valid regular expression"),
        ({**JUDGE, "prompt": "{answer}?"}, "prompt", "would not see the response"),
        ({**JUDGE, "base_url": "localhost:8000"}, "base_url", "no web address"),
        ({"type": "length", "limit": 5, "buffer": 6}, "buffer", "longer than `limit`"),
        ({"type": "model", "path": "./nowhere"}, "path", "no such folder"),
        (python("lenght"), "function", "Did you mean"),
        ({"type": "python", "function": "no_such_module:f"}, "function", "no_such_module"),
        (python("half", params={"facto": 1}), "function", "unexpected keyword argument 'facto'"),
        (python("half", params={"item": 1}), "function", "cannot be called as f(item, item)"),
        (python("compute_score", batch=True), "batch", "verl's signature for one row"),
        (python("compute_scores"), "batch", "verl's signature for a batch"),
        ({"type": "exact", "sources": ["chain_sums"]}, "sources", "Did you mean `chain_sum`?"),
    ],
)
def test_a_mistake_is_refused_by_its_key(function, key, text):
    error = refusal({"type": "length", "limit": 9, "buffer": 3, "name": "fine"}, function)
    assert error.key == f"rewards.functions.1.{key}"
    assert text in str(error)


def test_two_rewards_of_one_name_are_refused():
    error = refusal({"type": "exact"}, {"type": "exact", "ignore_case": True})
    assert (error.code, error.key) == ("config-conflict", "rewards.functions.1.name")


def test_rewards_that_could_never_give_a_score_are_refused():
    assert "weight 0" in str(refusal({"type": "exact", "weight": 0}))


def test_the_tasks_verifier_without_a_task_is_refused(tmp_path: Path):
    file = [{"type": "file", "path": str(tmp_path / "rows.jsonl")}]
    error = refusal({"type": "reasoning_gym"}, sources=file)
    assert error.key == "rewards.functions.0.type"
    check({"type": "reasoning_gym"}, sources=file, evaluation=[SUMS])


def test_rows_of_files_may_name_sources_of_their_own(tmp_path: Path):
    check({"type": "exact", "sources": ["gsm8k"]}, sources=[{"type": "file", "path": str(tmp_path / "rows.jsonl")}])


def test_a_machine_that_cannot_shut_programs_in_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert refusal({"type": "code"}).code == "reward-sandbox"


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal({"type": "math"})
    assert (error.code, error.want) == ("reward-package", "math_verify")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ({"type": "math"}, True), ({"type": "exact"}, True), ({"type": "code"}, True),
        ({"type": "regex", "pattern": ""}, False),
        ({**JUDGE, "prompt": "{response}{answer}"}, True), (JUDGE, False), ({"type": "reasoning_gym"}, False),
        ({"type": "exact", "sources": ["a"]}, False),
    ],
)  # fmt: skip
def test_which_rewards_need_an_answer_in_every_row(function, wanted):
    assert answers_required(config(function)) is wanted
