"""vLLM as an inference engine: token ids in, token ids and log-probabilities of the sampled distribution out.

This module and `sync/receive.py` are all that knows of vLLM. They keep to what its versions 0.24 to 0.33 share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from ..config.rollout import VllmConfig
from ..errors import RunError, SurefootError, UserError
from ..sync.parcel import Parcel
from .api import Completion, Request, WeightSource
from .reaper import Reaper

T = TypeVar("T")
FinishReason = Literal["stop", "length", "aborted"]
_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What one replica is started with.

    `max_length` is of prompt and response together; `kv_cache_bytes` None leaves the size to vLLM; `stream` says that
    weights may change while requests are open.
    """

    model: str
    dtype: str
    trust_remote_code: bool
    max_length: int
    max_rows: int
    eos_token_ids: tuple[int, ...]
    seed: int
    config: VllmConfig
    kv_cache_bytes: int | None = None
    sleeps: bool = False
    stream: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not been answered: what was sampled so far, by which weights."""

    request: Request
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    aborted: bool = False


class VllmEngine:
    """An `InferenceEngine` over vLLM's asynchronous engine, whose core runs in processes of its own."""

    def __init__(self, llm: Any, settings: VllmSettings, reaper: Reaper | None = None) -> None:
        self._llm: Any = llm
        self._settings = settings
        self._reaper = reaper
        self._version = 0
        self._open: dict[str, _Open] = {}
        self._paused = False
        self._asleep: list[str] = []
        self._awake = asyncio.Event()
        self._awake.set()

    @classmethod
    async def start(cls, settings: VllmSettings) -> VllmEngine:
        """Load the model's weights and get ready to sample.

        Raises:
            RunError: `engine-start`: vLLM did not come up.
            UserError: vLLM is not installed, or refuses a setting.
        """
        cls.check_installed()
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        from ..sync import receive

        config = settings.config
        cuda = _has_cuda()
        keys: dict[str, Any] = {
            "model": settings.model,
            "dtype": settings.dtype,
            "trust_remote_code": settings.trust_remote_code,
            "max_model_len": settings.max_length,
            "max_num_seqs": settings.max_rows,
            "tensor_parallel_size": config.tensor_parallel_size,
            "seed": settings.seed & 0x7FFFFFFF,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": config.enforce_eager or not cuda,
            "enable_sleep_mode": settings.sleeps and cuda,
            "disable_log_stats": True,
            "worker_extension_cls": f"{receive.__name__}.{receive.WorkerExtension.__name__}",
            "weight_transfer_config": {"backend": receive.NAME},
        }
        if cuda and not config.compile and not config.enforce_eager:
            keys["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if not cuda:
            # The CPU build cannot take back what a seeded row drew before the last piece of its prompt was computed.
            keys["enable_chunked_prefill"] = False
            keys["max_num_batched_tokens"] = max(2048, settings.max_length)
        if config.max_num_batched_tokens:
            keys["max_num_batched_tokens"] = config.max_num_batched_tokens
        if config.gpu_memory_utilization is not None:
            keys["gpu_memory_utilization"] = config.gpu_memory_utilization
        elif settings.kv_cache_bytes is not None:
            keys["kv_cache_memory_bytes"] = settings.kv_cache_bytes
        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**(keys | config.engine_args)))
        except (TypeError, ValueError) as error:
            raise UserError(
                "engine-start",
                f"vLLM refuses: {_first_line(error)}",
                key="rollout.engine",
                got=config.engine_args or None,
            ) from error
        except Exception as error:
            raise RunError(
                "engine-start", f"vLLM did not come up: {_first_line(error)}", key="rollout.engine",
                hint="Its own log, in the run's logs folder, says what happened first.",
            ) from error  # fmt: skip
        return cls(llm, settings, Reaper.of_children())

    @staticmethod
    def check_installed() -> None:
        """Import vLLM, which takes long the first time.

        Raises:
            UserError: `engine-missing`.
        """
        _environment()
        try:
            import vllm.v1.engine.async_llm  # noqa: F401 # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "engine-missing",
                f"vLLM cannot be imported: {error}",
                key="rollout.engine",
                hint="Install it with `pip install surefoot[vllm]`, or use the embedded engine with placement: local.",
            ) from error

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def generate(self, request: Request) -> Completion:
        """Sample one continuation; while the engine sleeps, wait.

        Raises:
            UserError: The prompt is empty or too long.
            RunError: The id is in use, or the engine died.
        """
        self._check(request)
        entry = self._open[request.id] = _Open(request)
        try:
            while True:
                await self._awake.wait()
                reason = await self._run(entry)
                # Sleep ends what runs; it goes on from its tokens after waking.
                if reason != "aborted" or entry.aborted:
                    break
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._ask(self._llm.abort(self._id(entry)))
            raise
        finally:
            del self._open[request.id]
        return Completion(
            token_ids=np.array(entry.tokens, np.int32),
            logprobs=np.array(entry.logprobs, np.float32),
            policy_version=np.array(entry.versions, np.int32),
            finish_reason=reason,
        )

    async def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        if (entry := self._open.get(request_id)) is not None:
            entry.aborted = True
            await self._ask(self._llm.abort(self._id(entry)))

    async def update_weights(self, source: WeightSource | None, version: int) -> None:
        """Take new weights; open requests go on with them, on what they have cached.

        Raises:
            RunError: `weights-not-delivered`, naming the first tensor that is not what was sent.
        """
        assert source is not None
        await self.begin_update()
        async for parcel in source.parcels():
            await self.load(parcel)
        await self.finish_update(version)

    async def begin_update(self) -> None:
        """Stop between two steps; what is open waits and keeps its cache."""
        self._paused = bool(self._open)
        if self._paused:
            await self._ask(self._llm.pause_generation(mode="keep", clear_cache=False))
        await self._rpc("begin_update")

    async def load(self, parcel: Parcel) -> None:
        """Load one parcel; when this returns its buffer may be filled anew."""
        self._prove(await self._rpc("load_parcel", parcel=parcel.to_dict()))

    async def finish_update(self, version: int) -> None:
        """Go on with the new weights, after they were proved to be those that were sent."""
        self._prove(await self._rpc("end_update"))
        await self._ask(self._llm.reset_prefix_cache())
        self._version = version
        if self._paused:
            await self._ask(self._llm.resume_generation())

    def _prove(self, problems: list[str | None]) -> None:
        for worker, problem in enumerate(problems):
            if problem is not None:
                raise RunError("weights-not-delivered", f"{problem} (worker {worker} of the sampler)")

    async def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 keeps the weights in the host's memory, 2 drops them too.

        Open requests wait; those that were under way when memory was given back go on with another random stream.
        """
        self._awake.clear()
        if not self._settings.sleeps:
            if self._open:
                await self._ask(self._llm.pause_generation(mode="keep", clear_cache=False))
            return
        for entry in list(self._open.values()):
            await self._ask(self._llm.abort(self._id(entry)))
        await self._ask(self._llm.sleep(level))
        self._asleep = ["weights", CACHE]

    async def wake(self, weights_only: bool = False) -> None:
        """Take memory again; with `weights_only` just enough to take new weights, and wake again for the rest."""
        if self._settings.sleeps:
            # What is awake already must not be woken again.
            await self._ask(self._llm.wake_up([kind for kind in self._asleep if not weights_only or kind == "weights"]))
            self._asleep = [CACHE] if weights_only else []
        elif self._open:
            await self._ask(self._llm.resume_generation())
        if not weights_only:
            self._awake.set()

    async def close(self) -> None:
        """End open requests and all processes."""
        for entry in list(self._open.values()):
            await self.abort(entry.request.id)
        self._llm.shutdown()
        self._llm = None  # its own clean-up at the interpreter's end would find half of it gone
        if self._reaper is not None:
            self._reaper.close()

    def _id(self, entry: _Open) -> str:
        return f"{entry.request.id}+{len(entry.tokens) if not self._settings.stream else 0}"

    async def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        try:
            return await self._ask(self._llm.collective_rpc(method, kwargs=arguments))
        except SurefootError:
            raise
        except Exception as error:
            raise RunError("engine-died", f"vLLM failed in {method}: {_first_line(error)}") from error

    async def _ask(self, call: Awaitable[T]) -> T:
        """Await an answer of vLLM's core, which never comes when the core is gone.

        Raises:
            RunError: `engine-died`.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=1.0))[0]:
                if self._llm.errored:
                    raise RunError("engine-died", "vLLM's core process is gone")
            return task.result()
        finally:
            task.cancel()

    def _check(self, request: Request) -> None:
        if request.id in self._open:
            raise RunError(
                "rollout-request-id", f"the request id {request.id!r} is in use", hint="Give each request its own id."
            )
        if not len(request.token_ids):
            raise UserError("rollout-empty-prompt", f"request {request.id!r} has no prompt tokens")
        total = len(request.token_ids) + request.sampling.max_response_length
        if total > self._settings.max_length:
            raise UserError(
                "rollout-too-long", f"request {request.id!r} may grow longer than the engine was started for",
                key="rollout.sampling.max_response_length",
                got=f"{len(request.token_ids)} prompt tokens + {request.sampling.max_response_length}",
                want=f"at most {self._settings.max_length} together",
            )  # fmt: skip

    async def _run(self, entry: _Open) -> FinishReason:
        """Let vLLM go on from what is there; collect what it samples."""
        reason: FinishReason | None = None
        done = len(entry.tokens)
        prompt = {"prompt_token_ids": [*entry.request.token_ids.tolist(), *entry.tokens]}
        try:
            async for output in self._llm.generate(prompt, self._sampling(entry), self._id(entry)):
                (one,) = output.outputs
                ids = list(one.token_ids)
                entry.tokens += ids
                entry.logprobs += [step[i].logprob for step, i in zip(one.logprobs or [], ids, strict=True)]
                entry.versions += [self._version] * len(ids)
                if one.finish_reason is not None:
                    reason = _REASONS[one.finish_reason]
        except SurefootError:
            raise
        except Exception as error:
            if type(error).__name__ in ("ValueError", "VLLMValidationError"):
                raise UserError(
                    "rollout-request", f"vLLM refuses {entry.request.id!r}: {_first_line(error)}"
                ) from error
            raise RunError("engine-died", f"vLLM ended while sampling: {_first_line(error)}") from error
        new = entry.logprobs[done:]
        if any(value != value for value in new):
            raise RunError("rollout-not-finite", f"the model's output for request {entry.request.id!r} is not a number")
        return reason or "aborted"

    def _sampling(self, entry: _Open) -> Any:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        sampling = entry.request.sampling
        seed = (entry.request.seed + len(entry.tokens)) & 0x7FFFFFFFFFFFFFFF
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_response_length - len(entry.tokens),
            seed=seed if self._settings.config.per_request_seeds and sampling.temperature > 0 else None,
            logprobs=0,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            stop_token_ids=sorted({*self._settings.eos_token_ids, *sampling.stop_token_ids}),
            ignore_eos=True,  # what ends a response is ours to say, and is among the stop ids
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA if self._settings.stream else RequestOutputKind.FINAL_ONLY,
        )


def _environment() -> None:
    """Settings of vLLM's that are only read from the environment. What the user set stays."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would put every replica on the same cores
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at the first call, where there may be no compiler
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # parcels are plain data; their addresses are this run's own
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
