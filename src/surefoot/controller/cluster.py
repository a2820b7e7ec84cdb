"""Ray: connecting, reserving what a plan asks for within a deadline, and processes on what was reserved."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..config.placement import PlacementConfig
from ..errors import UserError
from ..rollout.reaper import Reaper
from .placement import Plan, Pool
from .process import available_cores

GIB = 2**30
WATCH = "watch"  # methods of this concurrency group are answered beside the work
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's default gives way to everything else on the machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # which GPUs a process sees is said by us, see `Slot`
    "RAY_DEDUP_LOGS": "0",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One reserved bundle: where it is, and the GPU that processes on it may see."""

    group: PlacementGroup
    bundle: int
    host: str
    gpus: str | None  # as CUDA_VISIBLE_DEVICES has it; None on a CPU pool
    cpus: float

    def start(self, name: str, what: type, *arguments: Any, gpus: str | None = None, **options: Any) -> Any:
        """Start a process that holds one object; returns the handle of its actor.

        Args:
            name: Shown by Ray's tools.
            what: The object's class.
            arguments: Of its constructor.
            gpus: GPUs that the process sees; left out: this slot's.
            options: More of Ray's actor options.
        """
        seen = self.gpus if gpus is None else gpus
        environment = {
            "CUDA_VISIBLE_DEVICES": seen or "",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        return (
            cast(Any, ray.remote)(concurrency_groups={WATCH: 1})(what)
            .options(
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.bundle),
                **options,
            )
            .remote(*arguments)
        )


@contextlib.contextmanager
def connect(placement: PlacementConfig) -> Iterator[None]:
    """Connect to a running cluster, or start one on this machine and end it afterwards.

    Raises:
        UserError: `cluster-unreachable`.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if placement.address is None:
        os.environ.pop("RAY_ADDRESS", None)
        options |= {
            "address": "local",  # not one that happens to run here
            "num_cpus": available_cores(),  # the allocation's, not the host's
            "include_dashboard": False,
            "object_store_memory": _object_store_bytes(),
        }
    else:
        options["address"] = placement.address
        _check_listens(placement.address)
        _use_token()
    for attempt in (1, 2):
        try:
            ray.init(**options)
            break
        except Exception as error:
            ray.shutdown()
            if attempt == 2 or placement.address is not None:
                raise UserError(
                    "cluster-unreachable", f"Ray does not answer: {str(error).strip().splitlines()[0]}",
                    key="placement.address", got=placement.address or "none: a cluster of its own",
                    hint="A cluster that asks for a token wants RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here, too.",
                ) from error  # fmt: skip
    # Ray's own processes notice by themselves that this one is gone, but take a minute.
    reaper = Reaper.of_children() if placement.address is None else None
    try:
        yield
    finally:
        ray.shutdown()
        if reaper is not None:
            reaper.close()


def _check_listens(address: str) -> None:
    """Ray itself tries for minutes to reach an address where nobody is."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # `auto` finds the address by itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            "cluster-unreachable", f"nobody answers there: {error}", key="placement.address", got=address,
            want="the address that `ray start --head` printed, or auto on a node of the cluster",
        ) from None  # fmt: skip


def _use_token() -> None:
    """Newer Rays ask for a token by themselves where there is one, and do not show it when an address is given."""
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextlib.contextmanager
def reserve(plan: Plan, placement: PlacementConfig) -> Iterator[dict[str, list[Slot]]]:
    """Reserve all pools of a plan; slots by pool, node after node.

    Raises:
        UserError: `cluster-too-small`: the cluster will never have it, or others hold it for too long.
    """
    _check_possible(plan)
    groups: list[tuple[Pool, PlacementGroup]] = []
    try:
        for pool in plan.pools.values():
            for node in range(pool.nodes):
                bundles = [pool.bundle() for _ in range(pool.per_node)]
                name = f"surefoot-{os.getpid()}-{pool.name}-{node}"
                group = placement_group(bundles, strategy="STRICT_PACK", name=name)
                groups.append((pool, group))
        waiting = [group.ready() for _, group in groups]
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=placement.reserve_timeout)
        if waiting:
            raise _too_small(plan, f"not free within {placement.reserve_timeout:.0f} s")
        slots: dict[str, list[Slot]] = {name: [] for name in plan.pools}
        for pool, group in groups:
            slots[pool.name] += _slots(pool, group)
        yield slots
    finally:
        for _, group in groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _slots(pool: Pool, group: PlacementGroup) -> list[Slot]:
    """Ask every bundle which GPU it got."""
    found = []
    for bundle in range(pool.per_node):
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        look = ray.remote(_look).options(num_cpus=0, num_gpus=1 if pool.gpu else 0, scheduling_strategy=strategy)
        found.append(look.remote())
    return [
        Slot(group, bundle, host, gpus if pool.gpu else None, pool.cpus)
        for bundle, (host, gpus) in enumerate(ray.get(found))
    ]


def _look() -> tuple[str, str]:
    return socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def _check_possible(plan: Plan) -> None:
    """Compare with what each node has at all: what no node can give would be waited for in vain."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for pool in plan.pools.values():
        want = {kind: amount * pool.per_node for kind, amount in pool.bundle().items()}
        fitting = [n for n in nodes if all(n.get(kind, 0) >= amount for kind, amount in want.items())]
        if len(fitting) < pool.nodes:
            raise _too_small(plan, f"pool {pool.name} wants {pool.nodes} nodes with {_words(want)} each", pool.name)
    total = ray.cluster_resources()
    for kind in ("GPU", "CPU"):
        want_all = sum(pool.bundle().get(kind, 0) * pool.size for pool in plan.pools.values())
        if want_all > total.get(kind, 0):
            raise _too_small(plan, f"all pools together want {_words({kind: want_all})}")


def _too_small(plan: Plan, what: str, pool: str | None = None) -> UserError:
    want: dict[str, float] = {}
    for one in plan.pools.values():
        for kind, amount in one.bundle().items():
            want[kind] = want.get(kind, 0) + amount * one.size
    held = "; ".join(holders()) or "nobody else"
    there = f"{_words(ray.cluster_resources())} in the cluster, {_words(ray.available_resources())} free"
    return UserError(
        "cluster-too-small", what, key=f"placement.pools.{pool}" if pool else "placement.pools",
        got=f"{there}; held by: {held}", want=_words(want),
    )  # fmt: skip


def holders() -> list[str]:
    """Who reserved what in the cluster, as lines."""
    lines = []
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            total: dict[str, float] = {}
            for bundle in group["bundles"].values():
                for kind, amount in bundle.items():
                    total[kind] = total.get(kind, 0) + amount
            lines.append(f"{group['name'] or 'a placement group without a name'} ({_words(total)})")
    return lines


def _words(resources: Mapping[str, float]) -> str:
    """Example: `2 GPU, 4 CPU`."""
    parts = [f"{resources[kind]:g} {kind}" for kind in ("GPU", "CPU") if resources.get(kind)]
    return ", ".join(parts) or "nothing"


def _object_store_bytes() -> int:
    """Rows and their columns cross here, never weights: a little is enough, and /dev/shm may be small."""
    shared = psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 2 * GIB
    return int(max(128 * 2**20, min(2 * GIB, shared * 0.5, psutil.virtual_memory().available * 0.1)))


def render_cluster(address: str) -> Table:
    """Return the nodes of a running cluster as a table; who holds what stands below.

    Raises:
        UserError: `cluster-unreachable`.
    """
    placement = PlacementConfig.model_validate({"type": "ray", "address": address, "pools": {"none": {}}})
    with connect(placement):
        free = available_resources_per_node()
        table = Table("node", "state", "GPUs", "CPUs", "memory", box=SIMPLE_HEAD)
        for node in sorted(ray.nodes(), key=lambda one: one["NodeManagerAddress"]):
            total, left = node["Resources"], free.get(node["NodeID"], {})
            cells = [_share(left.get(kind, 0.0), total.get(kind, 0.0)) for kind in ("GPU", "CPU")]
            memory = _share(left.get("memory", 0.0) / GIB, total.get("memory", 0.0) / GIB, " GiB")
            name = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
            table.add_row(name, "up" if node["Alive"] else "gone", *cells, memory)
        held = holders()
        table.caption = "held by " + "; ".join(held) if held else "nothing is reserved"
        table.caption_justify = "left"
    return table


def _share(free: float, total: float, unit: str = "") -> str:
    return f"{free:.4g} of {total:.4g}{unit} free" if total else "none"


def own_address() -> str:
    """This process' host, as the others reach it."""
    return ray.util.get_node_ip_address()
