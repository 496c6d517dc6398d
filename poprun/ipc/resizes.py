"""The request for other active instances that `poprun resize` sends to a job, and the job's answer. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> ResizeRequest:
        """Return the request in the JSON of `pack`.

        Raises:
            ValueError: The data are no request, or have another version.
        """
        found = _read(data)
        count = found.get("count")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"the request has no number of instances: {data[:80]!r}")
        return cls(count, _names(found.get("leave")), _names(found.get("use")))


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
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> ResizeAnswer:
        """Return the answer in the JSON of `pack`.

        Raises:
            ValueError: The data are no answer, or have another version.
        """
        found = _read(data)
        is_done, text = found.get("is_done"), found.get("text")
        if not isinstance(is_done, bool) or not isinstance(text, str):
            raise ValueError(f"the answer cannot be understood: {data[:80]!r}")
        return cls(is_done, text)


def _read(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise ValueError(f"these data are no message about a resize: {data[:20]!r}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(f"this message about a resize has version {version!r:.20}, but {VERSION} is known here")
    return dict(found)


def _names(found: object) -> tuple[str, ...]:
    names = tuple(found) if isinstance(found, list) else (None,)
    hosts = tuple(name for name in names if isinstance(name, str))
    if len(hosts) < len(names):
        raise ValueError(f"the hosts of the request cannot be understood: {str(found)[:80]}")
    return hosts
