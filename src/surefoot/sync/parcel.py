"""Buckets of weights on their way: what is in one, where it lies, and how to open it.

A parcel is one flat buffer of bytes with tensors behind one another. It never travels itself: its address does, a CUDA
IPC handle for a process on the same GPU, or a file in shared memory for one on the same host.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .items import Item


@dataclass(frozen=True, slots=True)
class Parcel:
    """One published bucket.

    `fingerprints` has a number a tensor, of what was sent. `addresses` is keyed by what a reader knows of itself: its
    GPU's uuid, or its host.
    """

    items: tuple[Item, ...]
    fingerprints: tuple[int, ...]
    addresses: Mapping[str, bytes]

    def joined(self, others: Sequence[Parcel]) -> Parcel:
        """The same bucket, published by several processes for their own readers."""
        addresses = dict(self.addresses)
        for other in others:
            same = (other.items, other.fingerprints) == (self.items, self.fingerprints)
            assert same, "the processes of a group publish the same buckets"
            addresses |= other.addresses
        return Parcel(self.items, self.fingerprints, addresses)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a wire that knows nothing else."""
        return {
            "items": [asdict(item) for item in self.items],
            "fingerprints": list(self.fingerprints),
            "addresses": dict(self.addresses),
        }

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Parcel:
        """Read what `to_dict` wrote."""
        items = (Item(i["name"], i["dtype"], tuple(i["shape"]), i["start"]) for i in tree["items"])
        return cls(tuple(items), tuple(tree["fingerprints"]), tree["addresses"])


class CudaBuffer:
    """A buffer on a GPU that other processes on the same GPU may map."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(self.tensor)
        self.addresses = {gpu_key(device): pickle.dumps(arguments)}

    def close(self) -> None:
        """Give the memory back."""
        del self.tensor


class SharedBuffer:
    """A buffer in a file in shared memory that other processes on the same host may map."""

    def __init__(self, size: int) -> None:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, self._path = tempfile.mkstemp(prefix="surefoot-weights-", dir=folder)
        os.truncate(handle, size)
        os.close(handle)
        self._remove = weakref.finalize(self, os.unlink, self._path)
        self.tensor = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        self.addresses = {socket.gethostname(): self._path.encode()}

    def close(self) -> None:
        """Remove the file; who has it mapped keeps it until they are done."""
        del self.tensor
        self._remove()


class Opener:
    """Maps parcels' buffers into this process, each once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[bytes, Tensor] = {}

    def buffer(self, parcel: Parcel) -> Tensor:
        """The parcel's bytes, on this process's GPU or on the CPU."""
        key = gpu_key(self._device) if self._device.type == "cuda" else ""
        if key in parcel.addresses:
            address = parcel.addresses[key]
            if address not in self._open:
                self._open = {address: self._map_gpu(address)}
            return self._open[address]
        address = parcel.addresses[socket.gethostname()]
        if address not in self._open:
            path = Path(address.decode())
            size = path.stat().st_size
            self._open = {address: torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)}
        return self._open[address]

    def _map_gpu(self, address: bytes) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(address))
        arguments[6] = self._device.index or 0  # the sender counts its devices in its own way
        return rebuild_cuda_tensor(*arguments)

    def close(self) -> None:
        """Let go of everything."""
        self._open = {}


def gpu_key(device: torch.device) -> str:
    """What two processes call the same GPU by."""
    return str(torch.cuda.get_device_properties(device).uuid)
