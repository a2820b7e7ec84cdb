"""The examples run as they stand, on the tiny model; what the documentation says of them is true."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from surefoot.config import load_config
from surefoot.config.rollout import SamplingConfig
from surefoot.controller.run import run_training
from surefoot.data.template import make_template
from surefoot.records import Prompt, Rollout
from surefoot.rollout.api import Completion, ProgramContext, Request
from tests.tiny import tiny_tokenizer

from .tiny_run import metrics_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))

from calculator_program import LONGEST, calculate, calculator  # noqa: E402


def test_the_calculator_example_runs_and_its_tool_turns_are_not_trained_on(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(
        "examples/calculator.yaml",
        [
            f"model.path={tiny_folder}",
            "model.dtype=float32",
            f"output_dir={tmp_path}",
            "data.max_prompt_length=400",
            "rollout.sampling.max_response_length=300",  # the tiny model's tokens are characters
            "train.max_tokens_per_microbatch=4096",
            "train.steps=2",
            "train.prompts_per_step=2",
            "train.samples_per_prompt=4",
            "tracking.trackers=[]",
            "threads=1",
        ],
    )
    run_training(config)
    rows = pq.read_table(tmp_path / "calculator" / "rollouts").to_pylist()
    assert len(rows) == 16
    # A random model writes `=` now and then, and nothing in front of it that could be calculated.
    with_tool = [row for row in rows if row["finish_reason"] == "tool_limit" or _holes(row["loss_mask"])]
    assert with_tool
    tokenizer = tiny_tokenizer()
    for row in with_tool:
        ids, mask = np.array(row["token_ids"]), np.array(row["loss_mask"])
        first = int(mask.argmax())
        between = tokenizer.decode(ids[first:][~mask[first:]].tolist())
        assert "<|im_start|>tool" in between or not between
        assert "error:" in between or not between
        assert "tool" not in row["response"]
        assert len(ids) - first <= 300
        assert np.array(row["engine_logprobs"])[~mask].tolist() == [0.0] * int((~mask).sum())
    assert all(row["actor/engine_gap"] < 1e-3 for row in metrics_of(config) if "actor/engine_gap" in row)


def _holes(mask: list[bool]) -> bool:
    """Whether tokens that the policy did not choose stand between those that it chose."""
    chosen = np.flatnonzero(mask)
    return bool(len(chosen)) and len(chosen) != chosen[-1] - chosen[0] + 1


@dataclass
class Script:
    """An engine that says what it is told to, turn by turn, and keeps what it was asked."""

    turns: list[str]
    asked: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        text = self.turns[len(self.asked)]
        self.asked.append(request)
        ids = np.array(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"], np.int32)
        reason = "stop" if text.endswith(("=", "<|im_end|>")) else "length"
        return Completion(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), reason)


def talk(*turns: str, max_turns: int = 3, limit: int = 400) -> tuple[Rollout, Script]:
    template = make_template(tiny_tokenizer())
    text = template.render([{"role": "user", "content": "how much?"}])
    prompt = Prompt("p/0", template.encode([text])[0], text, ({"role": "user", "content": "how much?"},))
    engine = Script(list(turns))
    context = ProgramContext(template, SamplingConfig(max_response_length=limit), 1, lambda sample, turn: turn)
    (rollout,) = asyncio.run(calculator(prompt, engine, context, max_turns=max_turns))
    return rollout, engine


def test_the_result_of_a_call_comes_back_and_the_policy_goes_on():
    rollout, engine = talk("I say 12 * 7 =", "84<|im_end|>")
    assert rollout.finish_reason == "stop"
    assert rollout.response == "I say 12 * 7 =\n84"
    seen = tiny_tokenizer().decode(engine.asked[1].token_ids.tolist())
    assert seen.endswith("12 * 7 =<|im_end|>\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n")
    chosen = tiny_tokenizer().decode(rollout.token_ids[rollout.loss_mask].tolist())
    assert chosen == "I say 12 * 7 =84<|im_end|>"
    assert np.array_equal(rollout.token_ids[: len(engine.asked[1].token_ids)], engine.asked[1].token_ids)


def test_turns_and_length_are_bounded():
    rollout, engine = talk("1 + 1 =", "2 + 2 =", "3 + 3 =")
    assert len(engine.asked) == 3
    assert rollout.finish_reason == "tool_limit"
    assert rollout.loss_mask[-1]  # ends with the policy's own last token
    rollout, engine = talk("1 + 1 =", limit=20)
    assert len(engine.asked) == 1  # the tool's message has no room
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("That is (2 + 3) * 4", "20"),
        ("6 / 4", "1.5"),
        ("3 - -2", "5"),
        ("12345678901 + 1", "12345678902"),
        ("1 / 0", "error: ZeroDivisionError"),
        ("2 ** 9", "error: ValueError"),
        ("", "error: SyntaxError"),
        ("many", "error: SyntaxError"),
        ("(" * LONGEST, "error: SyntaxError"),
    ],
)
def test_calculate(text: str, value: str):
    assert calculate(text).split(". ")[0] == value
