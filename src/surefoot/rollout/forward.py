"""The model call: the trainer's own module, borrowed for one pass and left as it was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from . import attention
from .attention import StepAttention
from .cache import Caches
from .packed_linear import PackedLinears
from .scheduler import Plan, Prefill, Row

# Relative error of the check's logits: bfloat16 alone gives up to 0.1 between two right ways, a missing term about 1.
_TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.1}
_PACK_AFTER = 8  # decode steps; packing costs about as much as it saves in twelve


class Forward:
    """Runs plans on a transformers causal language model, bare or wrapped by PEFT, without a copy of its weights.

    Args:
        model: The module. It is in evaluation mode, with this engine's attention, while a pass runs, and at no other
            time; nothing else may run it meanwhile.
        device: Where its weights are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        # PEFT's adapters live in the layers: the module inside computes with them.
        self._causal_lm: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
        self._config = self._causal_lm.config.get_text_config()
        self._device = device
        self._packed: PackedLinears | None = None
        self._steps = 0

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and response together that the model's positions reach; None when it does not say."""
        limit = getattr(self._config, "max_position_embeddings", None)
        # Rotary tables that change with the longest row of a batch would let rows influence each other.
        ropes = getattr(self._config, "rope_parameters", None) or {}
        for rope in ropes.values() if all(isinstance(v, dict) for v in ropes.values()) else [ropes]:
            if rope.get("rope_type") in ("dynamic", "longrope"):
                limit = rope.get("original_max_position_embeddings") or limit
        return limit

    @torch.inference_mode()
    def run(self, plan: Plan, caches: Caches) -> Tensor:
        """Compute one plan; return the logits `[decoding rows, V]` in the model's dtype."""
        caches.own.copy(plan.moves)
        caches.reserve(plan)
        tokens = [row.last_token for row in plan.decode]
        for prefill in (*plan.prefills, *plan.prefixes):
            tokens.extend(prefill.tokens)
        if not tokens:
            return torch.empty(0, 1, device=self._device)
        step = StepAttention(plan, caches, self._device)
        rows = len(plan.decode)
        # Only decoding rows need the head. They come first, and a count would keep the last.
        keep = 0 if rows == len(tokens) else torch.arange(max(rows, 1), device=self._device)
        with self._borrowed():
            output = self._causal_lm(
                input_ids=torch.tensor([tokens], device=self._device), position_ids=step.positions[None],
                past_key_values=step, use_cache=True, logits_to_keep=keep, surefoot_step=step,
            )  # fmt: skip
        return output.logits[0, :rows]

    @contextmanager
    def _borrowed(self, implementation: str = attention.NAME) -> Iterator[None]:
        """Set the attention, evaluation mode and packed weights, and put everything back."""
        before = self._config._attn_implementation
        modules = list(self._model.modules())
        training = [module for module in modules if module.training]
        with ExitStack() as stack:
            if any(module._compiled_call_impl is not None for module in modules):
                # Compiled for the trainer's shapes: every new number of rows would compile again.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self._packed is not None:
                stack.enter_context(self._packed.installed())
            try:
                self._config._attn_implementation = implementation
                for module in training:
                    module.training = False
                yield
            finally:
                self._config._attn_implementation = before
                for module in training:
                    module.training = True

    def warm(self) -> None:
        """Note that rows decode; after a few steps the weights are packed, where that pays."""
        self._steps += 1
        if self._steps == _PACK_AFTER:
            self._packed = PackedLinears(self._model)

    def cool(self) -> None:
        """Drop what was derived from the weights: nobody decodes any more, or the weights are about to change."""
        self._packed = None
        self._steps = 0

    @torch.inference_mode()
    def check(self) -> None:
        """Compare this engine's logits with the model's own on a few tokens.

        Raises:
            UserError: The architecture's attention is not what this engine computes.
        """
        embeddings = self._causal_lm.get_input_embeddings().weight
        vocabulary, dtype = embeddings.shape[0], embeddings.dtype
        tokens = [(7 * i + 3) % vocabulary for i in range(12)]
        caches = Caches.empty()
        row = Row("check", tuple(tokens[:-1]), slot=0)
        reason = "its logits come out different"
        try:
            self.run(Plan([], [], [Prefill(0, row.prompt[:-1])], []), caches)
            ours = [self.run(Plan([], [row], [], []), caches)]
            row.generated.append(tokens[-1])
            ours = torch.cat([*ours, self.run(Plan([], [row], [], []), caches)]).float()
            with self._borrowed("eager"):  # the one that every architecture defines itself
                theirs = (
                    self._causal_lm(input_ids=torch.tensor([tokens], device=self._device), use_cache=False)
                    .logits[0, -2:]
                    .float()
                )
            error = ((ours - theirs).norm() / (theirs - theirs.mean(-1, keepdim=True)).norm()).item()
            if error < _TOLERANCE.get(dtype, 0.01):
                return
            if not math.isfinite(theirs.norm().item()):
                raise UserError(
                    "model-load",
                    "the model's logits are not finite: its weights hold NaN or infinity",
                    key="model.path",
                )
        except UserError:
            raise
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
        raise UserError(
            "model-unsupported", "the embedded engine does not compute this architecture's attention", key="model.path",
            got=f"{self._config.model_type}: {reason}",
            want="a dense decoder such as Llama, Qwen2, Qwen3, Mistral, Phi or SmolLM",
        )  # fmt: skip
