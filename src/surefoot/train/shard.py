"""FSDP2: one model over many processes, each holding its share of every weight in float32.

Rank 0 reads the weights from disk and sends them tensor by tensor: no host holds more than one whole copy, and no
device more than its share and one tensor. Gradients are summed, not averaged: the losses' denominators are of the
whole minibatch already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..checkpoint.store import storable
from ..config.placement import ParallelConfig
from .model import Critic, Scorer, causal_lm_of
from .sequence import SequenceGroup


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """How a model is split: the process groups, and where its shares live.

    `mesh` has the dimensions `replicate` and `shard` (HSDP; with `replicate` 1 it is plain FSDP).
    """

    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype
    config: ParallelConfig
    sequence: SequenceGroup | None = None

    @classmethod
    def over_world(cls, device: torch.device, dtype: torch.dtype, config: ParallelConfig) -> Shards:
        """Split over all processes of the default group.

        Args:
            device: Where this process computes.
            dtype: Precision of forward and backward.
            config: Replicas, offloading.
        """
        world = dist.get_world_size()
        shape = (config.replicate, world // config.replicate)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        sequence = None
        if config.sequence > 1:
            # Neighbours share rows: the exchange at every layer stays within a node.
            shape = (world // config.sequence, config.sequence)
            inner = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))["sequence"]
            sequence = SequenceGroup(inner.get_group(), config.sequence, inner.get_local_rank())
        return cls(mesh if config.replicate > 1 else mesh["shard"], device, dtype, config, sequence)

    @property
    def first(self) -> bool:
        """Whether this is the process that reads the weights from disk."""
        return dist.get_rank() == 0

    def shard(self, scorer: Scorer, whole: nn.Module | None, trains: bool) -> None:
        """Split an empty scorer in place and fill it from `whole`, which rank 0 has (None on the others)."""
        if trains:
            for parameter in scorer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        half = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        single = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        for layer in cast(Any, scorer.body).layers:
            self._split(layer, half, offload)
        if isinstance(scorer.model, Critic):
            self._split(scorer.model.value_head, single, offload)
        self._split(scorer, half, offload)
        self._fill(scorer, whole)

    def _split(self, module: nn.Module, precision: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)

    def _fill(self, scorer: Scorer, full: nn.Module | None) -> None:
        home = torch.device("cpu") if self.config.cpu_offload else self.device
        scorer._apply(_onto(home))
        source = dict(full.named_parameters()) if full is not None else {}
        with torch.no_grad():
            for name, parameter in scorer.model.named_parameters():
                share = cast(DTensor, parameter)
                if full is not None:
                    tensor = source[name].detach().to(self.device, share.dtype)
                else:
                    tensor = torch.empty(share.shape, dtype=share.dtype, device=self.device)
                dist.broadcast(tensor, 0)
                put_whole(share, tensor)


def _onto(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device)


def full_tensor(tensor: Tensor) -> Tensor:
    """A whole tensor out of its shares: every rank must call. What is whole already is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put_whole(target: Tensor, whole: Tensor) -> Tensor:
    """Copy a whole tensor, which every process has, into a tensor or into this process's share of one."""
    if isinstance(target, DTensor):
        local = target.to_local()
        # No word between processes: each cuts its share out of what it has.
        share = distribute_tensor(whole.to(local.device), target.device_mesh, target.placements, src_data_rank=None)
        local.copy_(share.to_local())
    else:
        target.copy_(whole)
    return target


def write_whole(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors, or the shares that every process calls with, as one safetensors file of whole ones."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if first:
            whole[name] = full.cpu()
    if first:
        save_file(storable(whole), path)


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each parameter, in a precision; adapters are merged into what they adapt.

    Of a sharded model one tensor at a time is whole; every process must walk along.
    """
    adapted = {id(layer.base_layer.weight): layer for layer in model.modules() if isinstance(layer, LoraLayer)}
    for name, parameter in causal_lm_of(model).named_parameters():
        if "lora_" in name:
            continue
        whole = full_tensor(parameter.detach())
        if (layer := adapted.get(id(parameter))) is not None:
            # float32 until the sum is made: the adapter's product has parts smaller than a half-precision step.
            whole = whole.float() + _product(layer).to(whole.device)
        yield name.replace(".base_layer.", "."), whole.to(dtype)


def _product(layer: Any) -> Tensor:
    """What a LoRA layer adds to its base's weight, in float32."""
    (name,) = layer.active_adapters
    a, b = (full_tensor(part[name].weight.detach()).float() for part in (layer.lora_A, layer.lora_B))
    return layer.scaling[name] * (b @ a)
