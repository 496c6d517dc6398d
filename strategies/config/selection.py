"""How many replicas the IPUs of a device are enough for: arithmetic, without any device.

Semantics: the original's. A replica takes a power of two of IPUs, and a device has as many replicas as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SYSTEM_IPUS = 16
"""Of the system whose groups of IPUs `select_ipus` names: those of the listing in the original's documentation."""


@dataclass(frozen=True)
class Selection:
    """The device that a strategy drives: the first one that a configuration describes.

    Attributes:
        ipus: how many it has.
        said: where that was said, for messages.
        is_counted: whether the program has named their number; otherwise it has named devices, and under a launcher
            these are the launcher's.
    """

    ipus: int
    said: str
    is_counted: bool

    def replicas(self, ipus_per_replica: int = 1) -> int:
        """Return the number of replicas that span so many IPUs, or stages.

        Raises:
            ValueError: if its IPUs are not enough, or some would be left.
        """
        needed = rounded_to_power_of_two(ipus_per_replica)
        if self.ipus % needed:
            below = self.ipus - self.ipus % needed
            use = f"{below} or {below + needed}" if below else f"{needed}"
            raise ValueError(
                f"Current device has {self.ipus} IPUs attached, however the current model requires a multiple of "
                f"{needed} IPUs ({self.said}, and a replica spans {ipus_per_replica}); use {use} IPUs"
            )
        return self.ipus // needed


def select(auto_select_ipus: Sequence[int], select_ipus: Sequence[int]) -> Selection | None:
    """Return the first device of a configuration; None if it describes none.

    Args:
        auto_select_ipus: how many IPUs each device has.
        select_ipus: the number of a group of IPUs for each device.

    Raises:
        ValueError: if both are given, a device has no IPU, or a group is named twice or does not exist.
    """
    if auto_select_ipus and select_ipus:
        raise ValueError(
            f"auto_select_ipus is {list(auto_select_ipus)}, and select_ipus {list(select_ipus)}: Only one of "
            "`auto_select_ipus` and `select_ipus` can be set; leave the other one at []"
        )
    if few := [count for count in auto_select_ipus if count < 1]:
        raise ValueError(f"auto_select_ipus has a device with {few[0]} IPUs; it must have at least 1")
    if len(set(select_ipus)) < len(select_ipus):
        raise ValueError(
            f"select_ipus is {list(select_ipus)}: All MultiIPU indices in `select_ipus` must be unique; name each once"
        )
    sizes = [ipus_of_group(number) for number in select_ipus]
    if auto_select_ipus:
        return Selection(auto_select_ipus[0], f"auto_select_ipus is {_shown(auto_select_ipus)}", is_counted=True)
    return Selection(sizes[0], f"select_ipus is {_shown(select_ipus)}", is_counted=False) if sizes else None


def ipus_of_group(number: int) -> int:
    """Return the size of a group of IPUs: 0 to 15 are single ones, then come pairs, fours, eights and all 16.

    Raises:
        ValueError: if there is no such group.
    """
    first, size = 0, 1
    while size <= SYSTEM_IPUS:
        after = first + SYSTEM_IPUS // size
        if 0 <= number < after:
            return size
        first, size = after, 2 * size
    raise ValueError(
        f"select_ipus names {number}, and a system of {SYSTEM_IPUS} IPUs has the groups 0 to {first - 1}; name one of "
        "these, or say with auto_select_ipus how many IPUs there are"
    )


def rounded_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (count - 1).bit_length()


def _shown(numbers: Sequence[int]) -> str:
    return str(numbers[0] if len(numbers) == 1 else list(numbers))
