"""Linear layers whose weight lies in the blocked order that the CPU's matrix units read, while a rollout lasts.

A bfloat16 product of few rows spends a third of its time on bringing the weight into that order, again at each call.
oneDNN can keep the result: the numbers are the same, and a decode step's products take two thirds of the time. The
price is a second copy of the linear weights, so it is taken only while rows decode, dropped before anyone can train,
and left out where memory is short or the processor has no bfloat16 products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn

_BATCH = 64  # rows that oneDNN picks the block layout for
_MEMORY_SHARE = 0.25  # of what the machine has left


class PackedLinears:
    """The packed weights of a model's linear layers, made once and used through `installed`."""

    def __init__(self, model: nn.Module) -> None:
        # The ops that torch.compile's own CPU back end emits for frozen weights; there is no public name for them.
        self._ops: Any = torch.ops.mkldnn
        self._forwards: list[tuple[nn.Linear, Any]] = []
        linears = _packable(model)
        if sum(layer.weight.nbytes for layer in linears) > _MEMORY_SHARE * psutil.virtual_memory().available:
            return
        for layer in linears:
            packed = self._ops._reorder_linear_weight(layer.weight.detach(), _BATCH)
            self._forwards.append((layer, self._forward(packed, layer.bias)))

    def _forward(self, packed: Tensor, bias: Tensor | None) -> Any:
        product = self._ops._linear_pointwise

        def forward(x: Tensor) -> Tensor:
            return product(x, packed, bias, "none", [], "")

        return forward

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the layers compute with their packed weights inside this block, and as ever after it."""
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                layer.__dict__.pop("forward", None)


def _packable(model: nn.Module) -> list[nn.Linear]:
    """Plain bfloat16 linear layers on a CPU that multiplies bfloat16."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    modules: Iterable[nn.Module] = model.modules()
    plain = [m for m in modules if type(m) is nn.Linear and "forward" not in m.__dict__]
    return [m for m in plain if m.weight.device.type == "cpu" and m.weight.dtype == torch.bfloat16]
