"""What a reward function may look like and may return."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.rewards.api import RewardItem, adapt, evaluate, read_result
from tests.rewards import user_functions
from tests.rewards.helpers import config, item, python, rewards_of, rollout, score, scores


def test_the_view_carries_counts_instead_of_arrays_and_pickles():
    view = RewardItem.of(rollout("text", "a", extra={"k": [1]}, length=5, index=2))
    assert (view.num_tokens, view.num_model_tokens, view.sample_index) == (8, 5, 2)
    copy = pickle.loads(pickle.dumps(view))
    assert (copy.prompt, copy.response, copy.answer, copy.extra) == ("question", "text", "a", {"k": [1]})
    assert len(pickle.dumps(RewardItem.of(rollout(length=10_000)))) < 1000


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (0.5, 0.5), (True, 1.0), (3, 3.0), (np.float32(0.25), 0.25), (np.int64(2), 2.0), (np.bool_(True), 1.0),
        (np.array(1.5), 1.5), (np.array([[2.0]]), 2.0), (torch.tensor(0.75), 0.75), (None, None),
        ({"score": None}, None), ({"score": np.array(1)}, 1.0),
    ],
)  # fmt: skip
def test_results_that_are_accepted(result, value):
    assert read_result(result) == (value, {})


@pytest.mark.parametrize(
    "result",
    ["1.0", float("inf"), float("nan"), np.nan, 10**400, [1.0], np.zeros(2), 1j, {"acc": 1.0}, object(), Fraction(1, 2),
     {"score": "high"}, {"score": 1.0, "acc": float("nan")}, np.array("1"), b"1"],
)  # fmt: skip
def test_results_that_are_refused_name_the_function_and_the_row(result):
    rows = [rollout(extra={"result": 1.0}), rollout(extra={"result": result})]
    good, bad = rewards_of(score(config(python("return_extra", name="mine")), rows))
    assert good.score == 1.0
    assert bad.score is None
    assert bad.error is not None
    assert bad.error.startswith("mine (row 1): ")


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.integers(-(10**9), 10**9)))
def test_every_finite_number_comes_through_as_itself(number):
    assert read_result(number) == (float(number), {})
    assert read_result({"score": number, "note": "text"}) == (float(number), {})


def test_numbers_beside_the_score_become_parts_and_texts_do_not():
    result = {
        "score": 1.0,
        "acc": True,
        "n": np.int64(3),
        "pred": "x",
        "missing": None,
        "vector": np.zeros(3),
        "l": [1],
    }
    assert read_result(result) == (1.0, {"acc": 1.0, "n": 3.0})


def test_verl_signature_is_filled_by_name():
    rows = [rollout("4", "4", source="gsm", extra={"extra_info": {"level": 3}}), rollout("5", "4", extra={"level": 2})]
    first, second = rewards_of(score(config(python("compute_score", name="r")), rows))
    assert first.parts == {"r": 1.0, "r/acc": 1.0, "r/level": 3.0}
    assert second.parts == {"r": 0.0, "r/acc": 0.0, "r/level": 2.0}


def test_verl_batch_signature_and_params():
    rows = [rollout("4", "4"), rollout("5", "4")]
    assert scores(score(config(python("compute_scores", batch=True, params={"bonus": 1})), rows)) == [2.0, 1.0]


def test_a_function_that_takes_everything_by_keyword_gets_all_of_verls_names():
    def catch_all(solution_str, **others):
        return sorted(others) == ["data_source", "extra_info", "ground_truth"]

    assert evaluate(adapt(catch_all, {}), [item("x")])[0].value == 1.0


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "column", "ints"])
def test_batch_results_that_are_accepted(kind):
    rows = [rollout(answer=kind, index=i) for i in range(4)]
    assert scores(score(config(python("batch_result", batch=True)), rows)) == [0.0, 1.0, 2.0, 3.0]


def test_batch_of_bools():
    rows = [rollout(answer="bools") for _ in range(3)]
    assert scores(score(config(python("batch_result", batch=True)), rows)) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("short", "4 rows got 3"), ("matrix", "(4, 2)"), ("string", "str"), ("none", "NoneType")],
)
def test_a_batch_result_of_the_wrong_shape_costs_every_row_of_it(kind, text):
    rows = [rollout(answer=kind) for _ in range(4)]
    found = rewards_of(score(config(python("batch_result", batch=True, name="mine")), rows))
    assert [r.score for r in found] == [None] * 4
    assert all(f"mine (row {i})" in str(r.error) and text in str(r.error) for i, r in enumerate(found))


def test_bad_entries_of_a_batch_cost_their_own_rows():
    rows = [rollout(answer="one bad") for _ in range(5)]
    found = rewards_of(score(config(python("batch_result", batch=True)), rows))
    assert [r.score for r in found] == [0.0, None, None, 3.0, 4.0]
    assert "str 'good'" in str(found[1].error)
    assert "(row 2)" in str(found[2].error)


def test_an_exception_is_told_with_its_place():
    (found,) = rewards_of(score(config(python("by_instruction")), [rollout("raise")]))
    assert "KeyError: 'nothing here'" in str(found.error)
    assert "user_functions.py, line" in str(found.error)


def test_an_async_function_called_without_a_loop_still_gives_its_number():
    assert evaluate(adapt(user_functions.failing_async, {}), [item()])[0].error is not None
    assert evaluate(adapt(lambda i: user_functions.batch_async([i]), {}), [item()])[0].error is not None
    assert evaluate(adapt(user_functions.slow_async, {}), [item()])[0].value == 1.0
