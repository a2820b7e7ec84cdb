"""One replica of the sampler, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import psutil

from ..rollout.api import Completion, Request
from ..rollout.vllm_engine import VllmEngine, VllmSettings
from ..sync.parcel import Parcel
from .watchdog import own_stacks, stack_of
from .worker_log import redirect_output


class RolloutWorker:
    """Holds an engine. Importing what it needs takes long, so that is done while the trainer comes up."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)
        self._engine: VllmEngine | None = None
        VllmEngine.check_installed()

    def device_bytes(self) -> int:
        """Memory of the device that this process sees; 0 on a CPU."""
        import torch

        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0

    async def stacks(self) -> str:
        """Where this process and those of the engine are."""
        children = psutil.Process().children(recursive=True)
        return "\n".join([own_stacks(), *(line for child in children if (line := stack_of(child.pid)))])

    async def start(self, settings: VllmSettings) -> None:
        """As `VllmEngine.start`."""
        self._engine = await VllmEngine.start(settings)

    async def generate(self, request: Request) -> Completion:
        """As `InferenceEngine.generate`."""
        return await self._up.generate(request)

    async def abort(self, request_id: str) -> None:
        """As `InferenceEngine.abort`."""
        await self._up.abort(request_id)

    async def begin_update(self) -> None:
        """As `VllmEngine.begin_update`."""
        await self._up.begin_update()

    async def load(self, parcel: Parcel) -> None:
        """As `VllmEngine.load`."""
        await self._up.load(parcel)

    async def finish_update(self, version: int) -> None:
        """As `VllmEngine.finish_update`."""
        await self._up.finish_update(version)

    async def sleep(self, level: int) -> None:
        """As `InferenceEngine.sleep`."""
        await self._up.sleep(level)

    async def wake(self, weights_only: bool = False) -> None:
        """As `VllmEngine.wake`."""
        await self._up.wake(weights_only)

    async def close(self) -> None:
        """As `InferenceEngine.close`."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    @property
    def _up(self) -> VllmEngine:
        assert self._engine is not None, "start comes first"
        return self._engine
