from __future__ import annotations

import contextlib
import io
import itertools
import os
import pty
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from surefoot.records import Reward
from surefoot.tracking.api import Alarm, RunInfo
from surefoot.tracking.console import Console, wants_live
from surefoot.tracking.page import Page, duration, final_page, live_page, step_line
from surefoot.tracking.summary import summarise
from tests.tracking.helpers import make_rollout

FULL_ROW = {
    "step": 12,
    "reward/mean": 0.412,
    "reward/part/exact": 0.4,
    "reward/part/format": 1.0,
    "eval/score": 0.61,
    "rollout/length_mean": 12.34,
    "rollout/length_max": 40,
    "rollout/truncated": 0.25,
    "rollout/entropy": 0.81,
    "actor/kl_ref": 0.002,
    "actor/grad_norm": 0.8,
    "actor/lr": 2e-5,
    "critic/explained_variance": 0.4,
    "critic/loss": 0.1,
    "throughput/tokens_per_second": 1234.5,
    "time/generate": 20.1,
    "time/reward": 0.3,
    "time/update": 12.0,
    "time/other": 5.8,
    "time/step": 38.2,
}
ON_THE_PAGE = (
    "step 12/40",
    "eta",
    "30%",
    "generate",
    "reward    1 ",
    "▁▂▂▃▄▄▅▅▆▇▇█",
    "exact 0.4  format 1",
    "held-out  0.61",
    "12.3 tokens",
    "cut at the limit 25%",
    "entropy 0.81",
    "kl 0.002",
    "lr 2e-05",
    "explains 0.4",
    "1,234 tokens/s",
    "generate 20.1",
    "other 5.8",
    "38.2 s",
    "engine-gap (step 3)",
    "prompt    7 + 5 =",
    "response  It is⏎⏎12 \\x1b[2J",
    "reward 1  (exact 1, format 0)",
)


def info(**options) -> RunInfo:
    values = {"name": "sums", "project": "p", "folder": Path("runs/sums"), "run_id": "x", "steps": 40, "config": {}}
    return RunInfo(**(values | options))


def drawn(page: Page, width: int, height: int = 24) -> list[str]:
    stream = io.StringIO()
    console = RichConsole(
        file=stream, width=width, height=height, highlight=False, markup=False, emoji=False, legacy_windows=False
    )
    console.print(live_page(page, width, height))
    return stream.getvalue().rstrip("\n").split("\n")


def full_page() -> Page:
    page = Page(info(), now=itertools.count().__next__)
    for step in range(1, 13):
        page.add(step, FULL_ROW | {"step": step, "reward/mean": step / 12})
    page.begin_phase("generate")
    page.alarms.append(Alarm("alarm-engine-gap", 3, "they differ"))
    page.show_sample(
        12, make_rollout(response="It is\n\n12 \x1b[2J" * 40, reward=Reward(1.0, {"exact": 1.0, "format": 0.0}))
    )
    return page


def test_the_page_fits_a_terminal_of_80_by_24_and_shows_everything():
    lines = drawn(full_page(), 80)
    assert len(lines) <= 23
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    for words in ON_THE_PAGE:
        assert words in text, words


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 24, 60])
def test_the_page_never_exceeds_the_terminal(width: int, height: int):
    lines = drawn(full_page(), width, height)
    assert len(lines) <= max(2, height - 1)
    assert max(map(cell_len, lines)) <= max(width, 20) or width < 20


def test_wide_characters_keep_within_the_width():
    page = full_page()
    page.show_sample(
        12, make_rollout(response="答案是十二。" * 60, prompt_text="七加五等于几？" * 60, reward=Reward(1.0))
    )
    lines = drawn(page, 80)
    assert max(map(cell_len, lines)) <= 80
    assert sum("答案是十二" in line for line in lines) == 3
    assert any(line.startswith("prompt    …") and line.rstrip().endswith("等于几？") for line in lines)


def test_the_bar_of_the_last_step_is_as_long_as_its_phases():
    row = {"time/generate": 5.0, "time/update": 2.5, "time/other": 2.5, "time/step": 10.0}
    row |= {"time/actor_forward": 1.0, "time/actor_backward": 1.5}  # a split of the update, not more time
    page = Page(info())
    page.add(1, row)
    (bar,) = [line for line in drawn(page, 80) if line.startswith("last step")]
    assert (bar.count("█"), bar.count("▓"), bar.count("▒")) == (30, 15, 15)


def test_eta_is_the_pace_of_the_last_steps_times_the_rest():
    times = iter([0.0, 0.0, 10.0, 20.0, 25.0])
    page = Page(info(steps=12), now=lambda: next(times))
    page.add(1, {})
    page.add(2, {})
    assert page.eta == 95.0  # ten steps of 10 s, 5 s of them gone


def test_a_page_before_the_first_step_shows_no_numbers_it_does_not_have():
    text = "\n".join(drawn(Page(info()), 80))
    assert "step 0/40" in text
    assert "eta" not in text
    assert "reward" not in text


def test_a_line_a_step_where_there_is_no_terminal():
    assert step_line(12, 40, FULL_ROW) == (
        "step 12/40  reward 0.412  held-out 0.61  length 12.3  entropy 0.81  kl 0.002  grad 0.8  explained 0.4  "
        "lr 2e-05  cut 25%  1,234 tok/s  38.2 s (generate 20.1, reward 0.3, update 12.0, other 5.8)"
    )
    assert step_line(1, 40, {"warmup/actor_trains": 0.0}) == "step 1/40  critic warm-up"


def run_plain(stream: io.TextIOWrapper) -> None:
    console = Console(stream)
    console.start(info(facts={"model": "tiny"}))
    for step in range(1, 13):
        console.phase("generate")
        console.log(step, FULL_ROW | {"step": step})
        console.sample(step, make_rollout(response="zwölf ⏎ 十二 \x1b[2J\ud83d", reward=Reward(1.0)))
    console.alarm(Alarm("alarm-kl", 3, "far away"))
    console.message("saved")
    console.finish(summarise([FULL_ROW], "finished", 60) | {"folder": "runs/sums"})


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252"])
def test_plain_output_has_no_control_characters_in_any_encoding(encoding: str):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    run_plain(stream)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.count("step 12/40") == 1
    assert "surefoot export runs/sums --to DIR" in text
    assert "! alarm-kl at step 3: far away" in text
    assert text.count("response  ") == 2  # steps 1 and 11


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "live"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_a_live_page_only_where_one_can_be_drawn(environ: dict[str, str], live: bool):
    assert wants_live(Terminal(), environ) is live
    assert not wants_live(io.StringIO(), environ)


USER_PRINTS = """
import sys, os
from surefoot.tracking.console import Console
from surefoot.tracking.summary import summarise
from tests.tracking.test_console import info, FULL_ROW
console = Console()
console.start(info(steps=3))
for step in (1, 2, 3):
    console.phase("reward")
    print("user line", step)
    print("no line end", end="")
    sys.stderr.write("to stderr\\n")
    console.log(step, FULL_ROW | {"step": step})
console.finish(summarise([FULL_ROW], "finished", 60) | {"folder": "runs/sums"})
print("stdout is back", sys.stdout is sys.__stdout__)
"""


def in_a_terminal(script: str, keys: bytes = b"", columns: int = 80) -> tuple[int, str]:
    """Run a script on a pseudo-terminal; return its exit code and all that it wrote."""
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", "PYTHONUTF8": "1"}
    for name in ("CI", "NO_COLOR", "PYTHONBREAKPOINT"):
        environ.pop(name, None)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ,
        cwd=Path(__file__).parents[2],
    )
    os.close(slave)
    if keys:
        os.write(master, keys)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(master, 65536):
            written += piece
    os.close(master)
    return process.wait(), written.decode("utf-8", "replace")


def test_what_user_code_prints_is_shown_and_does_not_break_the_page():
    code, text = in_a_terminal(USER_PRINTS)
    assert code == 0, text
    for step in (1, 2, 3):
        assert f"user line {step}" in text
    assert text.count("to stderr") == 3
    assert "stdout is back True" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert "surefoot export runs/sums --to DIR" in text


BREAKPOINT = """
from surefoot.tracking.console import Console
from tests.tracking.test_console import info
console = Console()
console.start(info(steps=3))
def reward():
    secret = "found " + "it"
    breakpoint()
    return 1.0
reward()
print("went on")
console.finish({})
"""


def test_breakpoint_in_user_code_stops_there_with_a_visible_prompt():
    code, text = in_a_terminal(BREAKPOINT, keys=b"p secret\nc\n")
    assert code == 0, text
    assert "(Pdb)" in text
    assert "'found it'" in text
    assert "went on" in text


def test_an_exception_in_the_run_gives_the_terminal_back():
    script = """
import sys
from pathlib import Path
import tempfile
from surefoot.config.tracking import AlarmsConfig, TrackingConfig
from surefoot.tracking.hub import Trackers
from surefoot.tracking.run_folder import RunFolder
hub = Trackers(TrackingConfig(), AlarmsConfig(), RunFolder(tempfile.mkdtemp(), "a"))
hub.start("a", 3, {})
try:
    with hub.phase("reward"):
        raise KeyboardInterrupt
finally:
    hub.close("interrupted")
    print("real stdout", sys.stdout is sys.__stdout__)
"""
    code, text = in_a_terminal(script)
    assert code != 0
    assert "real stdout True" in text
    assert "\x1b[?25h" in text


def test_a_closed_pipe_disables_the_console_not_the_run():
    script = """
import sys, tempfile
from surefoot.config.tracking import AlarmsConfig, TrackingConfig
from surefoot.tracking.hub import Trackers
from surefoot.tracking.run_folder import RunFolder
hub = Trackers(TrackingConfig(), AlarmsConfig(), RunFolder(tempfile.mkdtemp(), "a"))
hub.start("a", 2000, {})
for step in range(1, 2001):
    hub.log(step, {"reward/mean": 0.5})
hub.finish()
sys.stderr.write(f"finished {len(hub.rows)}")
sys.stderr.flush()
import os; os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "step 1/" not in process.stdout.readline():
        pass
    process.stdout.close()
    errors = process.stderr.read()
    process.wait()
    assert errors.count("warning: tracker console failed (BrokenPipeError") == 1
    assert errors.endswith("finished 2000")


def test_the_page_at_the_end_says_what_came_out_and_what_is_next():
    rng = random.Random(0)
    rows = [{"step": 0, "eval/score": 0.25}]
    rows += [
        {"step": s, "reward/mean": s / 40, "time/step": 30 + rng.random(), "throughput/tokens_per_second": 1200.0}
        for s in range(1, 41)
    ]
    rows[-1]["eval/score"] = 0.61
    summary = summarise(rows, "finished", 1234.0, [Alarm("alarm-kl", 3, "far")])
    summary |= {"folder": "runs/sums", "next": ["surefoot export runs/sums --to m", "surefoot eval c.yaml --model m"]}
    stream = io.StringIO()
    RichConsole(file=stream, width=80).print(final_page(summary))
    text = stream.getvalue()
    assert max(map(cell_len, text.split("\n"))) <= 80
    expected = [
        "finished after 40 steps, 20:34",
        "first 4",
        "last 4",
        "+0.9",
        "eval/score (base, trained)",
        "0.25",
        "0.61",
    ]
    expected += ["+0.36", "alarm-kl", "runs/sums/rollouts", "next      surefoot export runs/sums --to m"]
    expected += ["\n          surefoot eval c.yaml --model m"]
    for words in expected:
        assert words in text, words


def test_the_end_of_a_run_that_never_got_to_a_step_can_be_shown():
    stream = io.StringIO()
    RichConsole(file=stream, width=80).print(final_page(summarise([], "failed", 1.0) | {"folder": "runs/a"}))
    assert "failed after 0 steps" in stream.getvalue()


def test_durations():
    assert [duration(s) for s in (0, 59.9, 60, 3723)] == ["0 s", "59 s", "1:00", "1:02:03"]


def test_drawing_is_cheap_enough_for_a_busy_machine():
    page = full_page()
    for step in range(13, 3000):
        page.add(step, FULL_ROW | {"step": step})
    page._now = time.monotonic
    start = time.process_time()
    for _ in range(10):
        drawn(page, 80)
    assert (time.process_time() - start) / 10 < 0.1
