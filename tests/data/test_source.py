"""Rows of every kind of source: what is read, and what is said when it cannot be."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from surefoot.config.data import HubSource, PythonSource, ReasoningGymSource
from surefoot.data.source import plain, read_rows, source_names
from surefoot.errors import UserError
from tests.data.helpers import file_source, jsonl

KEY = "data.sources.0"
RICH = [
    {
        "prompt": [
            {"role": "user", "content": "Add 1 and 2."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "add", "arguments": {"terms": [1, 2]}}}],
            },
            {"role": "tool", "content": "3"},
        ],
        "keep": True,
        "meta": {"level": 3, "tags": ["a", "b"]},
    },
    {"prompt": [{"role": "user", "content": "Hi"}], "keep": False, "meta": {"other": "x"}},
]


def no_foreign_types(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(no_foreign_types(v) for v in value.values())
    if isinstance(value, list):
        return all(no_foreign_types(v) for v in value)
    return type(value) in (str, bool, int, float, type(None))


def refused(source: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read_rows(source, KEY)
    assert KEY in str(caught.value)
    return caught.value


class TestFiles:
    def test_parquet_keeps_lists_nested_dicts_and_booleans_as_plain_python(self, tmp_path: Path):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(RICH), path)
        rows = read_rows(file_source(str(path)), KEY)
        assert no_foreign_types(rows)
        assert rows[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["terms"] == [1, 2]
        assert rows[0]["keep"] is True
        assert rows[1]["keep"] is False
        assert rows[0]["meta"]["level"] == 3

    def test_parquet_with_objects_of_mixed_shape_that_the_datasets_library_wrote(self, tmp_path: Path):
        path = tmp_path / "rows.parquet"
        mixed = [{"prompt": "a", "arg": [{"x": 1}, {"y": [True, None]}]}, {"prompt": "b", "arg": [3]}]
        Dataset.from_list(mixed, on_mixed_types="use_json").to_parquet(path)
        assert read_rows(file_source(str(path)), KEY) == mixed

    def test_parquet_maps_become_dicts(self, tmp_path: Path):
        path = tmp_path / "rows.parquet"
        column = pa.array([[("k", 1)]], type=pa.map_(pa.string(), pa.int64()))
        pq.write_table(pa.table({"prompt": ["a"], "m": column}), path)
        assert read_rows(file_source(str(path)), KEY) == [{"prompt": "a", "m": {"k": 1}}]

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json"])
    def test_json_rows_come_back_as_they_were_written(self, tmp_path: Path, name: str):
        jsonl(tmp_path / name, RICH)
        assert read_rows(file_source(str(tmp_path / name)), KEY) == RICH

    def test_json_list_and_byte_order_mark(self, tmp_path: Path):
        (tmp_path / "rows.json").write_text(json.dumps(RICH), encoding="utf-8-sig")
        assert read_rows(file_source(str(tmp_path / "rows.json")), KEY) == RICH

    def test_gzip(self, tmp_path: Path):
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "b"}'))
        assert read_rows(file_source(str(tmp_path / "rows.jsonl.gz")), KEY) == [{"prompt": "a"}, {"prompt": "b"}]

    def test_csv_is_text_and_is_not_reinterpreted(self, tmp_path: Path):
        long = "word " * 40_000
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [["prompt", "answer", "note"], ['say "a",\nthen b', "007", "NA"], [long, "1.0", "true"]]
            )
        rows = read_rows(file_source(str(tmp_path / "rows.csv")), KEY)
        assert rows[0] == {"prompt": 'say "a",\nthen b', "answer": "007", "note": "NA"}
        assert rows[1] == {"prompt": long, "answer": "1.0", "note": "true"}

    def test_csv_line_that_is_too_short_has_no_entry_for_what_is_missing(self, tmp_path: Path):
        (tmp_path / "rows.tsv").write_text("prompt\tanswer\na\n")
        assert read_rows(file_source(str(tmp_path / "rows.tsv")), KEY) == [{"prompt": "a"}]

    def test_several_files_and_globs_in_a_stable_order_with_a_limit_over_all(self, tmp_path: Path):
        for name in ("b", "a", "c"):
            jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(2)])
        paths = [str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")]
        prompts = [row["prompt"] for row in read_rows(file_source(paths, limit=5), KEY)]
        assert prompts == ["c0", "c1", "a0", "a1", "b0"]

    def test_a_name_with_glob_characters_is_a_file_first(self, tmp_path: Path):
        path = jsonl(tmp_path / "rows[1].jsonl", [{"prompt": "a"}])
        assert len(read_rows(file_source(path), KEY)) == 1

    def test_any_fsspec_address(self):
        import fsspec

        fsspec.filesystem("memory").pipe("/folder/rows.jsonl", b'{"prompt": "far"}\n')
        assert read_rows(file_source("memory://folder/*.jsonl"), KEY) == [{"prompt": "far"}]

    @pytest.mark.parametrize(
        ("path", "code", "said"),
        [
            ("{dir}/trian.jsonl", "data-missing", "train.jsonl"),
            ("{dir}/*.arrow", "data-missing", "no file matches"),
            ("{dir}", "data-missing", "folder"),
            ("nosuchscheme://bucket/rows.jsonl", "data-missing", "nosuchscheme"),
            ("{dir}/empty.jsonl", "data-empty", "empty.jsonl"),
            ("{dir}/list.json", "data-empty", "list.json"),
            ("{dir}/rows.txt", "data-unreadable", ".parquet"),
            ("{dir}/zero.parquet", "data-unreadable", "zero.parquet"),
            ("{dir}/broken.jsonl", "data-unreadable", "line 2"),
            ("{dir}/numbers.jsonl", "data-unreadable", "line 1"),
            ("{dir}/object.json", "data-unreadable", "rows, version"),
            ("{dir}/latin.jsonl", "data-unreadable", "latin.jsonl"),
            ("{dir}/wide.csv", "data-unreadable", "line 2"),
            ("{dir}/false.jsonl.gz", "data-unreadable", "false.jsonl.gz"),
        ],
    )
    def test_files_that_are_not_what_they_should_be(self, tmp_path: Path, path: str, code: str, said: str):
        contents = {
            "train.jsonl": '{"prompt": "a"}',
            "empty.jsonl": "\n",
            "list.json": "[]",
            "rows.txt": "a",
            "zero.parquet": "",
            "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
            "numbers.jsonl": "1\n",
            "object.json": '{"rows": [], "version": 1}',
            "wide.csv": "prompt\na,b\n",
            "false.jsonl.gz": "not gzip",
        }
        for name, text in contents.items():
            (tmp_path / name).write_text(text)
        (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
        error = refused(file_source(path.format(dir=tmp_path)))
        assert error.code == code
        assert said in str(error)


class TestHub:
    def test_saved_dataset_with_and_without_splits(self, tmp_path: Path):
        dataset = Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
        dataset.with_format("numpy").save_to_disk(tmp_path / "plain")
        DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(tmp_path / "split")
        whole = read_rows(HubSource(type="hub", path=str(tmp_path / "plain"), limit=1), KEY)
        assert whole == [{"prompt": "a", "n": 1}]
        assert no_foreign_types(whole)
        assert read_rows(HubSource(type="hub", path=str(tmp_path / "split"), split="test"), KEY) == [
            {"prompt": "b", "n": 2}
        ]
        error = refused(HubSource(type="hub", path=str(tmp_path / "split"), split="tset"))
        assert error.code == "data-missing"
        assert "`test`" in str(error)

    def test_folder_of_files_as_the_hub_lays_them_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "repo").mkdir()
        jsonl(tmp_path / "repo" / "train.jsonl", [{"prompt": "a"}])
        source = HubSource(type="hub", path=str(tmp_path / "repo"))
        assert read_rows(source, KEY) == [{"prompt": "a"}]
        error = refused(source.model_copy(update={"split": "trian"}))
        assert "train" in str(error)

    def test_what_cannot_be_reached_is_one_line_and_no_trace(self, tmp_path: Path):
        (tmp_path / "mathset").mkdir()
        assert "mathset" in str(refused(HubSource(type="hub", path=str(tmp_path / "mathsets"))))
        error = refused(HubSource(type="hub", path="nobody/no-such-dataset"))
        assert error.code == "data-missing"
        assert error.__suppress_context__


class TestReasoningGym:
    def test_entry_is_kept_whole_so_that_the_task_can_score_it(self):
        import reasoning_gym

        source = ReasoningGymSource(type="reasoning_gym", task="chain_sum", size=3, seed=5, params={"max_terms": 2})
        rows = read_rows(source, KEY)
        assert len(rows) == 3
        entry = rows[1]["reasoning_gym"]
        assert rows[1]["prompt"] == entry["question"]
        assert rows[1]["answer"] == entry["answer"]
        assert rows[1]["reasoning_gym_params"] == {"max_terms": 2}
        scorer = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
        assert scorer.score_answer(entry["answer"], entry) == 1.0
        assert read_rows(source, KEY) == rows
        assert read_rows(source.model_copy(update={"seed": 6}), KEY) != rows

    @pytest.mark.parametrize(
        ("keys", "said"),
        [
            ({"task": "chain_sums"}, "`chain_sum`"),
            ({"task": "chain_sum", "params": {"max_term": 2}}, "`max_terms`"),
            ({"task": "chain_sum", "params": {"size": 2}}, "size"),
            ({"task": "chain_sum", "params": {"min_terms": 9, "max_terms": 2}}, "max_terms"),
        ],
    )
    def test_wrong_task_or_parameter(self, keys: dict[str, Any], said: str):
        assert said in str(refused(ReasoningGymSource(type="reasoning_gym", **keys)))


class TestPython:
    def write(self, folder: Path, text: str) -> str:
        (folder / "mine.py").write_text(text)
        return str(folder / "mine.py")

    def test_lists_and_generators_with_parameters_and_a_limit(self, tmp_path: Path):
        some = "def some(n): return [{'prompt': str(i)} for i in range(n)]\n"
        file = self.write(tmp_path, some + "def endless():\n    while True: yield {'prompt': 'x'}\n")
        source = PythonSource(type="python", function=f"{file}:some", params={"n": 3})
        assert [row["prompt"] for row in read_rows(source, KEY)] == ["0", "1", "2"]
        assert len(read_rows(PythonSource(type="python", function=f"{file}:endless", limit=4), KEY)) == 4

    @pytest.mark.parametrize(
        ("body", "code", "said"),
        [
            ("return 3", "data-unreadable", "int"),
            ("return {'prompt': 'a'}", "data-unreadable", "dict"),
            ("return [['a']]", "data-unreadable", "row 0"),
            ("return []", "data-empty", "no rows"),
            ("yield {'prompt': 'a'}; raise KeyError('x')", "plugin-broken", "mine.py, line 1"),
            ("return open('/no/such/file')", "plugin-broken", "FileNotFoundError"),
        ],
    )
    def test_functions_that_give_no_rows(self, tmp_path: Path, body: str, code: str, said: str):
        error = refused(PythonSource(type="python", function=f"{self.write(tmp_path, f'def f(): {body}')}:f"))
        assert error.code == code
        assert said in str(error)


def test_plain_reaches_every_level_and_leaves_the_rest():
    moment = datetime.date(2025, 1, 2)
    value = {
        "array": np.array([[1, 2], [3, 4]]),
        "objects": np.array([{"a": np.float32(0.5)}, None], dtype=object),
        "scalars": (np.int64(3), np.bool_(True), np.str_("x"), np.float64(0.1)),
        "date": moment,
    }
    result = plain(value)
    assert result == {
        "array": [[1, 2], [3, 4]],
        "objects": [{"a": 0.5}, None],
        "scalars": [3, True, "x", 0.1],
        "date": moment,
    }
    del result["date"]
    assert no_foreign_types(result)


def test_sources_have_different_names_and_two_equal_ones_of_your_own_are_refused(tmp_path: Path):
    files = [
        file_source("data/train.jsonl.gz"),
        file_source("other/train.parquet"),
        file_source("sets/part-*.jsonl"),
        file_source("sets/*.csv"),
    ]
    more = [
        HubSource(type="hub", path="owner/gsm8k"),
        PythonSource(type="python", function="a.b:rows"),
        file_source("x.csv", name="train-2"),
    ]
    assert source_names([*files, *more]) == ["train", "train-3", "part", "sets", "gsm8k", "rows", "train-2"]
    with pytest.raises(UserError, match="twin"):
        source_names([file_source("a.csv", name="twin"), file_source("b.csv", name="twin")])
