"""The cache's size, by hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.controller.memory import GIB, EngineNeeds, TrainMemory, kv_cache_bytes
from surefoot.errors import UserError

TRAIN = TrainMemory(total=80 * GIB, peak=40 * GIB, resident=20 * GIB, context=1 * GIB)
NEEDS = EngineNeeds(weights=10 * GIB, working=4 * GIB, asleep=2 * GIB, full_cache=100 * GIB, least_cache=GIB)


def size(devices=(TRAIN,), needs=NEEDS, reserve=2 * GIB, sleeps=True, total=None) -> int:
    return kv_cache_bytes(devices, needs, reserve, sleeps, total)


def test_taking_turns_the_cache_gets_what_training_keeps_between_updates():
    assert size() == (80 - 1 - 20 - 2 - 10 - 4) * GIB


def test_at_the_same_time_it_gets_what_trainings_peak_leaves():
    assert size(sleeps=False) == (80 - 1 - 40 - 2 - 10 - 4) * GIB


def test_on_devices_of_its_own_it_gets_all_but_the_reserve():
    assert size(devices=(), total=80 * GIB) == (80 - 2 - 10 - 4) * GIB


def test_never_more_than_it_can_use():
    assert size(needs=replace(NEEDS, full_cache=3 * GIB)) == 3 * GIB


def test_the_tightest_device_decides():
    assert size(devices=(TRAIN, replace(TRAIN, resident=30 * GIB))) == size() - 10 * GIB


def test_the_wrong_order_would_have_sized_it_wrongly():
    """Before training has run, its memory is not there to be seen: what is free then is not what is left later."""
    unseen = replace(TRAIN, peak=0, resident=0)
    wrong, right = size(devices=(unseen,)), size()
    resident_in_generation = TRAIN.context + TRAIN.resident + NEEDS.weights + NEEDS.working
    assert resident_in_generation + wrong > TRAIN.total
    assert resident_in_generation + right <= TRAIN.total


def test_no_room_for_one_row_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"(?s)0\.5 GiB left of .* at least 1\.0 GiB") as caught:
        size(devices=(replace(TRAIN, resident=int(62.5 * GIB)),))
    assert caught.value.code == "gpu-too-small"


def test_a_training_peak_beside_a_sleeping_sampler_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="measured on the longest rows"):
        size(devices=(replace(TRAIN, peak=77 * GIB),))


@given(
    peak=st.integers(0, 80), resident=st.integers(0, 80), weights=st.integers(0, 40), reserve=st.integers(0, 8),
    sleeps=st.booleans(),
)  # fmt: skip
def test_what_is_granted_always_fits(peak: int, resident: int, weights: int, reserve: int, sleeps: bool):
    resident = min(resident, peak)
    device = TrainMemory(80 * GIB, peak * GIB, resident * GIB, GIB)
    needs = replace(NEEDS, weights=weights * GIB)
    try:
        cache = size(devices=(device,), needs=needs, reserve=reserve * GIB, sleeps=sleeps)
    except UserError:
        return
    sampling = needs.weights + needs.working + cache + (device.resident if sleeps else device.peak)
    training = device.peak + (needs.asleep if sleeps else needs.weights + needs.working + cache)
    assert device.context + sampling + reserve * GIB <= device.total
    assert device.context + training + reserve * GIB <= device.total
