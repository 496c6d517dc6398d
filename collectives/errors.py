"""The errors of the collectives, grouped by what the caller does next.

CollectiveError
├── LayoutMismatchError     the ranks made different calls: a bug of the program; the communicator stays usable
├── CollectiveTimeoutError  a rank did not come within `timeout_s`: the communicator is broken, end the program
├── PeerLostError           a rank is gone: the communicator is broken, end the program or rebuild it
├── PeerRefusedError        this worker may not join: fix its address, index, token, certificate or costs
├── SecurityError           the connection would not be safe, or its certificates are unusable: fix the settings
├── BrokenError             an earlier call failed half-way: make a new communicator
├── ClosedError             the communicator was closed: do not use it any more
├── BusyError               two threads called at once: use the named asynchronous calls
├── UnsupportedBufferError  dtype, memory layout or shape that no collective takes (also a TypeError)
├── CudaError               the CUDA driver refused a call: exchange on another path
├── MappingError            ranks cannot map each other's memory: exchange on another path
└── MissingBackendError     an optional library is not installed: install it (also an ImportError)
"""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(Exception):
    """Base of everything that the collectives raise on purpose."""


class LayoutMismatchError(CollectiveError):
    """The ranks called different collectives, or the same one with different tensors, or wait in names that cross.

    Every rank raises it, with the same text; no buffer was touched; the communicator stays usable.

    Attributes:
        closed: the ranks that had closed the communicator, at the end of their program, say; they are the cause.
    """

    def __init__(self, text: str, closed: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.closed = tuple(closed)


class CollectiveTimeoutError(CollectiveError):
    """A wait lasted longer than `timeout_s`; the message says who waited for whom in which call."""


class PeerLostError(CollectiveError):
    """A rank of the communicator has failed or has gone."""


class PeerRefusedError(CollectiveError):
    """This worker cannot take its place: its address is in use, another worker refuses it, or it has other costs."""


class SecurityError(CollectiveError):
    """Plaintext would leave this machine, or certificates and keys cannot be used."""


class BrokenError(CollectiveError):
    """An earlier call failed half-way, so the ranks are no longer in step."""


class ClosedError(CollectiveError):
    """The communicator has been closed."""


class BusyError(CollectiveError):
    """A synchronous collective was called while another thread was inside one."""


class UnsupportedBufferError(CollectiveError, TypeError):
    """A buffer whose dtype, shape or memory layout the called collective does not take."""


class CudaError(CollectiveError):
    """The CUDA driver refused a call.

    Attributes:
        code: the driver's number of the error; 0 where another rank met it.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class MappingError(CollectiveError):
    """The ranks cannot map each other's memory; every rank raises it, with the same text."""


class MissingBackendError(CollectiveError, ImportError):
    """The library behind a backend is not installed."""
