"""Weights off the disk: the policy (whole or with adapters), the critic, the reference."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config.model import CriticConfig, LoraConfig, ModelConfig
from ..data.pretrained import resolve_model
from ..errors import UserError
from . import attention

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(config: ModelConfig, device: torch.device) -> nn.Module:
    """Load a causal language model, with adapters when `model.lora` is set: a transformers or PEFT module.

    Raises:
        UserError: The folder is no loadable causal language model, or its architecture needs terms that the trainer
            does not compute.
    """
    model = _load_causal_lm(config.path, config.dtype, config.trust_remote_code, device)
    if config.lora is not None:
        model = _with_adapters(model, config.lora)
    if config.gradient_checkpointing:
        cast(Any, model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cast(Any, model).enable_input_require_grads()
    return model


def load_reference(config: ModelConfig, device: torch.device) -> nn.Module:
    """Load the policy's starting weights once more, frozen. With LoRA there is no need: see `adapters_off`."""
    return _load_causal_lm(config.path, config.dtype, config.trust_remote_code, device).requires_grad_(False)


def load_critic(config: CriticConfig, model: ModelConfig, device: torch.device) -> nn.Module:
    """Load the critic: a decoder without its output head, and a scalar head that starts at zero."""
    decoder = _load_causal_lm(config.path or model.path, model.dtype, model.trust_remote_code, device)
    if model.gradient_checkpointing:
        cast(Any, decoder).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cast(Any, decoder).enable_input_require_grads()
    return Critic(decoder)


class Critic(nn.Module):
    """A decoder body and a linear value head in float32; at the start it says 0 everywhere."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.config = cast(Any, causal_lm).config
        self.body = body_of(causal_lm)
        self.value_head = nn.Linear(self.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.value_head.to(next(causal_lm.parameters()).device)

    def values(self, hidden: Tensor) -> Tensor:
        """Hidden states `[N, H]` -> values `[N]` in float32."""
        return self.value_head(hidden.float())[:, 0]


def causal_lm_of(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: nn.Module) -> nn.Module:
    """The decoder without its output head; adapters, which live in its layers, stay on."""
    lm = causal_lm_of(model)
    return getattr(lm, lm.base_model_prefix)


def head_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight `[V, H]` and bias `[V]` of the output embedding."""
    head = causal_lm_of(model).get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


def adapters_off(model: nn.Module) -> Any:
    """Context in which a PEFT model is its base: the reference costs no second copy."""
    return cast(Any, model).disable_adapter()


def _load_causal_lm(path: str, dtype: str, trust_remote_code: bool, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve_model(path)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        attention.check_supported(hf_config)
        model, found = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except UserError:
        raise
    except Exception as error:  # each file format raises errors of its own kind
        raise UserError(
            "model-load", f"not loadable as a causal language model: {error}", key="model.path", got=path
        ) from error
    if wrong := [*sorted(found["missing_keys"]), *map(str, found["mismatched_keys"])]:
        raise UserError(
            "model-load",
            "the weights are not those of the architecture that config.json describes; layers would start at random",
            key="model.path",
            got=f"{len(wrong)} tensors missing or of another shape, the first {wrong[0]}",
        )
    model = cast(Any, model).to(device)
    # An embedding with a padding index gives that token no gradient; where pad is the end-of-sequence token, the
    # model could never learn about its end. There is no padding here.
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model.eval()


def _with_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    settings = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(cast(Any, model), settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UserError(
            "model-load",
            f"PEFT refuses the adapter: {error}",
            key="model.lora.target_modules",
            got=config.target_modules,
        ) from error
