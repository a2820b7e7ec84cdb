"""Rollout programs: what was sampled is what is trained on, turn after turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.algorithms.credit import assign_credit
from surefoot.config.rollout import RolloutConfig, SamplingConfig
from surefoot.data.template import make_template
from surefoot.errors import UserError
from surefoot.records import Metric, Prompt, Reward, Scores
from surefoot.rollout.api import Completion, ProgramContext
from surefoot.rollout.builder import RolloutBuilder
from surefoot.rollout.embedded import EmbeddedEngine
from surefoot.rollout.programs import load_program
from surefoot.rollout.single_turn import single_turn
from surefoot.seeds import derive_seed
from surefoot.tracking.metrics import rollout_metrics
from tests.algorithms.runs import algorithm
from tests.rollout.calculator_program import calculator
from tests.rollout.fake_engine import ScriptedEngine
from tests.rollout.test_stopping import BYTES
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def context(num_samples=1, tokenizer=TOKENIZER, **sampling) -> ProgramContext:
    options = {"max_response_length": 400, **sampling}
    return ProgramContext(
        make_template(tokenizer), SamplingConfig(**options), num_samples, lambda i, turn: derive_seed(0, i, turn)
    )


def prompt_of(text: str, name: str = "p") -> Prompt:
    messages = ({"role": "user", "content": text},)
    rendered = make_template(TOKENIZER).render(messages)
    return Prompt(name, np.array(TOKENIZER.encode(rendered), np.int32), rendered, messages)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def turns(*texts: str):
    """A script that says one text a turn; the turn is how many assistant headers the request ends."""
    header = encode("<|im_start|>assistant\n")

    def script(request):
        ids = request.token_ids.tolist()
        turn = sum(ids[i : i + len(header)] == header for i in range(len(ids))) - 1
        return encode(texts[min(turn, len(texts) - 1)])

    return script


def run(program, prompt, engine, ctx):
    return asyncio.run(program(prompt, engine, ctx))


CALL = '<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call><|im_end|>'


def test_ids_sent_are_ids_trained_and_only_sampled_tokens_are_unmasked():
    engine = ScriptedEngine(turns(CALL, CALL, "It is 8.<|im_end|>"), [EOS])
    prompt = prompt_of("2+3+3?")
    (rollout,) = run(calculator, prompt, engine, context())
    for request in engine.requests:
        assert rollout.token_ids[: len(request.token_ids)].tolist() == request.token_ids.tolist()
    text = TOKENIZER.decode(rollout.token_ids.tolist())
    answered = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert text == prompt.text + CALL + answered + CALL + answered + "It is 8.<|im_end|>"
    sampled = TOKENIZER.decode(rollout.token_ids[rollout.loss_mask].tolist())
    assert sampled == CALL + CALL + "It is 8.<|im_end|>"
    assert (rollout.logprobs[rollout.loss_mask] == -0.5).all()
    assert (rollout.logprobs[~rollout.loss_mask] == 0).all()
    assert len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.logprobs) == len(rollout.policy_version)
    assert rollout.finish_reason == "stop"
    assert rollout.response.endswith("It is 8.")


def test_the_separator_after_each_turn_is_there_once_and_masked():
    engine = ScriptedEngine(turns(CALL, CALL, "ok<|im_end|>"), [EOS])
    (rollout,) = run(calculator, prompt_of("?"), engine, context())
    ids, mask = rollout.token_ids, rollout.loss_mask
    ends = np.flatnonzero((ids == EOS) & mask)
    newline = encode("\n")[0]
    assert len(ends) == 3
    for end in ends[:-1]:
        assert ids[end + 1] == newline
        assert not mask[end + 1]
        assert ids[end + 2] == encode("<|im_start|>")[0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"name": "add", "argum', "JSONDecodeError"),
        ('["add", 1, 2]', "TypeError"),
        ('{"name": "subtract", "arguments": {}}', "KeyError"),
        ('{"name": "add", "arguments": {"a": 1}}', "TypeError"),
    ],
)
def test_a_malformed_call_is_answered_and_costs_nothing_else(call, told):
    def script(request):
        bad = request.id.startswith("bad")
        return turns(f"<call>{call}</call><|im_end|>" if bad else CALL, "done<|im_end|>")(request)

    async def batch():
        engine = ScriptedEngine(script, [EOS])
        prompts = [prompt_of("2+3?", name) for name in ("good 1", "bad", "good 2")]
        return await asyncio.gather(*(calculator(p, engine, context(2)) for p in prompts))

    good, bad, other = asyncio.run(batch())
    for rollouts in (good, bad, other):
        assert len(rollouts) == 2
        assert all(r.response.endswith("done") for r in rollouts)
    text = TOKENIZER.decode(bad[0].token_ids.tolist())
    assert f"<|im_start|>tool\nerror: {told}" in text
    assert "error" not in TOKENIZER.decode(bad[0].token_ids[bad[0].loss_mask].tolist())
    counted = rollout_metrics([*good, *bad, *other])
    assert counted["rollout/tool_errors"] == Metric(2.0, kind="sum")  # the two samples of the bad prompt
    assert "rollout/tool_errors" not in rollout_metrics(good)


def test_completions_stay_with_their_prompt_through_uneven_turns_in_any_order():
    def script(request):
        name = request.id.split("/")[0]
        sample = int(request.id.split("/")[1])
        return turns(*[CALL] * (sample % 3), f"{name}-{sample}<|im_end|>")(request)

    async def batch():
        engine = ScriptedEngine(script, [EOS], delay=lambda r: r.seed % 17)
        prompts = [prompt_of("?", f"prompt{i}") for i in range(5)]
        return await asyncio.gather(*(calculator(p, engine, context(4)) for p in prompts))

    for i, rollouts in enumerate(asyncio.run(batch())):
        assert [r.sample_index for r in rollouts] == [0, 1, 2, 3]
        assert [r.response.splitlines()[-1] for r in rollouts] == [f"prompt{i}-{s}" for s in range(4)]


def test_the_length_limit_bounds_all_turns_together():
    engine = ScriptedEngine(turns(CALL), [EOS])
    ctx = context(max_response_length=len(encode(CALL)) + 60)
    prompt = prompt_of("?")
    (rollout,) = run(calculator, prompt, engine, ctx)
    assert len(rollout.token_ids) == len(prompt.token_ids) + ctx.sampling.max_response_length
    assert rollout.finish_reason == "length"


def test_context_past_the_limit_ends_in_an_empty_turn_and_is_not_trained():
    engine = ScriptedEngine(turns(CALL), [EOS])
    prompt = prompt_of("?")
    (rollout,) = run(calculator, prompt, engine, context(max_response_length=len(encode(CALL)) + 2))
    assert len(engine.requests) == 1
    assert rollout.token_ids.tolist() == prompt.token_ids.tolist() + encode(CALL)
    assert rollout.finish_reason == "length"
    assert rollout.loss_mask[-1]


def test_the_turn_limit_has_its_own_reason_and_leaves_no_trailing_context():
    engine = ScriptedEngine(turns(CALL), [EOS])
    (rollout,) = run(calculator, prompt_of("?"), engine, context())
    assert rollout.finish_reason == "tool_limit"
    assert rollout.loss_mask[-1]
    assert len(engine.requests) == 4


def test_a_rollout_aborted_before_its_first_token_is_its_prompt():
    engine = ScriptedEngine(turns(CALL), [EOS])
    prompt = prompt_of("?")

    async def scenario():
        row = RolloutBuilder(prompt, 0, context())
        task = asyncio.create_task(row.sample(engine))
        await asyncio.sleep(0)
        await engine.abort(engine.requests[0].id)
        await task
        return row.build()

    rollout = asyncio.run(scenario())
    assert rollout.token_ids.tolist() == prompt.token_ids.tolist()
    assert not rollout.loss_mask.any()
    assert (rollout.finish_reason, rollout.response) == ("aborted", "")


@pytest.mark.parametrize("limit", [4, 50])
def test_tokens_that_no_encoding_gives_are_trained_as_sampled(limit):
    said = [BYTES.convert_tokens_to_ids(t) for t in ("a", "b", "<", "/")]
    assert BYTES.encode("ab</") != said
    prompt = Prompt("p", np.array(BYTES.encode("hey"), np.int32), "hey", ())
    engine = ScriptedEngine(lambda request: said, [said[-1]])
    (rollout,) = run(single_turn, prompt, engine, context(tokenizer=BYTES, max_response_length=limit))
    assert rollout.token_ids[3:].tolist() == said
    assert rollout.response == "ab</"


def test_the_reward_lands_on_the_custom_stop_token_that_ended_the_row():
    model = tiny_model(scale=5)
    engine = EmbeddedEngine(model, TOKENIZER, [EOS], 8, torch.device("cpu"))
    prompt = prompt_of("hello")
    free = run(single_turn, prompt, engine, context(4, max_response_length=20))
    stop = int(free[0].token_ids[len(prompt.token_ids) + 5])  # some token of the first row, not the end of sequence
    rollouts = run(single_turn, prompt, engine, context(4, max_response_length=20, stop_token_ids=[stop]))
    assert rollouts[0].finish_reason == "stop"
    assert rollouts[0].token_ids[-1] == stop
    rows = [replace(rollout, reward=Reward(3.0)) for rollout in rollouts]
    values = [Scores(values=np.zeros(len(r.token_ids), np.float32)) for r in rows]
    half = algorithm(name="ppo", gamma=0.5, whiten_advantages=False)
    for sample in assign_credit(rows, values, half, 0.0)[0]:
        returns = sample.returns[sample.loss_mask]
        # Discounted by 1/2 a token from the last one, which holds all of the score.
        assert returns.tolist() == [3.0 * 0.5**k for k in range(len(returns))][::-1]
        assert not sample.returns[~sample.loss_mask].any()


def test_single_turn_on_the_real_engine():
    model = tiny_model(scale=5)
    engine = EmbeddedEngine(model, TOKENIZER, [EOS], 8, torch.device("cpu"))
    prompt = prompt_of("hello")
    rollouts = run(single_turn, prompt, engine, context(4, max_response_length=20, temperature=0.7))
    assert len({tuple(r.token_ids.tolist()) for r in rollouts}) == 4
    for rollout in rollouts:
        start = len(prompt.token_ids)
        assert rollout.token_ids[:start].tolist() == prompt.token_ids.tolist()
        assert rollout.loss_mask.tolist() == [False] * start + [True] * (len(rollout.token_ids) - start)
        assert rollout.num_model_tokens <= 20
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rollout.token_ids[None]).long()).logits[0] / 0.7
        expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(rollout.token_ids[1:]).long()[:, None])[:, 0]
        assert np.allclose(rollout.logprobs[start:], expected[start - 1 :].numpy(), atol=1e-4)


def test_the_calculator_on_the_real_engine_reads_what_it_wrote():
    """Random weights seldom call a tool, so the call is put into their mouth: the turns between still line up."""
    model = tiny_model(scale=5)
    engine = EmbeddedEngine(model, TOKENIZER, [EOS], 8, torch.device("cpu"))
    ctx = context(max_response_length=120)

    async def scenario():
        row = RolloutBuilder(prompt_of("2+3?"), 0, ctx)
        first = await row.sample(engine)
        row.add_context(encode("\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"))
        second = await row.sample(engine)
        return row.build(), first, second

    rollout, first, second = asyncio.run(scenario())
    assert rollout.token_ids[rollout.loss_mask].tolist() == [*first.token_ids.tolist(), *second.token_ids.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rollout.token_ids[None]).long()).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(rollout.token_ids[1:]).long()[:, None])[:, 0]
    mask = rollout.loss_mask[1:]
    assert np.allclose(rollout.logprobs[1:][mask], expected.numpy()[mask], atol=1e-4)


def test_versions_of_each_turn_are_kept():
    row = RolloutBuilder(prompt_of("?"), 0, context())

    class Versioned(ScriptedEngine):
        async def generate(self, request) -> Completion:
            answer = await super().generate(request)
            self.version += 1
            return answer

    engine = Versioned(lambda request: [5, 6, EOS], [EOS])

    async def scenario():
        await row.sample(engine)
        row.add_context([7, 8])
        await row.sample(engine)
        return row.build()

    rollout = asyncio.run(scenario())
    assert rollout.policy_version[-8:].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert rollout.loss_mask[-8:].tolist() == [True] * 3 + [False] * 2 + [True] * 3


HERE = Path(__file__).parent / "calculator_program.py"


def test_programs_are_found_by_name_and_by_path():
    engine = ScriptedEngine(turns(CALL), [EOS])
    assert len(run(load_program(RolloutConfig()), prompt_of("?"), engine, context(3))) == 3
    config = RolloutConfig(program=f"{HERE}:calculator", program_params={"max_turns": 2})
    engine = ScriptedEngine(turns(CALL), [EOS])
    run(load_program(config), prompt_of("?"), engine, context())
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("program", "params", "code", "key"),
    [
        ("multi_turns", {}, "rollout-program", "rollout.program"),
        (f"{HERE}:calculatr", {}, "plugin-not-found", "rollout.program"),
        (f"{HERE}:call_tool", {}, "rollout-program", "rollout.program"),
        (f"{HERE}:calculator", {"max_turn": 2}, "rollout-program", "rollout.program_params"),
        ("single_turn", {"max_turns": 2}, "rollout-program", "rollout.program_params"),
    ],
)
def test_programs_that_cannot_run_are_refused_before_anything_loads(program, params, code, key):
    with pytest.raises(UserError) as failure:
        load_program(RolloutConfig(program=program, program_params=params))
    assert (failure.value.code, failure.value.key) == (code, key)
