"""The built-in verifiers, against answers worked out by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest
import reasoning_gym

from surefoot.config.data import ReasoningGymSource
from surefoot.config.rewards import ExactReward, LengthReward, MathReward, ReasoningGymReward, RegexReward
from surefoot.data.rows import parse_rows
from surefoot.data.source import read_rows
from surefoot.rewards.api import evaluate
from surefoot.rewards.reasoning_gym import _last_integer
from surefoot.rewards.table import build
from tests.rewards.helpers import item


def value(spec, *arguments, **options):
    """The outcome's value; an error fails the test."""
    (outcome,) = evaluate(build(spec, 10.0), [item(*arguments, **options)])
    assert outcome.error is None, outcome.error
    return outcome.value


def error(spec, *arguments, **options):
    (outcome,) = evaluate(build(spec, 10.0), [item(*arguments, **options)])
    assert outcome.value is None
    return outcome.error


# exact


@pytest.mark.parametrize(
    ("keys", "response", "answer", "wanted"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "the 42", "42", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "PARIS", "paris", 1.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "c", ["a", "b"], 0.0),
        ({"extract": r"answer: (\w+)"}, "answer: no, answer: yes", "yes", 1.0),
        ({"extract": r"answer: (\w+)"}, "yes", "yes", 0.0),
        ({"extract": r"\d+"}, "1 then 2", "2", 1.0),
        ({"extract": r"x(\d+)|y"}, "x1 y", "y", 1.0),
        ({}, "", "", 1.0),
        ({}, "anything", None, None),
    ],
)
def test_exact(keys, response, answer, wanted):
    assert value(ExactReward(type="exact", **keys), response, answer) == wanted


# format


@pytest.mark.parametrize(
    ("full", "response", "wanted"),
    [
        (True, "<think>a\nb</think> 4", 1.0),
        (True, "  <think></think>4 \n", 1.0),
        (True, "so: <think>a</think>4", 0.0),
        (False, "so: <think>a</think>4", 1.0),
        (False, "", 0.0),
    ],
)
def test_regex(full, response, wanted):
    assert value(RegexReward(type="regex", pattern=r"<think>.*</think>.*", full=full), response) == wanted


@pytest.mark.parametrize("spec", [
    RegexReward(type="regex", pattern=r"\\boxed\{.*\}", full=False),
    ExactReward(type="exact", extract=r"\\boxed\{(.*?)\}"),
    MathReward(type="math"),
    ReasoningGymReward(type="reasoning_gym", extract="answer_tag"),
])  # fmt: skip
def test_a_marker_in_the_prompt_does_not_score(spec):
    prompt = r"Put your answer into \boxed{4}, as in <answer>4</answer>."
    extra = {"reasoning_gym": {"answer": "4", "metadata": {"source_dataset": "chain_sum"}}}
    assert value(spec, "I do not know.", "4", prompt=prompt, extra=extra) == 0.0
    assert value(spec, r"\boxed{4} <answer>4</answer>", "4", prompt=prompt, extra=extra) == 1.0


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_soft_overlong_punishment_counts_the_policys_tokens(tokens, wanted):
    spec = LengthReward(type="length", limit=100, buffer=20)
    assert value(spec, length=tokens) == wanted  # The prompt's three tokens are no part of it.


# math


@pytest.mark.parametrize(
    ("response", "answer", "wanted"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("The answer is 72.", "72", 1.0),
        ("The answer is 71.", "72", 0.0),
        (r"First 3, then \boxed{72}, and 5 apples remain.", "72", 1.0),
        ("72", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 1.0),
        ("1,234", "1234", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{3}", r"$\boxed{3}$", 1.0),
        (r"\boxed{-3}", "3", 0.0),
        ("no number at all", "72", 0.0),
        ("", "72", 0.0),
        (r"\boxed{\frac{", "72", 0.0),
        ("72", 72, 1.0),
        ("72", 72.0, 1.0),
        ("72", None, None),
    ],
)
def test_math(response, answer, wanted):
    assert value(MathReward(type="math"), response, answer) == wanted


@pytest.mark.parametrize("answer", ["", "   ", "####", "\\frac{", "$$"])
@pytest.mark.parametrize("response", ["", "\\boxed{}", "5", "\\frac{"])
def test_an_answer_that_cannot_be_read_is_an_error_and_never_a_hit(answer, response):
    assert "no mathematics" in str(error(MathReward(type="math"), response, answer))


# reasoning_gym


def entry_of(task, **params):
    """The entry of a task and a row's `extra`, as the data source makes them."""
    source = ReasoningGymSource(type="reasoning_gym", task=task, seed=1, size=1, params=params)
    (row,) = parse_rows(read_rows(source, "data.sources.0"), source, task, "data.sources.0")
    return row.extra["reasoning_gym"], row.extra


@pytest.mark.parametrize(
    ("extract", "response"),
    [
        ("all", " {answer} "),
        ("answer_tag", "<answer>0</answer> no: <answer>\n{answer}\n</answer>"),
        ("last_integer", "1 + 2 is 3, so it is {answer}."),
        ("last_line", "I add them.\n\n{answer}\n"),
    ],
)
def test_the_tasks_own_verifier_scores_the_extracted_part(extract, response):
    entry, extra = entry_of("chain_sum")
    spec = ReasoningGymReward(type="reasoning_gym", extract=extract)
    assert value(spec, response.format(answer=entry["answer"]), extra=extra) == 1.0
    assert value(spec, response.format(answer=int(entry["answer"]) + 1), extra=extra) < 1.0
    assert value(spec, "", extra=extra) == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it is 12.", "12"), ("-7", "-7"), ("10-5", "5"), ("pi is 3.14", None), ("4 of 3.14", "4"),
        ("1,234,567", "1234567"), ("12, 13", "13"), ("1,23", "23"), ("x=5.", "5"), ("no", None),
        ("3.0 then 7, 8.5", "7"),
    ],
)  # fmt: skip
def test_last_integer(text, found):
    assert _last_integer(text) == found


def test_rows_of_other_sources_are_left_to_other_rewards():
    assert value(ReasoningGymReward(type="reasoning_gym"), "4", "4", extra={"level": 1}) is None


def test_a_verifier_that_raises_on_the_models_text_scores_0():
    entry, extra = entry_of("prime_factorization")
    spec = ReasoningGymReward(type="reasoning_gym")
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("two times three", entry)
    assert value(spec, "two times three", extra=extra) == 0.0
    assert value(spec, entry["answer"], extra=extra) == 1.0


def test_a_verifier_that_raises_on_its_own_entry_is_an_error():
    extra = {"reasoning_gym": {"answer": "x", "metadata": {"source_dataset": "prime_factorization"}}}
    assert "ValueError" in str(error(ReasoningGymReward(type="reasoning_gym"), "2 × 3", extra=extra))


def test_the_verifier_knows_the_sources_parameters():
    # Its tolerance is one unit of the last place that the task was asked for: 2 places here, 3 by default.
    entry, extra = entry_of("decimal_arithmetic", min_num_decimal_places=2, max_num_decimal_places=2)
    near = str(Decimal(entry["answer"]) + Decimal("0.009"))
    spec = ReasoningGymReward(type="reasoning_gym")
    assert value(spec, near, extra=extra) == 1.0
    assert value(spec, near, extra={"reasoning_gym": entry}) == 0.0
