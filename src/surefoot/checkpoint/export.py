"""A trained model as a Hugging Face folder that transformers and vLLM load as they load any other."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ..config.model import Dtype
from ..errors import RunError, UserError, nearest
from ..tracking.files import naming_full_disk, share
from .resume import resolve_checkpoint
from .store import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    merge_adapter: bool = True,
    dtype: Dtype = "bfloat16",
) -> Path:
    """Write a model with its tokenizer, chat template and generation settings. `model` is not changed in any bit.

    Adapters are merged in float32 and rounded once. Tied weights are stored once. The folder appears whole or not at
    all, after transformers has found in it exactly the tensors that the architecture asks for.

    Args:
        model: A transformers causal language model, or PEFT around one, on any device.
        tokenizer: Its tokenizer.
        folder: Where to; must not exist, or be empty.
        merge_adapter: Write whole weights; otherwise a PEFT model is written as a PEFT adapter of its base.
        dtype: Of the tensors written.

    Raises:
        UserError: `export-target`: the folder holds something. `config-bad-value`: no such dtype.
        RunError: `export-keys`: tensors are missing or left over. `disk-full`.
    """
    folder = folder.resolve()
    _check_request(folder, dtype)
    as_adapter = hasattr(model, "peft_config") and not merge_adapter
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with _quiet_transformers(), naming_full_disk(folder):
        try:
            temporary.mkdir(parents=True)
            if as_adapter:
                _write_adapter(model, temporary, dtype)
            else:
                _write_whole(model, temporary, dtype)
            tokenizer.save_pretrained(str(temporary))
            for file in temporary.rglob("*"):
                if file.is_file():
                    share(file)
            if folder.exists():
                folder.rmdir()
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder


def export_checkpoint(source: Path, to: Path, merge_adapter: bool = True, dtype: Dtype | None = None) -> Path:
    """Write the policy of a checkpoint, from its float32 master weights.

    Args:
        source: A run folder (its newest whole checkpoint is taken) or a checkpoint.
        to: Where to; must not exist, or be empty.
        merge_adapter: As for `export`.
        dtype: As for `export`; left out: `model.dtype` of the run.

    Raises:
        UserError: What `export` raises; `checkpoint-not-found`, `checkpoint-none-whole`; what loading the model raises.
        RunError: What `export` raises; `checkpoint-corrupt`; `checkpoint-mismatch`: the checkpoint and the model that
            the configuration describes have other parameters.
    """
    import torch

    from ..data.pretrained import load_tokenizer, resolve_model
    from ..train.model import load_policy

    _check_request(to, dtype or "bfloat16")
    checkpoint = resolve_checkpoint(source)
    settings = config_of(checkpoint).model
    exact = settings.model_copy(update={"dtype": "float32", "gradient_checkpointing": False, "compile": False})
    with _quiet_transformers():
        model = load_policy(exact, torch.device("cpu"))
    put_weights(model, checkpoint.tensors("actor"))
    tokenizer = load_tokenizer(resolve_model(settings.path), settings.chat_template, settings.trust_remote_code)
    return export(model, tokenizer, to, merge_adapter, dtype or settings.dtype)


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration that a checkpoint was made with.

    Raises:
        UserError: `checkpoint-not-found` when it brings none.
    """
    import yaml

    from ..config.load import build_config

    if not checkpoint.config_yaml:
        raise UserError(
            "checkpoint-not-found",
            "this checkpoint brings no config.yaml, so its model is unknown",
            key=str(checkpoint.path),
        )
    return build_config(yaml.safe_load(checkpoint.config_yaml))


def put_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy trained parameters into a model, by name.

    Raises:
        RunError: `checkpoint-mismatch`, naming parameters that only one side has or whose shapes differ.
    """
    import torch

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lines = [f"{name} is not in the checkpoint" for name in trained if name not in weights]
    lines += [f"{name} is not in the model" for name in weights if name not in trained]
    lines += [
        f"{name} is {list(tensor.shape)}, the model's is {list(trained[name].shape)}"
        for name, tensor in weights.items()
        if name in trained and tensor.shape != trained[name].shape
    ]
    if lines:
        raise RunError("checkpoint-mismatch", "the checkpoint does not fit the model", got=_few(lines))
    with torch.no_grad():
        for name, tensor in weights.items():
            trained[name].copy_(tensor)


def _write_whole(model: nn.Module, folder: Path, dtype: Dtype) -> None:
    """Write weights, config and generation config of a copy on the CPU; check that they load."""
    import torch

    target = getattr(torch, dtype)
    if hasattr(model, "peft_config"):
        # float32 until the sum is made: rounding the adapter's product first would lose the small part of it.
        # Copies even where device and dtype are these already, since merging writes into them.
        merged = _copy(model, lambda p: p.to("cpu", torch.float32, copy=True))
        plain = cast(Any, merged).merge_and_unload().to(target)
    else:
        plain = cast(Any, _copy(model, lambda p: p.to("cpu", target)))
    plain.save_pretrained(str(folder))
    _check_keys(type(plain), folder)


def _write_adapter(model: nn.Module, folder: Path, dtype: Dtype) -> None:
    """Write adapter weights and config; check that each adapted layer has both of its factors."""
    import torch
    from peft.tuners.lora import LoraLayer
    from safetensors import safe_open

    target = getattr(torch, dtype)
    # The base is shared with the live model, not copied: only adapters are written.
    slim = cast(Any, _copy(model, lambda p: p.to("cpu", target) if p.requires_grad else p))
    slim.save_pretrained(str(folder), save_embedding_layers=False)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        written = len(file.keys())
    wanted = 2 * sum(isinstance(module, LoraLayer) for module in slim.modules())
    if written != wanted:
        raise RunError("export-keys", "the adapter is not complete", got=f"{written} tensors", want=f"{wanted} tensors")


def _copy(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of the module tree whose parameters are converted; ties between parameters stay ties.

    `deepcopy` finds each parameter's replacement in its memo, so no second copy on the model's device is made.
    """
    from torch import nn

    memo: dict[int, Any] = {id(p): nn.Parameter(convert(p).detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(b): b.detach().cpu().clone() for b in model.buffers()}
    return copy.deepcopy(model, memo)


def _check_keys(architecture: Any, folder: Path) -> None:
    """Let transformers match the files with the architecture, without memory for the weights."""
    _, report = architecture.from_pretrained(
        str(folder), device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
    )
    kinds: tuple[tuple[str, Literal["missing_keys", "unexpected_keys", "mismatched_keys"]], ...] = (
        ("missing", "missing_keys"),
        ("left over", "unexpected_keys"),
        ("of another shape", "mismatched_keys"),
    )
    lines = [f"{words}: {key}" for words, kind in kinds for key in sorted(map(str, report[kind]))]
    if lines:
        raise RunError("export-keys", "the files do not match the architecture", got=_few(lines))


def _check_request(folder: Path, dtype: str) -> None:
    if dtype not in get_args(Dtype):
        near = nearest(dtype, get_args(Dtype))
        raise UserError(
            "config-bad-value",
            "no such dtype",
            key="dtype",
            got=dtype,
            want=" or ".join(get_args(Dtype)),
            hint=f"Did you mean `{near}`?" if near else None,
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError("export-target", "there is something here already, and nothing is overwritten", key=str(folder))


def _few(lines: list[str]) -> str:
    return "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and load reports off the terminal: what matters of them is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
