"""`agentx serve`: a deployment to replay against, without any hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    sim: Annotated[str | None, typer.Option(help="Serve a simulated deployment: mi325x, mi300x or a file.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Serve a tiny random model on llama.cpp.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    slots: Annotated[int | None, typer.Option(min=1, help="Slots of the tiny engine; 16 if not given.")] = None,
    context: Annotated[
        int | None, typer.Option(min=512, help="Context window of the tiny engine in tokens; 32768 if not given.")
    ] = None,
) -> None:
    """Serve a simulated deployment or a tiny real engine on loopback until interrupted.

    Example: agentx serve --sim mi325x --port 8000
    """
    from agentx.errors import InputError

    if (sim is None) == (not tiny):
        raise InputError("serve what?", "give one of --sim NAME and --tiny")
    if tiny:
        from agentx.engines.tiny import serve_tiny

        serve_tiny(port, host=host, slots=slots or 16, context=context or 32768, ready=_ready("tiny"))
        return
    if slots is not None or context is not None:
        raise InputError(
            "--slots and --context belong to --tiny", "a simulated deployment's are in its file: copy it and edit it"
        )
    import asyncio
    import contextlib
    import signal

    import uvloop

    from agentx.deployment import load_deployment
    from agentx.sim.server import SimServer

    assert sim is not None
    deployment = load_deployment(sim)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await SimServer(deployment).serve(host, port, _ready(deployment.name))

    try:
        uvloop.run(run())
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port") from error


def _ready(name: str) -> Callable[[str], None]:
    """A function that tells where the deployment can be reached."""
    import sys

    def tell(url: str) -> None:
        sys.stdout.write(f"serving {name} on {url}\n")
        sys.stdout.flush()

    return tell
