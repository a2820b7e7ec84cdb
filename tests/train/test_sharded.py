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
def of_two_ranks(tiny_folder, tmp_path_factory):
    return run_world(2, SPLIT, tiny_folder, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_equal_one_process(name: str, of_two_ranks, tiny_folder):
    assert_same(of_two_ranks[name], train(SPLIT[name].whole, tiny_folder), 1e-5)
