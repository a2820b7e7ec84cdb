"""The report on a run's data, and the sentences about what deserves a second look."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.config.load import build_config
from surefoot.data.findings import contradictions, duplicates, findings, overlap
from surefoot.data.inspect import report
from surefoot.data.load import PromptSet, load_prompts
from surefoot.data.template import make_template
from surefoot.errors import UserError
from tests.data.helpers import TOOL, file_source, jsonl, tokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


def load(path: Path, rows: list[dict[str, Any]], template: Any = None, **keys: Any) -> PromptSet:
    return load_prompts([file_source(jsonl(path, rows), **keys)], template or make_template(tiny_tokenizer()), 10_000)


def shown(tiny_folder: Path, train: str, evaluation: str | None = None, **data: Any) -> str:
    tree: dict[str, Any] = {
        "model": {"path": str(tiny_folder)},
        "data": {"sources": [{"type": "file", "path": train}], "max_prompt_length": 30, **data},
        "rewards": {"functions": [{"type": "regex", "pattern": "x"}]},
        "train": {"steps": 1},
    }
    if evaluation:
        tree["eval"] = {"sources": [{"type": "file", "path": evaluation}]}
    console = Console(file=io.StringIO(), width=200)
    console.print(report(build_config(tree)))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)


class TestReport:
    def test_lengths_what_is_over_the_limit_answers_and_special_tokens(self, tiny_folder: Path, tmp_path: Path):
        rows = [
            {"prompt": "a", "answer": "[red]1", "level": 2},
            {"prompt": "b" * 12},
            {"prompt": "c\u200b\t" + "c" * 8},
        ]
        text = shown(tiny_folder, jsonl(tmp_path / "rows.jsonl", rows))
        assert "1 of 3 prompts are over data.max_prompt_length = 30: with data.truncation = error the run stops" in text
        assert "<|im_start|>user" in text
        assert "answer: '[red]1'" in text
        assert "extra: level" in text
        assert "c\\u200b\\u0009cc" not in text  # only the first two rows of a source are shown in full
        row = next(line for line in text.splitlines() if line.startswith("│ train: rows "))
        assert [cell.strip() for cell in row.split("│")[2:-1]] == ["100%", "3", "20", "30", "31", "1", "2", "0"]

    @pytest.mark.parametrize(("truncation", "said"), [("drop", "they are dropped"), ("left", "they are cut (left)")])
    def test_what_would_be_done_under_another_policy(
        self, tiny_folder: Path, tmp_path: Path, truncation: str, said: str
    ):
        assert said in shown(tiny_folder, jsonl(tmp_path / "rows.jsonl", [{"prompt": "b" * 12}]), truncation=truncation)

    def test_the_histogram_holds_every_row_and_no_bar_straddles_the_limit(self, tiny_folder: Path, tmp_path: Path):
        rows = [{"prompt": "a" * n} for n in range(1, 70)]
        text = shown(tiny_folder, jsonl(tmp_path / "rows.jsonl", rows))
        bars = [line.split() for line in text.split("Prompt lengths")[1].splitlines() if " to " in line]
        assert sum(int(bar[3]) for bar in bars) == 69
        assert any(bar[2] == "30" for bar in bars)
        assert (int(bars[0][0]), int(bars[-1][2])) <= (20, 88 + 6)

    def test_prompts_of_the_evaluation_are_shown_as_left_out(self, tiny_folder: Path, tmp_path: Path):
        train = jsonl(tmp_path / "train.jsonl", [{"prompt": f"q{i}"} for i in range(4)])
        clean = shown(tiny_folder, train, jsonl(tmp_path / "clean.jsonl", [{"prompt": "z1"}]))
        dirty = shown(tiny_folder, train, jsonl(tmp_path / "dirty.jsonl", [{"prompt": "q2"}, {"prompt": "z1"}]))
        assert "left out of training" not in clean
        assert "1 of 4 prompts are in the evaluation too and were left out of training" in " ".join(dirty.split())
        assert "Contamination" not in dirty

    def test_the_users_mistakes_stay_errors(self, tiny_folder: Path, tmp_path: Path):
        with pytest.raises(UserError, match="prompt_column"):
            shown(tiny_folder, jsonl(tmp_path / "rows.jsonl", [{"promt": "a"}]))


class TestFindings:
    def test_the_same_question_in_other_case_white_space_and_system_prompt_is_the_same(self, tmp_path: Path):
        train = load(
            tmp_path / "a.jsonl", [{"prompt": "What  is it?\n", "answer": 1}, {"prompt": "what is it?", "answer": 2}]
        )
        evaluation = load(
            tmp_path / "b.jsonl", [{"prompt": "WHAT is it?"}, {"prompt": "what is it"}], system_prompt="S"
        )
        assert duplicates(train.prompts) == 1
        assert [p.id for p in overlap(train.prompts, evaluation.prompts)] == ["b/0"]
        assert [p.id for p in contradictions(train.prompts)] == ["a/1"]
        said = "\n".join(findings(train, evaluation, make_template(tiny_tokenizer())))
        assert "1 of 2 training prompts repeat" in said
        assert "another answer" in said

    def test_nothing_is_said_of_clean_data(self, tmp_path: Path):
        train = load(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1}])
        assert findings(train, None, make_template(tiny_tokenizer())) == []

    @pytest.mark.parametrize(
        ("chat_template", "said"),
        [
            ("{{ strftime_now('%d') }}" + CHAT_TEMPLATE, "today's date"),
            (CHAT_TEMPLATE.replace("tools", "hammers"), "will not see them"),
            (CHAT_TEMPLATE.replace("<|im_end|>", "<|im_start|>"), "rollout.sampling.stop_token_ids"),
        ],
    )
    def test_traps_of_the_template(self, tmp_path: Path, chat_template: str, said: str):
        template = make_template(tokenizer(chat_template))
        train = load(tmp_path / "a.jsonl", [{"prompt": "a", "tools": [TOOL]}], template)
        assert [said in line for line in findings(train, None, template)] == [True]
