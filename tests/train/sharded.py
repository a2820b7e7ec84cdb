"""What one process and several must agree on: three updates of a trainer, by whichever split."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from surefoot.algorithms.aggregate import Denominators
from surefoot.algorithms.objective import PolicyObjective, ValueObjective
from surefoot.config.model import CriticConfig, LoraConfig, ModelConfig
from surefoot.config.placement import ParallelConfig
from surefoot.config.train import TrainConfig
from surefoot.records import Metric, merge_metrics
from surefoot.train.engine import ModuleEngine
from surefoot.train.model import load_critic, load_policy
from surefoot.train.packing import plan_packs
from surefoot.train.shard import Shards, full_tensor

from .rows import random_samples

CPU = torch.device("cpu")
ONE = ParallelConfig()
GRPO = {"entropy_coef": 0.01, "importance_cap": None}


@dataclass(frozen=True)
class Case:
    """One way to train; `parallel` None is one process."""

    critic: bool = False
    lora: bool = False
    checkpointing: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    budget: int = 4096
    groups: int = 3
    samples: int = 4
    algorithm: dict[str, Any] = field(default_factory=lambda: dict(GRPO))
    parallel: ParallelConfig = ONE

    @property
    def whole(self) -> Case:
        return replace(self, parallel=ONE)


def train(
    case: Case, folder: Path, rank: int = 0, world: int = 1, start: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Three updates, after a rehearsal that must change nothing; returns metrics, outputs and whole weights.

    `start` is what to go on from, `save` where to leave the state.
    """
    from .test_engine import algorithm

    model_config = ModelConfig(
        path=str(folder), dtype=case.dtype, lora=LoraConfig(rank=4) if case.lora else None,
        gradient_checkpointing=case.checkpointing,
    )  # fmt: skip

    def load(empty: bool) -> torch.nn.Module:
        torch.manual_seed(3)  # adapters start at random
        if case.critic:
            return load_critic(CriticConfig(), model_config, device, empty)
        return load_policy(model_config, device, empty)

    split, device = dist.is_initialized(), torch.device(case.device)
    shards = Shards.over_world(device, getattr(torch, case.dtype), case.parallel) if split else None
    trainer = ModuleEngine(
        load(split), TrainConfig(steps=3, max_tokens_per_microbatch=case.budget), shards=shards,
        whole=load(False) if split and rank == 0 else None, peak_rate=1e-4, want_entropy=not case.critic,
    )  # fmt: skip
    trainer.rehearse(random_samples(1))
    if start is not None:
        trainer.load(start / "weights", start / "optimizer", 3)
    resolved = algorithm(**case.algorithm)
    objective = ValueObjective("token-mean", None) if case.critic else PolicyObjective(resolved)
    result: dict[str, Any] = {"loss": [], "norm": [], "outputs": []}
    for step in range(3):
        samples = random_samples(20 + step, groups=case.groups, samples=case.samples)
        if case.critic:
            samples = [replace(s, values=0 * s.advantages, returns=s.advantages) for s in samples]
        counts = Denominators.of([s.num_model_tokens for s in samples], [s.weight for s in samples])
        data = world // case.parallel.sequence
        plans = plan_packs(samples, case.budget, ranks=data)
        plan = plans[rank // case.parallel.sequence]
        scored = trainer.values(samples, plan) if case.critic else trainer.logprobs(samples, plan=plan)
        report = trainer.update(samples, objective, counts, plan)
        mine = [i for members in plan for i in members]
        gathered: list[Any] = [(report.metrics, {i: (scored[i], report.outputs[i]) for i in mine})]
        if world > 1:
            gathered = [None] * world
            dist.all_gather_object(gathered, (report.metrics, {i: (scored[i], report.outputs[i]) for i in mine}))
        heads = gathered[:: case.parallel.sequence]
        merged: dict[str, Metric] = merge_metrics([{"loss": m["loss"]} for m, _ in heads if "loss" in m])
        result["loss"].append(merged["loss"].value)
        result["norm"].append(report.optimizer["grad_norm"].value)
        rows = {i: pair for _, outputs in heads for i, pair in outputs.items()}
        assert sorted(rows) == list(range(len(samples)))
        result["outputs"].append([rows[i] for i in range(len(samples))])
    result["weights"] = {n: full_tensor(m.detach()).clone().cpu() for n, m in trainer.optimizer.masters.items()}
    if save is not None:
        trainer.save_weights(save / "weights")
        trainer.save_optimizer(save / "optimizer")
    result["published"] = {n: t.cpu() for n, t in trainer.weights()} if not case.critic else {}
    # Adam divides by a gradient's size, so where that is almost 0 the weights alone say little: the mean gradient too.
    moments = trainer.optimizer.state_tensors()
    result["weights"] |= {n: full_tensor(m).clone().cpu() for n, m in moments.items() if n.endswith("/exp_avg")}
    return result


def process(rank: int, world: int, cases: dict[str, Case], folder: Path, out: Path) -> None:
    """One rank of a gloo world: run the cases in order, rank 0 writes what came out.

    `out/one` holds the state that one process left after three updates: it is gone on from too.
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(out / "port").read_text())
    cuda = any(case.device == "cuda" for case in cases.values())
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=world)
    results = {name: train(case, folder, rank, world) for name, case in cases.items()}
    if not cuda:
        train(Case(), folder, rank, world, save=out)
        results["resumed"] = train(Case(), folder, rank, world, start=out / "one")
    if rank == 0:
        torch.save(results, out / "results.pt")
    dist.destroy_process_group()


def run_world(world: int, cases: dict[str, Case], folder: Path, out: Path) -> dict[str, Any]:
    """Start the ranks, wait, and read what they found."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (out / "port").write_text(str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(process, (world, cases, folder, out), nprocs=world)
    return torch.load(out / "results.pt", weights_only=False)


def assert_same(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    """Losses, gradient norms, outputs row by row, and weights."""
    np.testing.assert_allclose(got["loss"], want["loss"], atol=tolerance)
    np.testing.assert_allclose(got["norm"], want["norm"], rtol=10 * tolerance)
    for rows, expected in zip(got["outputs"], want["outputs"], strict=True):
        for pair, other in zip(rows, expected, strict=True):
            for numbers, right in zip(pair, other, strict=True):
                np.testing.assert_allclose(numbers, right, atol=10 * tolerance)
    for kind in ("weights", "published"):
        assert got[kind].keys() == want[kind].keys()
        for name, tensor in want[kind].items():
            torch.testing.assert_close(got[kind][name], tensor, atol=tolerance, rtol=0)
