"""Weights through a real shared buffer: what is published arrives, and what does not is named."""

from __future__ import annotations

import pytest
import torch

from surefoot.sync.fingerprint import fingerprints, pack
from surefoot.sync.items import place, used, view
from surefoot.sync.parcel import Opener, Parcel
from surefoot.sync.publish import Publisher

CPU = torch.device("cpu")
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(40, 16).bfloat16(),
        "odd": torch.randn(7),
        "body": torch.randn(64, 64),
        "scalar": torch.tensor(2.5),
        "last": torch.randn(3, 5).bfloat16(),
    }


@pytest.mark.parametrize("bucket", [1, 4096, 1 << 20])
def test_everything_arrives_whatever_the_size_of_the_buckets(bucket: int):
    sent, got, parcels = weights(), {}, 0
    publisher, opener = Publisher(bucket, CPU, same_gpu=False), Opener(CPU)
    for _ in range(2):  # the buffer is used again
        publisher.begin(iter(sent.items()))
        while (parcel := publisher.next_parcel()) is not None:
            parcel = Parcel.from_dict(parcel.to_dict())
            buffer = opener.buffer(parcel)
            assert fingerprints(buffer, parcel.items).tolist() == list(parcel.fingerprints)
            got |= {item.name: view(buffer, item).clone() for item in parcel.items}
            parcels += 1
    publisher.close()
    assert got.keys() == sent.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
    assert (parcels > 2) == (bucket < 1 << 20)


def numbers(tensors: list[torch.Tensor], device: str) -> list[int]:
    items, end = [], 0
    for i, tensor in enumerate(tensors):
        items.append(place(str(i), tensor, end))
        end = items[-1].start + items[-1].size
    buffer = torch.empty(used(items), dtype=torch.uint8, device=device)
    pack(tensors, items, buffer)
    return fingerprints(buffer, items).tolist()


CHANGES = {
    "zeroed": lambda t: torch.zeros_like(t),
    "one element": lambda t: t.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(9.0)),
    "rows swapped": lambda t: t[[1, 0, *range(2, len(t))]],
    "neighbours swapped": lambda t: t[:, [1, 0, *range(2, t.shape[1])]],
    "shifted by a row": lambda t: t.roll(1, 0),
    "shifted by an element": lambda t: t.flatten().roll(1).view_as(t),
    "transposed": lambda t: t.T.contiguous(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tensor_has_another_fingerprint_and_its_neighbours_have_not(change: str, device: str):
    first, tensor, last = torch.randn(5), torch.randn(64, 64), torch.randn(9, 9)
    before = numbers([first, tensor, last], device)
    after = numbers([first, CHANGES[change](tensor), last], device)
    assert before[1] != after[1]
    assert (before[0], before[2]) == (after[0], after[2])


def test_two_tensors_in_each_others_place_are_seen():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert numbers([a, b], "cpu") != numbers([b, a], "cpu")
