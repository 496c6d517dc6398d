"""The request for other active instances that `poprun resize` sends to a job, and the job's answer. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from poprun.ipc import json_values

RESIZE = 101
"""From `poprun resize`: a request."""
RESIZED = 102
"""From poprun: the answer, when the job has changed or cannot change."""
VERSION = 1
"""The version of both formats; it grows if a field changes its meaning or is removed."""
MOST_BYTES = 1 << 16
"""The most bytes of a request; it may name some thousand hosts."""


@dataclass(frozen=True)
class ResizeRequest:
    """A request of the user who started the job.

    Attributes:
        count: The wanted number of active instances; 0: as many as now, or as a change under way
            leads to, if the hosts allow it.
        leave: Hosts that shall carry no active instance any more.
        use: Hosts that were left, and may carry active instances again.
    """

    count: int = 0
    leave: tuple[str, ...] = ()
    use: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Return the request as JSON."""
        return json_values.pack(asdict(self), VERSION)

    @classmethod
    def unpack(cls, data: bytes) -> ResizeRequest:
        """Return the request in the JSON of `pack`.

        Raises:
            ValueError: The data are no request, or have another version.
        """
        request = json_values.unpack(cls, data, VERSION, "request of poprun resize")
        if request.count < 0:
            raise ValueError(f"the request has no number of instances: {data[:80]!r}")
        return request


@dataclass(frozen=True)
class ResizeAnswer:
    """The job's answer.

    Attributes:
        is_done: Whether the job has the wanted active instances now.
        text: The change, such as `4 -> 3 instances`, or the reason why there is none.
    """

    is_done: bool
    text: str

    def pack(self) -> bytes:
        """Return the answer as JSON."""
        return json_values.pack(asdict(self), VERSION)

    @classmethod
    def unpack(cls, data: bytes) -> ResizeAnswer:
        """Return the answer in the JSON of `pack`.

        Raises:
            ValueError: The data are no answer, or have another version.
        """
        return json_values.unpack(cls, data, VERSION, "answer to poprun resize")
