"""Models of well-known shapes with random weights, and prompts of an exact length: no download, and no luck."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

SHAPES = {
    # name: (hidden, intermediate, layers, heads, key heads, tied)
    "qwen2-0.5b": (896, 4864, 24, 14, 2, True),
    "qwen2-1.5b": (1536, 8960, 28, 12, 2, True),
    "qwen2-7b": (3584, 18944, 28, 28, 4, False),
    "tiny": (64, 128, 2, 4, 2, True),
}
VOCABULARY = 151_936


def make_model(shape: str, folder: Path) -> Path:
    """Write a Hugging Face folder of a shape in bfloat16, with a tokenizer of one letter a token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    path = folder / shape
    if (path / "model.safetensors").exists():
        return path
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=VOCABULARY if shape != "tiny" else 1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).cpu().save_pretrained(path)
    letters = [chr(code) for code in range(33, 127)]
    words = ["<unk>", "<end>", *letters, *(f"w{i}" for i in range(config.vocab_size))][: config.vocab_size]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", eos_token="<end>",
        pad_token="<end>",
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


def write_prompts(file: Path, count: int, length: int) -> Path:
    """Write raw prompts of exactly `length` tokens, a letter each, no two alike."""
    rng = random.Random(0)
    lines = (json.dumps({"prompt": "".join(rng.choices(string.ascii_letters, k=length))}) for _ in range(count))
    file.write_text("\n".join(lines) + "\n")
    return file
