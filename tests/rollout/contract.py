"""What every inference engine promises. An engine's own test runs each check of `CHECKS` on a `Subject`.

`SCHEDULING` asks nothing of the numbers; `NUMBERS` compares with the model itself, in float32.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surefoot.config.rollout import SamplingConfig
from surefoot.rollout.api import Completion, InferenceEngine, Request, WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An engine under test. `make(eos_token_ids, max_concurrent_rows)` gives a fresh one over `model`'s weights."""

    make: Callable[[list[int], int], InferenceEngine]
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel | None = None
    source: WeightSource | None = None  # the same weights, for engines that have their own

    @property
    def eos(self) -> int:
        assert self.tokenizer.eos_token_id is not None
        return int(self.tokenizer.eos_token_id)

    def request(self, name: str, text: str, seed: int = 0, **sampling) -> Request:
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
        return Request(name, ids, SamplingConfig(**{"max_response_length": 12, **sampling}), seed)

    def reference(self, request: Request, completion: Completion) -> torch.Tensor:
        """The model's own logits `[N, V]` for each sampled token, by one plain forward pass."""
        assert self.model is not None
        ids = np.concatenate([request.token_ids, completion.token_ids])
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor(ids[None]).long(), use_cache=False).logits[0].float()
        return logits[len(request.token_ids) - 1 : -1]


PROMPTS = ["Hello", "What is 2 + 2?", "x", "Say it again, and again, and then once more.", "So", "The end"]


def groups(subject: Subject, n: int = 4, **sampling) -> list[Request]:
    """n samples of each prompt, of uneven lengths."""
    return [
        subject.request(f"{p}/{i}", text, seed=1000 * p + i, max_response_length=3 + (5 * p + 7 * i) % 20, **sampling)
        for p, text in enumerate(PROMPTS)
        for i in range(n)
    ]


async def alone(subject: Subject, requests: list[Request]) -> dict[str, Completion]:
    """Each request by itself."""
    engine = subject.make([subject.eos], 4)
    answers = {request.id: await engine.generate(request) for request in requests}
    await engine.close()
    return answers


def same(a: Completion, b: Completion) -> bool:
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        and a.finish_reason == b.finish_reason
    )


async def every_completion_belongs_to_its_own_prompt_whatever_else_runs(subject: Subject) -> None:
    requests = groups(subject)
    expected = await alone(subject, requests)
    for slots in (1, 5, 64):
        random.Random(slots).shuffle(requests)
        engine = subject.make([subject.eos], slots)
        answers = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        for request, answer in zip(requests, answers, strict=True):
            assert same(answer, expected[request.id]), (slots, request.id)


async def requests_may_come_at_any_time(subject: Subject) -> None:
    requests = groups(subject)
    expected = await alone(subject, requests)
    engine = subject.make([subject.eos], 3)
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(engine.generate(request)))
        await asyncio.sleep(0.001)
    for request, task in zip(requests, tasks, strict=True):
        assert same(await task, expected[request.id])
    await engine.close()


async def the_length_limit_is_kept(subject: Subject) -> None:
    engine = subject.make([], 8)
    lengths = [1, 2, 17]
    answers = await asyncio.gather(
        *(engine.generate(subject.request(str(n), "Hello", max_response_length=n)) for n in lengths)
    )
    assert [len(a.token_ids) for a in answers] == lengths
    assert {a.finish_reason for a in answers} == {"length"}
    await engine.close()


async def columns_have_one_entry_a_token(subject: Subject) -> None:
    engine = subject.make([subject.eos], 8)
    answer = await engine.generate(subject.request("a", "Hello"))
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.policy_version)
    assert (answer.token_ids.dtype, answer.logprobs.dtype, answer.policy_version.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )
    assert (answer.logprobs <= 0).all()
    await engine.close()


async def an_aborted_request_returns_what_it_has(subject: Subject) -> None:
    engine = subject.make([], 1)
    running = asyncio.create_task(engine.generate(subject.request("running", "Hello", max_response_length=900)))
    waiting = asyncio.create_task(engine.generate(subject.request("waiting", "So", max_response_length=900)))
    other = asyncio.create_task(engine.generate(subject.request("other", "Hello", max_response_length=5)))
    await asyncio.sleep(0.02)
    await engine.abort("waiting")
    await engine.abort("running")
    await engine.abort("nobody")
    assert (await running).finish_reason == "aborted"
    assert len((await running).token_ids) < 900
    assert (await waiting).finish_reason == "aborted"
    assert len((await other).token_ids) == 5
    await engine.close()


async def a_cancelled_call_gives_its_place_back(subject: Subject) -> None:
    engine = subject.make([], 1)
    task = asyncio.create_task(engine.generate(subject.request("long", "Hello", max_response_length=900)))
    await asyncio.sleep(0.02)
    task.cancel()
    answer = await asyncio.wait_for(engine.generate(subject.request("next", "So", max_response_length=3)), 20)
    assert len(answer.token_ids) == 3
    assert task.cancelled()
    await engine.close()


async def every_token_carries_the_version_that_sampled_it(subject: Subject) -> None:
    engine = subject.make([], 2)
    await engine.update_weights(subject.source, 3)
    assert engine.version == 3
    task = asyncio.create_task(engine.generate(subject.request("a", "Hello", max_response_length=900)))
    await asyncio.sleep(0.02)
    await engine.update_weights(subject.source, 4)
    versions = (await task).policy_version
    assert versions[0] == 3
    assert versions[-1] == 4
    assert (np.diff(versions) >= 0).all()
    later = await engine.generate(subject.request("b", "Hello"))
    assert set(later.policy_version.tolist()) == {4}
    await engine.close()


async def a_sleeping_engine_lets_requests_wait(subject: Subject) -> None:
    engine = subject.make([], 2)
    await engine.sleep()
    task = asyncio.create_task(engine.generate(subject.request("a", "Hello", max_response_length=3)))
    await asyncio.sleep(0.02)
    assert not task.done()
    await engine.wake()
    assert len((await asyncio.wait_for(task, 20)).token_ids) == 3
    await engine.sleep()
    await engine.wake()
    await engine.close()


async def sleep_in_the_middle_changes_nothing(subject: Subject) -> None:
    requests = groups(subject, n=2)
    expected = await alone(subject, requests)
    engine = subject.make([subject.eos], 5)
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    for _ in range(3):
        await asyncio.sleep(0.004)
        await engine.sleep()
        await engine.wake()
    for request, task in zip(requests, tasks, strict=True):
        assert same(await task, expected[request.id])
    await engine.close()


async def an_idle_engine_does_nothing(subject: Subject) -> None:
    engine = subject.make([], 2)
    before = len(asyncio.all_tasks())
    await engine.generate(subject.request("a", "Hello", max_response_length=2))
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == before
    await engine.close()


async def any_of_several_end_ids_ends_a_response(subject: Subject) -> None:
    plain = await alone(subject, [subject.request("a", "Hello", seed=5, max_response_length=12)])
    tokens = plain["a"].token_ids.tolist()
    for ends, stop_ids in (([subject.eos, tokens[4]], []), ([subject.eos], [tokens[4]])):
        engine = subject.make(ends, 2)
        answer = await engine.generate(subject.request("a", "Hello", seed=5, stop_token_ids=stop_ids))
        assert answer.finish_reason == "stop"
        assert answer.token_ids.tolist() == tokens[: tokens.index(tokens[4]) + 1]
        await engine.close()


async def the_same_seed_gives_the_same_tokens(subject: Subject) -> None:
    engine = subject.make([], 8)
    names = ["a", "b", "c"]
    answers = await asyncio.gather(
        *(engine.generate(subject.request(n, "Hello", seed=s)) for n, s in zip(names, (1, 1, 2), strict=True))
    )
    assert answers[0].token_ids.tolist() == answers[1].token_ids.tolist()
    assert answers[0].token_ids.tolist() != answers[2].token_ids.tolist()
    await engine.close()


async def a_stop_string_ends_a_response_and_stays_in_it(subject: Subject) -> None:
    plain = (await alone(subject, [subject.request("a", "Hello", seed=3, max_response_length=12)]))["a"]
    decode = subject.tokenizer.decode
    text = decode(plain.token_ids.tolist())
    stop = text[2:5]
    engine = subject.make([], 2)
    answer = await engine.generate(subject.request("a", "Hello", seed=3, stop=["not in there", stop]))
    assert answer.finish_reason == "stop"
    assert stop in decode(answer.token_ids.tolist())
    assert stop not in decode(answer.token_ids.tolist()[:-1])
    assert answer.token_ids.tolist() == plain.token_ids.tolist()[: len(answer.token_ids)]
    await engine.close()


async def greedy_equals_generate(subject: Subject, count: int = 50, length: int = 12) -> None:
    assert subject.model is not None
    engine = subject.make([subject.eos], 16)
    requests = [
        subject.request(
            str(i),
            "".join(chr(97 + (i * k) % 26) for k in range(1, 3 + i % 17)),
            temperature=0,
            max_response_length=length,
        )
        for i in range(count)
    ]
    answers = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor(request.token_ids[None]).long()
        expected = subject.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length,
            eos_token_id=subject.eos, pad_token_id=subject.eos,
        )  # fmt: skip
        assert answer.token_ids.tolist() == expected[0, ids.shape[1] :].tolist(), request.id


async def logprobs_are_those_of_the_distribution_sampled_from(subject: Subject) -> None:
    engine = subject.make([subject.eos], 8)
    for temperature in (1.0, 0.6):
        requests = groups(subject, n=2, temperature=temperature)
        for request, answer in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            expected = (subject.reference(request, answer) / temperature).log_softmax(-1)
            chosen = expected.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0]
            assert np.allclose(answer.logprobs, chosen.numpy(), atol=1e-4)
    await engine.close()


async def a_greedy_logprob_is_untempered(subject: Subject) -> None:
    engine = subject.make([subject.eos], 8)
    request = subject.request("a", "Hello", temperature=0)
    answer = await engine.generate(request)
    expected = subject.reference(request, answer).log_softmax(-1).max(-1)
    assert answer.token_ids.tolist() == expected.indices.tolist()
    assert np.allclose(answer.logprobs, expected.values.numpy(), atol=1e-4)
    await engine.close()


async def filters_keep_and_renormalise(subject: Subject) -> None:
    engine = subject.make([subject.eos], 8)
    for options in ({"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}):
        requests = groups(subject, n=2, **options)
        for request, answer in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            probs = subject.reference(request, answer).softmax(-1)
            ranked = probs.sort(-1, descending=True).values
            kept = {
                "top_k": ranked[:, 2:3],
                "top_p": ranked.gather(1, (ranked.cumsum(-1) < 0.3).sum(-1, keepdim=True)),
                "min_p": ranked[:, :1] * 0.5,
            }[next(iter(options))]
            allowed = probs.where(probs >= kept * (1 - 1e-5), 0)
            expected = (allowed / allowed.sum(-1, keepdim=True)).log()
            chosen = expected.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0]
            assert np.allclose(answer.logprobs, chosen.numpy(), atol=1e-3), options
    await engine.close()


async def rows_with_different_sampling_run_together(subject: Subject) -> None:
    mixed = [
        subject.request("greedy", "Hello", temperature=0),
        subject.request("cold", "Hello", temperature=0.3, seed=1),
        subject.request("filtered", "Hello", top_k=4, top_p=0.8, seed=2),
        subject.request("plain", "Hello", seed=3),
    ]
    expected = await alone(subject, mixed)
    engine = subject.make([subject.eos], 8)
    for request, answer in zip(mixed, await asyncio.gather(*map(engine.generate, mixed)), strict=True):
        assert same(answer, expected[request.id]), request.id
    await engine.close()


Check = Callable[[Subject], Awaitable[None]]

SCHEDULING: list[Check] = [
    every_completion_belongs_to_its_own_prompt_whatever_else_runs,
    requests_may_come_at_any_time,
    the_length_limit_is_kept,
    columns_have_one_entry_a_token,
    an_aborted_request_returns_what_it_has,
    a_cancelled_call_gives_its_place_back,
    every_token_carries_the_version_that_sampled_it,
    a_sleeping_engine_lets_requests_wait,
    sleep_in_the_middle_changes_nothing,
    an_idle_engine_does_nothing,
    any_of_several_end_ids_ends_a_response,
]

NUMBERS: list[Check] = [
    the_same_seed_gives_the_same_tokens,
    a_stop_string_ends_a_response_and_stays_in_it,
    greedy_equals_generate,
    logprobs_are_those_of_the_distribution_sampled_from,
    a_greedy_logprob_is_untempered,
    filters_keep_and_renormalise,
    rows_with_different_sampling_run_together,
]
