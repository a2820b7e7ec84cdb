"""The embedded engine: samples with the actor's own module, in the actor's process. No second copy, no weight sync.

One task drives the steps while any request is open; each step computes one token for every running row in a worker
thread, so that the event loop is free for what finished rows need. Between two steps, and only there, requests come
and go and weights may change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..errors import RunError, UserError
from .api import Completion, Request, WeightSource
from .cache import Caches
from .forward import Forward
from .sampling import SamplingBatch, sample
from .scheduler import Plan, Row, Scheduler
from .stopping import StopRules

_PREFILL_TOKENS = 2048  # a step's prompts; more at once fall out of the CPU's caches


FinishReason = Literal["stop", "length", "aborted"]


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not been answered."""

    request: Request
    row: Row
    rules: StopRules
    answer: asyncio.Future[Completion]
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class EmbeddedEngine:
    """An `InferenceEngine` over a module that somebody else trains.

    The module is as its owner left it whenever no step is running, and while no request is open nothing derived from
    its weights is kept. Whoever changes the weights while requests are open says so by `update_weights`; whoever runs
    the module meanwhile puts the engine to sleep first.

    Args:
        model: A transformers causal language model, bare or wrapped by PEFT, on `device`.
        tokenizer: For stop strings.
        eos_token_ids: Ids that end every response.
        max_concurrent_rows: How many rows decode together.
        device: Where the module is.

    Raises:
        UserError: The architecture's attention is not what this engine computes.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        max_concurrent_rows: int,
        device: torch.device,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = device
        self._forward = Forward(model, device)
        self._forward.check()
        self._scheduler = Scheduler(max_concurrent_rows, _PREFILL_TOKENS)
        self._caches = Caches.empty()
        self._open: dict[str, _Open] = {}
        self._batch: tuple[list[Request], SamplingBatch] | None = None
        self._version = 0
        self.steps_done = 0
        self._asleep = False
        self._driver: asyncio.Task[None] | None = None
        self._gap: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def generate(self, request: Request) -> Completion:
        """Sample one continuation; while the engine sleeps, wait.

        Raises:
            UserError: The prompt is empty, or prompt and response together are longer than the model's positions reach.
            RunError: The id is in use, or the model's output is not finite.
        """
        self._check(request)
        row = Row(request.id, tuple(request.token_ids.tolist()))
        rules = StopRules(request.sampling, self._eos_token_ids, self._tokenizer)
        entry = _Open(request, row, rules, asyncio.get_running_loop().create_future())
        self._open[request.id] = entry
        self._scheduler.add(row)
        self._start()
        try:
            return await entry.answer
        except asyncio.CancelledError:
            await self.abort(request.id)
            raise

    async def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored, since it may just have ended by itself."""
        async with self._between_steps():
            if self._scheduler.abort(request_id) is not None:
                self._finish(self._open[request_id], "aborted")

    async def update_weights(self, source: WeightSource | None, version: int) -> None:
        """Note that the module's weights changed. Open requests go on with them, on what they have cached."""
        async with self._between_steps():
            self._forward.cool()
            self._version = version

    async def sleep(self, level: int = 1) -> None:
        """Stop between two steps and drop the caches. Open requests wait, and begin again from their tokens."""
        self._asleep = True
        async with self._between_steps():
            self._scheduler.preempt()
            self._rest()

    async def wake(self) -> None:
        """Go on with what is open."""
        self._asleep = False
        self._start()

    async def close(self) -> None:
        """End open requests as aborted and release everything."""
        async with self._between_steps():
            self._scheduler.clear()
            for entry in list(self._open.values()):
                self._finish(entry, "aborted")
            self._rest()
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _check(self, request: Request) -> None:
        if request.id in self._open:
            raise RunError(
                "rollout-request-id", f"the request id {request.id!r} is in use", hint="Give each request its own id."
            )
        if not len(request.token_ids):
            raise UserError("rollout-empty-prompt", f"request {request.id!r} has no prompt tokens")
        total = len(request.token_ids) + request.sampling.max_response_length
        limit = self._forward.max_length
        if limit is not None and total > limit:
            raise UserError(
                "rollout-too-long", f"request {request.id!r} may grow longer than the model's positions reach",
                key="rollout.sampling.max_response_length",
                got=f"{len(request.token_ids)} prompt tokens + {request.sampling.max_response_length}",
                want=f"at most {limit} together",
            )  # fmt: skip

    def _between_steps(self) -> asyncio.Lock:
        """The lock that a step holds. One for each event loop: a loop may end, and the engine serve the next one."""
        loop = asyncio.get_running_loop()
        if self._gap is None or self._gap[0] is not loop:
            self._gap = loop, asyncio.Lock()
        return self._gap[1]

    def _start(self) -> None:
        if self._scheduler and not self._asleep and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Step until nothing is open or the engine sleeps. A failure is the answer of every open request."""
        try:
            while self._scheduler and not self._asleep:
                async with self._between_steps():
                    if not self._scheduler or self._asleep:
                        break
                    await self._step()
                # A turn of the loop: whoever waits for the gap between steps, or for an answer, gets it now.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for entry in self._fail():
                entry.answer.cancel()
            raise
        except Exception as error:
            for entry in self._fail():
                entry.answer.set_exception(error)

    async def _step(self) -> None:
        plan = self._scheduler.plan(self._version)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        requests = [self._open[row.id].request for row in plan.decode]
        tokens, logprobs = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._compute, plan, requests, self._caches
        )
        self.steps_done += 1
        finished: list[tuple[_Open, FinishReason]] = []
        for row, token, logprob in zip(plan.decode, tokens, logprobs, strict=True):
            entry = self._open[row.id]
            if logprob != logprob:
                raise RunError("rollout-not-finite", f"the model's output for request {row.id!r} is not a number")
            row.generated.append(token)
            entry.logprobs.append(logprob)
            entry.versions.append(self._version)
            if reason := entry.rules.reason(row.generated):
                finished.append((entry, reason))
        self._scheduler.retire([entry.row for entry, _ in finished])
        if not self._scheduler:
            self._rest()
        for entry, reason in finished:
            self._finish(entry, reason)

    @torch.inference_mode()
    def _compute(self, plan: Plan, requests: list[Request], caches: Caches) -> tuple[list[int], list[float]]:
        """The step's tensor work, in the worker thread: it sees nothing that others change."""
        if plan.decode:
            self._forward.warm()
        logits = self._forward.run(plan, caches)
        if not plan.decode:
            return [], []
        if self._batch is None or self._batch[0] != requests:
            self._batch = requests, SamplingBatch.build([(r.sampling, r.seed) for r in requests], self._device)
        step = torch.tensor([len(row.generated) for row in plan.decode], device=self._device)
        tokens, logprobs = sample(logits, self._batch[1], step)
        return tokens.tolist(), logprobs.tolist()

    def _rest(self) -> None:
        self._forward.cool()
        self._batch = None
        # A new one, and not the old one emptied: a step that was abandoned may still write there.
        self._caches = Caches.empty()

    def _finish(self, entry: _Open, reason: FinishReason) -> None:
        del self._open[entry.request.id]
        if entry.answer.done():
            return
        entry.answer.set_result(
            Completion(
                token_ids=np.array(entry.row.generated, np.int32), logprobs=np.array(entry.logprobs, np.float32),
                policy_version=np.array(entry.versions, np.int32), finish_reason=reason,
            )
        )  # fmt: skip

    def _fail(self) -> list[_Open]:
        """Forget everything; return what was still to be answered."""
        self._scheduler.clear()
        self._rest()
        entries, self._open = list(self._open.values()), {}
        return [entry for entry in entries if not entry.answer.done()]
