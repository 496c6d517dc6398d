"""The replica whose program is being traced."""

from __future__ import annotations

from contextvars import ContextVar

current: ContextVar[object] = ContextVar("replica", default=None)


def refuse_in_replica(call: str) -> None:
    """Refuse a call that concerns all replicas at once, while a replica's program is traced.

    Raises:
        RuntimeError: A replica's program is being traced; the message names the call.
    """
    if current.get() is not None:
        raise RuntimeError(
            f"{call} was called by a replica, inside strategy.run or a loss function; call it outside, or use "
            "strategies.get_replica_context() there"
        )
