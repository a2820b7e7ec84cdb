"""Weights off the disk: the policy (whole or with adapters), the critic, the reference; and how the trainer calls them.

Each loader can also make an *empty* model: the same modules without memory, to be sharded and filled from one rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config.model import CriticConfig, LoraConfig, ModelConfig
from ..data.pretrained import resolve_model
from ..errors import UserError
from . import attention
from .head import token_logprobs
from .packing import Pack, padded
from .sequence import SequenceGroup

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one forward pass reads, on the device; `predict` and `targets` are of model tokens `[N]`.

    With sequence parallelism the first four are this process's slice, and `places` says where in `[count]` it goes.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    predict: Tensor  # [N] into [T]
    targets: Tensor  # [N]
    layout: attention.Layout
    places: Tensor  # [N] into [count]
    count: int

    @classmethod
    def of(cls, pack: Pack, device: torch.device, dtype: torch.dtype, sequence: SequenceGroup | None = None) -> Batch:
        """Bring a packed batch to the device, or this process's slice of it."""
        if sequence is not None:
            pack = padded(pack, sequence.size)
        low, high = sequence.bounds(pack.num_tokens) if sequence else (0, pack.num_tokens)
        places = np.flatnonzero((pack.predict >= low) & (pack.predict < high))
        tokens = slice(low, high)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device).long()

        return cls(
            token_ids=put(pack.token_ids[tokens]),
            position_ids=put(pack.position_ids[tokens]),
            predict=put(pack.predict[places] - low),
            targets=put(pack.targets[places]),
            layout=attention.build_layout(pack, device, dtype, sequence),
            places=put(places),
            count=len(pack.predict),
        )

    def whole(self, numbers: Tensor) -> Tensor:
        """`[N]` of this process -> `[count]` of the whole batch."""
        sequence = self.layout.sequence
        return numbers if sequence is None else sequence.spread(numbers, self.places, self.count)


def load_policy(config: ModelConfig, device: torch.device, empty: bool = False) -> nn.Module:
    """Load a causal language model, with adapters when `model.lora` is set: a transformers or PEFT module.

    Raises:
        UserError: The folder is no loadable causal language model, or its architecture needs terms that the trainer
            does not compute.
    """
    model = _load_causal_lm(config.path, config.dtype, config.trust_remote_code, device, empty)
    if config.lora is not None:
        with _without_memory(empty):
            model = _with_adapters(model, config.lora)
    if config.gradient_checkpointing:
        cast(Any, model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cast(Any, model).enable_input_require_grads()
    return model


def load_reference(config: ModelConfig, device: torch.device, empty: bool = False) -> nn.Module:
    """Load the policy's starting weights once more, frozen. With LoRA there is no need: see `adapters_off`."""
    return _load_causal_lm(config.path, config.dtype, config.trust_remote_code, device, empty).requires_grad_(False)


def load_critic(config: CriticConfig, model: ModelConfig, device: torch.device, empty: bool = False) -> nn.Module:
    """Load the critic: a decoder without its output head, and a scalar head that starts at zero."""
    decoder = _load_causal_lm(config.path or model.path, model.dtype, model.trust_remote_code, device, empty)
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


class Scorer(nn.Module):
    """A model as the trainer calls it: one packed batch in, log-probabilities or values out.

    One module with one `forward`, so that sharding can gather what the output head needs together with the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_critic = isinstance(model, Critic)

    @property
    def body(self) -> nn.Module:
        """The decoder without its head."""
        return cast(Any, self.model).body if self.is_critic else body_of(self.model)

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities `[N]` of the batch's targets (and entropies `[N]`), or the critic's values `[N]`."""
        body = self.body
        cast(Any, body).config._attn_implementation = attention.NAME  # the sampler may have set its own
        hidden = body(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed=batch.layout,
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, batch.predict)
        if self.is_critic:
            return batch.whole(cast(Any, self.model).values(hidden)), None
        weight, bias = head_of(self.model)
        logprobs, entropies = token_logprobs(hidden, weight, bias, batch.targets, temperature, entropy)
        return batch.whole(logprobs), None if entropies is None else batch.whole(entropies)


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


def _load_causal_lm(
    path: str, dtype: str, trust_remote_code: bool, device: torch.device, empty: bool = False
) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, auto = resolve_model(path), cast(Any, AutoModelForCausalLM)
    found: dict[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        attention.check_supported(hf_config)
        options = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        if empty:
            with _without_memory(True):
                model = auto.from_config(hf_config, **options)
            model.tie_weights()  # parameters were replaced one by one, which unties them
        else:
            model, found = auto.from_pretrained(folder, output_loading_info=True, **options)
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
    # An embedding with a padding index gives that token no gradient; where pad is the end-of-sequence token, the
    # model could never learn about its end. There is no padding here.
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return (model if empty else model.to(device)).eval()


def _without_memory(empty: bool) -> Any:
    """Context in which new parameters take no memory. Buffers are made as ever: they are small and not in files."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False) if empty else nullcontext()


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
