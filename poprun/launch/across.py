"""What a job on several hosts needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Across:
    """What a job on several hosts needs to know.

    Attributes:
        interface: our address that the other hosts reach; "" where there are none.
        silence_s: after which silence a host counts as gone.
        start_timeout_s: how long it may take until all instances have started.
        least: with how many instances the job goes on when others are lost; 0: with all only.
        stuck_timeout_s: how long an instance that others wait for may do nothing; 0: for ever.
        others: the hosts besides this machine.
        ssh: the words of ssh before a host.
    """

    interface: str = ""
    silence_s: float = 10.0
    start_timeout_s: float = 60.0
    least: int = 0
    stuck_timeout_s: float = 0.0
    others: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
