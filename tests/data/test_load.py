"""Sources to prompts: the length limit under each policy, several sources, and what is checked before anything else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.data import ReasoningGymSource
from surefoot.data.limit import apply_limit
from surefoot.data.load import PromptSet, load_prompts
from surefoot.data.template import make_template
from surefoot.errors import UserError
from surefoot.records import Prompt
from tests.data.helpers import TOOL, file_source, jsonl, tokenizer
from tests.tiny import tiny_tokenizer

RAW = make_template(tokenizer(chat_template=None))
RAW_BOS = make_template(tokenizer(chat_template=None, bos=True))
CHAT = make_template(tiny_tokenizer())


def load(folder: Path, rows: list[dict[str, Any]], template: Any = RAW, limit: int = 8, **options: Any) -> PromptSet:
    return load_prompts([file_source(jsonl(folder / "rows.jsonl", rows))], template, limit, **options)


class TestLimit:
    ROWS = ({"prompt": "12345678"}, {"prompt": "abcdefghi"}, {"prompt": "x"}, {"prompt": "ABCDEFGHIJK"})

    def test_exactly_the_limit_passes(self, tmp_path: Path):
        loaded = load(tmp_path, [self.ROWS[0]])
        assert len(loaded.prompts[0].token_ids) == 8
        assert loaded.notes() == []

    def test_error_counts_the_rows_and_shows_the_longest_length_and_an_example(self, tmp_path: Path):
        with pytest.raises(UserError) as caught:
            load(tmp_path, list(self.ROWS))
        assert caught.value.code == "data-too-long"
        for said in (
            "2 of 4",
            "longest has 11",
            "rows/1 with 9 tokens: 'abcdefghi'",
            "at most 8",
            "data.max_prompt_length to 11",
        ):
            assert said in str(caught.value)

    def test_error_speaks_of_all_sources_at_once(self, tmp_path: Path):
        paths = [jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "y" * n}]) for n in (9, 5, 12)]
        with pytest.raises(UserError, match="2 of 3 prompts have more tokens than this; the longest has 12"):
            load_prompts([file_source(path) for path in paths], RAW, 8)

    def test_drop_counts(self, tmp_path: Path):
        loaded = load(tmp_path, list(self.ROWS), truncation="drop")
        assert [p.text for p in loaded.prompts] == ["12345678", "x"]
        assert [p.id for p in loaded.prompts] == ["rows/0", "rows/2"]
        assert loaded.sources[0].dropped == 2
        assert loaded.sources[0].lengths.tolist() == [8, 9, 1, 11]
        assert "2 of 4" in loaded.notes()[0]

    def test_drop_that_leaves_nothing_is_an_error(self, tmp_path: Path):
        with pytest.raises(UserError, match="no prompt would be left"):
            load(tmp_path, [self.ROWS[1], self.ROWS[3]], truncation="drop")

    @pytest.mark.parametrize(
        ("truncation", "want"), [("left", "bcdefghi"), ("right", "abcdefgh"), ("middle", "abcdfghi")]
    )
    def test_cuts_keep_the_other_side(self, tmp_path: Path, truncation: Any, want: str):
        loaded = load(tmp_path, [self.ROWS[1], self.ROWS[2]], truncation=truncation)
        assert [p.text for p in loaded.prompts] == [want, "x"]
        assert loaded.prompts[0].token_ids.tolist() == RAW.encode([want])[0].tolist()
        assert loaded.sources[0].cut == 1

    @pytest.mark.parametrize(
        ("truncation", "want"), [("left", "<s>cdefghi"), ("right", "<s>abcdefg"), ("middle", "<s>abcdghi")]
    )
    def test_cuts_keep_the_begin_of_sequence(self, tmp_path: Path, truncation: Any, want: str):
        assert load(tmp_path, [self.ROWS[1]], RAW_BOS, truncation=truncation).prompts[0].text == want

    @pytest.mark.parametrize(
        "row", [{"prompt": "a"}, {"prompt": "a", "tools": [TOOL]}, {"prompt": [{"role": "user", "content": "a"}]}]
    )
    def test_all_that_the_template_adds_is_counted(self, tmp_path: Path, row: dict[str, Any]):
        length = len(load(tmp_path, [row], CHAT, 10_000).prompts[0].token_ids)
        assert load(tmp_path, [row], CHAT, length).prompts
        with pytest.raises(UserError, match=f"longest has {length}"):
            load(tmp_path, [row], CHAT, length - 1)

    @given(st.integers(1, 30), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]), st.booleans())
    def test_a_cut_has_the_limits_length_and_only_ids_that_were_there(self, size: int, limit: int, how: Any, bos: bool):
        template = RAW_BOS if bos else RAW
        ids = np.arange(3, 3 + size, dtype=np.int32)
        (made,) = apply_limit([Prompt("i", ids, "", ())], limit, how, template).prompts
        assert len(made.token_ids) == min(size, limit)
        assert np.isin(made.token_ids, ids).all()
        assert (np.diff(made.token_ids) > 0).all()


class TestSources:
    def test_prompts_lie_source_by_source_with_unique_ids(self, tmp_path: Path):
        paths = [
            jsonl(tmp_path / f"{n}.jsonl", [{"prompt": f"{n}{i}", "answer": "1"} for i in range(n)]) for n in (2, 3)
        ]
        sources = [
            file_source(path, name=name, weight=weight) for path, name, weight in zip(paths, "ab", (1, 3), strict=True)
        ]
        loaded = load_prompts(sources, CHAT, 100, answer_required=True)
        assert [p.id for p in loaded.prompts] == ["a/0", "a/1", "b/0", "b/1", "b/2"]
        assert [(s.name, s.start, s.stop, s.weight) for s in loaded.sources] == [("a", 0, 2, 1.0), ("b", 2, 5, 3.0)]
        assert [p.id for p in load_prompts(sources, CHAT, 100).prompts] == [p.id for p in loaded.prompts]

    def test_the_same_file_twice_still_has_unique_ids(self, tmp_path: Path):
        path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "id": "k"}])
        loaded = load_prompts([file_source(path), file_source(path)], CHAT, 100)
        assert [p.id for p in loaded.prompts] == ["rows/k", "rows-2/k"]

    def test_ids_that_names_make_equal_are_refused(self, tmp_path: Path):
        one = jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "id": "y/0"}])
        two = jsonl(tmp_path / "two.jsonl", [{"prompt": "a"}])
        with pytest.raises(UserError, match="x/y/0"):
            load_prompts([file_source(one, name="x"), file_source(two, name="x/y")], CHAT, 100)

    def test_a_missing_answer_in_the_last_source_stops_before_any_row_is_tokenised(self, tmp_path: Path):
        good = jsonl(tmp_path / "good.jsonl", [{"prompt": "a" * 500, "answer": "1"}])
        bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "a", "anwser": "1"}])
        with pytest.raises(UserError) as caught:
            load_prompts([file_source(good), file_source(bad)], CHAT, 10, answer_required=True)
        assert caught.value.code == "data-column"
        assert caught.value.key == "data.sources.1.answer_column"
        assert "answer_column: anwser" in str(caught.value)

    def test_the_key_of_evaluation_sources_is_theirs(self, tmp_path: Path):
        with pytest.raises(UserError, match=r"eval\.sources\.0\.path"):
            load_prompts([file_source(str(tmp_path / "no.jsonl"))], CHAT, 10, key="eval.sources")

    def test_replaced_half_characters_are_noted(self, tmp_path: Path):
        loaded = load(tmp_path, [{"prompt": "a\ud83d"}, {"prompt": "b"}])
        assert loaded.sources[0].repaired == 1
        assert "1 of 2" in loaded.notes()[0]

    def test_a_verifiable_task_from_source_to_score(self):
        import reasoning_gym

        source = ReasoningGymSource(
            type="reasoning_gym", task="chain_sum", size=4, system_prompt="S", prompt_suffix=" Only the number."
        )
        prompt = load_prompts([source], CHAT, 1000, answer_required=True).prompts[0]
        assert prompt.text.count(" Only the number.") == 1
        scorer = reasoning_gym.create_dataset("chain_sum", size=1, seed=9)
        assert scorer.score_answer(prompt.answer, prompt.extra["reasoning_gym"]) == 1.0


def test_this_floor_loads_without_torch():
    import subprocess

    modules = "surefoot.data.load, surefoot.data.sampler, surefoot.data.inspect, surefoot.data.pretrained"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
