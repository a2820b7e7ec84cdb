"""The KV cache: growth keeps what is cached, moves, and the two attention kernels against plain mathematics."""

from __future__ import annotations

import pytest
import torch

from surefoot.rollout.cache import KvCache
from surefoot.rollout.decode_attention import attention
from surefoot.rollout.prefill_attention import prefill_batches
from surefoot.rollout.scheduler import Move

CPU = torch.device("cpu")


def filled(cache: KvCache, slot: int, start: int, values: torch.Tensor) -> None:
    """Write `[n]` numbers as keys, and their negatives as values, with two heads of three dims."""
    where = slot * cache.tokens + start + torch.arange(len(values))
    key = values[None, :, None].expand(2, -1, 3)
    cache.write(0, where, key, -key)


def test_growth_in_both_directions_keeps_the_tokens():
    cache = KvCache()
    cache.reserve(2, 10)
    filled(cache, 0, 0, torch.arange(10.0))
    filled(cache, 1, 0, torch.arange(100.0, 110.0))
    before = cache.tokens
    cache.reserve(3, before + 1)
    assert cache.tokens >= 2 * before
    filled(cache, 1, 10, torch.tensor([110.0]))
    filled(cache, 2, 0, torch.tensor([7.0]))
    keys, values = cache.read(0, 3, 11)
    assert keys[0, 0, :10, 0].tolist() == list(range(10))
    assert keys[1, 1, :11, 2].tolist() == list(range(100, 111))
    assert keys[2, 0, 0, 0] == 7
    assert torch.equal(values, -keys)


def test_moves_are_simultaneous_and_other_slots_stay():
    cache = KvCache()
    cache.reserve(4, 5)
    for slot in range(4):
        filled(cache, slot, 0, torch.full((5,), float(slot)))
    cache.copy([Move(3, 0, 5), Move(2, 1, 2)])
    keys, _ = cache.read(0, 4, 5)
    assert keys[0, 0, :, 0].tolist() == [3.0] * 5
    assert keys[1, 0, :2, 0].tolist() == [2.0] * 2
    assert keys[2, 0, :, 0].tolist() == [2.0] * 5


def test_memory_is_taken_at_the_first_write():
    cache = KvCache()
    cache.reserve(2, 10)
    assert cache.num_bytes == 0
    filled(cache, 0, 0, torch.arange(3.0))
    assert cache.num_bytes == 2 * (2 * cache.tokens * 2 * 3 * 4)


@pytest.mark.parametrize("value_dim", [8, 5])  # equal dims take the CPU's kernel, others the plain path
def test_attention_and_its_log_sum_exp(value_dim):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, value_dim)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, ..., 4:] = float("-inf")
    out, lse = attention(q, k, v, mask, 0.3)
    scores = q @ k.transpose(-1, -2) * 0.3 + mask
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-5)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 9, 2, 2, 30, 8], [5]])
@pytest.mark.parametrize("window", [None, 3])
def test_prompts_see_only_themselves(lengths, window):
    torch.manual_seed(0)
    total = 2 + sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    out = torch.zeros(total, 4, 8)
    for batch in prefill_batches(lengths, 2, CPU):
        batch.attend(q, k, v, out, 0.3, window)
    assert not out[:2].any()
    start = 2
    for length in lengths:
        span = slice(start, start + length)
        start += length
        keys, values = (x[span].repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        scores = q[span].transpose(0, 1) @ keys.transpose(-1, -2) * 0.3
        age = torch.arange(length)[:, None] - torch.arange(length)
        scores.masked_fill_((age < 0) | (age >= (window or length)), float("-inf"))
        assert torch.allclose(out[span], (scores.softmax(-1) @ values).transpose(0, 1), atol=1e-5)
