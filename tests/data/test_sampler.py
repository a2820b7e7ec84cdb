"""The order of prompts: whole epochs, shares by weight, and a resumed run that is the uninterrupted one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from surefoot.data.sampler import PromptSampler
from surefoot.errors import UserError


def make(
    sizes: list[int], weights: list[float] | None = None, batch: int = 2, seed: int = 0, shuffle: bool = True
) -> PromptSampler:
    ids = [[f"{s}/{i}" for i in range(size)] for s, size in enumerate(sizes)]
    return PromptSampler(ids, weights or [1.0] * len(sizes), batch, seed, shuffle)


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    weights = draw(st.lists(st.floats(0.05, 10), min_size=len(sizes), max_size=len(sizes)))
    batch = draw(st.integers(1, 12))
    total = sum(weights)
    assume(all(size >= math.ceil(batch * w / total) + 1e-9 for size, w in zip(sizes, weights, strict=True)))
    return {
        "sizes": sizes,
        "weights": weights,
        "batch": batch,
        "seed": draw(st.integers(0, 99)),
        "shuffle": draw(st.booleans()),
    }


def test_file_order_without_shuffle_and_the_remainder_carries_into_the_next_epoch():
    sampler = make([5], batch=2, shuffle=False)
    assert [sampler.next_batch() for _ in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert sampler.epochs == {"source 0": 2.0}


def test_a_row_that_is_in_the_batch_already_waits_for_the_next_batch():
    sampler = make([3], batch=2, shuffle=False)
    assert [sampler.next_batch() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    sampler = make([4], batch=3, shuffle=False)
    # Epoch 2 begins in the second batch: [3, 0, 1]; epoch 3 in the third: [2, 3] and then 0, 1.
    assert [sampler.next_batch() for _ in range(4)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]


def test_order_depends_on_seed_source_and_epoch():
    def first(**options: Any) -> list[int]:
        return make([50], batch=50, **options).next_batch()

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    sampler = make([50, 50], batch=100)
    batches = [sampler.next_batch() for _ in range(2)]
    orders = [[i - start for i in batch if start <= i < start + 50] for batch in batches for start in (0, 50)]
    assert len({tuple(order) for order in orders}) == 4
    # Pinned: another order here would change every run that is resumed over an upgrade.
    assert make([8], batch=8, seed=7).next_batch() == [5, 4, 6, 3, 7, 2, 0, 1]


@given(setups())
@settings(max_examples=150, deadline=None)
def test_every_row_comes_exactly_once_in_each_epoch_and_no_batch_holds_one_twice(setup: dict[str, Any]):
    sampler = make(**setup)
    starts = [sum(setup["sizes"][:i]) for i in range(len(setup["sizes"]))]
    drawn: list[list[int]] = [[] for _ in starts]
    for _ in range(30):
        batch = sampler.next_batch()
        assert len(set(batch)) == len(batch) == setup["batch"]
        for index in batch:
            source = max(i for i, start in enumerate(starts) if start <= index)
            drawn[source].append(index)
    for rows, start, size in zip(drawn, starts, setup["sizes"], strict=True):
        epochs = [rows[i : i + size] for i in range(0, len(rows), size)]
        assert all(sorted(epoch) == list(range(start, start + size)) for epoch in epochs if len(epoch) == size)
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_shares_hold_to_within_one_prompt_after_every_prompt(weights: list[float], batch: int):
    sampler = make([400] * len(weights), weights, batch, shuffle=False)
    given_so_far = [0] * len(weights)
    taken = 0
    for _ in range(200 // batch):
        for index in sampler.next_batch():
            given_so_far[index // 400] += 1
            taken += 1
            for count, weight in zip(given_so_far, weights, strict=True):
                assert abs(count - taken * weight / sum(weights)) < 1


@given(setups(), st.integers(0, 25), st.integers(1, 10))
@settings(max_examples=150, deadline=None)
def test_resumed_equals_uninterrupted(setup: dict[str, Any], before: int, after: int):
    whole, first, second = make(**setup), make(**setup), make(**setup)
    want = [whole.next_batch() for _ in range(before + after)]
    got = [first.next_batch() for _ in range(before)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.next_batch() for _ in range(after)]
    assert got == want
    assert second.state_dict() == whole.state_dict()
    assert second.epochs == whole.epochs


@pytest.mark.parametrize("batches", [2, 3])
def test_resume_at_and_across_the_end_of_an_epoch(batches: int):
    whole, first, second = (make([6], batch=3 if batches == 2 else 4) for _ in range(3))
    want = [whole.next_batch() for _ in range(batches + 4)]
    for _ in range(batches):
        first.next_batch()
    second.load_state_dict(first.state_dict())
    assert [second.next_batch() for _ in range(4)] == want[batches:]


def test_the_batch_size_may_change_on_resume():
    first, second = make([10], batch=4, shuffle=False), make([10], batch=3, shuffle=False)
    first.next_batch()
    second.load_state_dict(first.state_dict())
    assert second.next_batch() == [4, 5, 6]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"sizes": [6, 4]}, "data.sources"),
        ({"sizes": [5, 4, 1]}, "data.sources"),
        ({"weights": [1, 2]}, "data.sources"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "data.shuffle"),
    ],
)
def test_a_state_of_other_data_is_refused(other: dict[str, Any], key: str):
    setup: dict[str, Any] = {"sizes": [5, 4], "weights": None}
    sampler = make(**(setup | other))
    with pytest.raises(UserError) as caught:
        sampler.load_state_dict(make(**setup).state_dict())
    assert caught.value.code == "data-changed"
    assert caught.value.key == key


def test_other_rows_under_the_same_numbers_are_other_data():
    state = PromptSampler([["a", "b"]], [1], 1, 0).state_dict()
    PromptSampler([["a", "b"]], [1], 1, 0).load_state_dict(state)
    for ids in (["b", "a"], ["a", "c"], ["ab", ""]):
        with pytest.raises(UserError, match="other rows"):
            PromptSampler([ids], [1], 1, 0).load_state_dict(state)


def test_a_step_larger_than_the_data_is_refused_with_both_numbers():
    with pytest.raises(UserError) as caught:
        make([3], batch=4)
    assert caught.value.code == "data-too-few"
    assert (caught.value.key, caught.value.got, caught.value.want) == (
        "train.prompts_per_step",
        "3 prompts",
        "at least 4",
    )
    with pytest.raises(UserError, match="source 1"):
        make([100, 3], weights=[1, 1], batch=8)


def test_state_is_small_whatever_the_size_of_the_data():
    sampler = make([100_000], batch=64)
    for _ in range(3):
        sampler.next_batch()
    assert len(json.dumps(sampler.state_dict())) < 500
