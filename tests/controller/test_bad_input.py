"""Mistakes are refused before a model loads, each with the key to change; faults of one row cost one row."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file

from surefoot.controller import record
from surefoot.controller.preflight import preflight
from surefoot.controller.run import run_evaluation, run_training
from surefoot.controller.signals import Interrupted
from surefoot.errors import RunError, UserError
from surefoot.rollout.embedded import EmbeddedEngine

from .tiny_run import (
    metrics_of,
    start_run,
    tiny_config,
    wait_for_rows,
    without_clocks,
    write_config,
    write_rows,
)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch):
    """Loading a model's weights fails the test: refusals must come first."""
    import transformers

    def refuse(*_, **__):
        raise AssertionError("weights were loaded before the refusal")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)


def refused(config, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        run_training(config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("no_model")
class TestBeforeTheModelLoads:
    def test_group_baseline_with_one_sample(self, tmp_path, tiny_folder):
        refused(
            tiny_config(tmp_path, tiny_folder, train={"samples_per_prompt": 1}),
            "train.samples_per_prompt",
            "algorithm.name",
        )

    def test_ppo_without_critic(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, algorithm={"name": "ppo"}), "critic")

    def test_warmup_without_critic(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, algorithm={"critic_warmup": 3}), "critic_warmup", "critic")

    def test_unknown_algorithm_names_the_nearest(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, algorithm={"name": "gropo"}), "gropo", "grpo")

    def test_updates_that_do_not_divide(self, tmp_path, tiny_folder):
        refused(
            tiny_config(tmp_path, tiny_folder, train={"updates_per_step": 3}),
            "train.updates_per_step",
            "train.prompts_per_step",
        )

    def test_batch_larger_than_the_data(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, train={"prompts_per_step": 64}), "train.prompts_per_step")

    def test_row_longer_than_the_memory_budget(self, tmp_path, tiny_folder):
        refused(
            tiny_config(tmp_path, tiny_folder, train={"max_tokens_per_microbatch": 50}),
            "train.max_tokens_per_microbatch",
            "72",
        )

    def test_greedy_training(self, tmp_path, tiny_folder):
        refused(
            tiny_config(tmp_path, tiny_folder, rollout={"sampling": {"temperature": 0}}), "rollout.sampling.temperature"
        )

    def test_filters_beside_importance_weights(self, tmp_path, tiny_folder):
        config = tiny_config(tmp_path, tiny_folder, rollout={"sampling": {"top_p": 0.9}})
        refused(config, "rollout.sampling.top_p", "algorithm.importance_cap")

    def test_row_longer_than_the_models_positions(self, tmp_path, tiny_folder):
        config = tiny_config(tmp_path, tiny_folder, rollout={"sampling": {"max_response_length": 1000}})
        refused(config, "rollout.sampling.max_response_length", "1024")

    @pytest.mark.parametrize("template", ["hello", "{% for m in messages %}{{ m['role'] }}{% endfor %}"])
    def test_chat_template_that_drops_the_prompt(self, tmp_path, tiny_folder, template):
        (tmp_path / "chat.jinja").write_text(template)
        config = tiny_config(tmp_path, tiny_folder, model={"chat_template": str(tmp_path / "chat.jinja")})
        refused(config, "model.chat_template", "same")

    def test_reward_file_that_exits(self, tmp_path, tiny_folder):
        config = tiny_config(tmp_path, tiny_folder)
        (tmp_path / "reward.py").write_text("import sys\nsys.exit(0)\n")
        refused(config, "reward.py", "SystemExit")

    def test_resume_word_with_a_typing_mistake(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, checkpoint={"resume": "atuo"}), "checkpoint.resume", "auto")

    def test_critic_of_another_vocabulary(self, tmp_path, tiny_folder):
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        other = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        LlamaForCausalLM(other).save_pretrained(tmp_path / "critic")
        AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "critic")
        config = tiny_config(
            tmp_path, tiny_folder, algorithm={"name": "ppo"}, critic={"path": str(tmp_path / "critic")}
        )
        refused(config, "critic.path", "vocabulary")

    def test_pass_at_more_than_sampled(self, tmp_path, tiny_folder):
        source = {"type": "file", "path": str(tmp_path / "rows.jsonl")}
        refused(tiny_config(tmp_path, tiny_folder, eval={"sources": [source], "pass_at": [4]}), "eval.pass_at")

    def test_gpu_that_is_not_there(self, tmp_path, tiny_folder):
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        refused(tiny_config(tmp_path, tiny_folder, device="cuda"), "device", "CUDA")

    def test_missing_file(self, tmp_path, tiny_folder):
        config = tiny_config(
            tmp_path, tiny_folder, data={"sources": [{"type": "file", "path": str(tmp_path / "rowz.jsonl")}]}
        )
        refused(config, "rowz.jsonl", "rows.jsonl")

    def test_wrong_columns(self, tmp_path, tiny_folder):
        (tmp_path / "other.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
        config = tiny_config(
            tmp_path, tiny_folder, data={"sources": [{"type": "file", "path": str(tmp_path / "other.jsonl")}]}
        )
        refused(config, "prompt", "question")

    def test_missing_answer_for_a_reward_that_needs_it(self, tmp_path, tiny_folder):
        (tmp_path / "bare.jsonl").write_text("".join(json.dumps({"prompt": f"a{i}"}) + "\n" for i in range(9)))
        config = tiny_config(
            tmp_path,
            tiny_folder,
            data={"sources": [{"type": "file", "path": str(tmp_path / "bare.jsonl")}]},
            rewards={"functions": [{"type": "exact"}]},
        )
        refused(config, "answer")

    def test_too_long_prompts_under_error(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder, data={"max_prompt_length": 8}), "max_prompt_length", "32")

    def test_missing_reward_function(self, tmp_path, tiny_folder):
        config = tiny_config(
            tmp_path,
            tiny_folder,
            rewards={"functions": [{"type": "python", "function": f"{tmp_path / 'reward.py'}:digit"}]},
        )
        refused(config, "digit", "digits")

    def test_missing_model_folder(self, tmp_path, tiny_folder):
        refused(tiny_config(tmp_path, tiny_folder.parent / "tinny"), "model.path")

    def test_model_folder_without_tokenizer(self, tmp_path, tiny_folder):
        from tests.tiny import tiny_model

        tiny_model().save_pretrained(tmp_path / "bare")
        refused(tiny_config(tmp_path, tmp_path / "bare"), "tokenizer")

    def test_unknown_program(self, tmp_path, tiny_folder):
        refused(
            tiny_config(tmp_path, tiny_folder, rollout={"program": "single_trun"}), "rollout.program", "single_turn"
        )


@pytest.mark.parametrize(("policy", "kept"), [("drop", 10), ("left", 32), ("right", 32), ("middle", 32)])
def test_too_long_prompts_under_the_other_policies(tmp_path, tiny_folder, policy: str, kept: int):
    base = tiny_config(tmp_path, tiny_folder)
    lengths = sorted(len(p.token_ids) for p in preflight(base).prompts.prompts)
    limit = lengths[9]  # ten prompts have a one-digit number
    ready = preflight(tiny_config(tmp_path, tiny_folder, data={"max_prompt_length": limit, "truncation": policy}))
    assert len(ready.prompts.prompts) == kept
    assert max(len(p.token_ids) for p in ready.prompts.prompts) == limit


def test_the_engine_never_sees_more_than_the_limit(tmp_path, tiny_folder, monkeypatch):
    """Every row of the data is over the limit, in training and in evaluation: each request is cut, and all run."""
    limit, seen = 6, []
    generate = EmbeddedEngine.generate

    async def watched(self, request):
        seen.append(len(request.token_ids))
        return await generate(self, request)

    monkeypatch.setattr(EmbeddedEngine, "generate", watched)
    evaluation = {"sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 4}], "hold_out": False}
    data = {"max_prompt_length": limit, "truncation": "left"}
    run_training(tiny_config(tmp_path, tiny_folder, data=data, eval=evaluation, train={"steps": 2}))
    assert len(seen) == 2 * 16 + 2 * 4
    assert set(seen) == {limit}


def test_a_step_of_cut_responses_alone_is_counted_as_empty_and_moves_nothing(tmp_path, tiny_folder):
    config = tiny_config(
        tmp_path,
        tiny_folder,
        algorithm={"mask_truncated": True},
        rollout={"sampling": {"max_response_length": 1}},
        train={"steps": 2},
    )
    run_training(config)
    for row in metrics_of(config):
        assert row["rollout/truncated"] == 1
        assert row["actor/empty_updates"] == 1
        assert row.get("actor/loss", 0.0) == 0
        assert not [name for name, value in row.items() if value == "NaN"]
    (start,) = (load_file(f) for f in tiny_folder.glob("*.safetensors"))
    end = load_file(tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002" / "actor.safetensors")
    assert all(torch.equal(start[name], end[name]) for name in end)


def test_more_threads_than_cores_are_refused(tmp_path, tiny_folder):
    refused(tiny_config(tmp_path, tiny_folder, threads=5000), "threads", "cores")


def test_evaluation_alone_reads_no_training_data(tmp_path, tiny_folder):
    write_rows(tmp_path, name="held.jsonl", count=4)
    evaluation = {"sources": [{"type": "file", "path": str(tmp_path / "held.jsonl")}]}
    sources = [{"type": "file", "path": str(tmp_path / "gone.jsonl")}]
    config = tiny_config(tmp_path, tiny_folder, eval=evaluation, data={"sources": sources})
    refused(config, "data.sources.0.path", "gone.jsonl")
    assert run_evaluation(config, None)["eval/rows"] == 4


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_a_final_evaluation_that_did_not_end_is_made_up(tmp_path, tiny_folder, monkeypatch, how: str):
    evaluation = {"sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 4}], "hold_out": False}
    config = tiny_config(tmp_path, tiny_folder, eval=evaluation, train={"steps": 2})
    whole = tiny_config(tmp_path, tiny_folder, name="whole", eval=evaluation, train={"steps": 2})
    run_training(whole)
    real, calls = record.evaluate, []

    async def broken(*arguments):
        calls.append(1)
        if len(calls) == 2:
            if how == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(5)
            raise RunError("reward-worker", "the judge is gone")
        return await real(*arguments)

    monkeypatch.setattr(record, "evaluate", broken)
    with pytest.raises(Interrupted if how == "interrupted" else RunError):
        run_training(config)
    assert [("eval/score" in row) for row in metrics_of(config)] == [True, False, False]
    summary = run_training(config)
    assert without_clocks(metrics_of(config)) == without_clocks(metrics_of(whole))
    assert summary["held_out"]["eval/score"]["trained_step"] == 2
    before = metrics_of(config)
    run_training(config)  # and once more: nothing is left to do
    assert len(calls) == 3
    assert metrics_of(config) == before


def test_a_reward_that_raises_hangs_or_is_no_number_costs_its_rows(tmp_path, tiny_folder):
    (tmp_path / "bad.py").write_text(
        "import time\n"
        "def bad(item):\n"
        "    kind = int(item.answer) % 4\n"
        "    if kind == 0: raise KeyError('no such thing')\n"
        "    if kind == 1: return float('nan')\n"
        "    if kind == 2 and int(item.answer) < 8:\n"
        "        sum(iter(int, 1))\n"
        "    return len(item.response) % 3\n"
    )
    reward = {
        "functions": [{"type": "python", "function": f"{tmp_path / 'bad.py'}:bad"}],
        "workers": 2,
        "timeout_seconds": 1,
    }
    config = tiny_config(tmp_path, tiny_folder, rewards=reward, train={"steps": 3}, data={"shuffle": False})
    run_training(config)
    rows = metrics_of(config)
    assert [row["reward/unscored"] for row in rows] == [12, 12, 8]
    assert all(row["reward/errors"] == row["reward/unscored"] for row in rows)
    assert all(row["reward/mean"] == row["reward/mean"] for row in rows)
    assert not psutil.Process().children(recursive=True)


def test_weights_that_are_not_the_architectures_are_refused(tmp_path, tiny_folder):
    folder = tmp_path / "deeper"
    shutil.copytree(tiny_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 4}))
    refused(tiny_config(tmp_path, folder), "model.path", "random", "layers.2")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("r.__class__ and dataclasses.replace(r, loss_mask=r.loss_mask[:-1])", "length"),
        ("dataclasses.replace(r, loss_mask=r.loss_mask | True)", "within the prompt"),
        ("dataclasses.replace(r, logprobs=r.logprobs * np.nan)", "finite"),
        ("dataclasses.replace(r, prompt=dataclasses.replace(prompt))", "another prompt"),
        ("exec('raise SystemExit(0)')", "SystemExit"),
    ],
)
def test_rollouts_that_do_not_fit_together_are_refused(tmp_path, tiny_folder, fault: str, words: str):
    (tmp_path / "program.py").write_text(
        "import dataclasses\nimport numpy as np\n"
        "from surefoot.rollout.single_turn import single_turn\n"
        "async def wrong(prompt, engine, context):\n"
        f"    return [{fault} for r in await single_turn(prompt, engine, context)]\n"
    )
    with pytest.raises(RunError, match=words):
        run_training(tiny_config(tmp_path, tiny_folder, rollout={"program": f"{tmp_path / 'program.py'}:wrong"}))


def test_a_program_that_fails_on_some_prompts_costs_those(tmp_path, tiny_folder):
    (tmp_path / "program.py").write_text(
        "from surefoot.rollout.single_turn import single_turn\n"
        "async def picky(prompt, engine, context):\n"
        "    if prompt.answer == '1': raise ValueError('not this one')\n"
        "    if prompt.answer == '2': return []\n"
        "    return await single_turn(prompt, engine, context)\n"
    )
    config = tiny_config(
        tmp_path,
        tiny_folder,
        rollout={"program": f"{tmp_path / 'program.py'}:picky"},
        data={"shuffle": False},
        train={"steps": 1},
    )
    run_training(config)
    row = metrics_of(config)[0]
    assert row["rollout/failed_prompts"] == 2
    assert row["rollout/count"] == 8


def test_a_run_on_nan_weights_stops_and_says_so(tmp_path, tiny_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "nan")
    with pytest.raises((RunError, UserError), match=r"finite|NaN|nan"):
        run_training(tiny_config(tmp_path, tmp_path / "nan"))


def test_another_model_section_on_resume_is_refused_by_name(tmp_path, tiny_folder):
    run_training(tiny_config(tmp_path, tiny_folder, train={"steps": 1}))
    refused(
        tiny_config(tmp_path, tiny_folder, model={"lora": {"rank": 4}}, train={"steps": 2}),
        "checkpoint",
        "model",
        "lora",
    )


def test_a_run_that_fails_between_updates_keeps_its_last_step(tmp_path, tiny_folder):
    (tmp_path / "program.py").write_text(
        "from surefoot.rollout.single_turn import single_turn\n"
        "calls = [0]\n"
        "async def tired(prompt, engine, context):\n"
        "    calls[0] += 1\n"
        "    if calls[0] > 8: raise RuntimeError('enough')\n"
        "    return await single_turn(prompt, engine, context)\n"
    )
    config = tiny_config(tmp_path, tiny_folder, rollout={"program": f"{tmp_path / 'program.py'}:tired"})
    with pytest.raises(RunError, match="enough"):
        run_training(config)
    assert metrics_of(config)[-1]["step"] == 2
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002" / "manifest.json").is_file()
    run_training(tiny_config(tmp_path, tiny_folder))
    whole = tiny_config(tmp_path, tiny_folder, name="whole")
    run_training(whole)
    from .test_run import assert_equal_runs

    assert_equal_runs(config, whole, 4)


def test_an_alarm_that_ends_the_run_ends_it_again_after_resume(tmp_path, tiny_folder):
    options = {"rewards": {"functions": [{"type": "regex", "pattern": "never this"}]}, "train": {"steps": 9}}
    config = tiny_config(tmp_path, tiny_folder, **options, alarms={"stop_on": ["alarm-nothing-to-learn"]})
    for last in (3, 4):
        with pytest.raises(RunError, match="alarm-nothing-to-learn"):
            run_training(config)
        assert metrics_of(config)[-1]["step"] == last
        assert (tmp_path / "runs" / "tiny" / "checkpoints" / f"step_{last:06d}" / "manifest.json").is_file()


def test_nothing_to_learn_is_said_once(tmp_path, tiny_folder):
    config = tiny_config(
        tmp_path, tiny_folder, rewards={"functions": [{"type": "regex", "pattern": "never this"}]}, train={"steps": 6}
    )
    run_training(config)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "alarms.jsonl").read_text().splitlines()]
    assert [line["code"] for line in lines] == ["alarm-nothing-to-learn"]
    assert metrics_of(config)[0]["actor/empty_updates"] == 1


COMMAND = [sys.executable, "-m", "surefoot.cli", "train"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_exits_130_and_goes_on_equal(tmp_path, tiny_folder, number):
    reward = {"functions": [{"type": "python", "function": f"{tmp_path / 'reward.py'}:digits"}], "workers": 1}
    config = tiny_config(tmp_path, tiny_folder, rewards=reward, train={"steps": 400})
    path = write_config(tmp_path, config)
    process = start_run(path)
    wait_for_rows(process, config, 3, 90)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130, output
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    done = metrics_of(config)[-1]["step"]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    more = done + 2
    run_training(config.model_copy(update={"train": config.train.model_copy(update={"steps": more})}))
    whole = tiny_config(tmp_path, tiny_folder, name="whole", rewards=reward, train={"steps": more})
    run_training(whole)
    from .test_run import assert_equal_runs

    assert_equal_runs(config, whole, more)


def test_a_run_interrupted_in_its_first_step_goes_on(tmp_path, tiny_folder):
    evaluation = {"sources": [{"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 4}], "hold_out": False}
    slow = "import time\ndef slow(item):\n    time.sleep(0.4)\n    return 1.0\n"
    config = tiny_config(tmp_path, tiny_folder, eval=evaluation, train={"steps": 2})
    (tmp_path / "reward.py").write_text(slow.replace("slow", "digits"))
    process = start_run(write_config(tmp_path, config))
    wait_for_rows(process, config, 1, 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    (tmp_path / "reward.py").write_text("def digits(item):\n    return 1.0\n")
    run_training(config)
    assert [row["step"] for row in metrics_of(config)] == [0, 1, 2]


def test_updates_with_nothing_to_learn_count_in_the_schedule(tmp_path, tiny_folder):
    (tmp_path / "late.py").write_text(
        "calls = [0]\ndef late(item):\n    calls[0] += 1\n"
        "    return float(len(item.response) + calls[0] % 3) if calls[0] > 32 else 0.0\n"
    )
    reward = {"functions": [{"type": "python", "function": f"{tmp_path / 'late.py'}:late"}], "workers": 0}
    optimizer = {"schedule": "linear", "learning_rate": 1e-3}
    config = tiny_config(tmp_path, tiny_folder, rewards=reward, train={"optimizer": optimizer})
    run_training(config)
    rows = metrics_of(config)
    assert [row["actor/empty_updates"] for row in rows] == [1, 1, 0, 0]
    assert [row["actor/lr"] for row in rows[2:]] == pytest.approx([5e-4, 2.5e-4])


def test_the_command_line_gives_one_message_and_the_right_exit_code(tmp_path, tiny_folder):
    path = write_config(tmp_path, tiny_config(tmp_path, tiny_folder))

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "surefoot.cli", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        return done.returncode, done.stdout + done.stderr

    code, text = run("train", str(path), "train.stesp=3")
    assert code == 2
    assert "train.steps" in text
    assert "Traceback" not in text
    code, text = run("train", str(tmp_path / "nothing.yaml"))
    assert code == 2
    assert "Traceback" not in text
    assert run("explain", "config-unknown-key")[0] == 0
    assert run("explain", "config-unknown-kee")[0] == 2
    assert run("algorithms")[0] == 0


def test_two_runs_cannot_share_a_folder(tmp_path, tiny_folder):
    from surefoot.tracking.run_folder import RunFolder

    config = tiny_config(tmp_path, tiny_folder)
    folder = RunFolder(config.output_dir, config.name)
    try:
        refused(config, "run")
    finally:
        folder.close()
