"""The sampler's side of a sync, inside vLLM's workers: a transfer engine of vLLM's own interface, and what it proves.

vLLM imports this module as the worker extension; that registers the transfer engine by name. Imported nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from .fingerprint import fingerprints, pack
from .items import Item, used, view
from .parcel import Opener, Parcel

NAME = "surefoot"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is to be agreed on before: every parcel says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`Parcel.to_dict`, as keywords."""

    items: list[dict[str, Any]]
    fingerprints: list[int]
    addresses: dict[str, bytes]


class ParcelTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes weights out of parcels that the trainer published, and checks that they arrived as they were sent."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._opener = Opener(device)
        # Weights that a kernel has packed or quantized can't be written in place: vLLM reloads them layer by layer.
        self._in_place = device.type == "cuda" and vllm_config.quant_config is None
        whole = vllm_config.parallel_config.tensor_parallel_size == 1
        self._held = dict(held_tensors(model)) if self._in_place and whole else None
        self._expected = set(checkpoint_names(model))
        self._arrived: set[str] = set()
        self.problem: str | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Begin a sync."""
        self._arrived, self.problem = set(), None
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take one parcel."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one parcel's tensors; what differs from what was sent is kept as `problem`."""
        parcel = Parcel.from_dict(vars(update_info))
        buffer = self._opener.buffer(parcel)[: used(parcel.items)]
        if buffer.device != self.device:
            buffer = buffer.to(self.device)
        elif not self._in_place:
            buffer = buffer.clone()  # a reload by layers keeps tensors until their layer is whole
        arrived = fingerprints(buffer, parcel.items)
        self.model.load_weights([(item.name, view(buffer, item)) for item in parcel.items])
        self._arrived |= {item.name for item in parcel.items}
        self._note(parcel.items, parcel.fingerprints, arrived.tolist(), "arrived")
        if self._held is not None and self.problem is None:
            known = [item for item in parcel.items if item.name in self._held]
            copy = torch.empty_like(buffer)
            pack([self._held[item.name] for item in known], known, copy)
            sent = {item.name: number for item, number in zip(parcel.items, parcel.fingerprints, strict=True)}
            found = fingerprints(copy, known).tolist() if known else []
            self._note(known, [sent[item.name] for item in known], found, "is computed with")

    def finish_weight_update(self) -> None:
        """End a sync. One that leaves something out is not ended: half a reload would only fail in its own way."""
        forgotten = sorted(self._expected - self._arrived)
        if self.problem is None and forgotten:
            self.problem = f"{forgotten[0]} was never sent, and {len(forgotten) - 1} others"
        if self.problem is None and not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._opener.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM's interface wants it; here `Publisher` sends, and vLLM's own side never does."""
        raise TypeError("weights come in parcels; see surefoot.sync.publish")

    def _note(self, items: Sequence[Item], sent: Sequence[int], found: Sequence[int], verb: str) -> None:
        for item, right, number in zip(items, sent, found, strict=True):
            if number != right and self.problem is None:
                self.problem = f"{item.name} {verb} with other values than were sent"


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

    def begin_update(self) -> None:
        """Begin a sync."""
        self.start_weight_update()  # type: ignore[attr-defined]

    def load_parcel(self, parcel: dict[str, Any]) -> str | None:
        """Take one parcel; returns what is wrong with what arrived."""
        self.update_weights(parcel)  # type: ignore[attr-defined]
        return self.weight_transfer_engine.problem  # type: ignore[attr-defined]

    def end_update(self) -> str | None:
        """End a sync; returns what is wrong with what this worker's model now holds."""
        self.finish_weight_update()  # type: ignore[attr-defined]
        return self.weight_transfer_engine.problem  # type: ignore[attr-defined]


def checkpoint_names(model: nn.Module) -> Iterator[str]:
    """The names of a model's weights in its checkpoint, without asking how its kernels keep them."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, _ in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        yield from (f"{parent}.{part}.{kind}" for part in fused[leaf]) if leaf in fused else (name,)


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
