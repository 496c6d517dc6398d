"""The errors of the collectives, grouped by the caller's next step.

CollectiveError
├── LayoutMismatchError     the ranks made different calls: fix the program; the communicator stays usable
├── CollectiveTimeoutError  a rank did not come within `timeout_s`: the communicator is broken, end the program
├── PeerLostError           a rank is gone: the communicator is broken, end the program or rebuild it
├── PeerRefusedError        this worker may not join: fix its address, index, token, certificate or network costs
├── SecurityError           the connection would not be safe, or its certificates are unusable: fix the settings
├── BrokenError             an earlier call failed half-way: make a new communicator
├── ClosedError             the communicator is closed: do not use it any more
├── ForkedProcessError      a forked child called: call in the parent, and pass the results to the child
├── BusyError               two threads called at the same time: use the named asynchronous calls
├── UnsupportedBufferError  no collective takes this dtype, layout or shape: pass another array (also a TypeError)
├── CudaError               the CUDA driver refused a call: set POPDIST_EXCHANGE=host
├── MappingError            ranks cannot map each other's memory: set POPDIST_EXCHANGE=host
└── MissingBackendError     an optional library is not installed: install it (also an ImportError)
"""

from __future__ import annotations

from collections.abc import Sequence


class CollectiveError(Exception):
    """Base class of all errors that the collectives raise on purpose."""


class LayoutMismatchError(CollectiveError):
    """Different collectives, different tensors, or a deadlock of named collectives on different ranks.

    Every rank raises it with the same text. No buffer was written. The communicator stays usable.

    Attributes:
        closed: Ranks that had closed the communicator and so caused the error, e.g. at the end of their program.
    """

    def __init__(self, text: str, closed: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.closed = tuple(closed)


class CollectiveTimeoutError(CollectiveError):
    """A wait longer than `timeout_s`; the message names the waiting rank, the missing ranks and the call."""


class PeerLostError(CollectiveError):
    """A rank of the communicator that failed or left."""


class PeerRefusedError(CollectiveError):
    """A worker that cannot join: its address is in use, another worker refuses it, or its network costs differ."""


class SecurityError(CollectiveError):
    """Plaintext that would leave this machine, unusable certificates or keys, or places that any user could take."""


class BrokenError(CollectiveError):
    """A call after an earlier call failed half-way: the ranks are out of step."""


class ClosedError(CollectiveError):
    """A call of a communicator that has been closed."""


class ForkedProcessError(CollectiveError):
    """A call in a forked child of the process that has made the communicator or the connection."""


class BusyError(CollectiveError):
    """A synchronous call while another thread is inside one."""


class UnsupportedBufferError(CollectiveError, TypeError):
    """A buffer whose dtype, shape or memory layout the called collective does not support."""


class CudaError(CollectiveError):
    """A call that the CUDA driver refused.

    Attributes:
        code: Error number of the driver; 0 if the error occurred on another rank.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class MappingError(CollectiveError):
    """Memory of ranks that they cannot map; every rank raises it with the same text."""


class MissingBackendError(CollectiveError, ImportError):
    """A missing library behind a backend."""
