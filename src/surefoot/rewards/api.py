"""The seam: what a reward function is given, what it may return, and how one that fails costs its own row only."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plugins import describe_failure
from ..records import FinishReason, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class RewardItem:
    """One response to judge: everything of a rollout but its arrays, so that it crosses to a worker cheaply.

    `prompt` is the rendered prompt, `messages` what it was rendered from; `response` holds the model's text alone.
    `num_tokens` counts the whole trajectory, `num_model_tokens` what the policy chose.
    """

    prompt: str
    messages: tuple[Mapping[str, Any], ...]
    response: str
    answer: Any
    source: str
    extra: Mapping[str, Any]
    finish_reason: FinishReason
    num_tokens: int
    num_model_tokens: int
    prompt_id: str
    sample_index: int

    @classmethod
    def of(cls, rollout: Rollout) -> RewardItem:
        """Return the view of a rollout."""
        prompt = rollout.prompt
        return cls(
            prompt=prompt.text,
            messages=prompt.messages,
            response=rollout.response,
            answer=prompt.answer,
            source=prompt.source,
            extra=prompt.extra,
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.token_ids),
            num_model_tokens=rollout.num_model_tokens,
            prompt_id=prompt.id,
            sample_index=rollout.sample_index,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function said of one row: a number, or nothing (it abstained), or an error."""

    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function ready to call: of one item, or of a list of items when `batch`."""

    call: Callable[[Any], Any]
    batch: bool = False
    is_async: bool = False


# verl's names, singular for one row and plural for a batch; any of the first column's marks the signature.
_VERL: Mapping[str, tuple[str, Callable[[RewardItem], Any]]] = {
    "data_source": ("data_sources", lambda item: item.source),
    "solution_str": ("solution_strs", lambda item: item.response),
    "ground_truth": ("ground_truths", lambda item: item.answer),
    "extra_info": ("extra_infos", lambda item: item.extra.get("extra_info", item.extra)),
}
VERL_NAMES = tuple(_VERL)


def adapt(function: Callable[..., Any], params: Mapping[str, Any], batch: bool = False) -> RewardFunction:
    """Return a user's function as one of an item (or of items), whichever of the two signatures it has.

    Parameters named as verl names them (`data_source`, `solution_str`, `ground_truth`, `extra_info`; with an `s` for
    a batch) are filled by name; any other function gets the item or items as its first argument. `params` are
    passed as keywords.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    names = {(plural if batch else one): get for one, (plural, get) in _VERL.items()}
    wanted = _parameters(function)
    solution = "solution_strs" if batch else "solution_str"
    if solution not in wanted:
        return RewardFunction(lambda given: function(given, **params), batch, is_async)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    used = {name: get for name, get in names.items() if takes_all or name in wanted}

    def call(given: Any) -> Any:
        filled = {n: [get(item) for item in given] if batch else get(given) for n, get in used.items()}
        return function(**filled, **params)

    return RewardFunction(call, batch, is_async)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some builtins have no signature.
        return {}


def evaluate(function: RewardFunction, items: Sequence[RewardItem]) -> list[Outcome]:
    """Call a function on one item (or on all, when it is a batch function). Whatever goes wrong becomes an outcome."""
    started = time.perf_counter()
    try:
        result = function.call(list(items) if function.batch else items[0])
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _outcomes(function, result, len(items), started)
    except (KeyboardInterrupt, GeneratorExit, BdbQuit):  # A person at the keyboard, not the function.
        raise
    except BaseException as error:  # Timeouts of some verifiers, and sys.exit, are no Exception.
        return _failed(error, len(items), started)


async def evaluate_async(function: RewardFunction, items: Sequence[RewardItem], timeout: float | None) -> list[Outcome]:
    """The same for an async function. `timeout` is in seconds and takes effect where the function awaits."""
    started = time.perf_counter()
    try:
        call = function.call(list(items) if function.batch else items[0])
        result = await asyncio.wait_for(call, timeout)
        return _outcomes(function, result, len(items), started)
    except TimeoutError:
        elapsed = time.perf_counter() - started
        text = "TimeoutError" if timeout is None or elapsed < timeout else f"no answer within {timeout:g} s"
        return [Outcome(error=text, seconds=elapsed / len(items))] * len(items)
    except Exception as error:
        return _failed(error, len(items), started)


async def _awaited(result: Any) -> Any:
    return await result


def _outcomes(function: RewardFunction, result: Any, count: int, started: float) -> list[Outcome]:
    results = read_batch(result, count) if function.batch else [result]
    seconds = (time.perf_counter() - started) / count
    outcomes: list[Outcome] = []
    for entry in results:
        try:
            value, parts = read_result(entry)
            outcomes.append(Outcome(value, parts, seconds=seconds))
        except ValueError as error:
            outcomes.append(Outcome(error=str(error), seconds=seconds))
    return outcomes


def _failed(error: BaseException, count: int, started: float) -> list[Outcome]:
    return [Outcome(error=describe_failure(error), seconds=(time.perf_counter() - started) / count)] * count


def read_result(result: Any) -> tuple[float | None, dict[str, float]]:
    """Return the score and the further numbers that one row's result holds.

    Accepted are int, float, bool, None (abstains), an array or tensor of one element, and a dict with `score` whose
    other numeric entries become logged parts; its other entries (verl's functions put texts there) are left aside.

    Raises:
        ValueError: Anything else, and infinity or NaN.
    """
    if not isinstance(result, Mapping):
        return _number(result, "the result"), {}
    if "score" not in result:
        raise ValueError(f"the result is a dict without `score`, but with {sorted(map(str, result))}")
    value = _number(result["score"], "`score`")
    parts: dict[str, float] = {}
    for name, entry in result.items():
        if name == "score" or entry is None or isinstance(entry, (str, bytes, Mapping, Sequence)):
            continue
        if hasattr(entry, "shape") and math.prod(entry.shape) != 1:
            continue
        number = _number(entry, f"`{name}`")
        if number is not None:
            parts[str(name)] = number
    return value, parts


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            raise ValueError(f"{what} is an array of shape {tuple(shape)} for one row; a number is wanted")
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ValueError(f"{what} is {_shown(value)}; a number or None is wanted")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; a finite number or None is wanted")
    return number


def read_batch(results: Any, count: int) -> list[Any]:
    """Return one entry per row from a batch function's result: a list, a tuple, or an array `(n,)` or `(n, 1)`.

    Raises:
        ValueError: Another type, shape or length.
    """
    shape = getattr(results, "shape", None)
    if shape is not None and hasattr(results, "tolist"):
        if tuple(shape) not in ((count,), (count, 1)):
            raise ValueError(f"the result is an array of shape {tuple(shape)} for {count} rows")
        return results.reshape(count).tolist()
    if not isinstance(results, (list, tuple)):
        raise ValueError(f"the result for a batch is {_shown(results)}; a list with one result per row is wanted")
    if len(results) != count:
        raise ValueError(f"the batch of {count} rows got {len(results)} results")
    return list(results)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"


def message_text(message: Mapping[str, Any]) -> str:
    """Return a chat message's text, whether its content is a string or a list of typed parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content)
