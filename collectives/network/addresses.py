"""Addresses of workers: `host:port` (also IPv4 and `[IPv6]`) and `unix:/path`, and what lies behind them."""

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

_HELLO_LIMIT_S = 2.0  # how long a server may take for its first bytes under TLS
_RECEIVED_BYTES = 1 << 14
_CLOCK = RealClock()  # as the kernel keeps the time of a socket's limit, whatever clock waits have
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Endpoint:
    """One socket address behind an `Address`.

    Attributes:
        family: AF_INET, AF_INET6 or AF_UNIX.
        location: what `socket.connect` and `socket.bind` take.
    """

    family: socket.AddressFamily
    location: str | tuple[str, int]

    @property
    def target(self) -> str:
        """The target of a gRPC channel, without any further look-up."""
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
        """Return a new connection; a process that is stopped accepts it too: its kernel does.

        Raises:
            OSError: it is not accepted in time.
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
        """Find out over a new connection whether certificates fit.

        Args:
            timeout_s: for connecting, and for the handshake.
            tls: with our certificates.
            name: which theirs has to carry.

        Raises:
            OSError: nobody answers in time; `ssl.SSLError` if the certificates do not fit.
        """
        with self.connect(timeout_s) as connection:
            talk = _Talk(connection, tls, name)
            talk.go_on(talk.secured.do_handshake, timeout_s)
            greeting = b""
            with contextlib.suppress(ssl.SSLEOFError):
                # With TLS 1.3 a refusal of our certificate comes only now, otherwise the server's greeting.
                greeting = talk.go_on(lambda: talk.secured.read(1), _HELLO_LIMIT_S)
            if not greeting:
                raise ssl.SSLError(ssl.SSL_ERROR_EOF, "it ended the connection, so it does not accept our certificate")


class _Talk:
    """TLS over a connection that stays the caller's.

    `SSLContext.wrap_socket` takes it over, and leaves it open where the other side has reset it by then (Python 3.11).
    """

    def __init__(self, connection: socket.socket, tls: ssl.SSLContext, name: str) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.secured = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def go_on(self, step: Callable[[], _Result], limit_s: float) -> _Result:
        """Do a step of it, with all that it has to send and to receive for that.

        Args:
            step: a method of `secured`.
            limit_s: for all of it, in however many pieces what is to be received comes.

        Raises:
            OSError: it did not come in time; `ssl.SSLEOFError` if the other side has ended the connection.
        """
        give_up_s = _CLOCK.now_s() + limit_s
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._send()
                self._receive(give_up_s)
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # what was wrong is worth more
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
        text: as the cluster names it.
        host: the name or number before the port; "" for a Unix-domain socket.
        port: 1 to 65535; 0 for a Unix-domain socket.
        path: of a Unix-domain socket, otherwise "".
        found: what it was found to stand for; empty if it is to be looked up.
    """

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    found: tuple[Endpoint, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port`, `1.2.3.4:port`, `[::1]:port`, `unix:/path` or `unix:///path`.

        Raises:
            ValueError: for anything else.
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
        """The name that a certificate of this worker has to carry."""
        return self.host or "localhost"

    def looked_up(self) -> Address:
        """Return this address with what its name stands for now, which stays so; unchanged if its name is unknown."""
        try:
            return replace(self, found=tuple(self.endpoints()))
        except OSError:
            return self

    def endpoints(self) -> list[Endpoint]:
        """Return what the address stands for, looked up now unless it was found before.

        Raises:
            OSError: if the name is unknown.
        """
        if self.found:
            return list(self.found)
        if self.path:
            return [Endpoint(socket.AF_UNIX, self.path)]
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        unique = dict.fromkeys((family, (str(at[0]), int(at[1]))) for family, _, _, _, at in found)
        return [Endpoint(family, location) for family, location in unique]

    def is_loopback(self) -> bool:
        """Return whether only this machine can be behind it."""
        if self.path:
            return True
        try:
            hosts = [endpoint.location[0] for endpoint in self.endpoints()]
        except OSError:
            return False
        return all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts)

    def reach(self, timeout_s: float) -> Endpoint:
        """Return the first endpoint that accepts a connection; nothing is sent to it.

        Raises:
            OSError: if none accepts.
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
        """Return the endpoints where this machine can listen.

        Raises:
            OSError: if there is none, or another process listens at one of them.
        """
        free: list[Endpoint] = []
        refusal: OSError = OSError(f"{self.text} stands for no address")
        for endpoint in self.endpoints():
            try:
                self._try_to_bind(endpoint)
                free.append(endpoint)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # who has one of them would be taken for this worker
                    raise
                refusal = error
        if not free:
            raise refusal
        return free

    def _try_to_bind(self, endpoint: Endpoint) -> None:
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as probe:
            if endpoint.family == socket.AF_UNIX:  # gRPC replaces a socket that is there, in use or not
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
    """Return an error of the operating system in words, without numbers and brackets."""
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error.args[-1])
        return getattr(error, "verify_message", "") or reason.replace("_", " ").lower()
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
