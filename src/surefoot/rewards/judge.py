"""A language model behind an OpenAI-compatible endpoint as judge, many requests at once."""

from __future__ import annotations

import asyncio
import os
import random
import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..config.rewards import JudgeReward
from .api import RewardFunction, RewardItem, message_text
from .exact import last_match

if TYPE_CHECKING:
    import httpx

_AGAIN = {408, 409, 429}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry; they double with each, up to the longest."""
_FIELD = re.compile(r"\{(prompt|response|answer)\}")


def build(spec: JudgeReward, timeout_seconds: float) -> RewardFunction:
    """Return the async function. It raises (the row's error) when no reply came, or one without a score."""
    return RewardFunction(Judge(spec), is_async=True)


class Judge:
    """Calls the endpoint. At most `concurrency` requests are under way in one event loop."""

    def __init__(self, spec: JudgeReward) -> None:
        self._spec = spec
        self._pattern = re.compile(spec.pattern)
        # Connections and semaphores belong to the event loop that first used them.
        self._of_loop: WeakKeyDictionary[Any, tuple[httpx.AsyncClient, asyncio.Semaphore]] = WeakKeyDictionary()

    async def __call__(self, item: RewardItem) -> float:
        """Return the score that the judge's reply holds, divided by `scale`."""
        client, slots = self._connection()
        async with slots:
            reply = await self._ask(client, render(self._spec.prompt, item))
        found = last_match(self._pattern, reply)
        if found is None:
            raise ValueError(f"the judge's reply holds no score: {reply[-200:]!r}")
        return float(found) / self._spec.scale

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        client, _ = self._of_loop.pop(asyncio.get_running_loop(), (None, None))
        if client is not None:
            await client.aclose()

    def _connection(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            spec = self._spec
            key = os.environ.get(spec.api_key_env)
            client = httpx.AsyncClient(
                base_url=spec.base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=spec.timeout_seconds,
                limits=httpx.Limits(max_connections=spec.concurrency, max_keepalive_connections=spec.concurrency),
            )
            self._of_loop[loop] = client, asyncio.Semaphore(spec.concurrency)
        return self._of_loop[loop]

    async def _ask(self, client: httpx.AsyncClient, question: str) -> str:
        """Return the reply's text, asking again after faults that may pass."""
        import httpx

        spec = self._spec
        body = {
            "model": spec.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": spec.max_tokens,
        }
        fault = ""
        for attempt in range(spec.retries + 1):
            wait = 0.0
            try:
                # httpx bounds each read; a server that sends a byte now and then would hold the row for ever.
                response = await asyncio.wait_for(client.post("chat/completions", json=body), spec.timeout_seconds)
            except (httpx.TransportError, TimeoutError) as error:
                fault = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code not in _AGAIN and response.status_code < 500:
                    return _reply(response)
                fault = f"status {response.status_code}: {response.text[:200]}"
                wait = _asked_to_wait(response)
            if attempt < spec.retries:
                # Without the random share all rows that failed together would come back together.
                pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(wait, pause), LONGEST_PAUSE))
        raise ConnectionError(f"no reply from {spec.base_url} in {spec.retries + 1} attempts; the last: {fault}")


def render(template: str, item: RewardItem) -> str:
    """Fill the template in one pass: a response that says `{answer}` is shown those letters, not the answer."""
    messages = item.messages
    if len(messages) == 1:
        prompt = message_text(messages[0])
    else:
        prompt = "\n".join(f"{m.get('role')}: {message_text(m)}" for m in messages) or item.prompt
    fields = {"prompt": prompt, "response": item.response, "answer": "" if item.answer is None else str(item.answer)}
    return _FIELD.sub(lambda match: fields[match.group(1)], template)


def _reply(response: httpx.Response) -> str:
    if response.status_code != 200:
        raise ConnectionError(f"the judge answered with status {response.status_code}: {response.text[:200]}")
    try:
        text = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f"the judge's reply is no chat completion: {response.text[:200]!r}")
    return text


def _asked_to_wait(response: httpx.Response) -> float:
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdigit() else 0.0  # It may also be a date.
