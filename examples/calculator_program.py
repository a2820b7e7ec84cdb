"""A rollout program of your own: the policy may use a calculator, over several turns.

A turn of the policy that ends with `=` is a call: what stands before the sign is calculated, the result comes back as
a message of the role `tool`, and the policy goes on. Any other turn is the answer.

Run it: `surefoot train examples/calculator.yaml`
"""

from __future__ import annotations

import ast
import asyncio
import operator
import re
from collections.abc import Callable

from surefoot.records import Prompt, Rollout
from surefoot.rollout.api import InferenceEngine, ProgramContext
from surefoot.rollout.builder import RolloutBuilder

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
LONGEST = 100  # characters of a call


async def calculator(
    prompt: Prompt, engine: InferenceEngine, context: ProgramContext, max_turns: int = 3
) -> list[Rollout]:
    """Sample `context.num_samples` conversations on a prompt, all at once, each of at most `max_turns` turns."""
    samples = range(context.num_samples)
    return list(await asyncio.gather(*(conversation(prompt, i, engine, context, max_turns) for i in samples)))


async def conversation(
    prompt: Prompt, sample_index: int, engine: InferenceEngine, context: ProgramContext, max_turns: int
) -> Rollout:
    """One trajectory. What the policy sampled is trained on as it is; what the tool said is read and not trained on."""
    row = RolloutBuilder(prompt, sample_index, context)
    messages = list(prompt.messages)
    for _ in range(max_turns):
        turn = await row.sample(engine)
        said = context.template.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True)
        if turn.finish_reason != "stop" or not said.rstrip().endswith("="):
            return row.build()
        messages.append({"role": "assistant", "content": said})
        result = {"role": "tool", "content": calculate(said.rstrip().removesuffix("="))}
        row.count("tool_calls")
        if result["content"].startswith("error"):
            row.count("tool_errors")
        ids = context.template.next_turn(messages, turn.token_ids, [result], prompt.tools)
        if len(ids) >= row.num_left:
            return row.build("length")
        row.add_context(ids)
        messages.append(result)
    return row.build("tool_limit")


def calculate(text: str) -> str:
    """Return the value of the arithmetic that `text` ends with, or what is wrong with it. Never raises.

    Example:
        calculate("That is (2 + 3) * 4") == "20"
    """
    expression = re.search(r"[-+*/().\d\s]*$", text[-LONGEST:])
    try:
        tree = ast.parse(expression.group().strip() if expression else "", mode="eval")
        return f"{value_of(tree.body):.12g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}. Write arithmetic in front of the sign, such as 2 * (3 + 4) ="


def value_of(node: ast.AST) -> float:
    """Evaluate the tree of an expression: numbers, + - * / and parentheses, and nothing else."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
        case _:
            raise ValueError("no arithmetic")
