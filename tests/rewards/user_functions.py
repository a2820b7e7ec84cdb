"""Reward functions as users write them: good, slow, broken and hostile."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time

import numpy as np

LEAK: list[bytearray] = []


def length(item):
    return len(item.response)


def half(item, factor=0.5):
    return factor * len(item.response)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "pred": solution_str, "level": extra_info["level"], "from": data_source}


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    return [float(s == g) + bonus for s, g in zip(solution_strs, ground_truths, strict=True)]


def even_rows_only(item):
    return 1.0 if item.sample_index % 2 == 0 else None


def odd_rows_only(item):
    return 3.0 if item.sample_index % 2 == 1 else None


def by_instruction(item):
    """Do what the response says."""
    if item.response == "spin":
        # Exponential backtracking: C code that never looks at signals and never lets go of the interpreter's lock.
        re.match(r"(a+)+$", "a" * 60 + "b")
    if item.response == "segfault":
        ctypes.string_at(0)
    if item.response == "exit":
        os._exit(3)
    if item.response == "sysexit":
        sys.exit("enough")
    if item.response == "child":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(300)  # {item.answer}"])
        time.sleep(300)
    if item.response.startswith("sleep"):
        time.sleep(float(item.response.split()[1]))
    if item.response == "raise":
        raise KeyError("nothing here")
    if item.response == "leak":
        LEAK.append(bytearray(os.urandom(1 << 10)) * (20 << 10))
    if item.response == "print":
        print(f"seen {item.answer}")
    if item.response == "pid":
        return os.getpid()
    if item.response == "torch":
        return "torch" in sys.modules or "transformers" in sys.modules
    return 1.0


def return_extra(item):
    return item.extra["result"]


def batch_result(items):
    kind = items[0].answer
    numbers = [float(i) for i in range(len(items))]
    return {
        "list": numbers,
        "tuple": tuple(numbers),
        "array": np.array(numbers),
        "column": np.array(numbers)[:, None],
        "bools": [i % 2 == 0 for i in range(len(items))],
        "ints": list(range(len(items))),
        "short": numbers[:-1],
        "matrix": np.zeros((len(items), 2)),
        "string": "x" * len(items),
        "none": None,
        "one bad": [0.0, "good", float("nan"), *numbers[3:]],
    }[kind]


async def slow_async(item):
    await asyncio.sleep(0.3)
    return 1.0


async def hanging_async(item):
    await asyncio.sleep(300 if item.response == "hang" else 0)
    return 1.0


async def batch_async(items):
    await asyncio.sleep(0)
    return [i.sample_index for i in items]


async def failing_async(item):
    raise TimeoutError("the service said no")


def take_breakpoint(item):
    breakpoint()
    return 1.0


def called_at(item):
    return time.time()
