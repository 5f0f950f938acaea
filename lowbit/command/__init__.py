"""The command line: ``lowbit demo``, ``plan``, ``quantize``, ``inspect``, ``sensitivity``, ``allocate``,
``doctor``, ``eval``, ``report``, ``bench``, ``tune``, ``env``, ``list``.

Results go to stdout (with ``--json`` nothing but JSON, an error as well), everything else to stderr. Exit codes: 0 for
success; 1 for work that failed (damaged files, a recipe that does not fit the model, a full disk) or whose output nobody read
to the end; 2 for a mistake in the command line: an option, a value, or a file, folder or model that is absent or of the wrong
kind (a quantized model where a float one is asked for); 130 for an interrupt.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import plugins
from .benchmark import bench
from .console import print_json, say, silence
from .demonstration import demo
from .diagnosing import doctor
from .evaluation import evaluate
from .inspection import inspect
from .listings import env, listing
from .mixed_precision import allocate, sensitivity
from .planning import plan
from .quantizing import quantize
from .reporting import report
from .tuning import tune

__all__ = ["app", "main", "run"]

_INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)

EXAMPLES = {
    "demo": "lowbit demo --out results",
    "plan": "lowbit plan ./model --recipe int4",
    "quantize": "lowbit quantize ./model -r 'gptq(int4)' --calibration text.txt -o ./model-int4",
    "inspect": "lowbit inspect ./model-int4",
    "sensitivity": "lowbit sensitivity ./model -s int3,int4 --calibration text.txt --report losses.json",
    "allocate": "lowbit allocate losses.json --bits 3.5 -o mixed.yaml",
    "doctor": "lowbit doctor ./model-int4 ./model --calibration text.txt",
    "eval": "lowbit eval ./model -r int8,int4 --tasks mmlu,perplexity --data ./questions --text text.txt",
    "report": "lowbit report result.json -o report",
    "tune": "lowbit tune llama-3-8b -r int4 --minutes 5",
    "env": "lowbit env --kernels",
}
"""A command line of each command, at the end of its help."""

app = typer.Typer(name="lowbit", add_completion=True, pretty_exceptions_enable=False)
for name, function in (
    ("demo", demo),
    ("plan", plan),
    ("quantize", quantize),
    ("inspect", inspect),
    ("sensitivity", sensitivity),
    ("allocate", allocate),
    ("doctor", doctor),
    ("eval", evaluate),
    ("report", report),
    ("tune", tune),
    ("env", env),
):
    app.command(name, epilog=f"Example: {EXAMPLES[name]}")(function)
app.add_typer(bench, name="bench")
app.add_typer(listing, name="list")


def _print_version(wanted: bool) -> None:
    if wanted:
        from lowbit import __version__

        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Low-bit number formats for PyTorch: quantize a model, see what it saves, measure what it costs.

    Every command takes --json; an error is then {"error": {"kind", "message", "exit_code"}} on stdout. Exit codes: 0 success,
    1 work that failed, 2 a mistake in the command line (an option, or a file, folder or model that is absent or of the wrong
    kind), 130 interrupted. LOWBIT_TRACEBACK=1 shows where an error came from.
    """


def main() -> None:
    """What the ``lowbit`` script calls."""
    _open_streams()
    code = run(sys.argv[1:])
    try:
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit code; errors become one line on stderr, and JSON on stdout for ``--json``."""
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    try:
        plugins.load()
        code = command.main(list(arguments) or ["--help"], prog_name="lowbit", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer turns an interrupt into this code
            raise KeyboardInterrupt
    except BrokenPipeError:
        silence(sys.stdout)
        return 1
    except SystemExit as error:  # rich's, of a page of help that nobody reads to the end
        return error.code if isinstance(error.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", _INTERRUPTED, "Interrupted", as_json)
    except Exception as error:
        if os.environ.get("LOWBIT_TRACEBACK"):
            traceback.print_exc()
        format_message = getattr(error, "format_message", None)  # a mistake in the command line has one
        if format_message is not None:
            return _failed(format_message(), getattr(error, "exit_code", 2), type(error).__name__, as_json)
        if isinstance(error, OSError) and error.filename is None and error.errno in _NO_ROOM:  # every file has a name
            silence(sys.stdout)
            return _failed(f"the output cannot be written: {error.strerror}", 1, type(error).__name__, False)
        return _failed(_words(error), 1, type(error).__name__, as_json)
    return (code if isinstance(code, int) else 0) if arguments else 2


def _open_streams() -> None:
    """Open those that were closed before Python started, and that it leaves out.

    A file that is opened later would else take the number of one, and get what a library prints.
    """
    closed = [(name, mode) for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")) if getattr(sys, name) is None]
    if closed:
        while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(handle)
    for name, mode in closed:
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the rest of the process


def _words(error: Exception) -> str:
    """What an error says; its kind as well where it says nothing or is no error that lowbit foresees."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    foreseen = isinstance(error, (ValueError, TypeError, OSError, ImportError)) or type(error).__module__.startswith("lowbit")
    text = str(error)
    return text if foreseen and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _failed(message: str, code: int, kind: str, as_json: bool) -> int:
    line = " ".join(message.split())
    say(f"lowbit: error: {line if len(line) <= 600 else line[:600] + ' ...'}")
    if as_json:
        try:
            print_json({"error": {"kind": kind, "message": line, "exit_code": code}})
            sys.stdout.flush()
        except OSError:  # nobody reads it
            silence(sys.stdout)
    return code
