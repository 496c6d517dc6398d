"""Channels and servers of gRPC for streams of bytes, with limits on both sides."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from collectives.network.addresses import Address, Endpoint
from collectives.network.security import Certificates

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 21
"""The largest message. gRPC refuses what announces more before it makes room for it."""

SERVICE = "/popdist.Collectives/"
CONTROL_METHOD, LANE_METHOD = f"{SERVICE}Control", f"{SERVICE}Lane"
HELLO, PROOF, WELCOME = "popdist-hello", "popdist-proof", "popdist-welcome"

REFUSAL = "popdist-refusal"
"""Metadata behind a status by which a worker refuses; other servers have such statuses too, but not this."""
REFUSED, NOT_YET = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION

_HANDSHAKE_LIMIT_MS = 5000  # what has said nothing by then was no worker, or has to come again
_IDLE_LIMIT_MS = 5000  # workers have a stream from their first moment
_ROOM_FOR_HEADERS = 1 << 10
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES + _ROOM_FOR_HEADERS),
    ("grpc.max_receive_message_length", MESSAGE_BYTES + _ROOM_FOR_HEADERS),
    # Otherwise gRPC estimates the bandwidth, and buffers as much of what nobody reads yet: up to 16 MiB more in one
    # all-reduce, and no faster. While a message is being read its size is the window anyway.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 18),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what is announced is what it takes
]


@dataclass(frozen=True)
class Room:
    """The room that a server has for callers.

    Attributes:
        streams: at once.
        connections: at once; more are closed as they come, so that strangers do not use up all descriptors.
    """

    streams: int
    connections: int


class DaemonThreads(Executor):
    """A thread for each stream, which does not keep the interpreter from ending."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it at once."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        try:
            threading.Thread(target=run, name="collectives-stream", daemon=True).start()
        except RuntimeError as error:  # no more threads, or the interpreter ends: what gRPC does besides must go on
            logger.warning("a stream is left unanswered: %s", error)
            future.set_exception(error)
        return future


def open_channel(endpoint: Endpoint, address: Address, certificates: Certificates | None) -> grpc.Channel:
    """Return a connection of its own to one worker; it is made when the first stream needs it."""
    options = [
        *_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # A stream that a closing connection has not sent would be tried again on that same connection, for ever and
        # without a pause: some hundred MB of memory a second (seen in 1.85). Who meets tries again with another one.
        ("grpc.enable_retries", 0),
    ]
    if certificates is None:
        return grpc.insecure_channel(endpoint.target, options)
    credentials = grpc.ssl_channel_credentials(
        certificates.authority.read_bytes(), certificates.key.read_bytes(), certificates.certificate.read_bytes()
    )
    name = [("grpc.ssl_target_name_override", address.authority), ("grpc.default_authority", address.authority)]
    return grpc.secure_channel(endpoint.target, credentials, [*options, *name])


def open_server(
    address: Address, certificates: Certificates | None, handlers: grpc.GenericRpcHandler, room: Room
) -> grpc.Server:
    """Return a server that listens at `address` only; not started yet.

    Raises:
        OSError: if it cannot listen there.
    """
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),  # a port belongs to one worker
        ("grpc.max_allowed_incoming_connections", room.connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_LIMIT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_LIMIT_MS),
    ]
    endpoints = address.check_free()
    server = grpc.server(DaemonThreads(), (handlers,), options=options, maximum_concurrent_rpcs=room.streams)
    for endpoint in endpoints:
        try:
            if certificates is None:
                server.add_insecure_port(endpoint.place)
            else:
                server.add_secure_port(endpoint.place, _server_credentials(certificates))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if address.path:
            Path(address.path).chmod(stat.S_IRUSR | stat.S_IWUSR)  # whoever may write to it can connect
    return server


def _server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    pair = (certificates.key.read_bytes(), certificates.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], certificates.authority.read_bytes(), require_client_auth=True)
