"""One GRPO step of the same work, by Surefoot and by TRL's GRPOTrainer, in turn: `python benchmarks/cpu_grpo.py`.

8 prompts x 8 samples x 64 new tokens (no stop), the same model, prompts and reward, bfloat16, all weights trained, no
KL. Each framework runs in a process of its own, steps in turn between the two, so that a machine whose speed drifts
drifts for both. TRL is run in each of the configurations below; the table names all, the ratio is to its best.
Needs `pip install trl==1.16.0`. `--device cuda` runs the same on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import zlib

TRL_CONFIGURATIONS = {
    # name: (weights' dtype, autocast to bfloat16, rows per backward pass)
    "trl, fp32 weights, bf16 autocast": ("float32", True, 16),
    "trl, bf16 weights": ("bfloat16", False, 16),
    "trl, bf16 weights, one pass": ("bfloat16", False, 64),
}


def reward_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: no group is without variance."""
    return zlib.crc32(text.encode()) / 2**32


def questions(count: int) -> list[str]:
    """Prompts of reasoning-gym's chain_sum."""
    import reasoning_gym

    return [row["question"] for row in reasoning_gym.create_dataset("chain_sum", size=count, seed=1)]


def report(name: str, seconds: float, generate: float, tokens: int, rows: int, process_seconds: float) -> None:
    """Tell the parent about one step."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    line = {"step": seconds, "generate": generate, "tokens": tokens, "rows": rows, "cpu": process_seconds, "peak": peak}
    print("RESULT " + json.dumps({"name": name, **line}), flush=True)


def wait_for_turn() -> None:
    """Block until the parent says that it is this process's turn."""
    if not sys.stdin.readline():
        sys.exit(0)


def run_surefoot(options: argparse.Namespace) -> None:
    import asyncio
    import tempfile
    from dataclasses import replace
    from pathlib import Path

    from surefoot.config.load import build_config
    from surefoot.controller import loop
    from surefoot.controller.parts import Progress, load_engines, make_collector
    from surefoot.controller.preflight import preflight
    from surefoot.controller.process import prepare_process
    from surefoot.controller.resume import Saver
    from surefoot.controller.run_parts import Run
    from surefoot.controller.signals import StopSignal
    from surefoot.rewards.runner import RewardRunner
    from surefoot.tracking.hub import Trackers
    from surefoot.tracking.run_folder import RunFolder

    folder = Path(tempfile.mkdtemp())
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions(512)))
    (folder / "reward.py").write_text(
        "import zlib\ndef reward(item):\n    return zlib.crc32(item.response.encode()) / 2**32\n"
    )
    config = build_config(
        {
            "output_dir": str(folder),
            "device": options.device,
            "threads": options.threads,
            "model": {"path": options.model, "compile": options.compile},
            "data": {"sources": [{"type": "file", "path": str(folder / "rows.jsonl")}]},
            "rollout": {
                "sampling": {"max_response_length": options.new_tokens},
                "max_concurrent_rows": options.prompts * options.samples,
            },
            "rewards": {"functions": [{"type": "python", "function": f"{folder}/reward.py:reward"}], "workers": 0},
            "train": {
                "steps": 1000,
                "prompts_per_step": options.prompts,
                "samples_per_prompt": options.samples,
                "max_tokens_per_microbatch": options.microbatch,
            },
            "tracking": {"trackers": []},
        }
    )
    prepare_process(config)
    ready = replace(preflight(config), stop_ids=())
    engines = load_engines(ready)
    run_folder = RunFolder(config.output_dir, config.name)
    trackers = Trackers(config.tracking, config.alarms, run_folder)

    async def work() -> None:
        with RewardRunner(config.rewards) as rewards, StopSignal() as stop:
            trackers.start("bench", 1000, {})
            collector = make_collector(ready, engines.sampler, rewards)
            saver = Saver(run_folder.checkpoints, config, None)
            run = Run(ready, engines, collector, trackers, run_folder, saver, stop, Progress())
            stop.defer()
            for number in range(1, 1000):
                wait_for_turn()
                trackers.clock.lap()
                cpu = time.process_time()
                await loop.step(run, number)
                row = trackers.rows[-1]
                rows = options.prompts * options.samples
                report(
                    "surefoot",
                    row["time/step"],
                    row["time/generate"],
                    rows * options.new_tokens,
                    rows,
                    time.process_time() - cpu,
                )
                if number == 3:
                    outside = row["time/other"] + row["time/reward"] + row["time/score"]
                    inside = sum(row.get(f"seconds/actor_{p}", 0) for p in ("forward", "backward", "optimizer"))
                    outside += row["time/update"] - inside
                    print(
                        f"surefoot: outside generation, forward, backward, optimizer {outside / row['time/step']:.2%}"
                    )

    asyncio.run(work())


def run_trl(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from surefoot.data.pretrained import resolve_model

    dtype, autocast, per_pass = TRL_CONFIGURATIONS[options.worker]
    path = resolve_model(options.model)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    rows = options.prompts * options.samples
    settings = GRPOConfig(
        output_dir="/tmp/trl-bench",
        use_cpu=options.device == "cpu",
        bf16=autocast,
        per_device_train_batch_size=min(per_pass, rows),
        gradient_accumulation_steps=max(1, rows // per_pass),
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        gradient_checkpointing=False,
        beta=0.0,
        max_steps=1000,
        learning_rate=1e-6,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    seconds = {"generate": 0.0}

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            wait_for_turn()
            self.started, self.cpu = time.perf_counter(), time.process_time()
            seconds["generate"] = 0.0

        def on_step_end(self, *_, **__):
            if options.device == "cuda":
                torch.cuda.synchronize()
            spent, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
            report(options.worker, spent, seconds["generate"], rows * options.new_tokens, rows, cpu)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=lambda completions, **_: [reward_of(c[0]["content"]) for c in completions],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions(512)]),
        callbacks=[Turns()],
    )
    inner = trainer._generate_single_turn

    def timed(*arguments, **keywords):
        started = time.perf_counter()
        result = inner(*arguments, **keywords)
        seconds["generate"] += time.perf_counter() - started
        return result

    trainer._generate_single_turn = timed
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--microbatch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3, help="counted steps, after one that is not")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="*", help="which of the frameworks, by name; little memory needs two at a time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_surefoot(options) if options.worker == "surefoot" else run_trl(options)
        return
    names = ["surefoot", *TRL_CONFIGURATIONS]
    if options.only:
        names = [n for n in names if n in options.only]
    results = compare(names, options)
    show(results, options)


def compare(names: list[str], options: argparse.Namespace) -> dict[str, list[dict]]:
    """Run one step of each framework in turn, `--steps` + 1 times."""
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
        )
        for name in names
    }
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(options.steps + 1):
        for name, worker in workers.items():
            if worker.poll() is None:
                worker.stdin.write("go\n")
                worker.stdin.flush()
            for line in worker.stdout:
                if line.startswith("RESULT "):
                    if number:
                        results[name].append(json.loads(line[7:]))
                    break
                if line.startswith("surefoot:"):
                    print(line.strip())
            else:
                print(f"{name}: ended early (BENCH_VERBOSE=1 shows why)")
    for worker in workers.values():
        worker.kill()
    return {name: rows for name, rows in results.items() if rows}


def show(results: dict[str, list[dict]], options: argparse.Namespace) -> None:
    """Print the table: medians over the counted steps."""
    work = f"{options.prompts} prompts x {options.samples} samples x {options.new_tokens} new tokens"
    print(f"\n{work}, {options.model}, {options.device}")
    print(f"{'':34} {'step s':>8} {'generate':>9} {'train':>8} {'tokens/s':>9} {'CPU s':>7} {'peak GiB':>9}")
    medians = {}
    for name, rows in results.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "name"}
        medians[name] = middle
        speed = middle["tokens"] / middle["step"]
        print(
            f"{name:34} {middle['step']:8.2f} {middle['generate']:9.2f} {middle['step'] - middle['generate']:8.2f} "
            f"{speed:9.0f} {middle['cpu']:7.1f} {middle['peak']:9.1f}"
        )
    if "surefoot" in medians and len(medians) > 1:
        best = min((n for n in medians if n != "surefoot"), key=lambda n: medians[n]["step"])
        ours, theirs = medians["surefoot"], medians[best]
        print(
            f"ratio to the best of TRL ({best}): step {theirs['step'] / ours['step']:.2f}, generation "
            f"{theirs['generate'] / ours['generate']:.2f}, training "
            f"{(theirs['step'] - theirs['generate']) / (ours['step'] - ours['generate']):.2f}, "
            f"CPU time {theirs['cpu'] / ours['cpu']:.2f}"
        )


if __name__ == "__main__":
    main()
