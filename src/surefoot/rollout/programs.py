"""Rollout programs by name, or a user's own by dotted path."""

from __future__ import annotations

import functools
import inspect

from ..config.rollout import RolloutConfig
from ..errors import UserError, nearest
from ..plugins import load_function
from .api import RolloutProgram
from .single_turn import single_turn

PROGRAMS: dict[str, RolloutProgram] = {
    "single_turn": single_turn,
}


def load_program(config: RolloutConfig) -> RolloutProgram:
    """Return the program that `rollout.program` names, with `rollout.program_params` as its keyword arguments.

    Raises:
        UserError: There is no such program, or it is not an async function that takes these arguments.
    """
    if ":" not in config.program and config.program not in PROGRAMS:
        near = nearest(config.program, PROGRAMS)
        raise UserError(
            "rollout-program",
            "there is no such program",
            key="rollout.program",
            got=config.program,
            want=f"{', '.join(PROGRAMS)}, or your own as package.module:function or file.py:function",
            hint=f"Did you mean {near}?" if near else None,
        )
    program = PROGRAMS.get(config.program) or load_function(config.program, "rollout.program")
    if not inspect.iscoroutinefunction(program):
        raise UserError(
            "rollout-program", "a rollout program is an async function", key="rollout.program", got=config.program
        )
    signature = inspect.signature(program)
    try:
        signature.bind(None, None, None, **config.program_params)
    except TypeError as error:
        raise UserError(
            "rollout-program", f"the program cannot be called so: {error}", key="rollout.program_params",
            got=f"(prompt, engine, context, {', '.join(config.program_params)})", want=f"{config.program}{signature}",
        ) from None  # fmt: skip
    return functools.partial(program, **config.program_params)
