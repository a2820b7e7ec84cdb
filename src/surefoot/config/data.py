"""`data`: where prompts come from and how long they may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import NonNegative, Positive, PositiveFloat, Section

Truncation = Literal["error", "drop", "left", "right", "middle"]


class SourceBase(Section):
    """Keys that every kind of source has.

    Further columns with a meaning: `id` (names the row, where it is unique), `tools` (JSON schemas for the chat
    template), `data_source` (the row's source name). All columns reach the rewards as `extra`.
    """

    name: str | None = None
    """Name in logs and for rewards; left out: the file's, dataset's or task's own name."""
    weight: PositiveFloat = 1.0
    """Share of this source among the prompts of a step, relative to the other sources' weights."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. `a.b` reaches into a column of dicts."""
    answer_column: str | None = None
    """Column with the reference answer. Left out: the first that is there of `answer`, `ground_truth`, `solution` and
    verl's `reward_model.ground_truth`."""
    system_prompt: str | None = None
    """Put before each prompt that has no system message of its own; as plain text where there is no chat template."""
    prompt_suffix: str = ""
    """Appended to the last user message."""
    limit: Positive | None = None
    """Take only the first so many rows."""


class FileSource(SourceBase):
    """Rows of parquet, jsonl, json or csv files."""

    type: Literal["file"]
    path: str | list[str]
    """One or several files, globs or fsspec URLs: `.parquet`, `.jsonl`, `.json`, `.csv`, `.tsv`, also compressed."""


class HubSource(SourceBase):
    """A Hugging Face dataset: a hub id, or a folder that `save_to_disk` wrote."""

    type: Literal["hub"]
    path: str
    """Hub id or folder."""
    subset: str | None = None
    """The dataset's configuration name."""
    split: str = "train"
    """Which split."""


class ReasoningGymSource(SourceBase):
    """A procedurally generated task of reasoning-gym, scored by the task's own verifier."""

    type: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as `chain_sum`."""
    size: Positive = 1000
    """How many problems to make."""
    seed: NonNegative = 0
    """Which problems are drawn. Another seed draws others, but a task with few different ones repeats them."""
    params: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the task's configuration."""


class PythonSource(SourceBase):
    """Rows from a function of your own that returns or yields dicts."""

    type: Literal["python"]
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the function."""


Source = Annotated[FileSource | HubSource | ReasoningGymSource | PythonSource, Field(discriminator="type")]


class DataConfig(Section):
    """Prompts: sources, length limit, order."""

    sources: list[Source] = Field(min_length=1)
    """Where rows come from. Several are mixed by weight."""
    max_prompt_length: Positive = 512
    """Longest prompt in tokens, chat template, tool schemas and generation prompt included."""
    truncation: Truncation = "error"
    """What to do with a longer prompt: stop before training, drop the row, or cut it at the left, right or middle."""
    shuffle: bool = True
    """Shuffle each epoch by the run's seed."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Extra variables for the chat template, such as `enable_thinking: false`. What it does not read is refused."""
