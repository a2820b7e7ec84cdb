"""Recorded inputs and outputs of verl's functions, packed from padded rows to flat columns.

verl pads rows to a matrix with a mask; an adapter takes the masked entries, so that "holes" in the middle of a row
(a tool's tokens) vanish as they do in Surefoot's columns.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.algorithms.segments import expand

_FILE = Path(__file__).parent / "data" / "verl.json.gz"


@cache
def _all() -> dict[str, list[dict[str, Any]]]:
    return json.loads(gzip.decompress(_FILE.read_bytes()))["cases"]


def cases(name: str) -> list[Any]:
    """Recorded calls of one function, for `pytest.mark.parametrize("case", ...)`."""
    import pytest

    return [pytest.param(case, id=case["id"]) for case in _all()[name]]


def tensor(value: dict[str, Any]) -> Tensor:
    """A recorded float64 tensor."""
    return torch.tensor(value["data"], dtype=torch.float64).reshape(value["shape"])


class Packed:
    """The rows of one recorded mask that have tokens, as flat columns."""

    def __init__(self, mask: dict[str, Any]) -> None:
        self.mask = tensor(mask).bool()
        lengths = self.mask.sum(1)
        self.full_rows = lengths > 0
        self.cu_seqlens = torch.cat([torch.zeros(1), lengths[self.full_rows].cumsum(0)]).long()

    def flat(self, matrix: dict[str, Any]) -> Tensor:
        """`[rows, width]` -> `[T]`."""
        return tensor(matrix)[self.mask]

    def spread(self, x_R: Tensor) -> Tensor:
        """One entry a row -> `[T]`."""
        return expand(x_R[self.full_rows], self.cu_seqlens, int(self.mask.sum()))
