"""Model text made safe to print: a policy samples escape sequences sooner or later."""

from __future__ import annotations

import unicodedata

from ..records import Rollout

# Control, format (bidirectional marks), surrogate, private, unassigned, line and paragraph separator: no width to
# rely on.
_UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_VISIBLE = {"\n": "⏎", "\t": "→"}


def printable(text: str) -> str:
    """Return `text` in one line, with line ends as ⏎, tabs as → and what can't be printed as `\\x1b`-like escapes."""
    return "".join(_printable(character) for character in text)


def tail(text: str, length: int) -> str:
    """Return the last `length` characters, with … in front of a cut."""
    return text if len(text) <= length else "…" + text[len(text) - length + 1 :] if length > 0 else ""


def head(text: str, length: int) -> str:
    """Return the first `length` characters, with … behind a cut."""
    return text if len(text) <= length else text[: length - 1] + "…" if length > 0 else ""


def rollout_as_text(rollout: Rollout) -> str:
    """Return prompt, response and reward as text of several lines."""
    lines = [rollout.prompt.text, "", "--- response", rollout.response, "", f"--- {reward_as_text(rollout)}"]
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")


def reward_as_text(rollout: Rollout) -> str:
    """Return the reward and its parts in one line.

    Example:
        "reward 0.5  (exact 0, format 1)  stop"
    """
    reward = rollout.reward
    if reward is None or reward.score is None:
        words = "no reward" if reward is None or reward.error is None else f"no reward: {printable(reward.error)}"
    else:
        parts = [f"{name} {value:.3g}" for name, value in reward.parts.items() if value is not None]
        words = f"reward {reward.score:.3g}" + (f"  ({', '.join(parts)})" if len(parts) > 1 else "")
    return f"{words}  {rollout.finish_reason}"


def _printable(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if unicodedata.category(character) in _UNPRINTABLE:
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character
