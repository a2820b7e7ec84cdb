"""Everything about rewards that can be refused before a model loads."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..config.data import ReasoningGymSource, Source
from ..config.rewards import (
    CodeReward,
    ExactReward,
    JudgeReward,
    LengthReward,
    ModelReward,
    PythonReward,
    RegexReward,
    RewardSpec,
)
from ..config.run import RunConfig
from ..data.source import source_names
from ..errors import UserError, nearest
from ..plugins import load_function
from .api import VERL_NAMES
from .code import sandbox_fault
from .model import check_model
from .table import names

_PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym", "judge": "httpx", "model": "transformers"}


def check_rewards(run: RunConfig) -> None:
    """Check all rewards of a run.

    Users' functions are imported, patterns compiled, packages and folders looked for, and the code sandbox is tried.

    Raises:
        UserError: Names the key at fault.
    """
    config = run.rewards
    sources = [run.data.sources, run.eval.sources if run.eval else []]
    if all(spec.weight == 0 for spec in config.functions):
        raise UserError(
            "config-conflict", "every reward has weight 0, so no row would have a score", key="rewards.functions"
        )
    seen: dict[str, int] = {}
    for index, (spec, name) in enumerate(zip(config.functions, names(config.functions), strict=True)):
        key = f"rewards.functions.{index}"
        if name in seen:
            message = f"rewards {seen[name]} and {index} are both named `{name}`"
            raise UserError("config-conflict", message, key=f"{key}.name", hint="Give each a `name` of its own.")
        seen[name] = index
        package = _PACKAGES.get(spec.type)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                "reward-package", f"the `{spec.type}` reward needs a package", key=f"{key}.type", want=package
            )
        _check_sources(spec, key, sources)
        if check := _CHECKS.get(type(spec)):
            check(spec, key)


def _check_sources(spec: RewardSpec, key: str, sources: Sequence[Sequence[Source]]) -> None:
    known = list(dict.fromkeys(name for part in sources for name in source_names(part)))
    generated = [isinstance(source, ReasoningGymSource) for part in sources for source in part]
    for name in spec.sources or ():
        # Rows of files may carry a `data_source` of their own, which no one knows before reading them.
        if name not in known and all(generated):
            near = nearest(name, known)
            hint = f"Did you mean `{near}`?" if near else None
            want = ", ".join(known)
            raise UserError(
                "config-conflict", "no source has this name", key=f"{key}.sources", got=name, want=want, hint=hint
            )
    if spec.type == "reasoning_gym" and not any(generated):
        message = "this reward scores the prompts of `reasoning_gym` sources, and there is none"
        raise UserError("config-conflict", message, key=f"{key}.type", got=", ".join(known))


def _compile(pattern: str, key: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError("config-bad-value", f"no valid regular expression: {error}", key=key, got=pattern) from None


def _check_length(spec: LengthReward, key: str) -> None:
    if spec.buffer > spec.limit:
        raise UserError(
            "config-conflict",
            "the slope is longer than `limit`",
            key=f"{key}.buffer",
            got=spec.buffer,
            want=f"at most {spec.limit}",
        )


def _check_code(spec: CodeReward, key: str) -> None:
    if fault := sandbox_fault():
        raise UserError("reward-sandbox", f"model-written code can't be run safely here: {fault}", key=f"{key}.type")


def _check_judge(spec: JudgeReward, key: str) -> None:
    _compile(spec.pattern, f"{key}.pattern")
    if not re.match(r"https?://[^/\s]+", spec.base_url):
        raise UserError(
            "config-bad-value", "no web address", key=f"{key}.base_url", got=spec.base_url, want="http://host:port/v1"
        )
    if "{response}" not in spec.prompt:
        raise UserError(
            "config-bad-value",
            "the judge would not see the response",
            key=f"{key}.prompt",
            want="a text with {response} in it",
        )


def _check_python(spec: PythonReward, key: str) -> None:
    """Load the function and see that it can be called as it will be."""
    function = load_function(spec.function, f"{key}.function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    given = [name + "s" if spec.batch else name for name in VERL_NAMES]
    other = [name if spec.batch else name + "s" for name in VERL_NAMES]
    if other[1] in signature.parameters:
        message = f"it takes `{other[1]}`, which is verl's signature for " + ("one row" if spec.batch else "a batch")
        raise UserError("config-conflict", message, key=f"{key}.batch", got=spec.batch, want=not spec.batch)
    is_verl = given[1] in signature.parameters
    keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    filled = {name: None for name in given if is_verl and (keywords or name in signature.parameters)}
    try:
        signature.bind(*(() if is_verl else (None,)), **filled, **spec.params)
    except TypeError as error:
        called = ", ".join([*(filled or ("items" if spec.batch else "item",)), *spec.params])
        got = f"{spec.function}{signature}"
        raise UserError(
            "config-bad-value", f"it cannot be called as f({called}): {error}", key=f"{key}.function", got=got
        ) from None


_CHECKS: dict[type[Any], Callable[[Any, str], None]] = {
    RegexReward: lambda spec, key: _compile(spec.pattern, f"{key}.pattern"),
    ExactReward: lambda spec, key: _compile(spec.extract, f"{key}.extract") if spec.extract else None,
    LengthReward: _check_length,
    CodeReward: _check_code,
    ModelReward: check_model,
    JudgeReward: _check_judge,
    PythonReward: _check_python,
}
