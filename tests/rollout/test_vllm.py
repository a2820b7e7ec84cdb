"""vLLM against the same contract as the others, and the ways of weights into it, on its CPU build."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from surefoot.config.rollout import VllmConfig
from surefoot.errors import RunError, UserError
from surefoot.records import Floats
from surefoot.rollout.api import Request
from surefoot.rollout.probe import compare
from surefoot.rollout.vllm_engine import VllmEngine, VllmSettings
from surefoot.sync.parcel import Parcel
from surefoot.sync.publish import Publisher
from surefoot.train.shard import whole_weights
from tests.rollout import contract
from tests.rollout.contract import Subject
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.slow

OPTIONS = {"hidden": 128, "scale": 5}  # vLLM's CPU attention wants heads of at least 32


@dataclass
class Source:
    """A model's weights, published as a trainer does it."""

    model: torch.nn.Module
    bucket: int = 1 << 16

    async def parcels(self) -> AsyncIterator[Parcel]:
        publisher = Publisher(self.bucket, torch.device("cpu"), same_gpu=False)
        publisher.begin(whole_weights(self.model, torch.float32))
        while (parcel := publisher.next_parcel()) is not None:
            yield parcel
        publisher.close()


class Shared:
    """vLLM's engine, started once: closing a subject's engine leaves it running."""

    def __init__(self, llm) -> None:
        self._llm = llm

    def __getattr__(self, name: str):
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        pass


@dataclass
class Running:
    runner: asyncio.Runner
    llm: Shared
    settings: VllmSettings

    def engine(self, eos: list[int], stream: bool = False) -> VllmEngine:
        return VllmEngine(self.llm, replace(self.settings, eos_token_ids=tuple(eos), stream=stream))


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    folder = save_tiny(tmp_path_factory.mktemp("model"), **OPTIONS)
    settings = VllmSettings(
        model=str(folder), dtype="float32", trust_remote_code=False, max_length=1024, max_rows=64, eos_token_ids=(),
        seed=1, config=VllmConfig(), kv_cache_bytes=1 << 27,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        engine = runner.run(VllmEngine.start(settings))
        yield Running(runner, Shared(engine._llm), settings)
        runner.run(engine.close())


@pytest.mark.parametrize("stream", [False, True], ids=["whole answers", "streaming"])
@pytest.mark.parametrize("check", contract.SCHEDULING + contract.NUMBERS, ids=lambda check: check.__name__)
def test_vllm_engine(check, stream: bool, running: Running):
    if check is contract.every_token_carries_the_version_that_sampled_it and not stream:
        pytest.skip("weights change while requests are open only where answers are streamed")
    model = tiny_model(**OPTIONS)
    subject = Subject(lambda eos, rows: running.engine(eos, stream), tiny_tokenizer(), model, Source(model))
    running.runner.run(asyncio.wait_for(check(subject), 120))


def requests_of(subject: Subject, count: int = 4) -> list[Request]:
    return [subject.request(f"r{i}/0/0/0", "Hello" + "!" * i, seed=i) for i in range(count)]


async def gap_to(model: torch.nn.Module, engine: VllmEngine, subject: Subject) -> float:
    """Mean |difference| between the engine's log-probabilities and a model's."""
    requests = requests_of(subject)
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    judge = replace(subject, model=model)
    scores: list[Floats] = []
    for request, answer in zip(requests, answers, strict=True):
        logits = judge.reference(request, answer).log_softmax(-1)
        scores.append(logits.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0].numpy())
    return compare(answers, scores).mean


def changed(model: torch.nn.Module, names: str = "") -> torch.nn.Module:
    """The model after a large update of some of its parameters."""
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if names in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return other


@pytest.mark.parametrize("how", ["full", "merged adapter", "asleep between"])
def test_after_a_large_update_the_engine_is_the_trainer(how: str, running: Running):
    """A large step on all weights, or on LoRA adapters that are merged on their way, with the tied head among them."""
    base = tiny_model(**OPTIONS)
    subject = Subject(lambda eos, rows: running.engine(eos), tiny_tokenizer(), base)
    new = changed(base)
    if how == "merged adapter":
        from peft import LoraConfig, get_peft_model

        new = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules="all-linear"))
        new = changed(new, "lora_").eval()

    async def scenario() -> tuple[float, float, float]:
        engine = running.engine([])
        await engine.update_weights(Source(base), 1)
        before = await gap_to(base, engine, subject)
        off = await gap_to(new, engine, subject)
        if how == "asleep between":
            await engine.sleep(2)
        await engine.update_weights(Source(new), 2)
        await engine.wake()
        return before, off, await gap_to(new, engine, subject)

    before, off, after = running.runner.run(scenario())
    assert before < 1e-4
    assert off > 0.05  # the engine without the update is far from the trainer: the test can fail
    assert after < 1e-4


LOST = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("harm", ["left out", "other value", "nothing at all"])
def test_a_sync_that_does_not_bring_everything_is_refused_by_name(harm: str, tmp_path, running: Running):
    base = tiny_model(**OPTIONS)

    class Broken(Source):
        async def parcels(self) -> AsyncIterator[Parcel]:
            async for parcel in super().parcels():
                items = list(zip(parcel.items, parcel.fingerprints, strict=True))
                if harm == "left out":
                    items = [(i, f) for i, f in items if i.name != LOST]
                if harm == "other value":
                    items = [(i, f + (i.name == LOST)) for i, f in items]
                if harm == "nothing at all":
                    items = []
                if items:
                    yield Parcel(tuple(i for i, _ in items), tuple(f for _, f in items), parcel.addresses)

    async def scenario() -> None:
        # An engine of its own: half a reload leaves vLLM's model unusable, as the run that ends here is.
        engine = await VllmEngine.start(replace(running.settings, model=str(save_tiny(tmp_path / "model", **OPTIONS))))
        try:
            await engine.update_weights(Broken(base), 1)
        finally:
            await engine.close()

    with pytest.raises(RunError) as caught:
        running.runner.run(scenario())
    assert caught.value.code == "weights-not-delivered"
    assert "was never sent" in str(caught.value) if harm == "nothing at all" else LOST in str(caught.value)


def test_what_an_engine_would_refuse_is_told_before_it_is_asked(running: Running):
    subject = Subject(lambda eos, rows: running.engine(eos), tiny_tokenizer())

    async def ask(request: Request) -> None:
        await running.engine([]).generate(request)

    with pytest.raises(UserError, match="at most 1024 together"):
        running.runner.run(ask(subject.request("long", "Hello", max_response_length=1020)))
    with pytest.raises(UserError, match="no prompt tokens"):
        running.runner.run(ask(Request("none", np.empty(0, np.int32), subject.request("x", "x").sampling, 0)))
