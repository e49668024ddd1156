"""The command line: the only place that prints. stdout is data, stderr is progress and errors.

Each command lives in a module of its own with a `register(app)`; heavy imports happen inside the
commands, so that `--help` and the first request are quick.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import traceback

import typer

from agentx.errors import AgentxError
from agentx.units import printable

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a place that output is sent to refuses with."""


def build_app() -> typer.Typer:
    """The typer application with every command registered."""
    from agentx.cli import doctor, gate, generate, replay, report, serve

    app = typer.Typer(
        name="agentx",
        help="Make agentic LLM traffic, prove it, replay it against a deployment and report what can be trusted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (generate, gate, replay, report, doctor, serve):
        module.register(app)

    @app.callback()
    def options(
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ) -> None:
        if debug:
            os.environ["AGENTX_DEBUG"] = "1"

    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from agentx import __version__

        sys.stdout.write(f"agentx {__version__}\n")
        raise typer.Exit


def main() -> None:
    """Run the command line and leave with its exit code (0, 1, 2, 3 or 130)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model's name may hold what the locale cannot
    gc.set_threshold(100_000)  # imports make many objects and no garbage
    signal.signal(signal.SIGTERM, _interrupted)  # as Ctrl-C: what is half-written is cleared away
    sys.exit(run())


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run(arguments: list[str] | None = None) -> int:
    """The exit code of one command line, errors printed on stderr; `arguments` default to the process's own."""
    try:
        result = build_app()(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
        if code == EXIT_INTERRUPTED:
            sys.stderr.write("interrupted\n")
        return code
    except AgentxError as error:
        if os.environ.get("AGENTX_DEBUG"):
            traceback.print_exc()
        sys.stderr.writelines(f"{printable(line)}\n" for line in error.lines())
        return error.exit_code
    except typer.TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # no command at all has shown the help already
            sys.stderr.write(f"error: {printable(message)}\nhint: see --help\n")
        return int(getattr(error, "exit_code", EXIT_INPUT))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _drop_output()
        sys.stderr.write(f"error: the output cannot be printed: {error.strerror}\nhint: look where it goes to\n")
        return EXIT_INPUT


def _drop_output() -> None:
    """Let what is still buffered go nowhere: the interpreter would try it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
