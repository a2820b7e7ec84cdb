"""`rewards`: how a rollout is judged. Several rewards add up, each with its weight, each logged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import NonNegative, Positive, PositiveFloat, Section


class RewardBase(Section):
    """Keys that every reward has."""

    name: str | None = None
    """Name in the metrics; left out: the type."""
    weight: float = 1.0
    """Factor in the sum. 0 logs the part without using it."""
    sources: list[str] | None = None
    """Judge only rows of the data sources with these names; on the others this reward abstains. Left out: all rows."""


class ReasoningGymReward(RewardBase):
    """The verifier of the reasoning-gym task that made the prompt."""

    type: Literal["reasoning_gym"]
    extract: Literal["all", "answer_tag", "last_integer", "last_line"] = "all"
    """Which part of the response is handed to the verifier. A response that lacks the part scores 0."""


class MathReward(RewardBase):
    """Symbolic equality with the answer, by math-verify."""

    type: Literal["math"]


class ExactReward(RewardBase):
    """1 when the response equals the answer, or one of the answers when the row has a list of them."""

    type: Literal["exact"]
    ignore_case: bool = False
    """Compare without case."""
    extract: str | None = None
    """A regular expression; its first group (or whole match), the last one in the response, is compared."""


class RegexReward(RewardBase):
    """1 when the response matches a regular expression: a format reward. The prompt is never looked at."""

    type: Literal["regex"]
    pattern: str
    """Python regular expression; `.` matches line ends too."""
    full: bool = True
    """The whole response must match, not a part of it."""


class LengthReward(RewardBase):
    """Falls from 0 to -1 over the last `buffer` tokens below the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    type: Literal["length"]
    limit: Positive
    """Tokens at which the reward reaches -1."""
    buffer: Positive
    """Length of the slope in tokens."""


class CodeReward(RewardBase):
    """Share of test cases that the last Python block of the response passes.

    It runs in a sandbox: no network, no further processes, no writing of files (Linux only).
    The row's answer holds the tests: a list of `{input, output}` (text for standard input, text it must print) or
    `{assert: "statement"}`, a list of such statements, or `{inputs: [...], outputs: [...]}`; or any of these as JSON.
    """

    type: Literal["code"]
    cpu_seconds: Positive = 5
    """Processor time of one test case. A row's tests together have 0.8 of `timeout_seconds`; those left then fail."""
    memory_mb: Positive = 512
    """Address space of one test case."""


class ModelReward(RewardBase):
    """A Hugging Face sequence-classification model: its first logit on the whole conversation."""

    type: Literal["model"]
    path: str
    """Folder or hub id of the reward model. Its tokenizer's own chat template renders the conversation."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision it runs in."""
    batch_size: Positive = 16
    """Rows per forward pass."""


class JudgeReward(RewardBase):
    """A language model behind an OpenAI-compatible endpoint that answers with a number."""

    type: Literal["judge"]
    base_url: str
    """Address of the API, ending in `/v1`."""
    model: str
    """Model name that the endpoint knows."""
    prompt: str
    """What the judge is asked; `{prompt}`, `{response}` and `{answer}` are filled in."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in the reply; the last match counts."""
    scale: PositiveFloat = 1.0
    """The number found is divided by this."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    concurrency: Positive = 16
    """Requests under way at once."""
    retries: NonNegative = 3
    """How often a request is tried again after a time-out, a lost connection or a status 408, 409, 429 or 5xx."""
    timeout_seconds: PositiveFloat = 60.0
    """Time for one request."""
    max_tokens: Positive = 256
    """Longest reply."""


class PythonReward(RewardBase):
    """Your own function, sync or async.

    It is called as `f(item)` with a `surefoot.rewards.api.RewardItem` or, when its parameters are verl's, as
    `f(data_source, solution_str, ground_truth, extra_info)`; with `batch: true` as `f(items)`, or with verl's plurals.
    It returns a number, None to abstain, or a dict with `score` whose other numbers are logged. Sync functions run in
    worker processes that are killed when time is up; async ones run concurrently in the controller and must not block.
    """

    type: Literal["python"]
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further keyword arguments."""
    batch: bool = False
    """Hand over all rows of a step at once; one result per row is expected."""
    concurrency: Positive = 64
    """Calls of an async function under way at once."""


RewardSpec = Annotated[
    ReasoningGymReward
    | MathReward
    | ExactReward
    | RegexReward
    | LengthReward
    | CodeReward
    | ModelReward
    | JudgeReward
    | PythonReward,
    Field(discriminator="type"),
]


class RewardsConfig(Section):
    """The rewards and the processes that compute them."""

    functions: list[RewardSpec] = Field(min_length=1)
    """The rewards; the score is their weighted sum."""
    workers: NonNegative = 1
    """Processes for the functions that run on the CPU (as many again when built-in verifiers and other functions are
    both there). 0 runs them in the controller, where a debugger stops, without time limits."""
    timeout_seconds: PositiveFloat = 10.0
    """Time for one call: one function on one row, or on the whole batch of a `batch: true` function. A row over it gets
    an error and its worker is replaced."""
