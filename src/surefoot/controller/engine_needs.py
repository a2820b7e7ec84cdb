"""What a sampler of its own will take of each GPU, from the model's configuration."""

from __future__ import annotations

from transformers import AutoConfig

from .memory import GIB, EngineNeeds
from .preflight import Preflight

_BLOCK = 16  # tokens of one block of cache
_BYTES = {"bfloat16": 2, "float32": 4}


def engine_needs(ready: Preflight, parameters: int, rows: int, tensor_parallel: int) -> EngineNeeds:
    """Estimate weights and working memory, and compute the cache that can be used at most.

    Args:
        ready: The run.
        parameters: Of the model.
        rows: Rows that a replica decodes together.
        tensor_parallel: GPUs of a replica; keys and weights are split over them.
    """
    config = ready.config
    text = AutoConfig.from_pretrained(
        ready.model_path, trust_remote_code=config.model.trust_remote_code
    ).get_text_config()
    size = _BYTES[config.model.dtype]
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = max(1, (text.num_key_value_heads or text.num_attention_heads) // tensor_parallel)
    per_token = 2 * text.num_hidden_layers * kv_heads * head * size
    row = -(-longest_row(ready) // _BLOCK) * _BLOCK * per_token
    # Logits in float32 and their sorted and exponentiated copies; activations, graphs and the library's own workspaces.
    working = int(2.5 * GIB) + 6 * 4 * rows * text.vocab_size
    return EngineNeeds(
        weights=parameters * size // tensor_parallel,
        working=working,
        asleep=int(1.5 * GIB),
        full_cache=(rows + 1) * row + 64 * _BLOCK * per_token,
        least_cache=row + 64 * _BLOCK * per_token,
    )


def longest_row(ready: Preflight) -> int:
    """Tokens of the longest row that the run can ask an engine for."""
    config = ready.config
    samplings = [config.rollout.sampling] + ([config.eval.sampling] if config.eval else [])
    return config.data.max_prompt_length + max(s.max_response_length for s in samplings)
