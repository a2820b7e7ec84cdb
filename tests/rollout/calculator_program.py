"""A rollout program with tools, as a user would write one: the policy may add numbers before it answers.

A call is `<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>` at the end of a turn. Whatever is wrong with a
call is told to the policy as the tool's answer: a policy that is still learning writes many wrong calls.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from surefoot.records import Prompt, Rollout
from surefoot.rollout.api import InferenceEngine, ProgramContext
from surefoot.rollout.builder import RolloutBuilder

TOOLS = {"add": lambda a, b: a + b}
CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


async def calculator(
    prompt: Prompt, engine: InferenceEngine, context: ProgramContext, max_turns: int = 4
) -> list[Rollout]:
    """Let the policy call tools until it answers without one, at most `max_turns` times."""

    async def one(sample_index: int) -> Rollout:
        row = RolloutBuilder(prompt, sample_index, context)
        messages: list[dict[str, Any]] = [dict(m) for m in prompt.messages]
        for _ in range(max_turns):
            completion = await row.sample(engine)
            text = context.template.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            found = CALL.search(text)
            if completion.finish_reason != "stop" or not found:
                return row.build()
            messages.append({"role": "assistant", "content": text})
            answer = {"role": "tool", "content": call_tool(found[1])}
            if answer["content"].startswith("error"):
                row.count("tool_errors")
            row.add_context(context.template.next_turn(messages, completion.token_ids, [answer], prompt.tools))
            messages.append(answer)
        return row.build("tool_limit")

    return list(await asyncio.gather(*map(one, range(context.num_samples))))


def call_tool(text: str) -> str:
    """Run a call, or say what is wrong with it."""
    try:
        call = json.loads(text)
        return str(TOOLS[call["name"]](**call["arguments"]))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
