"""The train engine: one model that scores rows and, when it has an optimizer, learns from samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms.aggregate import Denominators
from ..algorithms.columns import LossColumns
from ..config.train import TrainConfig
from ..records import Floats, Metric, Sample, merge_metrics
from . import attention
from .head import token_logprobs
from .model import Critic, adapters_off, body_of, head_of
from .optim import MasterAdamW, learning_rate
from .packing import Pack, Row, pack, plan_packs

Objective = Callable[[Tensor, Tensor | None, LossColumns, Denominators], tuple[Tensor, dict[str, Metric]]]
"""(logprobs or values `[N]`, entropy `[N]` or None, columns, denominators) -> (loss of this part, metrics)."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateReport:
    """What one update did. `outputs` are the model's own numbers (log-probabilities or values), row by row."""

    metrics: dict[str, Metric]
    outputs: list[Floats]  # one [L] per sample
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)


class TrainEngine:
    """Runs one model over packed rows.

    Args:
        model: A policy (causal language model, PEFT or not) or a `Critic`.
        config: Batch words, memory budget and optimizer.
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
        temperature: float = 1.0,
        peak_rate: float | None = None,
        total_updates: int = 1,
        want_entropy: bool = False,
        compile_blocks: bool = False,
    ) -> None:
        self.model = model
        self.updates_done = 0
        self._config = config
        self._temperature = temperature
        self._peak_rate = peak_rate
        self._total_updates = total_updates
        self._want_entropy = want_entropy
        self._is_critic = isinstance(model, Critic)
        self._body = cast(Any, model).body if self._is_critic else body_of(model)
        self._device = next(model.parameters()).device
        self._dtype = next(self._body.parameters()).dtype
        self.optimizer = None if peak_rate is None else MasterAdamW(model.named_parameters(), config.optimizer)
        if compile_blocks:
            for layer in cast(Any, self._body).layers:
                layer.compile(dynamic=True)

    def logprobs(self, rows: Sequence[Row], reference: bool = False) -> list[Floats]:
        """Log-probabilities `[L]` of each row's model tokens (0 elsewhere). `reference` turns adapters off."""
        assert not self._is_critic
        with adapters_off(self.model) if reference else nullcontext():
            return self._score(rows)

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """The critic's values `[L]` before each model token (0 elsewhere)."""
        assert self._is_critic
        return self._score(rows)

    def update(self, samples: Sequence[Sample], objective: Objective, denominators: Denominators) -> UpdateReport:
        """One optimizer update on one minibatch, cut into packs that the memory budget allows.

        Denominators are counted by the caller over the whole minibatch, so the cut does not change the gradient.
        """
        assert self.optimizer is not None, "this engine is frozen"
        assert self._peak_rate is not None
        outputs = [np.zeros(len(s.token_ids), np.float32) for s in samples]
        clock = Clock(self._device)
        parts: list[dict[str, Metric]] = []
        tokens = 0
        self.model.train()
        for packed in self._packs(samples):
            with clock("forward"):
                out, entropy = self._forward(packed, self._want_entropy)
                columns = self._columns(samples, packed)
                loss, metrics = objective(out, entropy, columns, denominators)
            with clock("backward"):
                loss.backward()
            parts.append(metrics)
            tokens += packed.num_tokens
            _spread(out.detach(), packed, samples, outputs)
        self.model.eval()
        with clock("optimizer"):
            rate = learning_rate(self.updates_done, self._total_updates, self._config.optimizer, self._peak_rate)
            norm, outcome = self.optimizer.step(rate)
            self.updates_done += 1
        metrics = merge_metrics(parts)
        metrics["grad_norm"] = Metric(norm)
        metrics["lr"] = Metric(rate)
        metrics["skipped_updates"] = Metric(float(outcome == "skipped"), kind="sum")
        return UpdateReport(metrics, outputs, tokens, clock.seconds)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Master weights and optimizer state, by name: all that training changes."""
        assert self.optimizer is not None
        return dict(self.optimizer.masters), self.optimizer.state_tensors()

    def load_state(self, masters: dict[str, Tensor], optimizer: dict[str, Tensor], updates_done: int) -> None:
        """Go on exactly where `state` was taken."""
        assert self.optimizer is not None
        self.optimizer.load(masters, optimizer)
        self.updates_done = updates_done

    def _packs(self, rows: Sequence[Row]) -> Iterator[Pack]:
        for members in plan_packs(rows, self._config.max_tokens_per_microbatch, self._config.share_prefixes):
            yield pack(rows, members, self._config.share_prefixes)

    @torch.no_grad()
    def _score(self, rows: Sequence[Row]) -> list[Floats]:
        outputs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        self.model.eval()
        for packed in self._packs(rows):
            _spread(self._forward(packed, False)[0], packed, rows, outputs)
        return outputs

    def _forward(self, packed: Pack, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropy, or values, `[N]`."""
        place = self._device
        cast(Any, self._body).config._attn_implementation = attention.NAME  # the sampler may have set its own
        hidden = self._body(
            input_ids=_to(packed.token_ids, place)[None],
            position_ids=_to(packed.position_ids, place)[None],
            use_cache=False,
            packed=attention.build_layout(packed, place, self._dtype),
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, _to(packed.predict, place))
        if self._is_critic:
            return cast(Any, self.model).values(hidden), None
        weight, bias = head_of(self.model)
        return token_logprobs(hidden, weight, bias, _to(packed.targets, place), self._temperature, entropy)

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
