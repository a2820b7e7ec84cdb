"""GRPO steps on GPUs, whole and by phase: `python benchmarks/gpu_grpo.py --shape qwen2-0.5b`.

64 prompts of 128 tokens x 8 samples x 512 new tokens of fixed length, random weights of a real shape, no KL, one update
of all rows a step unless `--updates` says otherwise; 2 steps that are not counted, 5 that are. `--ppo` adds a critic of
the same shape. `--separate` puts the sampler on GPUs of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import SHAPES, make_model, write_prompts

PHASES = ("generate", "reward", "score", "update", "sync", "other")


def configuration(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run as a user would write it."""
    model = make_model(options.shape, Path(options.models))
    prompts = write_prompts(folder / "prompts.jsonl", 4 * options.prompts, options.prompt_tokens)
    (folder / "reward.py").write_text(
        "import zlib\ndef reward(item):\n    return zlib.crc32(item.response.encode()) / 2**32\n"
    )
    tree: dict[str, Any] = {
        "output_dir": str(folder / "runs"),
        "device": options.device,
        "model": {"path": str(model), "compile": options.compile},
        "data": {
            "sources": [{"type": "file", "path": str(prompts)}],
            "max_prompt_length": options.prompt_tokens,
        },
        "rollout": {
            "sampling": {"max_response_length": options.new_tokens},
            "max_concurrent_rows": options.prompts * options.samples,
        },
        "rewards": {"functions": [{"type": "python", "function": f"{folder}/reward.py:reward"}], "workers": 0},
        "algorithm": {"name": "ppo" if options.ppo else "grpo"},
        "train": {
            "steps": options.warmup + options.steps,
            "prompts_per_step": options.prompts,
            "samples_per_prompt": options.samples,
            "updates_per_step": options.updates,
            "max_tokens_per_microbatch": options.microbatch,
        },
        "checkpoint": {"every": 0},
        "tracking": {"trackers": [], "rollouts_every": 0},
    }
    if options.ppo:
        tree["critic"] = {}
        tree["algorithm"] |= {"critic_warmup": 0, "kl": {"where": "none"}}
    if not options.local:
        tree["rollout"]["engine"] = {
            "type": "vllm",
            "max_num_seqs": options.prompts * options.samples,
            "tensor_parallel_size": options.tensor_parallel,
        }
        pools = {"main": {"nodes": 1, "gpus_per_node": options.gpus}}
        tree["placement"] = {"type": "ray", "pools": pools}
        if options.separate:
            pools["rollout"] = {"nodes": 1, "gpus_per_node": options.separate}
            tree["placement"]["roles"] = {"rollout": "rollout"}
    for override in options.set:
        key, value = override.split("=", 1)
        place = tree
        *parents, last = key.split(".")
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = json.loads(value)
    return tree


class PeakMemory(threading.Thread):
    """Asks the driver for the memory in use on each GPU, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib: dict[int, int] = {}

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while True:
            try:
                lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
            except (OSError, subprocess.CalledProcessError):
                return
            for gpu, used in enumerate(lines):
                self.mib[gpu] = max(self.mib.get(gpu, 0), int(used))
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b", choices=[*SHAPES])
    parser.add_argument("--models", default="/tmp/shapes", help="where the random models are kept")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--microbatch", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--separate", type=int, default=0, help="GPUs of the sampler alone")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--ppo", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--local", action="store_true", help="one process, the embedded engine")
    parser.add_argument("--set", nargs="*", default=[], help="key.sub=JSON, more of the configuration")
    options = parser.parse_args()

    from surefoot.config.load import build_config
    from surefoot.controller import loop
    from surefoot.controller.preflight import preflight
    from surefoot.controller.process import prepare_process
    from surefoot.controller.run import train_ready
    from surefoot.controller.run_parts import Run
    from surefoot.controller.signals import StopSignal

    folder = Path(tempfile.mkdtemp())
    tree = configuration(options, folder)
    begun = time.time()  # making a random model is no part of a start: a run has one on its disk
    config = build_config(tree)
    prepare_process(config)
    memory = PeakMemory()
    memory.start()
    started: list[float] = []
    train = loop.train

    async def timed(run: Run) -> None:
        started.append(time.time() - begun)
        print("start-up by part:", {name: round(seconds, 1) for name, seconds in run.engines.startup.items()})
        await train(run)

    loop.train = timed
    with StopSignal() as stop:
        train_ready(replace(preflight(config), stop_ids=()), stop)
    rows = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    show(rows, options, memory, started[0])


def show(rows: list[dict[str, float]], options: argparse.Namespace, memory: PeakMemory, startup: float) -> None:
    """Print the table: medians over the counted steps."""
    counted = [row for row in rows if row["step"] > options.warmup]
    middle = {key: statistics.median(row.get(key, 0.0) for row in counted) for key in counted[0]}
    sampled = options.prompts * options.samples * options.new_tokens
    gpus = options.gpus + options.separate
    print(
        f"\n{'PPO' if options.ppo else 'GRPO'}, {options.shape}, {options.prompts} x {options.samples} rows of "
        f"{options.prompt_tokens} + {options.new_tokens} tokens, {gpus} GPU, "
        f"{'one process' if options.local else 'vLLM'}; medians of {len(counted)} steps"
    )
    for phase in PHASES:
        seconds = middle.get(f"time/{phase}", 0.0)
        print(f"{phase:12} {seconds:8.2f} s {seconds / middle['time/step']:7.1%}")
    print(f"{'step':12} {middle['time/step']:8.2f} s")
    print(f"{'sampling':12} {sampled / middle['time/generate']:8.0f} tokens/s")
    trained = middle["throughput/tokens_per_second"] * middle["time/step"]
    print(f"{'update':12} {trained / middle['time/update']:8.0f} tokens/s")
    print(f"{'peak':12} {max(memory.mib.values(), default=0) / 1024:8.1f} GiB")
    for name in sorted(k for k in middle if k.startswith(("seconds/", "sync/", "startup/"))):
        print(f"{name:32} {middle[name]:8.3f}")
    print(f"{'start-up':12} {startup:8.1f} s from the configuration to the first prompt")


if __name__ == "__main__":
    main()
