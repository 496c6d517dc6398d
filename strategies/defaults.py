"""The defaults for what a program leaves open: given to a strategy, or put in force by `IPUConfig` for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


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


def rounded_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Defaults:
    """The defaults of a strategy, and of the trainers, pipelines, data sets and feeds that are made for it.

    An argument of one of these comes first; a default decides only where the argument is left out.

    Attributes:
        selection: the IPUs of a strategy that names no number of replicas.
        process_index: the index that a launcher must have given this process; read with `process_count` only.
        process_count: the number of processes that a launcher must have started; 0 for any.
        recomputes: whether pipelines recompute; None where nothing is configured, and their own arguments decide.
        checks_numerics: whether trainers refuse gradients that are not finite.
        rounds_stochastically: whether trainers round 16-bit variables stochastically.
        min_elements_for_sharding: the state of smaller variables stays whole where optimizer state is sharded.
        prefetches: whether data are prepared ahead.
        executables: the folder where compiled programs are kept; "" for none.
        attaches: whether programs run at all.
        exchange: the way of gradients that lie on a device, one of `strategies.exchange.on_device.EXCHANGES`.
        deterministic: whether programs on GPUs use operations with the same bits in each run.
    """

    selection: Selection | None = None
    process_index: int = 0
    process_count: int = 0
    recomputes: bool | None = None
    checks_numerics: bool = False
    rounds_stochastically: bool = False
    min_elements_for_sharding: int = 32
    prefetches: bool = True
    executables: str = ""
    attaches: bool = True
    exchange: str = "auto"
    deterministic: bool = True


_in_force = Defaults()

_of_strategy: ContextVar[Callable[[], Defaults] | None] = ContextVar("defaults", default=None)


def put_in_force(defaults: Defaults) -> None:
    """Make these the defaults of strategies that are given none, and of what is made without a strategy."""
    global _in_force
    _in_force = defaults


def in_force() -> Defaults:
    """Return the defaults of this process.

    Two places read them: a strategy that is given no defaults, and `current_defaults` outside of a strategy's scope.
    """
    return _in_force


def current_defaults() -> Defaults:
    """Return the defaults of the strategy in whose scope this is called; outside of any, those of the process.

    It is for what is made without a strategy at hand: infeeds, `Pipelining`, pipelines of functions.
    """
    of_strategy = _of_strategy.get()
    return in_force() if of_strategy is None else of_strategy()


@contextmanager
def current_defaults_of(of_strategy: Callable[[], Defaults]) -> Iterator[None]:
    """Make a strategy's defaults, whatever they are when they are read, the current ones inside the block."""
    token = _of_strategy.set(of_strategy)
    try:
        yield
    finally:
        _of_strategy.reset(token)
