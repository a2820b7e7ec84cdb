"""Tokens a second of the embedded engine beside transformers' `generate`: same model, same run, same distribution.

    python benchmarks/decode.py --model smollm2-135m-instruct --device cpu

Three kinds of work, each with 8 and 64 rows at a time:
- distinct: every row has a prompt of its own, all responses equally long;
- groups: eight samples a prompt, as in GRPO;
- long tail: three times as many rows as run together, in groups, most responses short and a few long. `generate` takes
  them in batches that wait for their longest row; only the tokens that were asked for count.

Both columns are useful tokens over seconds. CPU seconds are of all threads: on a machine that others use too, they are
the ones to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from surefoot.config.rollout import SamplingConfig
from surefoot.data.pretrained import resolve_model
from surefoot.rollout.api import Completion, Request
from surefoot.rollout.embedded import EmbeddedEngine


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts `[rows][prompt length]` and how many tokens each row is to have."""

    name: str
    rows: int
    prompts: list[np.ndarray]
    lengths: list[int]


def make_work(rows: int, prompt_length: int, new: int, vocabulary: int) -> list[Work]:
    """The three kinds of work for so many rows at a time."""
    draw = np.random.default_rng(0)

    def prompts(count: int, samples: int) -> list[np.ndarray]:
        distinct = [
            draw.integers(100, vocabulary - 100, prompt_length, dtype=np.int32) for _ in range(-(-count // samples))
        ]
        return [distinct[i // samples] for i in range(count)]

    tail = np.clip(np.exp(draw.normal(np.log(new / 2), 1.0, 3 * rows)), 4, 8 * new).astype(int).tolist()
    return [
        Work("distinct", rows, prompts(rows, 1), [new] * rows),
        Work("groups", rows, prompts(rows, 8), [new] * rows),
        Work("long tail", rows, prompts(3 * rows, 8), tail),
    ]


def run_generate(model: PreTrainedModel, work: Work) -> None:
    """Static batches through `generate`."""
    for start in range(0, len(work.prompts), work.rows):
        ids = torch.tensor(np.stack(work.prompts[start : start + work.rows]), device=model.device).long()
        longest = max(work.lengths[start : start + work.rows])
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest,
        )  # fmt: skip


def run_engine(engine: EmbeddedEngine, work: Work) -> None:
    """All rows through the embedded engine."""

    async def sample_all() -> list[Completion]:
        requests = [
            Request(str(i), prompt, SamplingConfig(max_response_length=length), seed=i)
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        return await asyncio.gather(*map(engine.generate, requests))

    assert [len(c.token_ids) for c in asyncio.run(sample_all())] == work.lengths


def best_of(repeats: int, run: Callable[[], None], device: str) -> tuple[float, float]:
    """Least wall and CPU seconds of several runs, after one that does not count."""
    walls, cpus = [], []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls[1:]), min(cpus[1:])


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--prompt", type=int, default=60, help="tokens of a prompt")
    parser.add_argument(
        "--new", type=int, default=32, help="tokens of a response; the long tail's median is half of it"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=["distinct", "groups", "long tail"])
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    path = resolve_model(options.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    print(
        f"{options.model}, {options.dtype}, {options.device}, {options.threads} threads, "
        f"prompts of {options.prompt} tokens"
    )
    head = f"{'generate':>9} {'engine':>9} {'ratio':>6}"
    print(f"{'rows':>4}  {'work':<10} {'tokens':>6} | {head} tokens/s | {head} tokens/CPU s")
    for rows in options.rows:
        # No end-of-sequence ids: lengths are as the work says.
        engine = EmbeddedEngine(model, tokenizer, [], rows, model.device)
        for work in make_work(rows, options.prompt, options.new, model.config.get_text_config().vocab_size):
            if work.name not in options.only:
                continue
            tokens = sum(work.lengths)
            theirs = best_of(options.repeats, lambda work=work: run_generate(model, work), options.device)
            ours = best_of(options.repeats, lambda work=work, engine=engine: run_engine(engine, work), options.device)
            columns = [f"{tokens / a:9.0f} {tokens / b:9.0f} {a / b:6.2f}" for a, b in zip(theirs, ours, strict=True)]
            print(f"{rows:>4}  {work.name:<10} {tokens:>6} | {columns[0]} {'':8} | {columns[1]}", flush=True)


if __name__ == "__main__":
    main()
