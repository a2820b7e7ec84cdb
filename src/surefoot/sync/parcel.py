"""Buckets of weights on their way: what is in one, where it lies, and how to open it.

A parcel is one flat buffer of bytes with tensors behind one another. It never travels itself: its address does, a CUDA
IPC handle for a process on the same GPU, or a file in shared memory for one on the same host.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """A buffer in shared memory that other processes of the same host and user may map.

    It has no name in any file system: however its processes end, nothing stays behind.
    """

    def __init__(self, size: int) -> None:
        self._handle = os.memfd_create("surefoot-weights")
        os.truncate(self._handle, size)
        path = f"/proc/{os.getpid()}/fd/{self._handle}"
        self.tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        # Numbers of handles are given again; readers know a buffer by its address.
        self.addresses = {socket.gethostname(): f"{path}#{secrets.token_hex(8)}".encode()}

    def close(self) -> None:
        """Let go of it; who has it mapped keeps it until they are done."""
        del self.tensor
        os.close(self._handle)


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
            path = address.decode().partition("#")[0]
            size = os.stat(path).st_size
            self._open = {address: torch.from_file(path, shared=True, size=size, dtype=torch.uint8)}
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
