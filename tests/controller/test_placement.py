"""Pools and roles -> processes, by hand, and what is refused before a cluster is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.load import build_config
from surefoot.controller.placement import plan
from surefoot.controller.sampler_group import Router, group_of
from surefoot.errors import UserError


def config(placement: dict, engine: dict | None = None):
    return build_config(
        {
            "model": {"path": "x"},
            "data": {"sources": [{"type": "reasoning_gym", "task": "chain_sum"}]},
            "rewards": {"functions": [{"type": "exact"}]},
            "train": {"steps": 1},
            "rollout": {"engine": engine} if engine else {},
            "placement": {"type": "ray", **placement},
        }
    )


def test_one_pool_is_colocated_with_one_training_process_a_gpu():
    got = plan(config({"pools": {"main": {"nodes": 2, "gpus_per_node": 8}}}), ["reference", "critic", "actor"])
    assert got.colocated
    assert got.training == {"main": ("reference", "critic", "actor")}
    assert got.pools["main"].size == 16
    assert got.replicas == 16


def test_a_pool_for_rollout_has_replicas_of_several_gpus():
    pools = {"train": {"gpus_per_node": 4}, "sample": {"nodes": 2, "gpus_per_node": 4}}
    wanted = config({"pools": pools, "roles": {"rollout": "sample"}}, {"type": "vllm", "tensor_parallel_size": 2})
    got = plan(wanted, ["actor"])
    assert not got.colocated
    assert (got.replicas, got.replica_size) == (4, 2)


@pytest.mark.parametrize(
    ("placement", "engine", "key", "says"),
    [
        ({"pools": {"main": {}}}, None, "placement.pools.main", "one of the two"),
        ({"pools": {"main": {"gpus_per_node": 1, "processes_per_node": 1}}}, None, "placement.pools.main", "one of"),
        (
            {
                "pools": {"main": {"gpus_per_node": 2}, "idle": {"gpus_per_node": 2}},
                "roles": {"actor": "main", "rollout": "main"},
            },
            None,
            "placement.pools.idle",
            "held",
        ),
        ({"pools": {"a": {"gpus_per_node": 2}, "b": {"gpus_per_node": 2}}}, None, "placement.roles.actor", "a, b"),
        (
            {"pools": {"a": {"gpus_per_node": 2}, "b": {"gpus_per_node": 2}}, "roles": {"actor": "a", "rollout": "c"}},
            None,
            "placement.roles.rollout",
            "one of a, b",
        ),
        ({"pools": {"main": {"gpus_per_node": 2}}, "roles": {"rollout": "mian"}}, None, "placement.roles", "main"),
        (
            {"pools": {"main": {"gpus_per_node": 3}}, "parallel": {"sequence": 2}},
            None,
            "placement.parallel.sequence",
            "[1, 3]",
        ),
        (
            {"pools": {"main": {"gpus_per_node": 6}}},
            {"type": "vllm", "tensor_parallel_size": 4},
            "rollout.engine.tensor_parallel_size",
            "[1, 2, 3, 6]",
        ),
        ({"pools": {"main": {"gpus_per_node": 2}}}, {"type": "embedded"}, "rollout.engine.type", "vllm"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(placement: dict, engine: dict | None, key: str, says: str):
    with pytest.raises(UserError) as caught:
        plan(config(placement, engine), ["actor"])
    assert str(caught.value.key).startswith(key)
    assert says in str(caught.value)


def test_samples_of_a_prompt_go_to_one_replica_and_others_to_the_idler():
    router = Router(["a", "b"])
    assert [router.enter(group, 10) for group in ("p", "p", "q", "r")] == ["a", "a", "b", "b"]
    router.leave("p", 10)
    router.leave("p", 10)
    assert router.enter("s", 10) == "a"
    assert group_of("data/7/3/0/ffee") == "data/7"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_a_router_that_is_empty_again_has_no_load(rows: list[tuple[int, int]]):
    router = Router(["a", "b", "c"])
    places: dict[int, str] = {}
    for group, cost in rows:
        assert router.enter(str(group), cost) == places.setdefault(group, router._groups[str(group)][0])
    for group, cost in rows:
        router.leave(str(group), cost)
    assert set(router._load.values()) == {0}
    assert not router._groups
