"""A row taken apart: columns, answers, messages, tools, ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.data.rows import ParsedRow, parse_rows
from surefoot.data.source import read_rows
from surefoot.errors import UserError
from tests.data.helpers import TOOL, file_source, jsonl

KEY = "data.sources.0"
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0, "hard": False, "steps": ["a", "b"]},
}


def parse(rows: list[dict[str, Any]], answer_required: bool = False, **keys: Any) -> list[ParsedRow]:
    return parse_rows(rows, file_source("x.jsonl", **keys), "x", KEY, answer_required)


def refused(rows: list[dict[str, Any]], answer_required: bool = False, **keys: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        parse(rows, answer_required, **keys)
    assert KEY in str(caught.value)
    return caught.value


class TestColumns:
    def test_verl_rows_are_taken_as_they_are(self):
        (row,) = parse([VERL], answer_required=True)
        assert row.answer == "4"
        assert row.source == "openai/gsm8k"
        assert row.messages == ({"role": "user", "content": "2+2?"},)
        assert row.extra == {k: v for k, v in VERL.items() if k != "prompt"}

    @pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
    @pytest.mark.parametrize(
        "row",
        [
            VERL,
            {"prompt": "2+2?", "answer": "4", "level": 3, "tags": ["x"], "hard": True},
            {"prompt": "2+2?", "ground_truth": "4", "info": {"a": {"b": [1, 2]}}},
            {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4", "id": "row-7"},
        ],
    )
    def test_extra_columns_reach_the_rewards_untouched_under_every_layout(
        self, tmp_path: Path, kind: str, row: dict[str, Any]
    ):
        path = tmp_path / f"rows.{kind}"
        write = {
            "parquet": lambda: pq.write_table(pa.Table.from_pylist([row]), path),
            "jsonl": lambda: jsonl(path, [row]),
        }
        write.get(kind, lambda: path.write_text(json.dumps([row])))()
        (parsed,) = parse(read_rows(file_source(str(path)), KEY), answer_required=True)
        own = {"prompt", "answer", "ground_truth", "solution"}
        assert parsed.extra == {k: v for k, v in row.items() if k not in own}
        assert parsed.answer == "4"

    def test_missing_prompt_column_names_what_is_wanted_and_what_is_there(self):
        error = refused([{"promt": "a", "answer": "b"}])
        assert error.code == "data-column"
        assert (error.want, error.got) == ("prompt", "promt, answer")
        assert "prompt_column: promt" in str(error)
        assert "prompt_column: question" in str(refused([{"question": "a", "answer": "b"}]))

    def test_prompt_missing_in_some_rows_only(self):
        error = refused([{"prompt": "a"}, {"text": "b"}, {"prompt": None}])
        assert "2 of 3 rows" in str(error)
        assert "row 1" in str(error)

    def test_missing_answer_column_stops_a_run_whose_reward_needs_it(self):
        rows = [{"prompt": "a", "anser": "b"}]
        assert parse(rows)[0].answer is None
        error = refused(rows, answer_required=True)
        assert error.code == "data-column"
        assert "answer or ground_truth" in str(error)
        assert "anser" in str(error)

    def test_answer_missing_in_some_rows(self):
        rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": None}]
        assert [r.answer for r in parse(rows)] == ["b", None]
        assert "1 of 2 rows" in str(refused(rows, answer_required=True))

    def test_answer_column_that_was_asked_for_must_be_there_even_if_no_reward_needs_it(self):
        assert "gold" in str(refused([{"prompt": "a", "answer": "b", "gold_": "c"}], answer_column="gold"))

    def test_an_empty_column_does_not_hide_a_full_one(self):
        assert parse([{"prompt": "a", "answer": None, "reward_model": {"ground_truth": 5}}], True)[0].answer == 5

    @pytest.mark.parametrize("answer", ["", 0, False, [], {"a": None}])
    def test_false_answers_are_answers(self, answer: Any):
        assert parse([{"prompt": "a", "answer": answer}], answer_required=True)[0].answer == answer

    def test_dotted_columns_reach_into_dicts(self):
        rows = [{"task": {"question": "a", "gold": {"value": 1}}, "more": 2}]
        (row,) = parse(rows, prompt_column="task.question", answer_column="task.gold.value")
        assert row.messages[0]["content"] == "a"
        assert row.answer == 1
        assert row.extra == rows[0]


class TestIds:
    def test_own_unique_ids_or_else_the_index(self):
        assert [r.id for r in parse([{"prompt": "a", "id": "k"}, {"prompt": "a", "id": 5}])] == ["x/k", "x/5"]
        assert [r.id for r in parse([{"prompt": "a", "id": "k"}, {"prompt": "a", "id": "k"}])] == ["x/0", "x/1"]
        assert [r.id for r in parse([{"prompt": "a", "id": 1}, {"prompt": "a", "id": "1"}])] == ["x/0", "x/1"]
        assert [r.id for r in parse([{"prompt": "a", "id": "k"}, {"prompt": "a"}])] == ["x/0", "x/1"]


class TestMessages:
    def test_system_prompt_and_suffix_and_the_rows_themselves_stay_as_they_are(self):
        rows = [
            {"prompt": "a"},
            {
                "prompt": [
                    {"role": "system", "content": "own"},
                    {"role": "user", "content": "b"},
                    {"role": "tool", "content": "c"},
                ]
            },
        ]
        before = json.dumps(rows)
        first, second = parse(rows, system_prompt="S", prompt_suffix="!")
        assert [m["content"] for m in first.messages] == ["S", "a!"]
        assert [m["content"] for m in second.messages] == ["own", "b!", "c"]
        assert json.dumps(rows) == before

    def test_absent_fields_of_a_parquet_file_are_absent_in_messages_and_tools(self, tmp_path: Path):
        calls = [
            {"function": {"name": "f", "arguments": {"x": [1]}}},
            {"function": {"name": "g", "arguments": {"y": True}}},
        ]
        parameters = {"type": "object", "properties": {"y": {"type": "boolean"}}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "b", "name": "f"},
        ]
        rows = [
            {
                "prompt": messages,
                "tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": parameters}}],
            }
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        (row,) = parse(read_rows(file_source(str(tmp_path / "rows.parquet")), KEY))
        assert list(row.tools) == rows[0]["tools"]
        assert row.messages == (
            {"role": "user", "content": "a"},
            {**messages[1], "content": ""},
            rows[0]["prompt"][2],
        )

    def test_tools_may_be_json_text(self):
        assert parse([{"prompt": "a", "tools": json.dumps([TOOL])}])[0].tools == (TOOL,)
        assert parse([{"prompt": "a", "tools": ""}, {"prompt": "a", "tools": None}])[0].tools == ()
        assert refused([{"prompt": "a", "tools": "hammer"}]).code == "data-prompt"

    def test_text_parts_become_one_text_and_other_parts_are_refused(self):
        parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
        assert parse([{"prompt": [{"role": "user", "content": parts}]}])[0].messages[0]["content"] == "abc"
        assert "image_url" in str(refused([{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}]))

    def test_messages_may_be_json_text_since_csv_has_no_other_way(self):
        messages = [{"role": "user", "content": "a", "name": None}]
        (row,) = parse([{"prompt": json.dumps(messages)}])
        assert row.messages == ({"role": "user", "content": "a"},)
        assert not row.is_text
        for text in ('[{"role": "user"', '[{"a": 1}]', "[1, 2]"):
            (row,) = parse([{"prompt": text}])
            assert row.is_text
            assert row.messages[0]["content"] == text

    def test_a_tool_may_answer_with_an_object(self):
        messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": {"sum": 3}}]
        assert parse([{"prompt": messages}])[0].messages[1]["content"] == {"sum": 3}

    @pytest.mark.parametrize(
        ("prompt", "said"),
        [
            ("", "empty"),
            (" \n\t", "empty"),
            ([], "empty"),
            ([{"role": "user", "content": " "}], "empty"),
            (3, "int"),
            ({"role": "user", "content": "a"}, "dict"),
            (["a"], "str"),
            ([{"content": "a"}], "role"),
            ([{"from": "human", "value": "a"}], "rename"),
            ([{"role": "user"}], "NoneType"),
            ([{"role": "user", "content": 3}], "int"),
            ([{"role": "user", "content": {"text": "a"}}], "dict"),
            ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "the answer"}], "assistant"),
        ],
    )
    def test_prompts_of_another_shape_name_their_row(self, prompt: Any, said: str):
        error = refused([{"prompt": "fine"}, {"prompt": prompt}])
        assert error.code == "data-prompt"
        assert said in str(error)
        assert "row 1 of x" in str(error)

    def test_suffix_needs_a_user_message(self):
        assert refused([{"prompt": [{"role": "system", "content": "a"}]}], prompt_suffix="!").code == "data-prompt"

    def test_half_characters_are_replaced_and_counted_and_whole_ones_are_not(self):
        good = "é 你好 🙂 \u200d \x00"
        rows = parse(
            [
                {"prompt": good},
                {"prompt": "a\ud83d!"},
                {"prompt": "\ud83d\ude42"},
                {"prompt": [{"role": "user", "content": "\udc00"}]},
            ]
        )
        assert [r.messages[0]["content"] for r in rows] == [good, "a\ufffd!", "🙂", "\ufffd"]
        assert [r.repaired for r in rows] == [False, True, True, True]
