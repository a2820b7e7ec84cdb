"""The command line. Every verb imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__
from .config.model import Dtype
from .errors import CODES, RunError, SurefootError, UserError, nearest

DONE, USER_MISTAKE, RUN_FAILED, INTERRUPTED = 0, 2, 3, 130

app = typer.Typer(
    name="surefoot",
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

Config = Annotated[Path, typer.Argument(help="YAML file of the run, such as recipes/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value, as many as you like", metavar="[KEY=VALUE]...")
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""
    if version:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train a model, or go on with a run that was interrupted."""
    from .config import load_config
    from .controller.run import run_training
    from .controller.signals import Interrupted

    try:
        run_training(load_config(config, overrides or []))
    except Interrupted:
        errors.print("interrupted: the state is saved; the same command goes on from it")
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        errors.print("interrupted at once: nothing was saved since the last checkpoint")
        sys.exit(INTERRUPTED)


@app.command()
def data(config: Config, overrides: Overrides = None) -> None:
    """Look at the prompts: lengths, what would be dropped, duplicates, the first rows as the model sees them."""
    from .config import load_config
    from .data.inspect import report

    Console().print(report(load_config(config, overrides or [])))


@app.command("eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub id to evaluate instead of model.path")] = None,
) -> None:
    """Evaluate a model on the `eval` block of a configuration."""
    from .config import load_config
    from .controller.run import run_evaluation

    metrics = run_evaluation(load_config(config, overrides or []), model)
    for name, value in metrics.items():
        typer.echo(f"{name.removeprefix('eval/'):24} {value:.6g}")


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run folder, or one checkpoint in it")],
    to: Annotated[Path, typer.Option(help="Folder to write")],
    merge_adapter: Annotated[bool, typer.Option(help="Merge LoRA adapters into the weights")] = True,
    dtype: Annotated[Dtype | None, typer.Option(help="Precision to write; left out: the run's own")] = None,
) -> None:
    """Write a trained model as a Hugging Face folder."""
    from .checkpoint.export import export_checkpoint

    export_checkpoint(source, to, merge_adapter=merge_adapter, dtype=dtype)
    typer.echo(f"written to {to}")


@app.command()
def cluster(
    address: Annotated[str, typer.Argument(help="auto, host:port or ray://host:port of a running cluster")] = "auto",
) -> None:
    """Show the nodes of a Ray cluster, what is free on them, and who holds the rest."""
    from .controller.cluster import render_cluster

    Console().print(render_cluster(address))


@app.command()
def algorithms() -> None:
    """List the algorithms, what they are made of and what they need."""
    from .algorithms.table import render_table

    Console().print(render_table())


@app.command()
def explain(code: Annotated[str, typer.Argument(help="The code in brackets at the end of an error")]) -> None:
    """Say more about an error or an alarm."""
    if code not in CODES:
        near = nearest(code, CODES)
        raise UserError(
            "no-such-code", "nothing has this code", key=code, hint=f"Did you mean {near}?" if near else None
        )
    typer.echo(CODES[code])


def main() -> None:
    """Run the command line; mistakes of the user and failures of the run end it with one message and an exit code."""
    try:
        app()
    except UserError as error:
        _fail(error, USER_MISTAKE)
    except RunError as error:
        _fail(error, RUN_FAILED)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:
        with tempfile.NamedTemporaryFile("w", prefix="surefoot-", suffix=".log", delete=False) as file:
            traceback.print_exc(file=file)
        errors.print(f"unexpected {type(error).__name__}: {error}", markup=False)
        errors.print(f"  This is a fault of Surefoot, not yours. Its trace is in {file.name}; please report it.")
        sys.exit(RUN_FAILED)


def _fail(error: SurefootError, code: int) -> None:
    errors.print(str(error), markup=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
