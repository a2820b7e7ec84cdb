"""The page of alarms and error codes, made from the codes themselves: `python -m surefoot.tracking.reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from ..config.tracking import AlarmsConfig
from ..errors import CODES
from .alarms import ALARMS, Check

# Rung by the run folder and raised by the loop: not functions of a run's numbers.
_OTHER_CONDITIONS = {"alarm-disk-full": "A rollout file does not fit on its disk."}

_HEAD = """# Alarms and error codes

This page is made from the code. `surefoot explain CODE` prints the same texts.

**An error** ends the command with one message. Its code stands in brackets in the last line. Mistakes that you can mend
end with exit code 2, a run that failed with 3. Everything that can be checked before a model is loaded is.

**An alarm** is about a run that goes on. Each is said once a run, on the terminal, in `alarms.jsonl` and to the
trackers, with the key to look at. The codes listed in `alarms.stop_on` end the run with exit code 3, with its state
saved; out of the box that is `{stop_on}` alone. All thresholds are keys of the section
[`alarms`](config.md#alarms).
"""


def alarms_page() -> str:
    """Return the page as Markdown: each alarm with its condition and its keys, then each error."""
    lines = [_HEAD.format(stop_on=", ".join(AlarmsConfig().stop_on)), "## Alarms", ""]
    alarms = [*ALARMS, *_OTHER_CONDITIONS]
    for code in alarms:
        lines += [f"### {code}", "", *_condition(code), _text(CODES[code]), ""]
    lines += ["## Errors", ""]
    for code in sorted(set(CODES) - set(alarms)):
        lines += [f"### {code}", "", _text(CODES[code]), ""]
    return "\n".join(lines)


def _condition(code: str) -> Iterator[str]:
    check = ALARMS.get(code)
    what = (check.__doc__ or "").strip() if check else _OTHER_CONDITIONS[code]
    keys = ", ".join(f"`alarms.{key}` ({_default(key)})" for key in _thresholds(check)) if check else ""
    yield f"*When:* {what.rstrip('.')}." + (f" *Keys:* {keys}." if keys else "")
    yield ""


def _thresholds(check: Check) -> list[str]:
    """Keys of the section `alarms` that a check reads, in the order in which it reads them."""
    read = re.findall(r"\bconfig\.(\w+)", inspect.getsource(check))
    return [key for key in dict.fromkeys(read) if key in AlarmsConfig.model_fields]


def _default(key: str) -> object:
    return AlarmsConfig.model_fields[key].get_default(call_default_factory=True)


def _text(text: str) -> str:
    # A key with a wildcard outside of backticks would become emphasis.
    return re.sub(r"(?<!`)\*(?!`)", r"\\*", text)


if __name__ == "__main__":
    print(alarms_page())
