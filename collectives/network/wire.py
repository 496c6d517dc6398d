"""gRPC channels and servers for streams of bytes, with limits on both sides."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from collectives.network.addresses import Address, Endpoint
from collectives.network.security import Certificates

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 21
"""The size of the largest message. gRPC refuses a larger announced size before it allocates memory."""

SERVICE = "/popdist.Collectives/"
CONTROL_METHOD, LANE_METHOD = f"{SERVICE}Control", f"{SERVICE}Lane"
HELLO, PROOF, WELCOME = "popdist-hello", "popdist-proof", "popdist-welcome"
VIEW = "popdist-view"

REFUSAL = "popdist-refusal"
"""Metadata that marks a worker's refusal; other servers use the same status codes, but not this key."""
REFUSED, NOT_YET = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION

_HANDSHAKE_LIMIT_MS = 5000  # a peer that is silent for this long is no worker, or has to call again
_IDLE_LIMIT_MS = 5000  # workers open a stream as soon as they connect
_ROOM_FOR_HEADERS = 1 << 10
_FOR_OTHERS = stat.S_IXUSR | stat.S_IRWXG | stat.S_IRWXO
_umask_lock = threading.Lock()
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES + _ROOM_FOR_HEADERS),
    ("grpc.max_receive_message_length", MESSAGE_BYTES + _ROOM_FOR_HEADERS),
    # The bandwidth probe would enlarge the flow-control window. An all-reduce then took up to 16 MiB more memory for
    # unread data and was not faster. While a message is read, its size is the window anyway.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),  # with a quarter, messages of 64 KiB took 8 % more time for updates
    ("grpc.compression_enabled_algorithms_bitset", 1),  # no compression, so the announced size is the memory needed
]


@dataclass(frozen=True)
class Room:
    """The limits of a server for its callers.

    Attributes:
        streams: Maximum number of concurrent streams.
        connections: Maximum number of connections. Further ones are closed at once, so that strangers cannot use up all
            file descriptors.
    """

    streams: int
    connections: int


class DaemonThreads(Executor):
    """An executor with one daemon thread per stream, so that streams do not keep the interpreter from exiting."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the function in a new thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        try:
            threading.Thread(target=run, name="collectives-stream", daemon=True).start()
        except RuntimeError as error:  # no thread can start (limit, or interpreter exit); gRPC itself must continue
            logger.warning("a stream is left unanswered: %s", error)
            future.set_exception(error)
        return future


def open_channel(endpoint: Endpoint, address: Address, certificates: Certificates | None) -> grpc.Channel:
    """Return a separate channel to one worker; it connects when the first stream needs it."""
    options = [
        *_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC 1.85 would retry an unsent stream of a closing connection on that same connection, endlessly and without
        # pause. That takes some hundred MB of memory per second. The meeting of workers retries with a new connection.
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
    """Return a server for `address` only, not started yet.

    Raises:
        OSError: This machine cannot listen at the address.
    """
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),  # one worker per port
        ("grpc.max_allowed_incoming_connections", room.connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_LIMIT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_LIMIT_MS),
    ]
    endpoints = address.check_free()
    server = grpc.server(DaemonThreads(), (handlers,), options=options, maximum_concurrent_rpcs=room.streams)
    for endpoint in endpoints:
        with _private_files() if address.path else nullcontext():  # write permission is the permission to connect
            try:
                if certificates is None:
                    server.add_insecure_port(endpoint.place)
                else:
                    server.add_secure_port(endpoint.place, _server_credentials(certificates))
            except RuntimeError as error:
                raise OSError(str(error)) from error
        if address.path:  # a default ACL of its folder goes before the umask
            Path(address.path).chmod(stat.S_IRUSR | stat.S_IWUSR)
    return server


@contextmanager
def _private_files() -> Iterator[None]:
    """Create files that only this user can read and write.

    The umask is the process's: of two threads at the same time, one would restore the umask that the other has set.
    """
    with _umask_lock:
        before = os.umask(_FOR_OTHERS)
        try:
            yield
        finally:
            os.umask(before)


def _server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    pair = (certificates.key.read_bytes(), certificates.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], certificates.authority.read_bytes(), require_client_auth=True)
