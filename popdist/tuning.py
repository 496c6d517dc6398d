"""The limits of waits and the mechanism of reductions, read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from collectives import Limits
from collectives.factory import MECHANISMS
from collectives.plans.network import Network
from popdist.errors import EnvironmentMismatchError

STALL_WARNING = "POPDIST_STALL_WARNING_S"
"""Seconds that an instance waits for others before each warning. Default: 30."""
TIMEOUT = "POPDIST_TIMEOUT_S"
"""Seconds that an instance waits for others before `CollectiveTimeoutError`. Default: 600."""
CONNECT_TIMEOUT = "POPDIST_CONNECT_TIMEOUT_S"
"""Seconds that a worker over gRPC waits for the other workers to start. Default: 300."""
MECHANISM = "POPDIST_MECHANISM"
"""`window` requires shared memory inside each host; `ring` sends messages there too. Default: `auto`."""
NETWORK = "POPDIST_NETWORK"
"""File of `poprun simulate measure` by which plans of messages are chosen; every host needs it."""


def read_limits(environ: Mapping[str, str]) -> Limits:
    """Read the limits from POPDIST_STALL_WARNING_S, POPDIST_TIMEOUT_S and POPDIST_CONNECT_TIMEOUT_S.

    Raises:
        EnvironmentMismatchError: A value is not a positive number of seconds.
    """
    usual = Limits()
    return Limits(
        _seconds(environ, STALL_WARNING, usual.stall_warning_s),
        _seconds(environ, TIMEOUT, usual.timeout_s),
        _seconds(environ, CONNECT_TIMEOUT, usual.connect_timeout_s),
    )


def read_mechanism(environ: Mapping[str, str]) -> str:
    """Read the mechanism of `collectives.Settings` from POPDIST_MECHANISM.

    Raises:
        EnvironmentMismatchError: The mechanism is unknown.
    """
    mechanism = environ.get(MECHANISM, "auto")
    if mechanism not in MECHANISMS:
        raise EnvironmentMismatchError(
            f"{MECHANISM}={mechanism!r} is not a mechanism; use one of {', '.join(MECHANISMS)}, or unset it"
        )
    return mechanism


def read_network(environ: Mapping[str, str]) -> Network | None:
    """Read the network of `collectives.Settings` from the file that POPDIST_NETWORK names.

    Raises:
        EnvironmentMismatchError: The file cannot be read, or does not describe a network.
    """
    path = environ.get(NETWORK)
    if path is None:
        return None
    try:
        return Network.read(Path(path))
    except (OSError, ValueError) as error:
        raise EnvironmentMismatchError(
            f"{NETWORK}={path!r}: {error}; name a file of `poprun simulate measure` that every host has, or unset it"
        ) from error


def _seconds(environ: Mapping[str, str], variable: str, usual: float) -> float:
    text = environ.get(variable)
    if text is None:
        return usual
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise EnvironmentMismatchError(f"{variable}={text!r} is not a positive number of seconds; correct or unset it")
    return seconds
