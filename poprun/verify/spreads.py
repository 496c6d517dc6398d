"""The choice of runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poprun.verify.options import GRPC, MPI, SOME_FAULT, VerifyRequest, divisors

MOST_SPREADS = 4
INSTANCES_PER_CORE = 4
"""More than one, because what is to be proved does not depend on the time that it takes."""
INSTANCE_BYTES = 500 << 20
"""The memory that Python, JAX and a small model need."""


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        instances: how many processes.
        replicas: of all of them.
        transport: what connects them.
        faults: what goes wrong; the others go on without the instance that is lost.
        resumed_on: after it was stopped; None: it is not.
    """

    instances: int
    replicas: int
    transport: str = MPI
    faults: tuple[str, ...] = ()
    resumed_on: int | None = None

    @property
    def spread(self) -> str:
        """Instances x replicas of each."""
        text = f"{self.instances} x {self.replicas // self.instances}"
        return text if self.resumed_on is None else f"{text}, {self.resumed_on} x {self.replicas // self.resumed_on}"

    @property
    def how(self) -> str:
        """The circumstances of the run."""
        if self.faults:
            return f"{self.transport}, {'; '.join(self.faults)}"
        if self.resumed_on is not None:
            return f"{self.transport}, stopped and resumed"
        return "-" if self.instances == 1 and self.transport != GRPC else self.transport

    def __str__(self) -> str:
        return self.spread if self.how in (MPI, "-") else f"{self.spread} ({self.how})"


def choose_spreads(replicas: int, cores: int, memory_bytes: int | None) -> tuple[int, ...]:
    """Choose up to MOST_SPREADS numbers of instances: one, the most that fit the machine, some in between.

    Args:
        replicas: R, which has to be divisible by them.
        cores: of all hosts.
        memory_bytes: that is available; None: unknown.
    """
    most = INSTANCES_PER_CORE * cores
    if memory_bytes is not None:
        most = min(most, memory_bytes // INSTANCE_BYTES)
    fitting = [each for each in divisors(replicas) if each <= max(most, 2)] or [1]
    if len(fitting) <= MOST_SPREADS:
        return tuple(fitting)
    last = len(fitting) - 1
    return tuple(fitting[round(number * last / (MOST_SPREADS - 1))] for number in range(MOST_SPREADS))


def plain_runs(asked: VerifyRequest, spreads: Sequence[int]) -> list[Run]:
    """Return the runs without failures; a single run is made twice, to see whether it can be repeated."""
    runs = [
        Run(instances, asked.replicas, transport)
        for number, transport in enumerate(asked.transports)
        for instances in spreads
        if instances > 1 or number == 0
    ]
    return runs * 2 if len(runs) == 1 and asked.against is None else runs


def run_with_failure(asked: VerifyRequest, plain: Sequence[Run], steps: int) -> Run | None:
    """Return the run with a failure under shrink; None where none is wanted.

    Args:
        asked: whether there is one, and which failure.
        plain: the other runs; there is one of several instances over MPI.
        steps: how many they made.
    """
    if not asked.inject:
        return None
    run = max((each for each in plain if can_shrink(each)), key=lambda each: each.instances)
    chosen = f"kill:instance={run.instances - 1},step={steps // 2}"
    faults = (chosen,) if asked.inject == (SOME_FAULT,) else asked.inject
    return Run(run.instances, run.replicas, run.transport, faults)


def can_shrink(run: Run) -> bool:
    """Return whether it could go on without an instance."""
    return run.instances > 1 and run.transport != GRPC


def run_to_resume(asked: VerifyRequest, plain: Sequence[Run]) -> Run | None:
    """Return the run that is stopped and resumed on fewer instances if possible; None if none is wanted."""
    if not asked.resume:
        return None
    spreads = sorted({run.instances for run in plain})
    return Run(spreads[-1], asked.replicas, asked.transports[0], resumed_on=spreads[max(0, len(spreads) - 2)])
