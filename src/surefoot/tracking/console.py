"""The run on the terminal: a live page where there is one, a line a step elsewhere."""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.live import Live

from ..records import Rollout
from .api import Alarm, Row, RunInfo
from .page import Page, final_page, live_page, step_line
from .text import printable, tail

_FRAMES_PER_SECOND = 2.0
# A log file is to stay readable: a sample in it every so many steps.
_STEPS_PER_SAMPLE = 10


class Console:
    """Shows the run on `stream`. Nothing here raises for what a model wrote or how small the terminal is.

    Args:
        stream: Where to; stdout when left out.
        live: Force the live page on or off; left out, `wants_live` decides.
    """

    def __init__(self, stream: IO[str] | None = None, live: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live_wanted = wants_live(self._stream, os.environ) if live is None else live
        self._rich = RichConsole(
            file=self._stream, highlight=False, markup=False, emoji=False, force_terminal=self._live_wanted or None
        )
        self._live: Live | None = None
        self._page: Page | None = None
        self._hook: Any = None
        self._next_sample = 0

    def start(self, info: RunInfo) -> None:
        """Show what runs."""
        self._page = Page(info)
        resumed = "" if info.resumed_step is None else f", going on after step {info.resumed_step}"
        facts = {"run": f"{info.name}, {info.steps} steps{resumed}"}
        for name, value in {**facts, **info.facts, "folder": str(info.folder)}.items():
            self._line(f"{name:<9} {printable(value)}")
        if self._live_wanted:
            self._live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=_FRAMES_PER_SECOND)
            self._live.start()
            self._hook, sys.breakpointhook = sys.breakpointhook, self._breakpoint

    def phase(self, name: str) -> None:
        """Show that a phase of the next step has begun."""
        if self._page:
            self._page.begin_phase(name)
            self._refresh()

    def log(self, step: int, metrics: Row) -> None:
        """Show a step."""
        if self._page:
            self._page.add(step, metrics)
            if self._live:
                self._refresh()
            else:
                self._line(step_line(step, self._page.info.steps, metrics))

    def sample(self, step: int, rollout: Rollout) -> None:
        """Show a rollout: the prompt's tail, the response, the reward."""
        if self._page:
            self._page.show_sample(step, rollout)
            if self._live:
                self._refresh()
            elif self._next_sample <= step:
                self._next_sample = step + _STEPS_PER_SAMPLE
                prompt, response, reward = self._page.sample_lines()
                self._line(f"  prompt    {tail(prompt, 200)}\n  response  {tail(response, 400)}\n  {reward}")

    def alarm(self, alarm: Alarm) -> None:
        """Show an alarm in full once, and its code from then on."""
        if self._page:
            self._page.alarms.append(alarm)
        self._line(f"! {alarm.code} at step {alarm.step}: {alarm.message}", style="bold yellow")

    def message(self, text: str) -> None:
        """Print something above the live page."""
        self._line(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the live page down; show what came out, where it lies, and what can be done with it."""
        self.stop()
        if self._page and "compared" in summary:
            width = self._rich.width if self._live_wanted else 100
            RichConsole(file=self._stream, width=width, highlight=False, markup=False, emoji=False).print(
                final_page(summary)
            )

    def _render(self) -> Any:
        assert self._page is not None
        try:
            return live_page(self._page, self._rich.width, self._rich.height)
        except Exception as error:  # it would end the thread that draws, and leave stdout redirected
            return f"this page can't be drawn: {error!r}"

    def _refresh(self) -> None:
        if self._live:
            self._live.refresh()

    def _line(self, text: str, style: str | None = None) -> None:
        if self._live_wanted:
            self._rich.print(text, style=style)
        else:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()

    def stop(self) -> None:
        """Take the live page down and give stdout and `breakpoint()` back. Does nothing when there is none."""
        if self._live:
            live, self._live = self._live, None
            sys.breakpointhook = self._hook
            live.stop()

    def _breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Serve `breakpoint()` in user code: a page that redraws itself would hide the prompt, so it goes first."""
        hook = self._hook
        self.stop()
        self._live_wanted = False
        if hook is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT"):
            return hook(*args, **kwargs)
        return pdb.Pdb().set_trace(sys._getframe(1))


def wants_live(stream: IO[str], environ: Mapping[str, str]) -> bool:
    """Say whether a live page can be drawn: a terminal that understands it, with a Unicode encoding, not in CI."""
    if environ.get("CI") or environ.get("NO_COLOR") or environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    encoding = getattr(stream, "encoding", None) or ""
    return stream.isatty() and encoding.lower().replace("-", "").startswith("utf8")
