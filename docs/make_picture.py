"""Draw the live page of a finished run as an SVG: `python docs/make_picture.py runs/quickstart 20 docs/run.svg`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console

from surefoot.records import Prompt, Reward, Rollout
from surefoot.tracking.api import RunInfo
from surefoot.tracking.jsonl import read_metrics
from surefoot.tracking.page import Page, live_page


def sample_of(run: Path, step: int) -> Rollout:
    """The first rollout of a step's file that earned its reward."""
    rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    row = max(rows, key=lambda r: r["reward"] or 0)
    ids = np.array(row["token_ids"], np.int32)
    prompt = Prompt(row["prompt_id"], ids[:0], row["prompt"], ())
    mask = np.array(row["loss_mask"], bool)
    logprobs = np.zeros(len(ids), np.float32)
    return Rollout(prompt, 0, ids, mask, logprobs, ids, row["finish_reason"], row["response"], Reward(row["reward"]))


def main() -> None:
    run, step, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rows = read_metrics(run / "metrics.jsonl")
    seconds = [0.0]
    page = Page(RunInfo("quickstart", "", run, "", int(rows[-1]["step"]), {}), now=lambda: seconds[0])
    for row in rows[: step + 1]:
        seconds[0] += row.get("time/step", 0)
        page.add(int(row["step"]), row)
    page.begin_phase("generate")
    page.show_sample(step, sample_of(run, step))
    console = Console(width=92, height=18, record=True, file=io.StringIO(), force_terminal=True)
    console.print(live_page(page, 92, 18))
    picture = console.export_svg(title="surefoot train recipes/quickstart.yaml")
    # The viewer's own monospace font does; nothing is to be fetched from anywhere.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
