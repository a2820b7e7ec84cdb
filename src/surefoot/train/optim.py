"""AdamW on float32 master weights, whatever precision the model computes in, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..config.train import OptimizerConfig
from .shard import full_tensor, put_whole


def learning_rate(update: int, total_updates: int, config: OptimizerConfig, peak: float) -> float:
    """Learning rate of the update with this index (from 0): linear warm-up, then the schedule down to 0 at the end."""
    if update < config.warmup_steps:
        return peak * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    return peak * (1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """The optimizer of one model.

    A bfloat16 parameter gets a float32 master copy; its gradient is moved into the master's float32 gradient as soon
    as a backward pass has made it, so sums over micro-batches lose nothing and no second gradient buffer lives on.
    Float32 parameters are their own masters.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float().clone()
                parameter.register_post_accumulate_grad_hook(self._moves_gradient_to(self.masters[name]))
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
        )

    @staticmethod
    def _moves_gradient_to(master: Tensor) -> Any:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def step(self, rate: float) -> tuple[float, Literal["done", "skipped"]]:
        """Clip, update and clear the gradients. Returns the gradient norm before clipping, and whether it updated.

        A gradient that is not finite changes nothing: the update is skipped, and the caller counts it.
        """
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
        size = float(norm)
        if not math.isfinite(size):
            self.zero_grad()
            return size, "skipped"
        if size > self._config.max_grad_norm:
            torch._foreach_mul_(gradients, self._config.max_grad_norm / size)  # pyright: ignore[reportPrivateImportUsage]
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.zero_grad()
        self.publish()
        return size, "done"

    def rehearse(self) -> None:
        """Make a step of rate 0 on gradients of 0, for the memory that it takes, and forget that it was made."""
        assert not self._adam.state, "an optimizer that has learnt something does not rehearse"
        self.step(0.0)
        self._adam.state.clear()

    def move(self, device: torch.device) -> None:
        """Have masters and moments on another device. Masters that are the model's own parameters move with it."""
        for name, master in self.masters.items():
            if master is not self._parameters[name]:
                master.data = master.data.to(device)
            for field, value in self._adam.state.get(master, {}).items():
                if field != "step":
                    self._adam.state[master][field] = value.to(device)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model's own parameters."""
        copies = [(p, self.masters[n]) for n, p in self._parameters.items() if p.dtype != torch.float32]
        if copies:
            torch._foreach_copy_([p for p, _ in copies], [m for _, m in copies])  # pyright: ignore[reportPrivateImportUsage]

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's moments and step counts by `parameter name/field`."""
        return {
            f"{name}/{field}": value
            for name, master in self.masters.items()
            for field, value in self._adam.state.get(master, {}).items()
        }

    @torch.no_grad()
    def load(self, weights: Path, state: Path) -> None:
        """Restore master weights and moments exactly from whole tensors on disk, and publish them to the model."""
        with safe_open(weights, "pt") as file:
            assert set(file.keys()) == self.masters.keys(), "the saved parameters are not this model's"
            for name, master in self.masters.items():
                put_whole(master, file.get_tensor(name))
        with safe_open(state, "pt") as file:
            fields: dict[str, list[str]] = {}
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                name, field = key.rsplit("/", 1)
                fields.setdefault(name, []).append(field)
            for name, master in self.masters.items():
                if name in fields:
                    self._adam.state[master] = {
                        field: self._state_like(master, field, file.get_tensor(f"{name}/{field}"))
                        for field in fields[name]
                    }
        self.publish()

    @staticmethod
    def _state_like(master: Tensor, field: str, whole: Tensor) -> Tensor:
        if field == "step":
            return whole
        return put_whole(torch.zeros_like(master), whole)
