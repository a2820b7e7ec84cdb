"""Logits to tokens: the distribution, its log-probabilities, and what a row's randomness depends on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config.rollout import SamplingConfig
from surefoot.rollout import sampling
from surefoot.rollout.sampling import SamplingBatch, sample, uniform


def draw(logits: torch.Tensor, config: SamplingConfig, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = SamplingBatch.build([(config, seed) for seed in range(count)])
    return sample(logits.expand(count, -1), batch, torch.zeros(count, dtype=torch.int64))


def test_splitmix64_known_answer():
    # The reference generator's first output for seed 0 is 0xE220A8397B1DCDAF.
    from surefoot.rollout.sampling import _splitmix

    assert _splitmix(torch.tensor([0])).item() % 2**64 == 0xE220A8397B1DCDAF


def test_uniform_is_in_range_and_even():
    u = uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64))
    v = uniform(torch.full((200_000,), 7), torch.arange(200_000))
    for x in (u, v):
        assert 0 <= x.min() < 1e-4
        assert 1 - 1e-4 < x.max() < 1
        assert torch.histc(x, 20, 0, 1).sub(10_000).abs().max() < 500  # 5 sigma


def test_draws_follow_the_softmax():
    torch.manual_seed(0)
    logits = torch.randn(1, 700) * 2  # three blocks, the last one padded
    tokens, _ = draw(logits, SamplingConfig(), 50_000)
    expected = logits.softmax(-1)[0] * 50_000
    counts = torch.bincount(tokens, minlength=700).float()
    big = expected > 20
    chi = ((counts - expected) ** 2 / expected)[big].sum()
    assert chi < big.sum() + 5 * math.sqrt(2 * big.sum())


def test_logprob_is_that_of_the_tempered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    tokens, logprobs = draw(logits, SamplingConfig(temperature=0.6), 50)
    assert torch.allclose(logprobs, (logits / 0.6).log_softmax(-1)[0][tokens], atol=1e-6)
    assert len(set(tokens.tolist())) > 1


def test_greedy_takes_the_likeliest_and_scores_it_untempered_and_unfiltered():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    tokens, logprobs = draw(logits, SamplingConfig(temperature=0, top_k=1, top_p=0.1, min_p=0.5), 3)
    assert tokens.tolist() == [1, 1, 1]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[0, 1].expand(3))


# Probabilities 0.4, 0.3, 0.2, 0.1, scattered over the vocabulary.
KNOWN = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),  # renormalised over three: 0.44, 0.33, 0.22
        ({"top_k": 2, "min_p": 0.8}, {1}),
    ],
)
def test_filters_by_hand(options, kept):
    tokens, logprobs = draw(KNOWN, SamplingConfig(**options), 400)
    assert set(tokens.tolist()) == kept
    mass = sum(KNOWN.exp()[0, t].item() for t in kept)
    assert torch.allclose(logprobs, KNOWN[0][tokens] - math.log(mass), atol=1e-5)


def test_nucleus_wider_than_the_candidates():
    logits = torch.zeros(1, 3000)
    logits[0, :10] = 1.0
    tokens, _ = draw(logits, SamplingConfig(top_p=0.999999), 2000)
    assert tokens.max() > 2900  # equal tokens tie with the last one kept
    peaked = torch.zeros(1, 3000) - torch.arange(3000) / 300
    tokens, _ = draw(peaked, SamplingConfig(top_p=0.9), 2000)
    mass = peaked.softmax(-1)[0].cumsum(0)
    last = int((mass < 0.9).sum())
    assert last > 512
    assert tokens.max() <= last
    assert tokens.max() > 0.8 * last


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_does_not_depend_on_its_companions(data):
    configs = st.builds(
        SamplingConfig,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 1.3]),
        top_k=st.sampled_from([0, 1, 5, 400]),
        top_p=st.sampled_from([0.2, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
    )
    rows = data.draw(
        st.lists(st.tuples(configs, st.integers(0, 2**63 - 1), st.integers(0, 500)), min_size=1, max_size=6)
    )
    torch.manual_seed(data.draw(st.integers(0, 10)))
    logits = torch.randn(len(rows), 600) * 3
    batch = SamplingBatch.build([(config, seed) for config, seed, _ in rows])
    tokens, logprobs = sample(logits, batch, torch.tensor([step for *_, step in rows]))
    for i, (config, seed, step) in enumerate(rows):
        alone = sample(logits[i : i + 1], SamplingBatch.build([(config, seed)]), torch.tensor([step]))
        assert alone[0].item() == tokens[i].item()
        assert alone[1].item() == pytest.approx(logprobs[i].item(), abs=1e-6)


def test_rows_taken_in_parts_are_the_same_rows(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, 600) * 3
    configs = [
        SamplingConfig(temperature=t, top_k=k) for t, k in ((0, 0), (0.5, 3), (1, 0), (1.2, 0), (1, 9), (0, 1), (1, 0))
    ]
    batch = SamplingBatch.build([(config, seed) for seed, config in enumerate(configs)])
    whole = sample(logits, batch, torch.arange(7))
    monkeypatch.setattr(sampling, "_CPU_ELEMENTS", 1200)
    parts = sample(logits, batch, torch.arange(7))
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


def test_zero_probability_is_never_drawn_and_the_ends_are_safe():
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [3, 500, 997]] = 0.0
    tokens, logprobs = draw(logits, SamplingConfig(), 5000)
    assert set(tokens.tolist()) == {3, 500, 997}
    assert torch.allclose(logprobs, torch.tensor(1 / 3).log().expand(5000), atol=1e-5)


def test_not_finite_logits_show_in_the_logprob():
    for bad in (math.nan, math.inf):
        logits = torch.zeros(1, 300)
        logits[0, 5] = bad
        tokens, logprobs = draw(logits, SamplingConfig(), 2)
        assert logprobs.isnan().all()
        assert ((tokens >= 0) & (tokens < 300)).all()


def test_bfloat16_logits_are_computed_on_in_float32():
    logits = torch.randn(1, 500).bfloat16()
    tokens, logprobs = draw(logits, SamplingConfig(temperature=0.7), 20)
    assert torch.allclose(logprobs, (logits.float() / 0.7).log_softmax(-1)[0][tokens], atol=1e-5)
