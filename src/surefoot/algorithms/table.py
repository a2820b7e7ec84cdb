"""The tables: advantage estimators, policy losses, presets; and an algorithm with every value filled in.

To add an algorithm, write its function, add its row here, and test it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ..config.algorithm import Aggregation, KlConfig, KlEstimator
from .advantages import discounted_returns, gae, group_relative
from .columns import LossColumns
from .losses import ppo_clip
from .segments import expand

if TYPE_CHECKING:
    from rich.table import Table

Setting = float | bool | str | None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A fully resolved objective: preset, tables and configuration put together by `resolve`.

    A number that the algorithm's rows don't read keeps the neutral default below.
    """

    name: str
    advantage: str
    policy_loss: str
    aggregation: Aggregation
    whiten_advantages: bool
    paper: str
    max_response_length: int = 1
    gamma: float = 1.0
    lam: float = 1.0
    normalize_by_std: bool = False
    clip_low: float = math.inf
    clip_high: float = math.inf
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl: KlConfig = field(default_factory=KlConfig)
    kl_estimator: KlEstimator = "k3"
    mask_truncated: bool = False
    importance_cap: float | None = None

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage reads values."""
        return ADVANTAGES[self.advantage].needs_critic

    @property
    def needs_group(self) -> bool:
        """Whether the advantage compares the samples of one prompt, and so needs more than one."""
        return ADVANTAGES[self.advantage].needs_group

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is part of the objective."""
        return self.kl.where != "none"

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether the entropy is part of the loss."""
        return self.entropy_coef > 0


@dataclass(frozen=True, slots=True, eq=False)
class CreditColumns:
    """What advantage estimators read of a whole step: flat over its model tokens `[T]` and its rollouts `[R]`.

    `rewards_T` holds the score on each rollout's last model token, and the KL penalty when it is in the reward;
    `totals_R` is its sum over each rollout, NaN where the rollout has no score. `values_T` is None without a critic.
    """

    rewards_T: Tensor
    values_T: Tensor | None
    totals_R: Tensor
    group_R: Tensor
    cu_seqlens: Tensor  # [R + 1]

    def spread(self, x_R: Tensor) -> Tensor:
        """Give each token its rollout's entry."""
        return expand(x_R, self.cu_seqlens, len(self.rewards_T))


@dataclass(frozen=True, slots=True)
class AdvantageRow:
    """An estimator: `run` gives advantages `[T]` and, for a critic, its targets `[T]`.

    `settings` are the keys of `algorithm` that it reads, with their values where neither file nor preset has one.
    """

    run: Callable[[CreditColumns, Algorithm], tuple[Tensor, Tensor | None]]
    paper: str
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    needs_critic: bool = False
    needs_group: bool = False


@dataclass(frozen=True, slots=True)
class PolicyLossRow:
    """A policy loss: `run(logprobs_T, old_logprobs_T, columns, algorithm)` gives loss `[T]` and columns to log."""

    run: Callable[[Tensor, Tensor, LossColumns, Algorithm], tuple[Tensor, dict[str, Tensor]]]
    paper: str
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])


@dataclass(frozen=True, slots=True)
class Preset:
    """A name for a choice of rows and settings."""

    paper: str
    settings: Mapping[str, Setting]


def _gae(columns: CreditColumns, a: Algorithm) -> tuple[Tensor, Tensor]:
    assert columns.values_T is not None
    return gae(columns.rewards_T, columns.values_T, columns.cu_seqlens, a.gamma, a.lam)


def _group_relative(columns: CreditColumns, a: Algorithm) -> tuple[Tensor, None]:
    return columns.spread(group_relative(columns.totals_R, columns.group_R, a.normalize_by_std)), None


def _discounted_return(columns: CreditColumns, a: Algorithm) -> tuple[Tensor, None]:
    return discounted_returns(columns.rewards_T, columns.cu_seqlens, a.gamma), None


def _ppo_clip(
    logprobs_T: Tensor, old_T: Tensor, columns: LossColumns, a: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    return ppo_clip(logprobs_T, old_T, columns.advantages_T, a.clip_low, a.clip_high, a.dual_clip)


ADVANTAGES: Mapping[str, AdvantageRow] = {
    "gae": AdvantageRow(_gae, "arXiv:1506.02438", {"gamma": 1.0, "lam": 1.0}, needs_critic=True),
    "group_relative": AdvantageRow(_group_relative, "arXiv:2402.03300", {"normalize_by_std": True}, needs_group=True),
    "discounted_return": AdvantageRow(_discounted_return, "Williams 1992", {"gamma": 1.0}),
}

POLICY_LOSSES: Mapping[str, PolicyLossRow] = {
    "ppo_clip": PolicyLossRow(
        _ppo_clip,
        "arXiv:1707.06347, arXiv:1912.09729",
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    ),
}

ROW_KEYS = sorted({key for row in (*ADVANTAGES.values(), *POLICY_LOSSES.values()) for key in row.settings})
"""Keys of `algorithm` that only some rows read."""

PRESETS: Mapping[str, Preset] = {
    "ppo": Preset(
        "arXiv:1707.06347",
        {"advantage": "gae", "policy_loss": "ppo_clip", "aggregation": "token-mean", "whiten_advantages": True},
    ),
    # The paper's own aggregation, seq-mean-token-mean, makes long wrong answers cheap (arXiv:2503.20783).
    "grpo": Preset(
        "arXiv:2402.03300",
        {
            "advantage": "group_relative",
            "policy_loss": "ppo_clip",
            "aggregation": "token-mean",
            "whiten_advantages": False,
        },
    ),
    "dr_grpo": Preset(
        "arXiv:2503.20783",
        {
            "advantage": "group_relative",
            "normalize_by_std": False,
            "policy_loss": "ppo_clip",
            "aggregation": "seq-mean-token-sum-norm",
            "whiten_advantages": False,
        },
    ),
    "reinforce_plus_plus": Preset(
        "arXiv:2501.03262",
        {
            "advantage": "discounted_return",
            "policy_loss": "ppo_clip",
            "aggregation": "token-mean",
            "whiten_advantages": True,
        },
    ),
}


def preset_settings(name: str, advantage: str | None = None, policy_loss: str | None = None) -> dict[str, Setting]:
    """All settings of a preset, with the defaults of its rows or of the rows that replace them.

    What the preset says of a row that was replaced is left out.
    """
    own = PRESETS[name].settings
    rows = {
        **ADVANTAGES[advantage or str(own["advantage"])].settings,
        **POLICY_LOSSES[policy_loss or str(own["policy_loss"])].settings,
    }
    return {**rows, **{key: value for key, value in own.items() if key in rows or key not in ROW_KEYS}}


def render_table() -> Table:
    """What `surefoot algorithms` prints, 80 columns wide: each preset with its paper, rows, needs and settings."""
    from rich.table import Table

    table = Table("preset", "advantage, policy loss, aggregation", "settings", show_lines=True)
    for name, preset in PRESETS.items():
        settings = preset_settings(name)
        row = ADVANTAGES[str(settings["advantage"])]
        needs = {"a critic": row.needs_critic, "samples_per_prompt > 1": row.needs_group}
        parts = [str(settings.pop(key)) for key in ("advantage", "policy_loss", "aggregation")]
        parts += [f"needs {what}" for what, needed in needs.items() if needed]
        shown = [f"{key}={value}" for key, value in settings.items()]
        table.add_row(f"{name}\n{preset.paper}", "\n".join(parts), "\n".join(shown))
    return table
