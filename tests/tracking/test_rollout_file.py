from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.records import Reward
from surefoot.tracking.rollout_file import rollout_table, write_rollout_file
from surefoot.tracking.run_folder import RunFolder
from tests.tracking.helpers import make_rollout


def test_everything_about_a_rollout_is_in_its_row(tmp_path: Path):
    rollouts = [
        make_rollout("a", 0, "12", Reward(1.0, {"exact": 1.0, "format": None}), answer={"value": 12, "unit": "ä"}),
        make_rollout("a", 1, "13", Reward(None, error="judge: timed out"), "length", model_tokens=4, answer=None),
        make_rollout("b", 0, "14"),
    ]
    advantages = [np.array([9, 9, 9, 1.0, 0.5], np.float32), None, np.zeros(5, np.float32)]
    trainer = [np.array([0, 0, 0, -0.4, -0.6], np.float32), None, None]
    write_rollout_file(tmp_path / "f.parquet", 7, rollouts, advantages, trainer)
    rows = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert rows[0] == {
        "step": 7, "prompt_id": "a", "source": "sums", "sample_index": 0, "prompt": "7 + 5 =", "response": "12",
        "answer": '{"value": 12, "unit": "ä"}', "finish_reason": "stop", "num_model_tokens": 2, "reward": 1.0,
        "error": None, "advantage": 0.75, "token_ids": [0, 1, 2, 3, 4], "loss_mask": [False, False, False, True, True],
        "engine_logprobs": [0.0, 0.0, 0.0, -0.5, -0.5],
        "trainer_logprobs": [0.0, 0.0, 0.0, *np.float32([-0.4, -0.6]).tolist()],
        "policy_version": [0, 0, 0, 4, 4], "reward/exact": 1.0, "reward/format": None,
    }  # fmt: skip
    assert (rows[1]["reward"], rows[1]["error"], rows[1]["advantage"]) == (None, "judge: timed out", None)
    assert (rows[1]["finish_reason"], rows[1]["answer"]) == ("length", "null")
    assert (rows[2]["reward"], rows[2]["advantage"], rows[2]["reward/exact"]) == (None, 0.0, None)


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(), max_size=30), st.recursive(st.none() | st.booleans() | st.text(max_size=3), st.lists))
def test_any_text_and_answer_can_be_written(text: str, answer: object):
    rollout = make_rollout(response=text, prompt_text=text, answer=answer, reward=Reward(None, error=text))
    (row,) = rollout_table(1, [rollout]).to_pylist()
    assert row["response"] == text.encode("utf-8", "replace").decode()
    json.loads(row["answer"])


def test_half_characters_of_a_byte_level_vocabulary_can_be_written():
    (row,) = rollout_table(1, [make_rollout(response="ok \ud83d")]).to_pylist()
    assert row["response"] == "ok ?"


def test_answers_that_json_does_not_know_are_written_as_text():
    (row,) = rollout_table(
        1,
        [
            make_rollout(
                answer={
                    "x": np.int64(3),
                    "y": {
                        1,
                    },
                }
            )
        ],
    ).to_pylist()
    assert json.loads(row["answer"]) == {"x": "3", "y": "{1}"}


def test_rows_must_match_their_columns(tmp_path: Path):
    with pytest.raises(AssertionError):
        write_rollout_file(tmp_path / "f.parquet", 1, [make_rollout()], advantages=[None, None])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_rollout_file_but_not_the_run(tmp_path: Path):
    script = f"""
import resource, random
from surefoot.tracking.run_folder import RunFolder
from tests.tracking.helpers import make_rollout
folder = RunFolder({str(tmp_path)!r}, "a")
noise = random.Random(0)
rollouts = [make_rollout(response=noise.randbytes(50).hex(), sample_index=i) for i in range(300)]
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
print([alarm and alarm.code for alarm in (folder.write_rollouts(step, rollouts) for step in (1, 2))])
print(sorted(p.name for p in folder.rollouts.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(folder.write_rollouts(3, rollouts), sorted(p.name for p in folder.rollouts.iterdir()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines() == ["['alarm-disk-full', None]", "[]", "None ['step_000003.parquet']"], done.stderr


def test_other_trouble_with_the_rollout_file_is_not_hidden(tmp_path: Path):
    folder = RunFolder(tmp_path, "a")
    folder.rollouts.rmdir()
    with pytest.raises(FileNotFoundError):
        folder.write_rollouts(1, [make_rollout()])
