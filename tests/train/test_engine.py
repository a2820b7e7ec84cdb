"""The train engine on the real tiny model: equal to the plain forward pass, whatever the cut, sharing or order."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from surefoot.algorithms.aggregate import Denominators
from surefoot.algorithms.objective import PolicyObjective
from surefoot.algorithms.resolve import resolve
from surefoot.config.load import build_config
from surefoot.config.model import CriticConfig, LoraConfig, ModelConfig
from surefoot.config.train import TrainConfig
from surefoot.train.engine import ModuleEngine
from surefoot.train.model import load_critic, load_policy

from .rows import make_sample, random_samples

CPU = torch.device("cpu")


def algorithm(**keys):
    return resolve(
        build_config(
            {
                "model": {"path": "x"},
                "data": {"sources": [{"type": "reasoning_gym", "task": "chain_sum"}]},
                "rewards": {"functions": [{"type": "exact"}]},
                "train": {"steps": 1},
                "algorithm": keys,
            }
        )
    )


def engine(
    folder,
    *,
    lora=None,
    checkpointing=False,
    temperature=1.0,
    rate=1e-2,
    compile_blocks=False,
    want_entropy=False,
    **train,
) -> ModuleEngine:
    model = load_policy(
        ModelConfig(path=str(folder), dtype="float32", lora=lora, gradient_checkpointing=checkpointing), CPU
    )
    return ModuleEngine(
        model,
        TrainConfig(steps=1, **train),
        temperature=temperature,
        peak_rate=rate,
        compile_blocks=compile_blocks,
        want_entropy=want_entropy,
    )


def update(trainer, samples, objective):
    counts = Denominators.of([int(s.loss_mask.sum()) for s in samples], [s.weight for s in samples])
    return trainer.update(samples, objective, counts)


def plain_logprobs(model, sample, temperature=1.0) -> np.ndarray:
    """One row at a time through transformers' own eager attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        logits = twin(input_ids=torch.from_numpy(sample.token_ids).long()[None]).logits[0] / temperature
    logp = torch.log_softmax(logits.float(), -1)[:-1].gather(1, torch.from_numpy(sample.token_ids[1:]).long()[:, None])[
        :, 0
    ]
    return np.concatenate([[0], logp.numpy()]) * sample.loss_mask


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [24, 4096])
def test_logprobs_equal_the_row_alone(tiny_folder, share: bool, budget: int):
    trainer = engine(tiny_folder, share_prefixes=share, max_tokens_per_microbatch=budget, temperature=0.6)
    rows = random_samples(1)
    for row, got in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(got, plain_logprobs(trainer.model, row, 0.6), atol=2e-5)


def test_no_row_sees_another(tiny_folder):
    trainer = engine(tiny_folder)
    rows = random_samples(2)
    before = trainer.logprobs(rows)
    changed = [make_sample("g0", rows[0].token_ids[: rows[0].prompt_length].tolist(), [9, 9, 9, 9, 9]), *rows[1:]]
    after = trainer.logprobs(changed)
    for a, b in zip(before[1:], after[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def deltas(folder, samples, keys=None, **options) -> dict[str, torch.Tensor]:
    """The gradient of one update, before clipping."""
    trainer = engine(folder, want_entropy=True, **options)
    captured: dict[str, torch.Tensor] = {}
    original = trainer.optimizer.step

    def spy(rate):
        captured.update({n: m.grad.clone() for n, m in trainer.optimizer.masters.items() if m.grad is not None})
        return original(rate)

    trainer.optimizer.step = spy
    update(trainer, samples, PolicyObjective(algorithm(**(keys or {}))))
    return captured


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_does_not_depend_on_the_cut_the_sharing_or_the_order(tiny_folder, mode: str):
    samples = random_samples(3)
    keys = {"aggregation": mode, "entropy_coef": 0.01, "importance_cap": None}
    want = deltas(tiny_folder, samples, keys)
    for other in (
        deltas(tiny_folder, samples, keys, max_tokens_per_microbatch=20),
        deltas(tiny_folder, samples, keys, share_prefixes=False),
        deltas(tiny_folder, samples[::-1], keys, max_tokens_per_microbatch=40),
        deltas(tiny_folder, samples, keys, checkpointing=True),
    ):
        for name, gradient in want.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-6)


def test_a_row_of_weight_zero_leaves_the_gradient_and_the_denominator(tiny_folder):
    samples = random_samples(4)
    keys = {"importance_cap": None}
    want = deltas(tiny_folder, samples[:-1], keys)
    got = deltas(tiny_folder, [*samples[:-1], replace(samples[-1], weight=0.0)], keys)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7)


def test_the_first_update_is_on_policy_and_the_second_is_not(tiny_folder):
    trainer = engine(tiny_folder)
    samples = random_samples(5)
    samples = [replace(s, old_logprobs=old) for s, old in zip(samples, trainer.logprobs(samples), strict=True)]
    first = update(trainer, samples, PolicyObjective(algorithm())).metrics
    second = update(trainer, samples, PolicyObjective(algorithm())).metrics
    assert first["ratio_gap"].value < 1e-6
    assert second["ratio_gap"].value > 1e-3


def test_end_of_sequence_in_prompt_and_response_is_seen_and_learnt(tiny_folder):
    eos = 2  # also the pad token
    trainer = engine(tiny_folder)
    sample = make_sample("g", [5, eos, 6], [7, eos])
    assert trainer.model.get_input_embeddings().padding_idx is None
    with_eos, without = trainer.logprobs([sample, make_sample("h", [5, 9, 6], [7, eos])])
    assert abs(with_eos[4] - without[4]) > 1e-6  # attended in the prompt
    report = update(trainer, [sample], PolicyObjective(algorithm(importance_cap=None)))
    assert trainer.logprobs([sample])[0][4] > report.outputs[0][4]  # a positive advantage raised the end's probability


def test_lora_reference_is_the_base_and_only_adapters_move(tiny_folder):
    trainer = engine(tiny_folder, lora=LoraConfig(rank=4))
    base = engine(tiny_folder)
    rows = random_samples(6)
    update(trainer, rows, PolicyObjective(algorithm(importance_cap=None)))
    assert all("lora" in name for name in trainer.optimizer.masters)
    moved = trainer.logprobs(rows)
    for reference, want, now in zip(trainer.logprobs(rows, reference=True), base.logprobs(rows), moved, strict=True):
        np.testing.assert_allclose(reference, want, atol=1e-6)
        assert np.abs(now - want).max() > 1e-5


def test_critic_starts_at_zero_and_learns(tiny_folder):
    from surefoot.algorithms.objective import ValueObjective

    model = load_critic(CriticConfig(), ModelConfig(path=str(tiny_folder), dtype="float32"), CPU)
    trainer = ModuleEngine(model, TrainConfig(steps=1), peak_rate=1e-2)
    samples = random_samples(7)
    values = trainer.values(samples)
    assert all(np.all(v == 0) for v in values)
    samples = [
        replace(s, values=v, returns=s.loss_mask.astype(np.float32)) for s, v in zip(samples, values, strict=True)
    ]
    losses = [update(trainer, samples, ValueObjective("token-mean", None)).metrics["loss"].value for _ in range(8)]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.1


def test_bfloat16_keeps_float32_masters_that_small_steps_reach(tiny_folder):
    model = load_policy(ModelConfig(path=str(tiny_folder)), CPU)
    trainer = ModuleEngine(model, TrainConfig(steps=1), peak_rate=1e-7)
    before = {n: m.clone() for n, m in trainer.optimizer.masters.items()}
    samples = random_samples(8)
    for _ in range(3):
        update(trainer, samples, PolicyObjective(algorithm(importance_cap=None)))
    assert next(model.parameters()).dtype == torch.bfloat16
    # Steps far below bfloat16's resolution are kept in the masters.
    assert any((m != before[n]).any() for n, m in trainer.optimizer.masters.items())


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tiny_folder):
    trainer = engine(tiny_folder)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

    def broken(logprobs, entropy, columns, denominators):
        return logprobs.sum() * float("inf"), {}

    report = update(trainer, random_samples(9), broken)
    assert report.optimizer["skipped_updates"].value == 1
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_state_goes_on_bit_for_bit(tiny_folder, tmp_path):
    samples, objective = random_samples(10), PolicyObjective(algorithm(importance_cap=None))
    one = engine(tiny_folder)
    for _ in range(4):
        update(one, samples, objective)
    two = engine(tiny_folder)
    for _ in range(2):
        update(two, samples, objective)
    two.save_weights(tmp_path / "weights")
    two.save_optimizer(tmp_path / "optimizer")
    three = engine(tiny_folder)
    three.load(tmp_path / "weights", tmp_path / "optimizer", two.updates_done)
    for _ in range(2):
        update(three, samples, objective)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, dict(three.model.named_parameters())[name])


def test_published_weights_are_those_that_peft_would_merge(tiny_folder):
    trainer = engine(tiny_folder, lora=LoraConfig(rank=4))
    for _ in range(2):
        update(trainer, random_samples(11), PolicyObjective(algorithm(importance_cap=None)))
    published = {name: tensor.clone() for name, tensor in trainer.weights()}
    merged = dict(copy.deepcopy(trainer.model).merge_and_unload().named_parameters())
    assert published.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(published[name], tensor, rtol=0, atol=1e-6)


def test_a_rehearsal_changes_nothing(tiny_folder):
    one, two = engine(tiny_folder), engine(tiny_folder)
    two.rehearse(random_samples(12, samples=9))
    before = torch.get_rng_state()
    for trainer in (one, two):
        update(trainer, random_samples(13), PolicyObjective(algorithm(importance_cap=None)))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b), name
