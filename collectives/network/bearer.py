"""What the certificate of a caller says of its host."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DNS, _IP, _ANY, _COMMON = "peer_dns", "peer_ip", "x509_subject_alternative_name", "x509_common_name"


@dataclass(frozen=True)
class Bearer:
    """Who shows a certificate that an authority of ours has signed.

    Attributes:
        names: the names of hosts that it carries; the first label may be `*`.
        numbers: and their addresses.
    """

    names: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @classmethod
    def of(cls, context: Mapping[str, Sequence[bytes]]) -> Bearer:
        """What gRPC knows of a caller; a certificate without alternative names may have a common name instead.

        So the side that calls reads the one of the side that is called.
        """
        names = context.get(_DNS, ()) if context.get(_ANY) else context.get(_COMMON, ())
        return cls(*(tuple(each.decode(errors="replace") for each in every) for every in (names, context.get(_IP, ()))))

    @property
    def hosts(self) -> str:
        """All of them, for people."""
        return ", ".join((*self.names, *self.numbers)) or "no host"

    def is_for(self, host: str) -> bool:
        """Whether a worker at this host, a name or an address, may show it (RFC 9525, section 6)."""
        number = _number(host)
        if number is not None:
            return number in map(_number, self.numbers)
        return any(_fits(name, host) for name in self.names)


def _number(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _fits(name: str, host: str) -> bool:
    name, host = (each.rstrip(".").lower() for each in (name, host))
    label, _, rest = name.partition(".")
    if label == "*":  # two labels at least behind it: nobody has all of a top-level domain
        return "." in rest and rest == host.partition(".")[2] and bool(host.partition(".")[0])
    return bool(name) and name == host
