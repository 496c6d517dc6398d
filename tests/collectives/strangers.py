"""Clients of a worker that are no workers: they send any message over gRPC."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import grpc
from certificates import Files

from collectives.network.addresses import Address
from collectives.network.hello import CONTROL, PROTOCOL, Hello, digest_cluster
from collectives.network.security import Security
from collectives.network.wire import CONTROL_METHOD, HELLO, LANE_METHOD, PROOF, WELCOME

LIMIT_S = 60.0
METHODS = {"control": CONTROL_METHOD, "lane": LANE_METHOD}
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]


def good_hello(addresses: Iterable[str], method: str = "control", **changes: object) -> Hello:
    """Return the hello of rank 1 to rank 0, with changes."""
    lane = CONTROL if method == "control" else "all/0/0"
    hello = Hello(PROTOCOL, digest_cluster(list(addresses), ""), 1, 0, "0123456789abcdef", lane)
    return replace(hello, **{"user_id": os.getuid(), **changes})


def proven(hello: str, token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a stream whose sender knows the token, or none if the token is empty."""
    return ((HELLO, hello), (PROOF, Security(token=token).prove(hello)))


def channel_to(address: str, files: Files | None = None, *, presents_certificate: bool = True) -> grpc.Channel:
    """Open a separate connection to the address.

    Args:
        address: The address of a worker.
        files: The certificate files for TLS; None for plaintext.
        presents_certificate: Whether the client shows its certificate to the worker.
    """
    (endpoint, *_) = Address.parse(address).endpoints()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    options += UNLIMITED
    if files is None:
        return grpc.insecure_channel(endpoint.target, options)
    own = (files.key.read_bytes(), files.certificate.read_bytes()) if presents_certificate else (None, None)
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes(), *own)
    return grpc.secure_channel(endpoint.target, credentials, options)


def answer_to(
    channel: grpc.Channel,
    metadata: Iterable[tuple[str, str | bytes]] = (),
    method: str = CONTROL_METHOD,
    messages: Iterable[bytes] = (b"",),
) -> tuple[grpc.StatusCode, str]:
    """Return the status and message at the end of a worker's stream."""
    call = channel.stream_unary(METHODS.get(method, method)).future(
        _messages(messages), metadata=tuple(metadata), timeout=LIMIT_S
    )
    error = call.exception(LIMIT_S)
    assert error is None or isinstance(error, grpc.RpcError)
    assert WELCOME not in dict(call.initial_metadata() or ()), "it was let in"
    return call.code(), call.details()


def _messages(messages: Iterable[bytes]) -> Iterator[bytes]:
    yield from messages


def answer_at(
    address: str,
    metadata: Iterable[tuple[str, str | bytes]] = (),
    method: str = CONTROL_METHOD,
    messages: Iterable[bytes] = (b"",),
    files: Files | None = None,
    *,
    presents_certificate: bool = True,
) -> tuple[grpc.StatusCode, str]:
    """Return `answer_to` over a connection that is closed afterwards."""
    with channel_to(address, files, presents_certificate=presents_certificate) as channel:
        return answer_to(channel, metadata, method, messages)
