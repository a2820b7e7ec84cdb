"""Logits to tokens and log-probabilities, a row at a time in the mathematics and all rows at once in the tensors.

A row's randomness is a hash of its seed and of how many tokens it has, so its tokens depend on nothing else that
runs. That holds for this module bit for bit; the logits themselves may differ in their last bit between batches of
different size (the product's blocking), which in bfloat16 can turn a near tie the other way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config.rollout import SamplingConfig

_CANDIDATES = 512  # tokens in which the nucleus is looked for before all are sorted
_BLOCK = 256  # tokens a block of the inverse CDF
_CPU_ELEMENTS = 1 << 20  # logits that the CPU takes at a time: float32 copies of more are paged in anew at each step


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each row is sampled: one entry a row. A filter that no row uses is None."""

    seeds: Tensor  # [B] int64
    temperature: Tensor | None  # [B, 1] float32, 1 for greedy rows; None when all are 1
    greedy: Tensor | None  # [B] bool
    top_k: Tensor | None  # [B, 1] int64, 0 where off
    top_p: Tensor | None  # [B, 1] float32, 1 where off
    min_p: Tensor | None  # [B, 1] float32, 0 where off

    @staticmethod
    def build(rows: Sequence[tuple[SamplingConfig, int]], device: torch.device | str = "cpu") -> SamplingBatch:
        """Make the batch of rows, each a sampling section and a seed. Greedy rows use no filter."""
        hot = [config.temperature > 0 for config, _ in rows]

        def column(values: list[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            kept = [value if is_hot else off for value, is_hot in zip(values, hot, strict=True)]
            return None if all(v == off for v in kept) else torch.tensor(kept, dtype=dtype, device=device)[:, None]

        configs = [config for config, _ in rows]
        return SamplingBatch(
            seeds=torch.tensor([seed for _, seed in rows], dtype=torch.int64, device=device),
            temperature=column([c.temperature for c in configs], 1.0),
            greedy=None if all(hot) else ~torch.tensor(hot, device=device),
            top_k=column([c.top_k for c in configs], 0, torch.int64),
            top_p=column([c.top_p for c in configs], 1.0),
            min_p=column([c.min_p for c in configs], 0.0),
        )

    def part(self, rows: slice) -> SamplingBatch:
        """Some of the rows."""
        columns = (self.temperature, self.greedy, self.top_k, self.top_p, self.min_p)
        return SamplingBatch(self.seeds[rows], *(None if column is None else column[rows] for column in columns))


def sample(logits: Tensor, batch: SamplingBatch, step: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: `[B, V]`, any floating dtype; computed on in float32.
        batch: How to draw.
        step: `[B]` int64, how many tokens each row has generated.

    Returns:
        Tokens `[B]` int64, and the log-probability `[B]` float32 of each in the distribution that it was drawn from:
        after temperature and filters. A greedy row's is that of its likeliest token at temperature 1, unfiltered.
    """
    count = max(1, _CPU_ELEMENTS // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > count:
        parts = [slice(start, start + count) for start in range(0, len(logits), count)]
        drawn = [sample(logits[rows], batch.part(rows), step[rows]) for rows in parts]
        return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])
    scaled = logits
    if batch.temperature is not None:
        scaled = logits.float() / batch.temperature
    if batch.top_k is not None or batch.top_p is not None or batch.min_p is not None:
        scaled = _filtered(scaled.float(), batch)
    probs = torch.softmax(scaled, -1, dtype=torch.float32)
    tokens = _inverse_cdf(probs, uniform(batch.seeds, step))
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def uniform(seeds: Tensor, step: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, step), `[B]` float64: SplitMix64 (Steele et al. 2014), seeded twice over."""
    mixed = _splitmix(_splitmix(seeds) ^ _splitmix(step ^ -0x61C8864680B583EB))
    return _shift(mixed, 11).double() * 2.0**-53


def _splitmix(x: Tensor) -> Tensor:
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64; products and sums wrap
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulated probability first exceeds u: `[B, V]`, `[B]` -> `[B]`.

    Blocks first, then the tokens of one block, in float64: no cumulated sum over the vocabulary, and a token of
    probability 0 cannot be drawn.
    """
    rows, vocabulary = probs.shape
    padded = -vocabulary % _BLOCK
    blocks = torch.nn.functional.pad(probs, (0, padded)) if padded else probs
    blocks = blocks.view(rows, -1, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = u[:, None] * ends[:, -1:]
    block = _first_above(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks[torch.arange(rows, device=probs.device), block[:, 0]].double().cumsum(-1)
    # The bound is for NaN, which compares with nothing: the caller sees it in the log-probability.
    return (block * _BLOCK + _first_above(inner, target - before))[:, 0].clamp_(max=vocabulary - 1)


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Index `[B, 1]` of the first entry above target; rounding at the end falls back to the last that rose."""
    index = torch.searchsorted(cumulated, target, right=True)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(index, last).clamp_(max=cumulated.shape[1] - 1)


def _filtered(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Set what top-k, top-p and min-p drop to -inf, in that order, each on what the one before left.

    Each is a threshold on the logit, so tokens that tie with the last one kept are kept too.
    """
    if batch.top_k is not None and (widest := int(batch.top_k.max())):
        limited = (batch.top_k > 0)[:, 0]
        best = scaled[limited].topk(min(widest, scaled.shape[1]), dim=-1).values
        floor = torch.full_like(scaled[:, :1], -math.inf)
        floor[limited] = best.gather(1, batch.top_k[limited].clamp(max=best.shape[1]) - 1)
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if batch.top_p is not None:
        scaled = scaled.masked_fill(scaled < _nucleus_floor(scaled, batch.top_p), -math.inf)
    if batch.min_p is not None:
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + batch.min_p.log(), -math.inf)
    return scaled


def _nucleus_floor(scaled: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token of the smallest set whose probability reaches top_p: `[B, V]` -> `[B, 1]`."""
    floor = torch.full_like(top_p, -math.inf)
    rows = (top_p[:, 0] < 1).nonzero()[:, 0]
    for count in (_CANDIDATES, scaled.shape[1]):
        part = scaled[rows]
        best = part.topk(min(count, part.shape[1]), dim=-1).values
        mass = (best - part.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        reached = mass >= top_p[rows]
        found = reached[:, -1] | (best.shape[1] == scaled.shape[1])
        # Rounding may leave the whole mass just short of top_p: then nothing is dropped.
        index = torch.where(reached.any(-1), reached.int().argmax(-1), best.shape[1] - 1)
        floor[rows[found]] = best.gather(1, index[:, None])[found]
        rows = rows[~found]
        if not len(rows):
            break
    return floor
