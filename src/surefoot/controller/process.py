"""What every process of a run sets up for itself: threads, and libraries that keep quiet."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..config import RunConfig


def prepare_process(config: RunConfig) -> None:
    """Settings of the whole process: threads, and libraries that don't draw over the display."""
    import torch

    torch.set_num_threads(config.threads or available_cores())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def available_cores() -> int:
    """How many CPU cores this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, math.ceil(int(limit) / int(period))))
    return cores
