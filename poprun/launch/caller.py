"""The ties of a job to the process that called `popdist.launch`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from popdist.environments.poprun import NETWORK_VARIABLE
from popdist.errors import LaunchError
from popdist.launching.channel import LaunchChannel, LaunchMessage, MessageKind, call
from poprun.errors import PopRunError
from poprun.ipc.processes import die_with_parent
from poprun.launch.launch import Launch


def tie_to_caller(launch: Launch, environ: Mapping[str, str]) -> tuple[Launch, dict[str, str]]:
    """End this process with the call of `popdist.launch`, and let the instances on other hosts reach the calling one.

    Args:
        launch: The launch.
        environ: The environment, with the variables of `popdist.launch`.

    Returns:
        The launch and the environment in which instances on other hosts find the calling process.

    Raises:
        PopRunError: The calling process has ended, or it cannot listen at this machine's address.
    """
    die_with_parent(signal.SIGTERM)  # child processes of the calling one may keep the connection open
    try:
        channel = call(environ)  # also fails if the calling process has ended before
        place = "" if launch.remote is None else _listen(channel, launch.remote.address)
        channel.end_with()
    except (LaunchError, OSError) as error:
        raise PopRunError(f"the function cannot be handed out: {error}") from None
    if not place:
        return launch, dict(environ)
    return replace(launch, forwarded=(*launch.forwarded, NETWORK_VARIABLE)), {**environ, NETWORK_VARIABLE: place}


def _listen(channel: LaunchChannel, address: str) -> str:
    """Let the calling process listen for instances on other hosts; return `ADDRESS PORT`."""
    channel.send(LaunchMessage(MessageKind.LISTEN, [address.encode()]))
    return f"{address} {bytes(channel.receive().parts[0]).decode()}"
