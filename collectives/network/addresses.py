"""Addresses of workers: `host:port` (name, IPv4 or `[IPv6]`) and `unix:/path`, and their socket endpoints."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from collectives.clock import RealClock

UNIX = "unix:"

_HELLO_LIMIT_S = 2.0  # time for a server's first bytes under TLS
_RECEIVED_BYTES = 1 << 14
_CLOCK = RealClock()  # the kernel measures socket timeouts in real time, whatever clock waits use
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Endpoint:
    """One socket address of an `Address`.

    Attributes:
        family: AF_INET, AF_INET6 or AF_UNIX.
        location: Argument of `socket.connect` and `socket.bind`.
    """

    family: socket.AddressFamily
    location: str | tuple[str, int]

    @property
    def target(self) -> str:
        """The target of a gRPC channel, which needs no further look-up."""
        if self.family == socket.AF_UNIX:
            return self.place
        return f"{'ipv6' if self.family == socket.AF_INET6 else 'ipv4'}:{self.place}"

    @property
    def place(self) -> str:
        """The address for a gRPC server."""
        if isinstance(self.location, str):
            return f"{UNIX}{self.location}"
        host, port = self.location
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Open a connection. Even a stopped process accepts it, because its kernel does.

        Raises:
            OSError: The connection was not accepted in time.
        """
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.location)
        except BaseException:
            connection.close()
            raise
        return connection

    def shake_hands(self, timeout_s: float, tls: ssl.SSLContext, name: str) -> None:
        """Test over a new connection whether the certificates of both sides are valid for each other.

        Args:
            timeout_s: Limit of connecting, and of the handshake.
            tls: TLS context with our certificates.
            name: Host name that the peer's certificate must carry.

        Raises:
            OSError: No answer comes in time. `ssl.SSLError` if a certificate is refused.
        """
        with self.connect(timeout_s) as connection:
            talk = _Talk(connection, tls, name)
            talk.go_on(talk.secured.do_handshake, timeout_s)
            greeting = b""
            with contextlib.suppress(ssl.SSLEOFError):
                # With TLS 1.3 the server refuses our certificate only now; otherwise it sends its greeting.
                greeting = talk.go_on(lambda: talk.secured.read(1), _HELLO_LIMIT_S)
            if not greeting:
                raise ssl.SSLError(ssl.SSL_ERROR_EOF, "it ended the connection, so it does not accept our certificate")


class _Talk:
    """TLS over a connection that the caller keeps.

    `SSLContext.wrap_socket` would take the connection over, and in Python 3.11 leak it if the peer has just reset it.
    """

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext, name: str) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.secured = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def go_on(self, step: Callable[[], _Result], limit_s: float) -> _Result:
        """Run a step of TLS with all the sending and receiving that it needs.

        Args:
            step: Method of `secured`.
            limit_s: Limit of the whole step, in however many pieces data arrives.

        Raises:
            OSError: The step did not end in time. `ssl.SSLEOFError` if the peer has closed the connection.
        """
        give_up_s = _CLOCK.now_s() + limit_s
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._send()
                self._receive(give_up_s)
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the TLS error is more informative
                    self._send()
                raise
            else:
                self._send()
                return result

    def _send(self) -> None:
        if self._outgoing.pending:
            self._connection.sendall(self._outgoing.read())

    def _receive(self, give_up_s: float) -> None:
        left_s = give_up_s - _CLOCK.now_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        if data := self._connection.recv(_RECEIVED_BYTES):
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


@dataclass(frozen=True)
class Address:
    """The address at which a worker listens.

    Attributes:
        text: Address as written in the cluster.
        host: Name or number before the port; "" for a Unix-domain socket.
        port: Port, 1 to 65535; 0 for a Unix-domain socket.
        path: Path of a Unix-domain socket, else "".
        found: Endpoints of an earlier look-up; empty if each use looks the name up.
    """

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    found: tuple[Endpoint, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `host:port`, `1.2.3.4:port`, `[::1]:port`, `unix:/path` or `unix:///path`.

        Raises:
            ValueError: The text has another form.
        """
        if text.startswith(UNIX):
            path = text.removeprefix(UNIX)
            path = path.removeprefix("//") if path.startswith("///") else path
            if not path.startswith("/"):
                raise ValueError(f"address {text!r} has no absolute path; write unix:/path")
            return cls(text, path=path)
        host, _, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if is_bracketed else host
        if not host or (":" in host and not is_bracketed) or not (port.isascii() and port.isdigit()):
            raise ValueError(f"address {text!r} is not host:port; write host:port, [IPv6]:port or unix:/path")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"address {text!r} has port {port}; ports are 1 to 65535")
        return cls(text, host, int(port))

    @property
    def authority(self) -> str:
        """The host name that a certificate of this worker must carry."""
        return self.host or "localhost"

    def looked_up(self) -> Address:
        """Return this address with its present endpoints, which then stay fixed; unchanged if the name is unknown."""
        try:
            return replace(self, found=tuple(self.endpoints()))
        except OSError:
            return self

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints of this address, from an earlier look-up or from a new one.

        Raises:
            OSError: The name is unknown.
        """
        if self.found:
            return list(self.found)
        if self.path:
            return [Endpoint(socket.AF_UNIX, self.path)]
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        unique = dict.fromkeys((family, (str(at[0]), int(at[1]))) for family, _, _, _, at in found)
        return [Endpoint(family, location) for family, location in unique]

    def is_loopback(self) -> bool:
        """Return whether the address can only be on this machine."""
        if self.path:
            return True
        try:
            hosts = [endpoint.location[0] for endpoint in self.endpoints()]
        except OSError:
            return False
        return all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts)

    def reach(self, timeout_s: float) -> Endpoint:
        """Return the first endpoint that accepts a connection; no data is sent.

        Raises:
            OSError: No endpoint accepts.
        """
        refusal: OSError = OSError(f"{self.text} stands for no address")
        for endpoint in self.endpoints():
            try:
                endpoint.connect(timeout_s).close()
                return endpoint
            except OSError as error:
                refusal = error
        raise refusal

    def check_free(self) -> list[Endpoint]:
        """Return the endpoints at which this machine can listen.

        Raises:
            OSError: There is no such endpoint, or another process listens at one.
        """
        free: list[Endpoint] = []
        refusal: OSError = OSError(f"{self.text} stands for no address")
        for endpoint in self.endpoints():
            try:
                self._try_to_bind(endpoint)
                free.append(endpoint)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # others would take the process there for this worker
                    raise
                refusal = error
        if not free:
            raise refusal
        return free

    def _try_to_bind(self, endpoint: Endpoint) -> None:
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as probe:
            if endpoint.family == socket.AF_UNIX:  # gRPC would replace an existing socket, even one in use
                try:
                    probe.connect(endpoint.location)
                except OSError:
                    return
                raise OSError(f"another process listens at {self.path}")
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if endpoint.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(endpoint.location)


def describe_os_error(error: OSError) -> str:
    """Describe an error of the operating system in words, without numbers and brackets."""
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error.args[-1])
        return getattr(error, "verify_message", "") or reason.replace("_", " ").lower()
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
