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


class ReasoningGymReward(RewardBase):
    """The verifier of the reasoning-gym task that made the prompt."""

    type: Literal["reasoning_gym"]
    extract: Literal["all", "answer_tag", "last_integer", "last_line"] = "all"
    """Which part of the response is handed to the verifier."""


class MathReward(RewardBase):
    """Symbolic equality with the answer, by math-verify."""

    type: Literal["math"]


class ExactReward(RewardBase):
    """1 when the response equals the answer."""

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
    """Falls from 0 to -1 over the last `buffer` tokens below the limit (DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13)."""

    type: Literal["length"]
    limit: Positive
    """Tokens at which the reward reaches -1."""
    buffer: Positive
    """Length of the slope in tokens."""


class CodeReward(RewardBase):
    """Share of test cases that the last Python block of the response passes, run in a sandboxed subprocess."""

    type: Literal["code"]
    cpu_seconds: Positive = 5
    """Processor time of one test case."""
    memory_mb: Positive = 512
    """Address space of one test case."""


class ModelReward(RewardBase):
    """A Hugging Face sequence-classification model: its first logit on the whole conversation."""

    type: Literal["model"]
    path: str
    """Folder or hub id of the reward model."""
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
    """Template with `{prompt}`, `{response}` and `{answer}`."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score in the reply; the last match counts."""
    scale: PositiveFloat = 1.0
    """The number found is divided by this."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    concurrency: Positive = 16
    """Requests under way at once."""
    retries: NonNegative = 3
    """How often a failed request is tried again."""
    max_tokens: Positive = 256
    """Longest reply."""


class PythonReward(RewardBase):
    """Your own function, sync or async.

    It is called as `f(rollout)` or, when its parameters are verl's, as
    `f(data_source, solution_str, ground_truth, extra_info)`; with `batch: true` as `f(rollouts)`.
    """

    type: Literal["python"]
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""
    batch: bool = False
    """Hand over all rows of a step at once; one result per row is expected."""


RewardSpec = Annotated[
    ReasoningGymReward | MathReward | ExactReward | RegexReward | LengthReward | CodeReward | ModelReward | JudgeReward | PythonReward,
    Field(discriminator="type"),
]


class RewardsConfig(Section):
    """The rewards and the processes that compute them."""

    functions: list[RewardSpec] = Field(min_length=1)
    """The rewards; the score is their weighted sum."""
    workers: NonNegative = 1
    """Processes for the functions that run on the CPU. 0 runs them in the controller, where a debugger stops, without time limits."""
    timeout_seconds: PositiveFloat = 10.0
    """Time for one row; a row over it gets an error and its worker is replaced."""
