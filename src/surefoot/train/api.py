"""The seam between the controller and whatever trains a model: one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..algorithms.aggregate import Denominators
from ..algorithms.columns import LossColumns
from ..records import Floats, Metric, Sample, merge_metrics
from .packing import Row

if TYPE_CHECKING:
    from torch import Tensor

Objective = Callable[["Tensor", "Tensor | None", LossColumns, Denominators], "tuple[Tensor, dict[str, Metric]]"]
"""(logprobs or values `[N]`, entropy `[N]` or None, columns, denominators) -> (loss of this part, metrics)."""

Plan = Sequence[Sequence[int]]
"""The packs to compute, one pass after another, as indices of rows; an empty one is a filler."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateReport:
    """What one update did.

    `metrics` are of the rows; `optimizer` holds what is the same wherever the rows were computed. `outputs` are the
    model's own numbers (log-probabilities or values), row by row.
    """

    metrics: dict[str, Metric]
    optimizer: dict[str, Metric]
    outputs: list[Floats]  # one [L] per sample
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """Of the rows and of the optimizer."""
        return self.metrics | self.optimizer


class TrainEngine(Protocol):
    """One model that scores rows and, when it has an optimizer, learns from samples."""

    @property
    def updates_done(self) -> int:
        """Updates so far: the place in the schedule."""
        ...

    def logprobs(self, rows: Sequence[Row], reference: bool = False) -> list[Floats]:
        """Log-probabilities `[L]` of each row's model tokens (0 elsewhere). `reference` turns adapters off."""
        ...

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """The critic's values `[L]` before each model token (0 elsewhere)."""
        ...

    def update(self, samples: Sequence[Sample], objective: Objective, denominators: Denominators) -> UpdateReport:
        """One optimizer update on one minibatch. `denominators` are counted over the whole of it."""
        ...

    def skip_update(self) -> None:
        """Count an update that had nothing to learn: the schedule goes by updates."""
        ...

    def num_parameters(self) -> tuple[int, int]:
        """How many parameters the model has, and how many of them are trained."""
        ...

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each trained parameter, as a checkpoint holds them."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write the float32 weights as one safetensors file, however many processes hold them."""
        ...

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer's state as one safetensors file, however many processes hold it."""
        ...

    def load(self, weights: Path, optimizer: Path, updates_done: int) -> None:
        """Go on exactly where the files were written."""
        ...


class WeightReader(Protocol):
    """What a sampler of another process needs of the engine whose weights it samples with."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors in the precision of the forward pass; adapters are merged.

        With several processes each must walk the iterator, at the same pace.
        """
        ...


def merge_reports(parts: Sequence[tuple[Sequence[int], UpdateReport]], rows: int) -> UpdateReport:
    """Put the reports of several processes together; each comes with the indices of the rows that it had."""
    outputs: dict[int, Floats] = {}
    for mine, report in parts:
        outputs.update(zip(mine, report.outputs, strict=True))
    seconds: dict[str, float] = {}
    for _, report in parts:
        for name, value in report.seconds.items():
            seconds[name] = max(value, seconds.get(name, 0.0))
    return UpdateReport(
        metrics=merge_metrics([report.metrics for _, report in parts]),
        optimizer=parts[0][1].optimizer,
        outputs=[outputs[i] for i in range(rows)],
        tokens=sum(report.tokens for _, report in parts),
        seconds=seconds,
    )
