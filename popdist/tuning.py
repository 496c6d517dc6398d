"""The limits of waits and the mechanism of reductions, read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from collectives import Limits
from collectives.factory import MECHANISMS
from collectives.plans.network import Network
from popdist.errors import EnvironmentMismatchError

PREFIX = "POPDIST_"


def read_limits(environ: Mapping[str, str]) -> Limits:
    """Read the limits from POPDIST_STALL_WARNING_S, POPDIST_TIMEOUT_S and POPDIST_CONNECT_TIMEOUT_S.

    Raises:
        EnvironmentMismatchError: A value is not a positive number of seconds.
    """
    usual = Limits()
    return Limits(
        _seconds(environ, "STALL_WARNING_S", usual.stall_warning_s),
        _seconds(environ, "TIMEOUT_S", usual.timeout_s),
        _seconds(environ, "CONNECT_TIMEOUT_S", usual.connect_timeout_s),
    )


def read_mechanism(environ: Mapping[str, str]) -> str:
    """Read the mechanism of `collectives.Settings` from POPDIST_MECHANISM.

    Raises:
        EnvironmentMismatchError: The mechanism is unknown.
    """
    name = f"{PREFIX}MECHANISM"
    mechanism = environ.get(name, "auto")
    if mechanism not in MECHANISMS:
        raise EnvironmentMismatchError(
            f"{name}={mechanism!r} is not a mechanism; use one of {', '.join(MECHANISMS)}, or unset it"
        )
    return mechanism


def read_network(environ: Mapping[str, str]) -> Network | None:
    """Read the network of `collectives.Settings` from the file that POPDIST_NETWORK names.

    Raises:
        EnvironmentMismatchError: The file cannot be read, or does not describe a network.
    """
    name = f"{PREFIX}NETWORK"
    path = environ.get(name)
    if path is None:
        return None
    try:
        return Network.read(Path(path))
    except (OSError, ValueError) as error:
        raise EnvironmentMismatchError(
            f"{name}={path!r}: {error}; name a file of `poprun simulate measure` that every host has, or unset it"
        ) from error


def _seconds(environ: Mapping[str, str], limit: str, usual: float) -> float:
    text = environ.get(f"{PREFIX}{limit}")
    if text is None:
        return usual
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise EnvironmentMismatchError(
            f"{PREFIX}{limit}={text!r} is not a positive number of seconds; correct or unset it"
        )
    return seconds
