"""Two FSDP2 ranks over gloo do what one process does: losses, gradient norms, outputs and weights, three updates on."""

from __future__ import annotations

import pytest

from surefoot.config.placement import ParallelConfig

from .sharded import Case, assert_same, run_world, train

SPLIT = {
    "grpo": Case(),
    "ppo critic": Case(critic=True),
    "half the budget": Case(budget=60),
    "one row for two ranks": Case(groups=1, samples=1),
    "adapters": Case(lora=True),
    "activation checkpointing": Case(checkpointing=True),
    "two replicas": Case(parallel=ParallelConfig(replicate=2)),
    "sequence parallel": Case(parallel=ParallelConfig(sequence=2)),
    "sequence parallel, half the budget": Case(budget=60, parallel=ParallelConfig(sequence=2)),
    "sequence parallel critic": Case(critic=True, parallel=ParallelConfig(sequence=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both worlds leave their state."""
    where = tmp_path_factory.mktemp("two")
    (where / "one").mkdir()
    return where


@pytest.fixture(scope="module")
def of_two_ranks(tiny_folder, folder):
    train(Case(), tiny_folder, save=folder / "one")
    return run_world(2, SPLIT, tiny_folder, folder)


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_equal_one_process(name: str, of_two_ranks, tiny_folder):
    assert_same(of_two_ranks[name], train(SPLIT[name].whole, tiny_folder), 1e-5)


def test_a_state_of_one_process_goes_on_on_two(of_two_ranks, tiny_folder, folder):
    want = train(Case(), tiny_folder, start=folder / "one")
    assert want["loss"] != of_two_ranks["grpo"]["loss"]  # it did go on from somewhere else
    assert_same(of_two_ranks["resumed"], want, 1e-5)


def test_a_state_of_two_processes_goes_on_on_one(of_two_ranks, tiny_folder, folder):
    assert_same(train(Case(), tiny_folder, start=folder), of_two_ranks["resumed"], 1e-5)


def test_adapters_are_published_merged_under_the_base_models_names(of_two_ranks):
    plain, merged = of_two_ranks["grpo"]["published"], of_two_ranks["adapters"]["published"]
    assert plain.keys() == merged.keys()
    assert all("lora" not in name and "base_layer" not in name for name in merged)
