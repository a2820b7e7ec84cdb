"""The one tree of errors, and what each code means.

Every error that a user can see carries a code; `surefoot explain CODE` prints the text kept here. The
classes keep their arguments in `args`, so they cross process borders by pickle unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CODES: dict[str, str] = {
    "config-unknown-key": "The file or an override names a key that no section has. Nothing ignores a key: a typing mistake would train another run than the one you meant.",
    "config-bad-value": "A key has a value of the wrong type or out of its range.",
    "config-file": "The configuration file cannot be read as YAML.",
    "config-conflict": "Two keys contradict each other; both are named in the message.",
    "plugin-not-found": "A key names a function of yours, and there is no such file, module or name. Write `package.module:function` or `path/to/file.py:function`; paths are relative to the working directory.",
    "plugin-broken": "The file or module that holds your function raises while it is imported, or the name in it is no function. Import it in a Python shell to see the whole traceback.",
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that looks most like `word`, or None when nothing is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


class SurefootError(Exception):
    """Base of every error that Surefoot raises on purpose.

    Args:
        code: A key of `CODES`.
        message: One sentence: what is wrong.
        key: The configuration key, column or option it is about.
        got: What was found.
        want: What is accepted.
        hint: The nearest right thing, or the next step.
    """

    def __init__(
        self,
        code: str,
        message: str,
        key: str | None = None,
        got: object = None,
        want: object = None,
        hint: str | None = None,
    ) -> None:
        assert code in CODES, f"error code {code!r} is not explained in errors.CODES"
        got, want = (None if v is None else str(v) for v in (got, want))
        super().__init__(code, message, key, got, want, hint)
        self.code, self.message, self.key, self.got, self.want, self.hint = code, message, key, got, want, hint

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}" if self.key else self.message]
        lines += [f"  {label}: {value}" for label, value in (("got", self.got), ("want", self.want)) if value is not None]
        if self.hint:
            lines.append(f"  {self.hint}")
        lines.append(f"  [{self.code}: `surefoot explain {self.code}` says more]")
        return "\n".join(lines)


class UserError(SurefootError, ValueError):
    """A mistake that the user can mend: config, data, files. Exit code 2."""


class RunError(SurefootError, RuntimeError):
    """The run itself failed after it had started properly. Exit code 3."""
