"""Whole runs: they learn, repeat by seed, go on equal, and leave everything that they promise in their folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from surefoot.config.load import build_config
from surefoot.controller.run import run_evaluation, run_training
from surefoot.errors import RunError

from .tiny_run import metrics_of, tiny_config, without_clocks

PPO = {
    "algorithm": {"name": "ppo", "kl": {"where": "reward", "coef": 0.01}},
    "critic": {"learning_rate": 1e-3},
    "train": {"updates_per_step": 2},
}


def weights(config, step: int) -> dict[str, torch.Tensor]:
    folder = Path(config.output_dir) / config.name / "checkpoints" / f"step_{step:06d}"
    return {f"{file.stem}/{k}": v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_equal_runs(one, two, step: int) -> None:
    a, b = weights(one, step), weights(two, step)
    assert a.keys() == b.keys()
    assert any("actor_optimizer" in key for key in a)
    for key in a:
        assert torch.equal(a[key], b[key]), key
    assert without_clocks(metrics_of(one)) == without_clocks(metrics_of(two))


def test_grpo_learns_and_leaves_its_record(tmp_path, tiny_folder):
    evaluation = {"every": 10, "sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 8}]}
    evaluation |= {
        "samples_per_prompt": 4,
        "pass_at": [1, 4],
        "pass_score": 0.5,
        "sampling": {"max_response_length": 8},
    }
    config = tiny_config(tmp_path, tiny_folder, train={"steps": 20, "samples_per_prompt": 8}, eval=evaluation)
    summary = run_training(config)
    rows = metrics_of(config)
    assert [row["step"] for row in rows] == list(range(21))
    first, last = (np.mean([r["reward/mean"] for r in part]) for part in (rows[1:5], rows[-4:]))
    assert last > first + 0.2
    assert rows[-1]["eval/score"] > rows[0]["eval/score"] + 0.2
    assert rows[-1]["eval/pass@4"] >= rows[-1]["eval/pass@1"]
    assert rows[1]["actor/engine_gap"] < 1e-4  # the sampler's log-probabilities are the trainer's
    folder = tmp_path / "runs" / "tiny"
    assert summary["status"] == "finished"
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert build_config(yaml.safe_load((folder / "config.yaml").read_text())).train == config.train
    table = pq.read_table(folder / "rollouts" / "step_000012.parquet").to_pylist()
    assert len(table) == 32
    assert all(len(r["token_ids"]) == len(r["engine_logprobs"]) for r in table)
    assert (folder / "checkpoints" / "step_000020" / "manifest.json").is_file()


@pytest.mark.parametrize("options", [{}, PPO], ids=["grpo", "ppo"])
def test_runs_repeat_by_seed_and_go_on_bit_for_bit(tmp_path, tiny_folder, options):
    whole = tiny_config(tmp_path, tiny_folder, name="whole", **options)
    again = tiny_config(tmp_path, tiny_folder, name="again", **options)
    run_training(whole)
    run_training(again)
    assert_equal_runs(whole, again, 4)
    for steps in (1, 3, 4):  # 1 + 2 + 1, over an epoch's end
        parts = tiny_config(tmp_path, tiny_folder, name="parts", **options)
        parts = parts.model_copy(update={"train": parts.train.model_copy(update={"steps": steps})})
        run_training(parts)
    assert_equal_runs(whole, parts, 4)
    other = tiny_config(tmp_path, tiny_folder, name="other", seed=1, **options)
    run_training(other)
    assert not all(
        torch.equal(a, b) for a, b in zip(weights(whole, 4).values(), weights(other, 4).values(), strict=True)
    )


@pytest.mark.slow
def test_twenty_steps_of_a_million_parameters_equal_ten_and_ten(tmp_path):
    from tests.tiny import save_tiny

    model = save_tiny(tmp_path / "million", hidden=128, layers=6)
    whole = tiny_config(tmp_path, model, name="whole", train={"steps": 20})
    again = tiny_config(tmp_path, model, name="again", train={"steps": 20})
    run_training(whole)
    run_training(again)
    assert_equal_runs(whole, again, 20)
    for steps in (10, 20):
        run_training(tiny_config(tmp_path, model, name="parts", train={"steps": steps}))
    assert_equal_runs(whole, tiny_config(tmp_path, model, name="parts"), 20)


def test_ppo_with_lora_uses_the_base_as_reference(tmp_path, tiny_folder):
    config = tiny_config(tmp_path, tiny_folder, **PPO, model={"lora": {"rank": 4}})
    run_training(config)
    rows = metrics_of(config)
    assert rows[0]["kl/per_sequence"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[-1]["kl/per_sequence"]) > 0
    assert all("lora" in key for key in weights(config, 4) if key.startswith("actor/"))


def test_the_actor_is_untouched_while_the_critic_warms_up(tmp_path, tiny_folder):
    options = {
        **PPO,
        "algorithm": {**PPO["algorithm"], "critic_warmup": 2},
        "checkpoint": {"every": 1, "keep_last": 10},
    }
    config = tiny_config(tmp_path, tiny_folder, **options)
    run_training(config)
    actor = [{k: v for k, v in weights(config, s).items() if k.startswith("actor/")} for s in (1, 2, 3)]
    assert all(torch.equal(actor[0][k], actor[1][k]) for k in actor[0])
    assert any(not torch.equal(actor[1][k], actor[2][k]) for k in actor[0])
    assert [r["warmup/actor_trains"] for r in metrics_of(config)] == [0, 0, 1, 1]


def test_auto_warmup_starts_the_actor_when_the_critic_explains_its_returns(tmp_path, tiny_folder):
    bounds = {"explained_variance": 0.1, "patience": 2, "max_steps": 20}
    options = {
        "algorithm": {"name": "ppo", "critic_warmup": "auto", "auto_warmup": bounds},
        "critic": {"learning_rate": 3e-3, "passes_per_step": 4, "value_clip": None},
        "train": {"steps": 24, "prompts_per_step": 8},
    }
    config = tiny_config(tmp_path, tiny_folder, **options)
    run_training(config)
    trains = [r["warmup/actor_trains"] for r in metrics_of(config)]
    explained = [r.get("critic/explained_variance", -1) for r in metrics_of(config)]
    start = trains.index(1)
    assert start >= 2
    assert all(e >= 0.1 for e in explained[start - 1 : start + 1])
    bounds |= {"explained_variance": 0.99, "max_steps": 2}
    with pytest.raises(RunError, match="critic"):
        run_training(tiny_config(tmp_path, tiny_folder, **options, name="never"))


def test_sampler_and_trainer_agree_at_any_temperature(tmp_path, tiny_folder):
    for temperature in (0.6, 1.5):
        sampling = {"temperature": temperature, "max_response_length": 8}
        config = tiny_config(tmp_path, tiny_folder, name=f"t{temperature}", **PPO, rollout={"sampling": sampling})
        run_training(config)
        for row in metrics_of(config):
            assert row["actor/engine_gap_max"] < 1e-3
        assert metrics_of(config)[0]["actor/first_ratio_gap"] < 1e-5
        assert metrics_of(config)[0]["kl/per_sequence"] == pytest.approx(0, abs=1e-4)  # the reference divides too


def test_memory_budget_and_sharing_do_not_change_the_result(tmp_path, tiny_folder):
    wide = tiny_config(tmp_path, tiny_folder, name="wide")
    narrow = tiny_config(
        tmp_path, tiny_folder, name="narrow", train={"max_tokens_per_microbatch": 80, "share_prefixes": False}
    )
    run_training(wide)
    run_training(narrow)
    for a, b in zip(metrics_of(wide), metrics_of(narrow), strict=True):
        assert a["reward/mean"] == b["reward/mean"]  # the same tokens were sampled
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-3)


def test_evaluation_of_the_trained_folder_equals_the_runs_own(tmp_path, tiny_folder):
    from surefoot.checkpoint.export import export_checkpoint

    evaluation = {"sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 8}]}
    evaluation |= {"sampling": {"temperature": 0.0, "max_response_length": 8}}
    config = tiny_config(tmp_path, tiny_folder, eval=evaluation)
    run_training(config)
    last = metrics_of(config)[-1]
    export_checkpoint(tmp_path / "runs" / "tiny", tmp_path / "out", merge_adapter=True, dtype="float32")
    metrics = run_evaluation(config, str(tmp_path / "out"))
    assert metrics["eval/score"] == pytest.approx(last["eval/score"])
