"""Held out means held out: training never sees a prompt of the evaluation."""

from __future__ import annotations

import pytest

from surefoot.controller.preflight import preflight
from surefoot.errors import UserError
from tests.controller.tiny_run import tiny_config


def evaluation(tmp_path, **more):
    return {"sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 5}], **more}


def test_shared_prompts_leave_training_and_are_counted(tmp_path, tiny_folder):
    ready = preflight(tiny_config(tmp_path, tiny_folder, eval=evaluation(tmp_path)))
    assert len(ready.prompts.prompts) == 27
    assert not {p.text for p in ready.prompts.prompts} & {p.text for p in ready.eval_prompts.prompts}
    assert ready.prompts.sources[0].stop == 27
    assert any("5 of 32" in note for note in ready.prompts.notes())
    assert [ready.prompts.prompts[i].answer for i in ready.sampler.next_batch()]


def test_it_can_be_turned_off(tmp_path, tiny_folder):
    ready = preflight(tiny_config(tmp_path, tiny_folder, eval=evaluation(tmp_path, hold_out=False)))
    assert len(ready.prompts.prompts) == 32


def test_nothing_left_is_refused(tmp_path, tiny_folder):
    source = {"type": "file", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(UserError, match=r"eval\.hold_out"):
        preflight(tiny_config(tmp_path, tiny_folder, eval={"sources": [source]}))
