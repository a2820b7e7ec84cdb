"""`placement`: where the models run. `local` is one process; everything else is Ray's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import NonNegative, Positive, PositiveFloat, Section

RoleName = Literal["actor", "critic", "reference", "rollout"]


class ParallelConfig(Section):
    """How each trained model is split over the processes of its pool (FSDP2)."""

    replicate: Positive = 1
    """HSDP: how many whole copies the shares make together. Gradients are summed over them; weights are gathered
    within one only."""
    sequence: Positive = 1
    """Ulysses sequence parallelism: so many processes share each packed row's tokens. For long rows."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer on the CPU, and bring each layer to the GPU while it computes."""


class PoolConfig(Section):
    """A resource pool: so many GPUs on so many nodes; or processes on CPUs, where there are no GPUs."""

    nodes: Positive = 1
    """Nodes (verl: `trainer.nnodes`)."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node (verl: `trainer.n_gpus_per_node`). There is one training process a GPU."""
    processes_per_node: NonNegative = 0
    """On CPUs: processes of each node. Say this or `gpus_per_node`."""
    cpus_per_process: PositiveFloat = 1.0
    """Ray's CPUs to reserve with each GPU or process."""


class PlacementConfig(Section):
    """Models in processes of a Ray cluster. How many processes a GPU gets is derived and cannot be said."""

    type: Literal["ray"]
    """Ray."""
    address: str | None = None
    """`auto`, `host:port` or `ray://host:port` of a running cluster; left out: one of its own on this machine."""
    pools: dict[str, PoolConfig] = Field(min_length=1)
    """Pools by name."""
    roles: dict[RoleName, str] = Field(default_factory=dict[RoleName, str])
    """Which pool each role runs on; those that are not named run on the only pool that no other role names. A pool with
    training roles and `rollout` is colocated: they take turns."""
    parallel: ParallelConfig = ParallelConfig()
    """How trained models are split."""
    offload_idle: bool = False
    """Of several trained or frozen models in a process, keep only the one at work on the GPU."""
    reserve_timeout: PositiveFloat = 60.0
    """Seconds to wait for resources that others hold. What a cluster does not have at all is refused at once."""
