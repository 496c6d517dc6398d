"""The right to join: certificates for connections and a token for the job, read from the environment."""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from collectives.errors import SecurityError
from collectives.network.addresses import Address

logger = logging.getLogger(__name__)

CERTIFICATE = "POPDIST_TLS_CERT"
"""PEM file with the certificate of a worker over gRPC."""
KEY = "POPDIST_TLS_KEY"
"""PEM file with the private key of `POPDIST_TLS_CERT`."""
AUTHORITY = "POPDIST_TLS_CA"
"""PEM file with the certificate authority that signed the certificates of all workers."""
TLS_VARIABLES = (CERTIFICATE, KEY, AUTHORITY)
INSECURE = "POPDIST_GRPC_INSECURE"
"""1 allows gradients and variables to travel over a network in plaintext. Default: only over loopback addresses."""
TOKEN = "POPDIST_JOB_TOKEN"  # noqa: S105 - the name of a variable
"""Secret that the workers of a job share."""


@dataclass(frozen=True)
class Certificates:
    """The PEM files of one worker: its certificate and key, and the authority that signed all workers' certificates."""

    certificate: Path
    key: Path
    authority: Path

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """The TLS context for connections to other workers; its creation checks that the files match.

        Raises:
            SecurityError: A file cannot be read, or the key does not belong to the certificate.
        """
        for name, path in zip(TLS_VARIABLES, (self.certificate, self.key, self.authority), strict=True):
            if not path.is_file():
                raise SecurityError(f"{name}={path} is not a file; name a PEM file that this process can read")
        try:
            context = ssl.create_default_context(cafile=str(self.authority))
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(f"{AUTHORITY}={self.authority} is not a certificate in PEM form: {error}") from error
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(
                f"{CERTIFICATE}={self.certificate} and {KEY}={self.key} are not a certificate and its key: {error}"
            ) from error
        context.set_alpn_protocols(["h2"])
        return context


@dataclass(frozen=True)
class Security:
    """The certificates and the token with which workers identify themselves.

    Attributes:
        certificates: Certificates for mutual TLS; None for plaintext.
        token: Secret token of the job; "" for none.
        allows_plaintext: Whether plaintext may leave this machine.
    """

    certificates: Certificates | None = None
    token: str = field(default="", repr=False)
    allows_plaintext: bool = False

    def __post_init__(self) -> None:
        try:
            self.token.encode()
        except UnicodeEncodeError:
            raise SecurityError(
                f"{TOKEN} is not valid UTF-8; give it a secret of letters and digits, as `openssl rand -hex 16` prints"
            ) from None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Security:
        """Read POPDIST_TLS_CERT, POPDIST_TLS_KEY, POPDIST_TLS_CA, POPDIST_JOB_TOKEN and POPDIST_GRPC_INSECURE.

        Raises:
            SecurityError: Some of the files are not named, the token is empty or not UTF-8, or
                POPDIST_GRPC_INSECURE is not 0 or 1.
        """
        named = [name for name in TLS_VARIABLES if environ.get(name)]
        if named and len(named) < len(TLS_VARIABLES):
            missing = [name for name in TLS_VARIABLES if name not in named]
            raise SecurityError(
                f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} set and {', '.join(missing)} not; "
                "mutual TLS needs all three"
            )
        insecure = environ.get(INSECURE, "") or "0"
        if insecure not in ("0", "1"):
            raise SecurityError(f"{INSECURE}={insecure!r}; use 1 to allow plaintext between machines, or unset it")
        certificates = Certificates(*(Path(environ[name]) for name in TLS_VARIABLES)) if named else None
        if not environ.get(TOKEN, "unset").strip():
            raise SecurityError(f"{TOKEN} is set but empty, so it protects nothing; give it a secret, or unset it")
        return cls(certificates, environ.get(TOKEN, ""), insecure == "1")

    def check(self, addresses: Sequence[Address]) -> list[Address]:
        """Refuse plaintext that would leave this machine.

        Returns:
            The addresses. An address that is safe because it is on this machine stays fixed, whatever a name server
            says later. Others are looked up at each call, because a worker may still move.

        Raises:
            SecurityError: An address is not a loopback address, and there are no usable certificates.
        """
        if self.certificates is not None:
            _ = self.certificates.client_context
            return list(addresses)
        found = [address.looked_up() for address in addresses]
        remote = [address.text for address in found if not address.is_loopback()]
        used = [known if known.is_loopback() else address for known, address in zip(found, addresses, strict=True)]
        if not remote:
            return used
        if not self.allows_plaintext:
            raise SecurityError(
                f"{', '.join(remote)} {'is' if len(remote) == 1 else 'are'} not on this machine, and plaintext is only "
                f"for loopback addresses; set {', '.join(TLS_VARIABLES)} for mutual TLS, or {INSECURE}=1 on a network "
                "that you trust"
            )
        logger.warning(
            "%s=1: gradients and variables travel in plaintext to %s, and %s",
            INSECURE,
            ", ".join(remote),
            "whoever reads them could replay the job token" if self.token else "whoever reaches this port can join",
        )
        return used

    def check_rejoining(self, addresses: Sequence[Address]) -> None:
        """Refuse workers that let a lost one join again if any process that connects could take its place.

        Only this user can connect to a Unix-domain socket of a worker. A TCP port is open to all users of its machine.

        Raises:
            SecurityError: A worker listens at a TCP port, and there are neither certificates nor a token.
        """
        ports = [address.text for address in addresses if not address.path]
        if len(addresses) > 1 and ports and self.certificates is None and not self.token:
            raise SecurityError(
                f"other users can connect to {', '.join(ports)}, and with on_failure='shrink' any of them could take "
                f"the place of a worker; set {TOKEN} to the same secret in all workers (`openssl rand -hex 16` makes "
                f"one), or {', '.join(TLS_VARIABLES)} for mutual TLS"
            )

    def prove(self, statement: str) -> str:
        """Return an HMAC of `statement` with the token, which proves knowledge of the token; "" without one."""
        return hmac.new(self.token.encode(), statement.encode(), "sha256").hexdigest() if self.token else ""

    def is_proof(self, proof: str | bytes, statement: str) -> bool:
        """Return whether `proof`, arbitrary input from a peer, is the HMAC of `statement` with our token.

        Always true without a token.
        """
        return not self.token or is_same(self.prove(statement), proof)


def is_same(known: str, given: str | bytes) -> bool:
    """Compare a secret with given input in constant time.

    The input may have any characters; bytes above 0x7f can reach us as such through gRPC.
    """
    sent = given if isinstance(given, bytes) else given.encode(errors="surrogatepass")
    return bool(known) and hmac.compare_digest(known.encode(), sent)
