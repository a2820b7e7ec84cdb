"""The engines against the contract."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.rollout.embedded import EmbeddedEngine
from tests.rollout import contract
from tests.rollout.contract import Subject
from tests.rollout.fake_engine import ScriptedEngine
from tests.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def embedded(request) -> Subject:
    device = torch.device(request.param)
    sampled = tiny_model(scale=5).to(device)

    def make(eos, rows):
        return EmbeddedEngine(sampled, tiny_tokenizer(), eos, rows, device)

    return Subject(make, tiny_tokenizer(), tiny_model(scale=5))


@pytest.fixture
def scripted() -> Subject:
    def echo(request):
        """The prompt, over and over, shifted by the seed: an answer that names its request."""
        shift = request.seed % 7
        return [3 + (int(t) + shift) % 90 for t in request.token_ids] + list(range(10, 10 + shift))

    def make(eos, rows):
        return ScriptedEngine(echo, eos, delay=lambda request: request.seed * 7919 % 13, pace=1e-4)

    return Subject(make, tiny_tokenizer())


@pytest.mark.parametrize("check", contract.SCHEDULING + contract.NUMBERS, ids=lambda check: check.__name__)
def test_embedded_engine(check, embedded):
    asyncio.run(asyncio.wait_for(check(embedded), 60))


@pytest.mark.parametrize("check", contract.SCHEDULING, ids=lambda check: check.__name__)
def test_scripted_engine(check, scripted):
    asyncio.run(asyncio.wait_for(check(scripted), 60))


@pytest.mark.slow
def test_a_real_model_in_bfloat16():
    from surefoot.data.pretrained import resolve_model

    folder = resolve_model("smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    subject = Subject(lambda eos, rows: EmbeddedEngine(model, tokenizer, eos, rows, CPU), tokenizer, model)
    requests = contract.groups(subject)

    async def sample():
        return await asyncio.gather(*map(subject.make([subject.eos], 24).generate, requests))

    gaps = []
    for request, answer in zip(requests, asyncio.run(sample()), strict=True):
        expected = subject.reference(request, answer).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0]
        gaps += (chosen - torch.tensor(answer.logprobs)).abs().tolist()
    assert sum(gaps) / len(gaps) < 0.1


@pytest.mark.slow
def test_greedy_equals_generate_on_a_real_model():
    from surefoot.data.pretrained import resolve_model

    folder = resolve_model("smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    subject = Subject(lambda eos, rows: EmbeddedEngine(model, tokenizer, eos, rows, CPU), tokenizer, model)
    asyncio.run(contract.greedy_equals_generate(subject, count=12, length=24))
    asyncio.run(contract.logprobs_are_those_of_the_distribution_sampled_from(subject))
