"""A random Llama of 0.1 to 1 M parameters with a character tokenizer and a ChatML template: real parts, fast."""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if m.get('tool_calls') %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, `<|im_start|>`, `<|im_end|>` (eos and pad)."""
    specials = ["<unk>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *string.printable[:95], "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(seed: int = 0, hidden: int = 64, layers: int = 2, scale: float = 1.0) -> LlamaForCausalLM:
    """A float32 Llama with grouped-query attention and tied embeddings. `scale` > 1 makes its choices sharper."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer().eos_token_id,
        initializer_range=0.02 * scale,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(folder: Path, **options) -> Path:
    """Write the tiny model and tokenizer as a Hugging Face folder."""
    tiny_model(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
