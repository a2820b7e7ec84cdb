"""The same promises on a CUDA device: what the CPU proves in float32, the GPU's own kernels must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.algorithms.objective import PolicyObjective
from surefoot.config.model import ModelConfig
from surefoot.config.placement import ParallelConfig
from surefoot.config.train import TrainConfig
from surefoot.train.engine import ModuleEngine
from surefoot.train.model import load_policy

from .controller.tiny_run import metrics_of, tiny_config
from .train.rows import random_samples
from .train.sharded import Case, assert_same, run_world, train
from .train.test_engine import algorithm, plain_logprobs, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def engine(folder, dtype: str, device: str = "cuda", **train) -> ModuleEngine:
    model = load_policy(ModelConfig(path=str(folder), dtype=dtype), torch.device(device))
    return ModuleEngine(model, TrainConfig(steps=1, **train), peak_rate=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.08)])
@pytest.mark.parametrize("share", [True, False])
def test_packed_logprobs_equal_the_row_alone(tiny_folder, dtype: str, tolerance: float, share: bool):
    reference = engine(tiny_folder, "float32", "cpu")
    rows = random_samples(1, groups=5, samples=6, longest=40)
    for row, got in zip(rows, engine(tiny_folder, dtype, share_prefixes=share).logprobs(rows), strict=True):
        np.testing.assert_allclose(got, plain_logprobs(reference.model, row), atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_equal_the_cpus(tiny_folder, dtype: str):
    rows = random_samples(2, groups=4, samples=6, longest=30)
    norms = [
        update(engine(tiny_folder, kind, device, max_tokens_per_microbatch=budget), rows, PolicyObjective(algorithm()))
        .optimizer["grad_norm"]
        .value
        for kind, device, budget in (("float32", "cpu", 4096), (dtype, "cuda", 4096), (dtype, "cuda", 100))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3 if dtype == "float32" else 0.05)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(
    "options", [{}, {"algorithm": {"name": "ppo", "kl": {"where": "reward"}}, "critic": {}}], ids=["grpo", "ppo"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_runs(tmp_path, tiny_folder, dtype: str, options: dict):
    from surefoot.controller.run import run_training

    config = tiny_config(
        tmp_path,
        tiny_folder,
        **options,
        device="cuda",
        model={"dtype": dtype},
        train={"steps": 16, "samples_per_prompt": 8},
    )
    run_training(config)
    rows = metrics_of(config)
    assert rows[0]["actor/engine_gap"] < (1e-4 if dtype == "float32" else 0.05)
    assert np.mean([r["reward/mean"] for r in rows[-3:]]) > rows[0]["reward/mean"] + 0.1


SPLIT = {
    "float32": (Case(device="cuda"), 1e-5),
    "critic": (Case(device="cuda", critic=True), 1e-5),
    "offloaded": (Case(device="cuda", parallel=ParallelConfig(cpu_offload=True)), 1e-5),
    "half precision": (Case(device="cuda", dtype="bfloat16"), 4e-4),
    "half precision, adapters": (Case(device="cuda", dtype="bfloat16", lora=True), 4e-4),
    "activation checkpointing": (Case(device="cuda", dtype="bfloat16", checkpointing=True), 4e-4),
}
if torch.cuda.device_count() % 2 == 0:
    SPLIT["sequence parallel"] = (Case(device="cuda", parallel=ParallelConfig(sequence=2)), 1e-5)
    SPLIT["two replicas"] = (Case(device="cuda", parallel=ParallelConfig(replicate=2)), 1e-5)


@pytest.fixture(scope="module")
def split_over_all_gpus(tiny_folder, tmp_path_factory):
    """One process a GPU, over NCCL. On a machine with a single GPU the shares are whole, and the path is the same."""
    cases = {name: case for name, (case, _) in SPLIT.items()}
    return run_world(torch.cuda.device_count(), cases, tiny_folder, tmp_path_factory.mktemp("gpus"))


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_model_equals_a_whole_one(name: str, split_over_all_gpus, tiny_folder):
    case, tolerance = SPLIT[name]
    assert_same(split_over_all_gpus[name], train(case.whole, tiny_folder), tolerance)
