"""Hidden states -> log-probabilities of the tokens that were chosen, never holding `[N, vocabulary]`.

The forward pass works in chunks and keeps one number a token (the log of the sum of exponentials); the backward pass
makes each chunk's probabilities again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MiB in float32


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of the distribution.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]` of the output embedding.
        bias: `[V]` or None.
        targets: `[N]` token ids.
        temperature: Divides the logits, as the sampler did.
        entropy: Compute the entropy too; it is part of the graph when `hidden` is.

    Returns:
        logprobs `[N]` and entropy `[N]` (nats) or None, in float32.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, entropy)  # type: ignore[misc]
    return logprobs, entropies if entropy else None


def chunk_size(vocabulary: int) -> int:
    """How many tokens go through the head together."""
    return max(16, CHUNK_ELEMENTS // vocabulary)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Float32 logits `[n, V]` of one chunk, divided by the temperature."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # the products are summed in float32: keep it
    else:
        logits = torch.mm(hidden, weight.t()).float()
    if bias is not None:
        logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        normalizers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        step = chunk_size(len(weight))
        for start in range(0, count, step):
            part = slice(start, start + step)
            logits = logits_of(hidden[part], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            normalizers[part] = normalizer
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normalizer
            if entropy:
                logits -= normalizer[:, None]
                entropies[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        use_entropy = ctx.entropy and bool(grad_entropies.any())
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        step = chunk_size(len(weight))
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            logp = logits_of(hidden[part], weight, bias, ctx.temperature).sub_(normalizers[part, None])
            grad = logp.exp()
            if use_entropy:
                # dH/dz = -p (log p + H); dlogp_y/dz = 1[y] - p
                scale = (
                    logp.add_(entropies[part, None]).mul_(grad_entropies[part, None]).add_(grad_logprobs[part, None])
                )
                grad.mul_(scale).neg_()
            else:
                grad.mul_(grad_logprobs[part, None]).neg_()
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad = grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
