from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import UserError
from surefoot.tracking.jsonl import MetricsFile, read_metrics, to_line


def test_one_object_a_step_is_on_the_disk_as_soon_as_the_step_is_logged(tmp_path: Path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(0, {"eval/score": 0.25})
    file.log(1, {"reward/mean": 0.5})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0, "eval/score": 0.25}, {"step": 1, "reward/mean": 0.5}]


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda n: n != "step"), st.floats() | st.integers(-(2**53), 2**53), max_size=4
    )
)
def test_every_line_is_valid_json_and_reads_back_equal(metrics: dict[str, float]):
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    line = to_line({"step": 3, **metrics})
    assert line.count("\n") == 1
    parsed = json.loads(line, parse_constant=refuse)
    assert all(math.isnan(v) == (parsed[n] == "NaN") for n, v in metrics.items())


def test_numbers_that_are_not_finite_come_back_as_what_they_were(tmp_path: Path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": float(np.float32(0.5))})
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 0.5)


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path):
    MetricsFile(tmp_path / "m.jsonl").log(1, {"a": np.float32(0.5), "b": np.int64(7), "c": np.bool_(True)})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": 0.5, "b": 7, "c": 1}]


def test_after_a_resume_each_step_occurs_once(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    for step in range(6):
        first.log(step, {"reward/mean": step / 10})
    resumed = MetricsFile(path, resumed_step=3)
    assert [row["step"] for row in resumed.history] == [0, 1, 2, 3]
    for step in (4, 5):
        resumed.log(step, {"reward/mean": 9.0})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[-1]["reward/mean"] == 9.0


def test_a_new_run_starts_with_an_empty_record(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    MetricsFile(path).log(1, {"a": 1.0})
    assert MetricsFile(path).history == ()
    assert path.read_text() == ""


def test_a_line_cut_by_a_crash_is_left_out_and_gone_after_the_resume(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a"')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    MetricsFile(path, resumed_step=2).log(3, {"a": 3.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_logging_a_step_twice_is_refused(tmp_path: Path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(1, {})
    with pytest.raises(AssertionError, match="each step is logged once"):
        file.log(1, {})


def test_a_full_disk_is_named_with_the_path_and_what_is_free(tmp_path: Path):
    script = f"""
import resource
from pathlib import Path
from surefoot.errors import RunError
from surefoot.tracking.jsonl import MetricsFile
file = MetricsFile(Path({str(tmp_path)!r}) / "m.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    for step in range(1000):
        file.log(step, {{"reward/mean": 0.5}})
except RunError as error:
    file.close()
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "m.jsonl" in done.stdout
    assert "free on its disk" in done.stdout
    assert "[disk-full:" in done.stdout
    assert done.stderr == ""
    # What fits is whole, and the cut line does not disturb the next run.
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == list(
        range(len(read_metrics(tmp_path / "m.jsonl")))
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 2000


@pytest.mark.parametrize("line", ["[1, 2]", "null", '{"a": 1}', '{"step": "1"}', '{"step": 2, "a": "much"}', "7"])
def test_a_line_that_is_no_step_is_refused_and_nothing_is_touched(tmp_path: Path, line: str):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n' + line + "\n")
    before = path.read_text()
    with pytest.raises(UserError, match="line 2 is no step's metrics") as caught:
        MetricsFile(path, resumed_step=1)
    assert caught.value.code == "metrics-unreadable"
    assert path.read_text() == before


def test_the_last_row_can_get_what_it_lacked(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n')
    file = MetricsFile(path, resumed_step=2)
    assert file.amend({"eval/score": 0.5}) == {"step": 2, "a": 2.0, "eval/score": 0.5}
    file.log(3, {"a": 3.0})
    file.close()
    assert read_metrics(path)[1:] == [{"step": 2, "a": 2.0, "eval/score": 0.5}, {"step": 3, "a": 3.0}]
