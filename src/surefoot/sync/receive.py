"""The sampler's side of a sync, inside vLLM's workers: a transfer engine of vLLM's own interface, and what it proves.

vLLM imports this module as the worker extension; that registers the transfer engine by name. Imported nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # pyright: ignore[reportMissingImports]

from .fingerprint import fetch, fingerprint
from .parcel import Opener, Parcel, view

NAME = "surefoot"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is to be agreed on before: every parcel says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`Parcel.to_dict`, as keywords."""

    items: list[dict[str, Any]]
    addresses: dict[str, bytes]


class ParcelTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes weights out of parcels that the trainer published."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._opener = Opener(device)
        self.arrived: dict[str, Tensor] = {}
        # Weights that a kernel has packed or quantized can't be written in place: vLLM reloads them layer by layer.
        self._in_place = device.type == "cuda" and vllm_config.quant_config is None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Begin a sync."""
        self.arrived = {}
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one parcel."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the buffer is filled anew as soon as this returns

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one parcel's tensors."""
        parcel = Parcel.from_dict({"items": update_info.items, "addresses": update_info.addresses})
        buffer = self._opener.buffer(parcel)
        tensors: list[tuple[str, Tensor]] = []
        for item in parcel.items:
            tensor = view(buffer, item).to(self.device)
            if not self._in_place:
                tensor = tensor.clone()  # a reload by layers keeps tensors until their layer is whole
            self.arrived[item.name] = fingerprint(tensor)
            tensors.append((item.name, tensor))
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """End a sync."""
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._opener.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Not how weights are sent here: see `Publisher`."""
        raise NotImplementedError


def repack_tied_head(model: nn.Module) -> None:
    """Let a head that shares the embedding's weight see the new one.

    vLLM's CPU build packs the head's product once; a reload renews the embedding and leaves the packed head old: a new
    body under an old head, and no error.
    """
    head: Any = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Methods that vLLM's workers get beside their own; called by `collective_rpc`."""

    def arrived_fingerprints(self) -> dict[str, int]:
        """Of the tensors that the last sync brought to this worker."""
        return fetch(self.weight_transfer_engine.arrived)  # type: ignore[attr-defined]

    def held_fingerprints(self) -> dict[str, int]:
        """Of the tensors that this worker's model computes with, where they can be told apart by their names."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if self.device.type != "cuda" or self.vllm_config.parallel_config.tensor_parallel_size > 1:  # type: ignore[attr-defined]
            return {}
        return fetch({name: fingerprint(tensor) for name, tensor in held_tensors(runner.model)})

    def weight_bytes(self) -> int:
        """Bytes of this worker's weights."""
        model: nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        return sum(p.nbytes for p in model.parameters())


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's weights under the names of their checkpoint: layers that vLLM fused are taken apart again."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        sizes = getattr(modules[path], "output_sizes", None)
        rows = getattr(modules[path], "org_vocab_size", None)  # an embedding may be padded for its kernels
        if leaf in fused and sizes is not None and len(sizes) == len(fused[leaf]) and sum(sizes) == parameter.shape[0]:
            for part, piece in zip(fused[leaf], parameter.split(list(sizes)), strict=True):
                yield f"{parent}.{part}.{kind}", piece
        else:
            yield name, parameter if rows is None else parameter[:rows]


WeightTransferEngineFactory.register_engine(NAME, ParcelTransfer)
