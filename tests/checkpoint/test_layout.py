from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.layout import (
    FileEntry,
    Found,
    Manifest,
    folder_name,
    judge,
    newest,
    parse_name,
    removable,
    unfinished_name,
)

MANIFEST = Manifest(
    12, {"actor.safetensors": FileEntry(100, "ab"), "state.json": FileEntry(7, "cd")}, {"torch": "2"}, "ef"
)
SIZES = {"actor.safetensors": 100, "state.json": 7, "manifest.json": 300}


@given(st.integers(0, 10**9))
def test_names_tell_their_step(step: int):
    assert parse_name(folder_name(step)) == step
    assert parse_name(unfinished_name(step)) == step


@pytest.mark.parametrize(
    "name", ["step_12", "step_000012.old", ".trash-step_000012", "latest", ".step_000012", "step_000012.tmp"]
)
def test_other_names_are_no_checkpoints(name: str):
    assert parse_name(name) is None
    assert judge(name, MANIFEST.to_json(), SIZES) is None


def test_a_manifest_reads_back_equal():
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cut short"),
        (MANIFEST.to_json()[:-9], "cut short"),
        ("{}", "lacks 'format'"),
        ("[]", "lacks"),
        ('{"format": 99}', "newer Surefoot"),
    ],
)
def test_a_bad_manifest_says_what_is_wrong(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("name", "manifest", "sizes", "problem"),
    [
        ("step_000012", MANIFEST.to_json(), SIZES, None),
        (".step_000012.tmp", MANIFEST.to_json(), SIZES, None),
        ("step_000012", None, SIZES, "no manifest"),
        ("step_000013", MANIFEST.to_json(), SIZES, "of step 12"),
        (
            "step_000012",
            MANIFEST.to_json(),
            SIZES | {"actor.safetensors": 99},
            "actor.safetensors has 99 bytes, not 100",
        ),
        ("step_000012", MANIFEST.to_json(), {"actor.safetensors": 100}, "state.json is missing"),
        ("step_000012", MANIFEST.to_json()[:40], SIZES, "cut short"),
    ],
)
def test_what_is_a_whole_checkpoint(name: str, manifest: str | None, sizes: dict[str, int], problem: str | None):
    found = judge(name, manifest, sizes)
    assert found is not None
    assert (found.problem is None) if problem is None else (problem in (found.problem or ""))


def whole(step: int, **options) -> Found:
    return Found(folder_name(step), step, None, **options)


def broken(step: int) -> Found:
    return Found(folder_name(step), step, "broken")


def test_the_newest_is_the_whole_one_of_the_highest_step():
    assert newest([whole(3), whole(10), broken(11)]) == whole(10)
    assert newest([broken(1)]) is None
    unfinished = Found(unfinished_name(10), 10, None)
    assert newest([unfinished, whole(10)]) == whole(10)
    assert newest([whole(9), unfinished]) == unfinished


def test_what_may_go_by_hand():
    found = [broken(1), whole(2), whole(4, pinned=True), whole(6), whole(8), broken(9)]
    assert removable(found, keep_last=1) == [folder_name(s) for s in (2, 6, 1)]
    assert removable(found, keep_last=2) == [folder_name(s) for s in (2, 1)]
    assert removable([broken(1), broken(2)], keep_last=1) == []


founds = st.lists(
    st.builds(
        lambda step, problem, pinned: Found(folder_name(step), step, problem, pinned),
        st.integers(0, 30),
        st.none() | st.just("x"),
        st.booleans(),
    ),
    unique_by=lambda one: one.step,
    max_size=12,
)


@given(founds, st.integers(1, 4))
def test_pruning_never_takes_the_newest_whole_one_a_pinned_one_or_the_last_ones(found: list[Found], keep_last: int):
    gone = set(removable(found, keep_last))
    rest = [one for one in found if one.name not in gone]
    assert newest(rest) == newest(found)
    assert all(one in rest for one in found if one.pinned and one.problem is None)
    loose = [one for one in rest if one.problem is None and not one.pinned]
    assert len(loose) <= keep_last + 1
    assert len(loose) >= min(keep_last, len([one for one in found if one.problem is None and not one.pinned]))
