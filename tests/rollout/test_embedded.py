"""What the embedded engine promises beyond the contract: the module, its weights, and failures."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from surefoot.config.rollout import SamplingConfig
from surefoot.errors import RunError, UserError
from surefoot.rollout import packed_linear
from surefoot.rollout.api import Request
from surefoot.rollout.embedded import EmbeddedEngine
from tests.rollout.contract import Subject, groups, same
from tests.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def make(model, rows=8, eos=()) -> EmbeddedEngine:
    return EmbeddedEngine(model, tiny_tokenizer(), list(eos), rows, CPU)


def subject(model) -> Subject:
    return Subject(lambda eos, rows: EmbeddedEngine(model, tiny_tokenizer(), eos, rows, CPU), tiny_tokenizer(), model)


def run_all(engine, requests):
    async def gather():
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(gather())


def worst_gap(model, requests, answers) -> float:
    """Largest difference between the engine's log-probabilities and those of a plain forward pass."""
    world = subject(model)
    gaps = []
    for request, answer in zip(requests, answers, strict=True):
        expected = world.reference(request, answer).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0]
        gaps.append(float(np.abs(chosen.numpy() - answer.logprobs).max()))
    return max(gaps)


def test_a_shared_prefix_is_exact_however_many_share_it():
    model = tiny_model(scale=5)
    requests = groups(subject(model), n=5)
    together = run_all(make(model, rows=64), requests)
    for request, answer in zip(requests, together, strict=True):
        assert same(answer, run_all(make(model), [request])[0])
    assert worst_gap(model, requests, together) < 1e-4


FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Gemma": {},
    "Gemma3Text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "Phi3": {"sliding_window": 5},
    "SmolLM3": {},
    "Olmo2": {},
    "Granite": {},
    "GPTNeoX": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def family(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    common = {
        "vocab_size": len(tiny_tokenizer()), "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**common, **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_architectures(name):
    """Prompts longer and shorter than the window, alone and shared, responses that leave the window behind."""
    model = family(name, **FAMILIES[name])
    requests = groups(subject(model), n=3)
    assert worst_gap(model, requests, run_all(make(model, rows=64), requests)) < 2e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GptOss", {"num_local_experts": 4}),  # attention sinks
        ("Gemma2", {}),  # capped attention scores
        ("Bloom", {}),  # position biases, no attention interface
        ("Mamba", {}),  # no attention
    ],
)
def test_unsupported_attention_is_refused_before_anything_runs(name, options):
    with pytest.raises(UserError) as failure:
        make(family(name, **options))
    assert failure.value.code == "model-unsupported"
    assert failure.value.key == "model.path"


def test_an_engine_can_be_made_after_the_trainer_set_its_own_attention():
    from surefoot.train import attention

    model = tiny_model(scale=5)
    model.config._attn_implementation = attention.NAME
    requests = groups(subject(model), n=1)
    answers = run_all(make(model), requests)
    assert model.config._attn_implementation == attention.NAME
    model.config._attn_implementation = "sdpa"
    assert worst_gap(model, requests, answers) < 1e-4


def test_adapters_are_sampled_from_and_can_be_changed():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(scale=5), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = make(model.eval())
    requests = groups(subject(model), n=2)
    first = run_all(engine, requests)
    assert worst_gap(model, requests, first) < 1e-4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3)
    second = run_all(engine, requests)
    assert worst_gap(model, requests, second) < 1e-4
    assert not all(same(a, b) for a, b in zip(first, second, strict=True))


def test_the_next_rollout_samples_from_the_updated_weights():
    """With bfloat16, where packed copies of the weights are made: none outlives the rollout."""
    model = tiny_model(scale=5).bfloat16()
    engine = make(model)
    requests = [
        Request(str(i), np.array([5, 6, 7 + i], np.int32), SamplingConfig(max_response_length=40), i) for i in range(4)
    ]
    run_all(engine, requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    again = run_all(engine, requests)
    assert worst_gap(model, requests, again) < 0.25  # bfloat16's own noise; old weights give gaps of several nats


def test_an_update_in_the_middle_takes_effect_at_the_next_token():
    model = tiny_model(scale=5).bfloat16()
    engine = make(model)
    request = Request("a", np.array([5, 6, 7], np.int32), SamplingConfig(max_response_length=600), 0)

    async def scenario():
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.1)
        await engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        await engine.update_weights(None, 1)
        await engine.wake()
        return await task

    answer = asyncio.run(scenario())
    new = answer.policy_version == 1
    assert 0 < new.sum() < 600
    expected = subject(model).reference(request, answer).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(answer.token_ids).long()[:, None])[:, 0].numpy()
    # Sleep drops the cache, so what was sampled before is read by the new weights too.
    assert np.abs(chosen - answer.logprobs)[new].max() < 0.25
    assert np.abs(chosen - answer.logprobs)[~new].max() > 1


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products")
def test_packed_weights_give_the_same_products():
    model = tiny_model(hidden=128).bfloat16()
    x = torch.randn(1, 33, 128).bfloat16()
    layer = model.model.layers[0].self_attn.q_proj
    plain = layer(x)
    packed = packed_linear.PackedLinears(model)
    with torch.inference_mode(), packed.installed():
        assert "forward" in vars(layer)
        assert torch.allclose(layer(x).float(), plain.float(), rtol=1e-2, atol=1e-3)
    assert "forward" not in vars(layer)
    assert torch.equal(layer(x), plain)


def test_packing_is_left_out_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(packed_linear, "_MEMORY_SHARE", 0.0)
    model = tiny_model().bfloat16()
    with packed_linear.PackedLinears(model).installed():
        assert "forward" not in vars(model.lm_head)


def test_the_module_is_left_as_it_was_found():
    """Modes, attention, forwards and gradients, at the end and while a step waits for the next."""
    model = tiny_model(scale=5).bfloat16().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    implementation = model.config._attn_implementation
    weights = [p.clone() for p in model.parameters()]
    engine = make(model)

    def check():
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == implementation
        assert not any("forward" in vars(module) for module in model.modules())

    async def scenario():
        request = Request("a", np.array([5, 6], np.int32), SamplingConfig(max_response_length=60), 0)
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.05)
        await engine.sleep()
        check()
        await engine.wake()
        await task

    asyncio.run(scenario())
    check()
    assert engine._caches.own.num_bytes == engine._caches.prefixes.num_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dropout_and_compiled_blocks_do_not_reach_sampling():
    model = tiny_model(scale=5).train()
    model.config.attention_dropout = 0.5
    compiled = []
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    requests = groups(subject(model), n=1)
    answers = run_all(make(model), requests)
    assert compiled == []
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    assert worst_gap(model.eval(), requests, answers) < 1e-4


def test_a_failing_step_reaches_every_caller_and_the_engine_lives_on():
    model = tiny_model()
    engine = make(model, rows=2)
    requests = groups(subject(model), n=1)

    async def scenario():
        handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        results = await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), 20)
        handle.remove()
        assert [type(r) for r in results] == [ZeroDivisionError] * len(requests)
        await asyncio.gather(*map(engine.generate, requests))

    asyncio.run(scenario())


def test_weights_that_are_not_finite_end_the_rollout_with_a_word():
    model = tiny_model()
    engine = make(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError) as failure:
        run_all(engine, groups(subject(model), n=1))
    assert failure.value.code == "rollout-not-finite"


@pytest.mark.parametrize(
    ("ids", "length", "code"),
    [([], 5, "rollout-empty-prompt"), ([5] * 1020, 5, "rollout-too-long"), ([5], 1024, "rollout-too-long")],
)
def test_requests_that_cannot_be_served_are_refused_at_once(ids, length, code):
    engine = make(tiny_model())
    request = Request("a", np.array(ids, np.int32), SamplingConfig(max_response_length=length), 0)
    with pytest.raises(UserError) as failure:
        run_all(engine, [request])
    assert failure.value.code == code


def test_the_longest_request_that_fits_is_served():
    engine = make(tiny_model())
    request = Request("a", np.full(1020, 5, np.int32), SamplingConfig(max_response_length=4), 0)
    assert len(run_all(engine, [request])[0].token_ids) == 4


def test_an_id_that_is_in_use_is_refused():
    engine = make(tiny_model())
    request = Request("a", np.array([5], np.int32), SamplingConfig(max_response_length=4), 0)

    async def scenario():
        first = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        with pytest.raises(RunError) as failure:
            await engine.generate(request)
        assert failure.value.code == "rollout-request-id"
        assert len((await first).token_ids) == 4

    asyncio.run(scenario())


def test_rope_that_depends_on_the_batch_bounds_the_length():
    model = family(
        "Phi3", hidden_size=64, original_max_position_embeddings=64, max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    request = Request("a", np.array([5] * 60, np.int32), SamplingConfig(max_response_length=5), 0)
    with pytest.raises(UserError) as failure:
        run_all(make(model), [request])
    assert failure.value.want == "at most 64 together"


def test_one_engine_serves_several_event_loops_and_close_answers_what_is_open():
    engine = make(tiny_model())
    request = Request("a", np.array([5], np.int32), SamplingConfig(max_response_length=900), 0)
    short = Request("b", np.array([5], np.int32), SamplingConfig(max_response_length=3), 0)
    assert len(run_all(engine, [short])[0].token_ids) == 3

    async def scenario():
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.02)
        await engine.close()
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(scenario()).finish_reason == "aborted"
    assert len(run_all(engine, [short])[0].token_ids) == 3


def test_aborts_between_steps_work_in_every_event_loop():
    engine = make(tiny_model())

    async def scenario():
        task = asyncio.create_task(
            engine.generate(Request("a", np.array([5], np.int32), SamplingConfig(max_response_length=900), 0))
        )
        await asyncio.sleep(0.01)
        await asyncio.gather(*(engine.abort("nobody") for _ in range(20)), engine.abort("a"))
        return (await task).finish_reason

    assert [asyncio.run(scenario()) for _ in range(3)] == ["aborted"] * 3


def test_a_cancelled_event_loop_leaves_an_engine_that_works():
    engine = make(tiny_model())
    requests = groups(subject(tiny_model()), n=2, stop_token_ids=[])
    expected = run_all(engine, requests)

    async def abandoned():
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.01)
        del tasks

    asyncio.run(abandoned())
    for answer, wanted in zip(run_all(engine, requests), expected, strict=True):
        assert same(answer, wanted)


def test_the_event_loop_is_free_while_a_step_runs():
    model = tiny_model()
    engine = make(model)
    model.model.layers[0].register_forward_hook(lambda *_: torch.linalg.inv(torch.rand(600, 600)) is None)

    async def scenario():
        turns = 0
        task = asyncio.create_task(
            engine.generate(Request("a", np.array([5], np.int32), SamplingConfig(max_response_length=5), 0))
        )
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scenario()) > 100
