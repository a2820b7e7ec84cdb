"""The configuration's pools and roles -> which process runs what. Pure: it asks no cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..config.placement import PlacementConfig, PoolConfig, RoleName
from ..config.rollout import EmbeddedConfig, VllmConfig
from ..errors import UserError, nearest

TRAINING: tuple[RoleName, ...] = ("reference", "critic", "actor")


@dataclass(frozen=True, slots=True)
class Pool:
    """A resource pool: `nodes` nodes with `per_node` bundles each; a bundle is a GPU, or a process' CPUs."""

    name: str
    nodes: int
    per_node: int
    gpu: bool
    cpus: float

    @property
    def size(self) -> int:
        """Bundles in all."""
        return self.nodes * self.per_node

    def bundle(self) -> dict[str, float]:
        """What Ray is asked for, for each."""
        return {"CPU": self.cpus} | ({"GPU": 1.0} if self.gpu else {})


@dataclass(frozen=True, slots=True)
class Plan:
    """Which process runs what.

    Training roles of one pool share one process a bundle: `training` maps pools to their roles, the lightest first.
    Each sampler replica spans `replica_size` neighbouring bundles of `rollout`, in a process of its own.
    """

    pools: Mapping[str, Pool]
    training: Mapping[str, tuple[RoleName, ...]]
    rollout: str
    replica_size: int

    @property
    def colocated(self) -> bool:
        """Whether sampling and training share devices."""
        return self.rollout in self.training

    @property
    def replicas(self) -> int:
        """Samplers in all."""
        return self.pools[self.rollout].size // self.replica_size


def plan(config: RunConfig, roles: Sequence[RoleName]) -> Plan:
    """Plan the processes of a run.

    Args:
        config: With `placement` not local.
        roles: Training roles that the run has.

    Raises:
        UserError: What cannot be, whatever the cluster has.
    """
    placement = config.placement
    assert isinstance(placement, PlacementConfig)
    pools = {name: _pool(name, one) for name, one in placement.pools.items()}
    _check_names(placement, pools)
    place = _places(placement, (*roles, "rollout"))
    training: dict[str, tuple[RoleName, ...]] = {}
    for role in TRAINING:
        if role in roles:
            training[place[role]] = (*training.get(place[role], ()), role)
    idle = [name for name in pools if name not in training and name != place["rollout"]]
    if idle:
        raise UserError(
            "config-conflict", "nothing runs on this pool, and its GPUs would be held for nothing",
            key=f"placement.pools.{idle[0]}", got=f"roles: {dict(placement.roles)}",
            want="a pool that `placement.roles` names, or the only one that it does not",
        )  # fmt: skip
    for name in training:
        _check_split(placement, pools[name])
    engine = engine_of(config)
    rollout = pools[place["rollout"]]
    size = engine.tensor_parallel_size
    if config.rollout.max_staleness and rollout.name in training:
        raise UserError(
            "config-conflict", "sampling cannot run ahead on GPUs that it shares with training",
            key="rollout.max_staleness", got=f"{config.rollout.max_staleness} with rollout on pool {rollout.name}",
            want="0, or a pool of its own for rollout (placement.roles)",
        )  # fmt: skip
    if rollout.per_node % size:
        fits = [n for n in range(1, rollout.per_node + 1) if rollout.per_node % n == 0]
        raise UserError(
            "config-conflict", "the GPUs of a replica are on one node, and each node holds whole replicas",
            key="rollout.engine.tensor_parallel_size", want=f"one of {fits}",
            got=f"{size} on pool {rollout.name} of {rollout.per_node} a node",
        )  # fmt: skip
    return Plan(pools, training, rollout.name, size)


def engine_of(config: RunConfig) -> VllmConfig:
    """The settings of the engine that samples outside of the trainer's process.

    Raises:
        UserError: The embedded engine was asked for.
    """
    engine = config.rollout.engine
    if isinstance(engine, EmbeddedConfig):
        raise UserError(
            "config-conflict", "it samples from the modules of the trainer's own process, which Ray's are not",
            key="rollout.engine.type", got="embedded", want="vllm, or placement: local",
        )  # fmt: skip
    return VllmConfig() if engine == "auto" else engine


def _pool(name: str, config: PoolConfig) -> Pool:
    if (config.gpus_per_node > 0) == (config.processes_per_node > 0):
        raise UserError(
            "config-conflict", "a pool is of GPUs, or of processes on CPUs",
            key=f"placement.pools.{name}",
            got=f"gpus_per_node: {config.gpus_per_node}, processes_per_node: {config.processes_per_node}",
            want="one of the two, at least 1",
        )  # fmt: skip
    gpu = config.gpus_per_node > 0
    return Pool(name, config.nodes, config.gpus_per_node or config.processes_per_node, gpu, config.cpus_per_process)


def _places(placement: PlacementConfig, roles: Sequence[RoleName]) -> dict[RoleName, str]:
    """Return the pool of each role. The order of the pools in the file says nothing."""
    free = [name for name in placement.pools if name not in placement.roles.values()] or list(placement.pools)
    open_roles = [role for role in roles if role not in placement.roles]
    if open_roles and len(free) > 1:
        raise UserError(
            "config-conflict", "with several pools, each role needs one", key=f"placement.roles.{open_roles[0]}",
            got="no pool named", want=f"one of {', '.join(placement.pools)}",
        )  # fmt: skip
    return {role: placement.roles.get(role, free[0]) for role in roles}


def _check_names(placement: PlacementConfig, pools: Mapping[str, Pool]) -> None:
    for role, name in placement.roles.items():
        if name not in pools:
            near = nearest(name, pools)
            raise UserError(
                "config-bad-value", "there is no such pool", key=f"placement.roles.{role}", got=name,
                want=f"one of {', '.join(pools)}", hint=f"Did you mean {near}?" if near else None,
            )  # fmt: skip


def _check_split(placement: PlacementConfig, pool: Pool) -> None:
    parallel = placement.parallel
    for key, value in (("replicate", parallel.replicate), ("sequence", parallel.sequence)):
        if pool.size % value:
            raise UserError(
                "config-conflict", "the pool's processes must divide by it", key=f"placement.parallel.{key}",
                got=f"{value} on pool {pool.name} of {pool.size}",
                want=f"one of {[n for n in range(1, pool.size + 1) if pool.size % n == 0]}",
            )  # fmt: skip
    if parallel.cpu_offload and placement.offload_idle:
        raise UserError(
            "config-conflict", "with cpu_offload every model is on the CPU already",
            key="placement.offload_idle", got="true with placement.parallel.cpu_offload: true", want="one of the two",
        )  # fmt: skip
