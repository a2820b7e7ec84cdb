"""One process of a train group: its share of every role's model, and nothing that knows of the other processes."""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from ..algorithms.aggregate import Denominators
from ..algorithms.table import Algorithm
from ..config import RunConfig
from ..config.placement import ParallelConfig
from ..records import Floats, Sample
from ..seeds import derive_seed
from ..sync.parcel import Parcel
from ..sync.publish import Publisher
from ..train.api import Objective, Plan, UpdateReport
from ..train.engine import ModuleEngine
from ..train.model import DTYPES
from ..train.packing import Row
from ..train.shard import Shards
from .cluster import WATCH, own_address
from .memory import TrainMemory
from .parts import load_engine
from .placement import engine_of
from .preflight import Role
from .process import prepare_process
from .watchdog import own_stacks
from .worker_log import redirect_output

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # the last resort: a process that dies is seen at once by the controller


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which process of the group this is, and what it may use."""

    rank: int
    world: int
    threads: int
    parallel: ParallelConfig
    offload_idle: bool
    log: Path
    same_gpu: bool  # the sampler that it publishes weights for is on the same device


class TrainWorker:
    """Holds one process's engines. Every method is called on all processes of the group at the same time."""

    def __init__(self, place: RankPlace, config: RunConfig, algorithm: Algorithm) -> None:
        redirect_output(place.log)
        self._place, self._config, self._algorithm = place, config, algorithm
        prepare_process(config.model_copy(update={"threads": place.threads}))
        self._device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
        self._engines: dict[Role, ModuleEngine] = {}
        self._shards: Shards | None = None
        self._publisher: Publisher | None = None

    @ray.method(concurrency_group=WATCH)
    def progress(self) -> int:
        """How many micro-batches were computed so far; answered whatever else goes on."""
        return sum(engine.packs_done for engine in self._engines.values())

    @ray.method(concurrency_group=WATCH)
    def stacks(self) -> str:
        """Where this process is; answered whatever else goes on."""
        return own_stacks()

    def endpoint(self) -> str:
        """An address of this host that the others can connect to; asked of the first process."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{own_address()}:{probe.getsockname()[1]}"

    def connect(self, endpoint: str) -> None:
        """Join the group."""
        place = self._place
        if place.world == 1:
            return
        cuda = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=endpoint,
            rank=place.rank,
            world_size=place.world,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=torch.device("cuda", 0) if cuda else None,
        )
        self._shards = Shards.over_world(self._device, DTYPES[self._config.model.dtype], place.parallel)

    def load(self, role: Role) -> dict[str, Any]:
        """Load one role's model. Returns its size and the shapes of what is trained.

        Raises:
            UserError: It cannot be loaded.
        """
        torch.manual_seed(derive_seed(self._config.seed, "torch", role))
        engine = load_engine(role, self._config, self._algorithm, self._device, self._shards)
        self._engines[role] = engine
        return {
            "parameters": engine.num_parameters(),
            "shapes": engine.trained_shapes() if engine.optimizer else {},
        }

    def rehearse(self) -> TrainMemory:
        """Run each trained role's step on the longest rows, changing nothing, and tell what memory that took."""
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for role, engine in self._engines.items():
            self._bring(role)
            engine.rehearse(longest_rows(self._config))
        peak = torch.cuda.max_memory_reserved() if cuda else 0
        self.rest()
        if not cuda:
            return TrainMemory(0, 0, 0, 0)
        free, total = torch.cuda.mem_get_info()
        resident = torch.cuda.memory_reserved()
        return TrainMemory(total, peak, resident, total - free - resident)

    def logprobs(self, role: Role, rows: Sequence[Row], reference: bool, plan: Plan) -> list[Floats]:
        """As `TrainEngine.logprobs`, of this process's rows."""
        return self._bring(role).logprobs(rows, reference, plan)

    def values(self, role: Role, rows: Sequence[Row], plan: Plan) -> list[Floats]:
        """As `TrainEngine.values`, of this process's rows."""
        return self._bring(role).values(rows, plan)

    def update(
        self, role: Role, samples: Sequence[Sample], objective: Objective, denominators: Denominators, plan: Plan
    ) -> UpdateReport:
        """As `TrainEngine.update`, of this process's rows."""
        return self._bring(role).update(samples, objective, denominators, plan)

    def skip_update(self, role: Role) -> None:
        """As `TrainEngine.skip_update`."""
        self._engines[role].skip_update()

    def save_weights(self, role: Role, path: Path) -> None:
        """As `TrainEngine.save_weights`; the first process writes."""
        self._engines[role].save_weights(path)

    def save_optimizer(self, role: Role, path: Path) -> None:
        """As `TrainEngine.save_optimizer`; the first process writes."""
        self._engines[role].save_optimizer(path)

    def restore(self, role: Role, weights: Path, optimizer: Path, updates_done: int) -> None:
        """As `TrainEngine.load`; every process reads its share."""
        self._engines[role].load(weights, optimizer, updates_done)

    def first_parcel(self) -> Parcel | None:
        """Start to walk over the actor's weights, for a sampler with weights of its own; publish the first bucket."""
        if self._publisher is None:
            self._publisher = Publisher(engine_of(self._config).bucket_bytes, self._device, self._place.same_gpu)
        self._publisher.begin(self._bring("actor").weights())
        return self.next_parcel()

    def next_parcel(self) -> Parcel | None:
        """Publish the next bucket, on all processes at once."""
        assert self._publisher is not None
        return self._publisher.next_parcel()

    def rest(self) -> None:
        """Give back what is needed only while computing."""
        if self._place.offload_idle:
            for engine in self._engines.values():
                engine.move(torch.device("cpu"))
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _bring(self, role: Role) -> ModuleEngine:
        """Have a role's model on the device, and with `offload_idle` no other."""
        engine = self._engines[role]
        if self._place.offload_idle:
            for other, idle in self._engines.items():
                if other != role:
                    idle.move(torch.device("cpu"))
            engine.move(self._device)
        return engine


def longest_rows(config: RunConfig) -> list[Sample]:
    """As many rows of full length as one micro-batch holds: what a step can meet at worst."""
    prompt, response = config.data.max_prompt_length, config.rollout.sampling.max_response_length
    length = prompt + response
    mask = np.arange(length) >= prompt
    column = np.zeros(length, np.float32)
    return [
        Sample(
            group=f"rehearsal {i}", prompt_length=prompt, token_ids=np.zeros(length, np.int32), loss_mask=mask,
            rollout_logprobs=column, old_logprobs=None, ref_logprobs=None, values=None, advantages=column, returns=None,
        )
        for i in range(max(1, config.train.max_tokens_per_microbatch // length))
    ]  # fmt: skip
