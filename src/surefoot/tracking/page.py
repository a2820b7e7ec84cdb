"""What the console shows, as functions of the run so far: rows in, renderables and lines out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..records import Rollout
from .api import Alarm, Row, RunInfo
from .sparkline import sparkline
from .text import head, printable, reward_as_text

_LABEL = 10  # columns of the labels at the left
# Told apart by shape as well as by colour.
_PHASE_STYLES = (("█", "green"), ("▓", "yellow"), ("▒", "cyan"), ("█", "magenta"), ("▓", "blue"), ("░", "bright_black"))
_RECENT_STEPS = 10
# Metrics whose whole course is drawn.
_CURVES = ("reward/mean", "eval/score")
# The engines' own split of phases that are shown already.
_INNER_PHASES = ("actor_", "critic_", "reference_")


class Page:
    """All that the live page shows. `now` is the clock, in seconds."""

    def __init__(self, info: RunInfo, now: Callable[[], float] = time.monotonic) -> None:
        self.info = info
        self.last: Row = {}
        self._curves: dict[str, list[float]] = {name: [] for name in _CURVES}
        self.alarms: list[Alarm] = []
        self.done = info.resumed_step or 0
        self._now = now
        self._phase, self._phase_start = "starting", now()
        self._step_ends = [now()]
        self._sample: tuple[int, Rollout] | None = None
        for row in info.history:
            self._take(row)

    def begin_phase(self, name: str) -> None:
        """A phase of the next step has begun."""
        self._phase, self._phase_start = name, self._now()

    def add(self, step: int, metrics: Row) -> None:
        """A step has ended."""
        self._take(metrics)
        self.done = step
        self._step_ends.append(self._now())

    def show_sample(self, step: int, rollout: Rollout) -> None:
        """A rollout to look at."""
        self._sample = step, rollout

    def sample_lines(self) -> tuple[str, str, str]:
        """Return prompt, response and reward of the sample, each in one printable line."""
        assert self._sample is not None
        step, rollout = self._sample
        return (
            printable(rollout.prompt.text.rstrip()),
            printable(rollout.response),
            f"step {step}: {reward_as_text(rollout)}",
        )

    @property
    def has_sample(self) -> bool:
        """Whether there is a sample to show."""
        return self._sample is not None

    @property
    def phase(self) -> str:
        """The phase under way and its seconds so far."""
        return f"{self._phase} {duration(self._now() - self._phase_start)}"

    @property
    def eta(self) -> float | None:
        """Seconds to the last step at the pace of the last ones, evaluation and saving included; None at the start."""
        ends = self._step_ends[-_RECENT_STEPS - 1 :]
        if len(ends) < 2:
            return None
        pace = (ends[-1] - ends[0]) / (len(ends) - 1)
        return max(0.0, pace * (self.info.steps - self.done) - (self._now() - ends[-1]))

    def curve(self, name: str) -> list[float]:
        """Return the finite values of a metric that is drawn, oldest first."""
        return self._curves[name]

    def _take(self, row: Row) -> None:
        self.last = row
        for name, values in self._curves.items():
            if math.isfinite(row.get(name, math.nan)):
                values.append(row[name])


def live_page(page: Page, width: int, height: int) -> RenderableType:
    """Return the page for a terminal of that size. What does not fit in height is left out from the bottom."""
    lines: list[RenderableType] = [_title(page, width), _progress(page, width), Text()]
    row = page.last
    # A row with a held-out score alone (step 0) has nothing to say about training.
    lines += [_line(label, words, width) for label, words in _metric_lines(page, row, width)]
    lines += _time_bar(row, width)
    if page.alarms:
        words = ", ".join(f"{alarm.code.removeprefix('alarm-')} (step {alarm.step})" for alarm in page.alarms)
        lines.append(_line("alarms", words, width, style="bold yellow"))
    if page.has_sample:
        prompt, response, reward = page.sample_lines()
        room = width - _LABEL - 1
        lines += [Text(), _line("prompt", _cell_tail(prompt, room), width, style="dim")]
        # A sample can be thousands of tokens long; only what three lines may hold is measured.
        pieces = chop_cells(head(response, 3 * room), room)[:3] or [""]
        lines += [_line("response" if i == 0 else "", piece, width) for i, piece in enumerate(pieces)]
        lines.append(_line("", reward, width, style="bold"))
    return Group(*lines[: max(2, height - 1)])


def step_line(step: int, steps: int, row: Row) -> str:
    """Return a step as one line of plain ASCII.

    Example:
        "step 12/40  reward 0.412  length 12.3  1,234 tok/s  38.2 s (generate 20.1, update 12.0, other 6.1)"
    """
    words = [f"step {step}/{steps}"]
    words += [f"{label} {_number(row[name])}" for name, label in _PLAIN.items() if name in row]
    if row.get("rollout/truncated"):
        words.append(f"cut {row['rollout/truncated']:.0%}")
    if row.get("reward/unscored"):
        words.append(f"unscored {row['reward/unscored']:.0f}")
    if row.get("warmup/actor_trains", 1) == 0:
        words.append("critic warm-up")
    if "throughput/tokens_per_second" in row:
        words.append(f"{_number(row['throughput/tokens_per_second'])} tok/s")
    if "time/step" in row:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in _phases(row))
        words.append(f"{row['time/step']:.1f} s" + (f" ({phases})" if phases else ""))
    return "  ".join(words)


def final_page(summary: Mapping[str, Any]) -> RenderableType:
    """Return the table of first against last steps, the held-out scores, where everything lies, and what to do next."""
    span = summary["span"]
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{summary['status']} after {summary['steps']} steps, {duration(summary['seconds'])}",
        title_justify="left",
    )
    for name in (
        "",
        f"first {span}" if span > 1 else "first step",
        f"last {span}" if span > 1 else "last step",
        "change",
    ):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, ends in summary["compared"].items():
        table.add_row(name, *_ends(ends["first"], ends["last"]))
    for name, ends in summary["held_out"].items():
        if "base" in ends and ends["trained_step"] > 0:
            table.add_row(f"{name} (base, trained)", *_ends(ends["base"], ends["trained"]), style="bold")
        else:
            table.add_row(f"{name} (step {ends['trained_step']})", "", _number(ends["trained"]), "", style="bold")
    alarms = [Text(f"alarms    {', '.join(summary['alarms'])}", style="bold yellow")] if summary["alarms"] else []
    folder = summary["folder"]
    # One command or several, as the caller knows what this run can be used for.
    commands = summary.get("next", f"surefoot export {folder} --to DIR")
    commands = [commands] if isinstance(commands, str) else commands
    lines = {"folder": [folder], "rollouts": [f"{folder}/rollouts"], "next": commands}
    where = [
        Text(f"{label if i == 0 else '':<{_LABEL}}{line}", overflow="fold")
        for label, texts in lines.items()
        for i, line in enumerate(texts)
    ]
    return Group(table, *alarms, *where)


def duration(seconds: float) -> str:
    """Return seconds as people write them.

    Example:
        duration(3723) == "1:02:03"; duration(42) == "42 s"
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Names and labels of a plain line.
_PLAIN = {
    "reward/mean": "reward",
    "eval/score": "held-out",
    "rollout/length_mean": "length",
    "rollout/entropy": "entropy",
    "actor/kl_ref": "kl",
    "actor/loss": "loss",
    "actor/grad_norm": "grad",
    "critic/explained_variance": "explained",
    "actor/lr": "lr",
}


def _title(page: Page, width: int) -> Text:
    eta = "" if page.eta is None or page.done >= page.info.steps else f"   eta {duration(page.eta)}"
    right = f"step {page.done}/{page.info.steps}{eta}"
    left = head(f"surefoot  {page.info.name}", max(0, width - len(right) - 2))
    return Text(left + right.rjust(width - len(left)), style="bold", no_wrap=True, overflow="crop")


def _progress(page: Page, width: int) -> RenderableType:
    share = f"{page.done / page.info.steps:4.0%}"
    phase = head(page.phase, 24)
    bar = ProgressBar(total=page.info.steps, completed=page.done, width=max(5, width - len(share) - 26))
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(bar, share, Text(phase, style="dim", no_wrap=True))
    return grid


def _metric_lines(page: Page, row: Row, width: int) -> list[tuple[str, str]]:
    """Return (label, words) of each line of numbers that this run has."""
    room = max(0, min(40, width - _LABEL - 26))
    lines: list[tuple[str, str]] = []
    rewards = page.curve("reward/mean")
    if rewards:
        lines.append(("reward", f"{rewards[-1]:<8.3g} {sparkline(rewards, room)}"))
    parts = [
        f"{name.removeprefix('reward/part/')} {value:.3g}"
        for name, value in row.items()
        if name.startswith("reward/part/")
    ]
    if len(parts) > 1:
        lines.append(("", "  ".join(parts)))
    held_out = page.curve("eval/score")
    if held_out:
        lines.append(("held-out", f"{held_out[-1]:<8.3g} {sparkline(held_out, room)}  from {held_out[0]:.3g}"))
    if "rollout/length_mean" in row:
        cut = row.get("rollout/truncated", 0.0)
        longest = f"  max {row['rollout/length_max']:.0f}" if "rollout/length_max" in row else ""
        lines.append(("response", f"{row['rollout/length_mean']:.1f} tokens{longest}  cut at the limit {cut:.0%}"))
    policy = _words(
        row, {"rollout/entropy": "entropy", "actor/kl_ref": "kl", "actor/grad_norm": "grad", "actor/lr": "lr"}
    )
    if row.get("warmup/actor_trains", 1) == 0:
        policy = f"waits for the critic's warm-up  {policy}"
    if policy:
        lines.append(("policy", policy))
    if critic := _words(row, {"critic/explained_variance": "explains", "critic/loss": "loss"}):
        lines.append(("critic", critic))
    if "throughput/tokens_per_second" in row:
        lines.append(("speed", f"{_number(row['throughput/tokens_per_second'])} tokens/s"))
    return lines


def _time_bar(row: Row, width: int) -> list[RenderableType]:
    """Return the last step's seconds as a bar of phases and its legend."""
    phases = _phases(row)
    total = sum(seconds for _, seconds in phases)
    if total <= 0:
        return []
    room = min(60, width - _LABEL - 10)
    bar, legend = (
        Text(f"{'last step':<{_LABEL}}", no_wrap=True, overflow="crop"),
        Text(" " * _LABEL, no_wrap=True, overflow="ellipsis"),
    )
    drawn, elapsed = 0, 0.0
    for index, (name, seconds) in enumerate(phases):
        character, style = _PHASE_STYLES[index % len(_PHASE_STYLES)]
        elapsed += seconds
        cells = round(room * elapsed / total) - drawn
        bar.append(character * cells, style=style)
        drawn += cells
        legend.append(character, style=style).append(f" {name} {seconds:.1f}  ")
    bar.append(f" {total:.1f} s")
    return [bar, legend]


def _phases(row: Row) -> list[tuple[str, float]]:
    """Return (name, seconds) of the step's phases, `other` last."""
    times = {name.removeprefix("time/"): v for name, v in row.items() if name.startswith("time/")}
    times.pop("step", None)
    other = times.pop("other", 0.0)
    phases = [(name, v) for name, v in times.items() if not name.startswith(_INNER_PHASES)]
    return [(name, v) for name, v in [*phases, ("other", other)] if v >= 0.05]


def _line(label: str, words: str, width: int, style: str = "") -> Text:
    line = Text(f"{label:<{_LABEL}}", no_wrap=True, overflow="crop")
    line.append(words, style=style)
    line.truncate(width, overflow="ellipsis")
    return line


def _cell_tail(text: str, room: int) -> str:
    """Return the end of `text` that fills at most `room` columns; East Asian characters take two."""
    end = text[-room:] if room > 0 else ""
    while cell_len(end) + (len(end) < len(text)) > room and end:
        end = end[1:]
    return end if len(end) == len(text) else "…" + end


def _words(row: Row, labels: Mapping[str, str]) -> str:
    return "  ".join(f"{label} {_number(row[name])}" for name, label in labels.items() if name in row)


def _ends(first: float, last: float) -> tuple[str, str, str]:
    return _number(first), _number(last), ("+" if last >= first else "") + _number(last - first)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
