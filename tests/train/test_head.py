"""The chunked head against torch's own log-softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from surefoot.train import head


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_with_gradients(monkeypatch: pytest.MonkeyPatch, entropy: bool, temperature: float):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 16 * 11)  # several chunks of 16
    torch.manual_seed(0)
    hidden = torch.randn(50, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    bias = torch.randn(11, requires_grad=True)
    targets = torch.randint(11, (50,))
    a, b = torch.randn(50), torch.randn(50)

    def plain():
        logp = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    results = []
    for logprobs, entropies in (plain(), head.token_logprobs(hidden, weight, bias, targets, temperature, entropy)):
        loss = (logprobs * a).sum() + ((entropies * b).sum() if entropy else 0)
        results.append((logprobs, entropies, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for index, (want, got) in enumerate(zip(*results, strict=True)):
        if index == 1 and not entropy:
            assert got is None
            continue
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_no_entropy_asked_means_none_in_the_graph_and_no_vocabulary_sized_tensor_kept():
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(1000, 8)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        logprobs, entropies = head.token_logprobs(hidden, weight, None, torch.zeros(4, dtype=torch.long), 1.0)
    assert entropies is None
    assert logprobs.requires_grad
    assert (4, 1000) not in [tuple(s) for s in kept]


def test_gradient_is_finite_where_a_token_is_nearly_impossible():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, entropies = head.token_logprobs(hidden, weight, None, torch.tensor([1]), 1.0, entropy=True)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
