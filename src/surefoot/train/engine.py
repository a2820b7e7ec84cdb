"""The train engine: a model in this process, whole or this process's share of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms.aggregate import Denominators
from ..algorithms.columns import LossColumns
from ..config.train import TrainConfig
from ..records import Floats, Metric, Sample, merge_metrics
from .api import Objective, Plan, UpdateReport
from .model import Batch, Scorer, adapters_off
from .optim import MasterAdamW, learning_rate
from .packing import Pack, Row, filler, pack, plan_packs
from .shard import Shards, whole_weights, write_whole


class ModuleEngine:
    """Runs one model over packed rows.

    Args:
        model: A policy (causal language model, PEFT or not) or a `Critic`.
        config: Batch words, memory budget and optimizer.
        shards: How the model is split over processes; None when this process has it whole. `model` is empty then.
        whole: The same model with its weights, on the CPU of rank 0; None on the other ranks.
        temperature: Divides the logits in every log-probability, as in the sampler.
        peak_rate: Peak learning rate; None for a frozen model.
        total_updates: Updates of the whole run, for the schedule.
        want_entropy: Compute the entropy of each token's distribution in updates.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        shards: Shards | None = None,
        whole: nn.Module | None = None,
        temperature: float = 1.0,
        peak_rate: float | None = None,
        total_updates: int = 1,
        want_entropy: bool = False,
        compile_blocks: bool = False,
    ) -> None:
        self.model = model
        self.updates_done = 0
        self.packs_done = 0
        self._scorer = Scorer(model)
        self._config = config
        self._shards = shards
        self._temperature = temperature
        self._peak_rate = peak_rate
        self._total_updates = total_updates
        self._want_entropy = want_entropy
        self._dtype = next(self._scorer.body.parameters()).dtype
        if compile_blocks:
            for layer in cast(Any, self._scorer.body).layers:
                layer.compile(dynamic=True)
        if shards is not None:
            shards.shard(self._scorer, whole, trains=peak_rate is not None)
        self._device = shards.device if shards is not None else next(model.parameters()).device
        self._home = self._device  # where the weights are now
        self.optimizer = None if peak_rate is None else MasterAdamW(model.named_parameters(), config.optimizer)

    def logprobs(self, rows: Sequence[Row], reference: bool = False, plan: Plan | None = None) -> list[Floats]:
        """Log-probabilities `[L]` of each row's model tokens (0 elsewhere). `reference` turns adapters off."""
        assert not self._scorer.is_critic
        with adapters_off(self.model) if reference else nullcontext():
            return self._score(rows, plan)

    def values(self, rows: Sequence[Row], plan: Plan | None = None) -> list[Floats]:
        """The critic's values `[L]` before each model token (0 elsewhere)."""
        assert self._scorer.is_critic
        return self._score(rows, plan)

    def update(
        self, samples: Sequence[Sample], objective: Objective, denominators: Denominators, plan: Plan | None = None
    ) -> UpdateReport:
        """One optimizer update on one minibatch, cut into packs that the memory budget allows.

        Denominators are counted by the caller over the whole minibatch, so the cut does not change the gradient.

        Args:
            samples: The minibatch; of a sharded model, this rank's share of it.
            objective: The loss.
            denominators: Of the whole minibatch.
            plan: The packs to compute, as indices into `samples`; equally many on every rank. Left out: planned here.
        """
        assert self.optimizer is not None, "this engine is frozen"
        assert self._peak_rate is not None
        outputs = [np.zeros(len(s.token_ids), np.float32) for s in samples]
        clock = Clock(self._device)
        parts: list[dict[str, Metric]] = []
        tokens = 0
        self.model.train()
        for packed in self._packs(samples, plan):
            with clock("forward"):
                out, entropy = self._forward(packed, self._want_entropy)
                if packed.rows:
                    loss, metrics = objective(out, entropy, self._columns(samples, packed), denominators)
                    parts.append(metrics)
                else:
                    loss = out.sum() * 0.0
            with clock("backward"):
                loss.backward()
            tokens += packed.num_tokens
            _spread(out.detach(), packed, samples, outputs)
        self.model.eval()
        with clock("optimizer"):
            rate = learning_rate(self.updates_done, self._total_updates, self._config.optimizer, self._peak_rate)
            norm, outcome = self.optimizer.step(rate)
            self.updates_done += 1
        done = {
            "grad_norm": Metric(norm),
            "lr": Metric(rate),
            "skipped_updates": Metric(float(outcome == "skipped"), kind="sum"),
        }
        return UpdateReport(merge_metrics(parts), done, outputs, tokens, clock.seconds)

    def skip_update(self) -> None:
        """Count an update that had nothing to learn: the schedule goes by updates."""
        self.updates_done += 1

    def rehearse(self, rows: Sequence[Sample]) -> None:
        """Go through a step on these rows, for the memory that it takes: nothing is changed."""
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
            for packed in self._packs(rows, None):
                if self.optimizer is None:
                    with torch.no_grad():
                        self._forward(packed, False)
                else:
                    self.model.train()
                    (self._forward(packed, self._want_entropy)[0].sum() * 0.0).backward()
        self.model.eval()
        if self.optimizer is not None:
            self.optimizer.rehearse()

    def move(self, device: torch.device) -> None:
        """Have weights and optimizer state on another device."""
        if self._home == device:
            return
        self._home = device
        self.model.to(device)
        if self.optimizer is not None:
            self.optimizer.move(device)

    def num_parameters(self) -> tuple[int, int]:
        """How many parameters the model has, and how many of them are trained."""
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each trained parameter."""
        assert self.optimizer is not None
        return {name: tuple(master.shape) for name, master in self.optimizer.masters.items()}

    def save_weights(self, path: Path) -> None:
        """Write the master weights whole, from the first process; every process calls."""
        assert self.optimizer is not None
        write_whole(self.optimizer.masters, path)

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer's state whole, from the first process; every process calls."""
        assert self.optimizer is not None
        write_whole(self.optimizer.state_tensors(), path)

    def load(self, weights: Path, optimizer: Path, updates_done: int) -> None:
        """Go on exactly where the files were written, by however many processes."""
        assert self.optimizer is not None
        self.optimizer.load(weights, optimizer)
        self.updates_done = updates_done

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors in the precision of the forward pass; adapters are merged."""
        yield from whole_weights(self.model, self._dtype)

    def _packs(self, rows: Sequence[Row], plan: Plan | None) -> Iterator[Pack]:
        share = self._config.share_prefixes
        if plan is None:
            (plan,) = plan_packs(rows, self._config.max_tokens_per_microbatch, share)
        for members in plan:
            yield pack(rows, members, share) if members else filler()
            self.packs_done += 1

    @torch.no_grad()
    def _score(self, rows: Sequence[Row], plan: Plan | None) -> list[Floats]:
        outputs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        self.model.eval()
        for packed in self._packs(rows, plan):
            _spread(self._forward(packed, False)[0], packed, rows, outputs)
        return outputs

    def _forward(self, packed: Pack, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropy, or values, `[N]`."""
        sequence = self._shards.sequence if self._shards is not None else None
        batch = Batch.of(packed, self._device, self._dtype, sequence)
        return self._scorer(batch, self._temperature, entropy)

    def _columns(self, samples: Sequence[Sample], packed: Pack) -> LossColumns:
        """Gather what the losses read, in packing order."""
        rows = [samples[i] for i in packed.rows]

        def column(name: str) -> Tensor | None:
            parts = [getattr(row, name) for row in rows]
            if parts[0] is None:
                return None
            flat = np.concatenate([part[row.loss_mask] for part, row in zip(parts, rows, strict=True)])
            return torch.from_numpy(flat).to(self._device)

        rollout, advantages = column("rollout_logprobs"), column("advantages")
        assert rollout is not None
        assert advantages is not None
        return LossColumns(
            cu_seqlens=_to(packed.cu_model, self._device),
            weight_S=torch.tensor([row.weight for row in rows], device=self._device),
            rollout_logprobs_T=rollout,
            advantages_T=advantages,
            old_logprobs_T=column("old_logprobs"),
            ref_logprobs_T=column("ref_logprobs"),
            values_T=column("values"),
            returns_T=column("returns"),
            names=tuple(row.group for row in rows),
        )


class Clock:
    """Adds up the seconds of named phases, waiting for the GPU at each end."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._cuda = device.type == "cuda"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device).long()


def _spread(out: Tensor, packed: Pack, rows: Sequence[Row], outputs: list[Floats]) -> None:
    """Write `[N]` numbers back to their rows' model tokens."""
    flat = out.float().cpu().numpy()
    for position, row in enumerate(packed.rows):
        outputs[row][rows[row].loss_mask] = flat[packed.cu_model[position] : packed.cu_model[position + 1]]
