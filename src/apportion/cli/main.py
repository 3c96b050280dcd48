"""The ``apportion`` command: subcommands, and one place that turns errors into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import typer

from apportion.cli import (
    adapt,
    audit,
    calibrate,
    compose,
    export,
    fit,
    measure,
    retarget,
    search,
    sources,
    specialize,
    targets,
    tasks,
    verify,
)
from apportion.errors import ApportionError, Exit

_INTERRUPTED = "interrupted; start it again with the same -o folder to go on"
UsageError: Any = typer.BadParameter.__base__  # typer brings its own click or uses the one installed, by version

app = typer.Typer(
    name="apportion",
    help="Name a model, a device and a budget; get a model that measurably meets it.\n\n"
    "Exit codes: 0 done and met, 2 bad input, 3 budget can't be met, 4 measured and not met, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("fit", help=fit.HELP)(fit.command)
app.command("verify", help=verify.HELP)(verify.command)
app.command("measure", help=measure.HELP)(measure.command)
app.command("targets", help=targets.HELP)(targets.command)
app.command("calibrate", help=calibrate.HELP)(calibrate.command)
app.command("audit", help=audit.HELP)(audit.command)
app.command("export", help=export.HELP)(export.command)
app.command("retarget", help=retarget.HELP)(retarget.command)
app.command("adapt", help=adapt.HELP)(adapt.command)
app.command("specialize", help=specialize.HELP)(specialize.command)
app.command("compose", help=compose.HELP)(compose.command)
app.command("search", help=search.HELP)(search.command)
app.add_typer(sources.app, name="sources")
app.add_typer(tasks.app, name="tasks")


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"apportion {installed('apportion')}")
        raise typer.Exit


def main() -> None:
    """Runs the command; a mistake of the user's prints one line on standard error, never a traceback."""
    sys.path.insert(0, os.getcwd())  # factories in the user's folder, as `python -m` would find them
    signal.signal(signal.SIGINT, _on_interrupt)
    try:
        code = app(standalone_mode=False)
    except ApportionError as error:
        _fail(" ".join(str(error).split()), error.exit_code)
    except UsageError as error:
        _fail(f"{error.format_message()} (see apportion --help)", Exit.BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        _fail(_INTERRUPTED, Exit.INTERRUPTED)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), Exit.BAD_INPUT)
    if code == Exit.INTERRUPTED:  # how typer returns from Ctrl-C
        _fail(_INTERRUPTED, Exit.INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _on_interrupt(_signal: int, _frame: object) -> None:
    """Ctrl-C ends the process at once, past libraries that would swallow it; every row recorded is safe on disk."""
    os.write(2, f"apportion: {_INTERRUPTED}\n".encode())
    os._exit(int(Exit.INTERRUPTED))


def _fail(message: str, code: Exit) -> None:
    print(f"apportion: {message}", file=sys.stderr)
    sys.exit(int(code))
