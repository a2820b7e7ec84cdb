"""What a run is made of when it is on disk, and how it goes on from there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..algorithms.warmup import WarmupState
from ..checkpoint.store import Checkpoint, Component, save
from ..config import RunConfig, to_yaml
from ..data.sampler import PromptSampler
from ..errors import UserError
from ..train.api import TrainEngine
from .parts import Engines, Progress


class Saver:
    """Writes checkpoints of one run; a step is written once."""

    def __init__(self, folder: Path, config: RunConfig, resumed: int | None) -> None:
        self._folder, self._config = folder, config
        self._last = resumed

    def save_once(self, engines: Engines, progress: Progress) -> None:
        """Save the state after `progress.step`, unless that is on disk already.

        Raises:
            RunError: `disk-full`. What was saved before is untouched.
        """
        if self._last == progress.step:
            return
        components, state = snapshot(engines, progress)
        keep = self._config.checkpoint.keep_last
        save(self._folder, progress.step, components, state, keep, to_yaml(self._config))
        self._last = progress.step


def snapshot(engines: Engines, progress: Progress) -> tuple[dict[str, Component], dict[str, Any]]:
    """Everything that training changes: weights, optimizers, random streams, cursors, running numbers."""
    random = {"torch": torch.get_rng_state()}
    if engines.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(engines.device)
    components: dict[str, Component] = {"random": random}
    updates: dict[str, int] = {}
    for name, engine in _trained(engines).items():
        components[name], components[f"{name}_optimizer"] = engine.save_weights, engine.save_optimizer
        updates[name] = engine.updates_done
    state = {
        "step": progress.step,
        "kl_coef": progress.kl_coef,
        "warmup": asdict(progress.warmup),
        "sampler": progress.cursor,
        "updates_done": updates,
        "weights_version": progress.version,
    }
    return components, state


async def restore(saved: Checkpoint, engines: Engines, sampler: PromptSampler) -> Progress:
    """Put a checkpoint back into freshly loaded parts.

    Raises:
        UserError: The checkpoint was made with other data, or of another model.
    """
    state, random = saved.state, saved.tensors("random")
    sampler.load_state_dict(state["sampler"])
    for name, engine in _trained(engines).items():
        _check_same_parameters(name, engine, saved)
        engine.load(saved.file(name), saved.file(f"{name}_optimizer"), state["updates_done"][name])
    torch.set_rng_state(random["torch"])
    if engines.device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], engines.device)
    await engines.begin_sampling(state["weights_version"])
    warmup = WarmupState(**state["warmup"])
    return Progress(state["step"], state["kl_coef"], warmup, version=state["weights_version"])


def _check_same_parameters(name: str, engine: TrainEngine, saved: Checkpoint) -> None:
    """A checkpoint of another model, or of other adapters, must not end in a stack trace."""
    want, got = engine.trained_shapes(), saved.shapes(name)
    if want == got:
        return
    key = next(k for k in [*want, *got] if want.get(k) != got.get(k))
    raise UserError(
        "checkpoint-mismatch",
        f"{saved.path} holds another {name} than the configuration describes",
        key="model",
        got=f"{key} of shape {got[key]}" if key in got else f"no {key}",
        want=f"{key} of shape {want[key]}" if key in want else f"no {key}",
        hint="Go on with the model section that the run was started with, or give the run another name.",
    )


def _trained(engines: Engines) -> dict[str, TrainEngine]:
    return {"actor": engines.actor} | ({"critic": engines.critic} if engines.critic else {})
