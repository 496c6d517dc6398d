"""Default values of options, given to a strategy or set for the process by `IPUConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """The IPUs that a strategy drives, as the first device of a configuration describes them.

    Attributes:
        ipus: The number of IPUs.
        said: The place in the configuration that gives the number, for messages.
        is_counted: Whether the program names the number of IPUs. If False, the program names devices; under a launcher
            these are the launcher's devices.
    """

    ipus: int
    said: str
    is_counted: bool

    def replicas(self, ipus_per_replica: int = 1) -> int:
        """Return the number of replicas, if each spans `ipus_per_replica` IPUs or stages.

        Raises:
            ValueError: If the IPUs are too few, or some would be left over.
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
    """Return the smallest power of two that is at least the positive number `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Defaults:
    """Default options of a strategy, and of the trainers, pipelines, data sets and feeds made for it.

    An explicit argument of these objects wins; a default applies only if the argument is left out.

    Example::

        strategy = strategies.PopDistStrategy(defaults=strategies.Defaults(checks_numerics=True, prefetches=False))

    Attributes:
        selection: The IPUs of a strategy that names no number of replicas; None if none are configured.
        process_index: The index that a launcher must have given this process; read only if `process_count` is set.
        process_count: The number of processes that a launcher must have started; 0 for any number.
        recomputes: Whether pipelines recompute activations; None leaves it to their own arguments.
        checks_numerics: Whether trainers refuse gradients that are not finite.
        rounds_stochastically: Whether trainers round 16-bit variables stochastically.
        min_elements_for_sharding: If optimizer state is sharded, the state of variables with fewer elements stays
            whole.
        prefetches: Whether data sets prepare batches ahead.
        executables: The folder that caches compiled programs; "" for no cache.
        attaches: Whether programs may run at all.
        exchange: The path of gradients that lie on a device, one of `strategies.exchange.choice.EXCHANGES`.
        deterministic: Whether programs on GPUs use operations that give the same bits in every run.
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
    """Set the defaults of the process, for strategies without their own and for objects made without a strategy."""
    global _in_force
    _in_force = defaults


def in_force() -> Defaults:
    """Return the defaults of this process.

    They apply to a strategy that was given no defaults, and to `current_defaults` outside of a strategy's scope.
    """
    return _in_force


def current_defaults() -> Defaults:
    """Return the defaults of the strategy whose scope is open; without an open scope, those of the process.

    Infeeds, `Pipelining` and pipelines of functions use them, because they are made without a strategy.
    """
    of_strategy = _of_strategy.get()
    return in_force() if of_strategy is None else of_strategy()


@contextmanager
def current_defaults_of(of_strategy: Callable[[], Defaults]) -> Iterator[None]:
    """Make `of_strategy()`, called at each read, the current defaults inside the block."""
    token = _of_strategy.set(of_strategy)
    try:
        yield
    finally:
        _of_strategy.reset(token)
