"""The memory that one instance of a training takes, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from strategies.exchange.means import Bucket
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import Batch

if TYPE_CHECKING:
    import jax

    from strategies.jax.gradients.gradient_programs import StashMemory

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
DEVICE, HOST, SHARED = "device", "host", "window"
"""The places of memory. `SHARED` memory is common to the instances of a host, and counted by each of them."""


@dataclass(frozen=True)
class ProgramMemory:
    """The memory of one compiled program as XLA reports it, in bytes.

    Attributes:
        name: Name of its computation.
        arguments: Size of its arguments.
        temporaries: Size of its temporary memory.
        outputs: Size of its outputs.
        reused: Size of the outputs that lie in the memory of arguments.
        at_once: Largest number of its runs in this instance at the same time.
    """

    name: str
    arguments: int
    temporaries: int
    outputs: int
    reused: int
    at_once: int

    @classmethod
    def of(cls, name: str, compiled: jax.stages.Compiled, at_once: int) -> ProgramMemory:
        """Return the memory of a program that `jax.jit(...).lower(...).compile()` has returned."""
        said = compiled.memory_analysis()
        assert said is not None
        return cls(
            name,
            int(said.argument_size_in_bytes),
            int(said.temp_size_in_bytes),
            int(said.output_size_in_bytes),
            int(said.alias_size_in_bytes),
            at_once,
        )


@dataclass(frozen=True)
class MemoryBlock:
    """A block of memory that an instance holds from one step to the next, or in each step.

    Attributes:
        what: Name of its content.
        nbytes: Size in bytes.
        where: `DEVICE`, `HOST` or `SHARED`.
        note: Explanation for the table.
    """

    what: str
    nbytes: int
    where: str = DEVICE
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that one instance needs for a training.

    Attributes:
        instance: Index of the instance.
        local_replicas: Number of replicas that it drives.
        held: Memory that it holds.
        kept: Memory that the stages of a pipeline keep between the passes of a replica's micro-batches.
        programs: Programs compiled for the training; empty for engines that compile none.
    """

    instance: int
    local_replicas: int
    held: Sequence[MemoryBlock]
    kept: Sequence[StashMemory] = ()
    programs: Sequence[ProgramMemory] = ()

    def nbytes(self, what: str) -> int:
        """Return the size of the memory with one name.

        Raises:
            KeyError: No memory has this name.
        """
        found = [each.nbytes for each in self.held if each.what == what]
        if not found:
            raise KeyError(f"{what}; use one of {', '.join(each.what for each in self.held)}")
        return sum(found)

    @property
    def held_bytes(self) -> int:
        """The memory held in all, including the stashes of stages for their backward passes."""
        stashed = sum(each.micro_batches * each.nbytes for each in self.kept)
        return sum(each.nbytes for each in self.held) + self.local_replicas * stashed

    @property
    def temporary_bytes(self) -> int:
        """The largest temporary memory of a program, times the number of its runs at once."""
        return max((each.at_once * each.temporaries for each in self.programs), default=0)

    def to_json(self) -> dict[str, object]:
        """Return the plan for `json.dumps`."""
        return {**asdict(self), "held_bytes": self.held_bytes, "temporary_bytes": self.temporary_bytes}

    def __str__(self) -> str:
        held = [[each.what, bytes_text(each.nbytes), each.where, each.note] for each in self.held]
        blocks = [
            f"Instance {self.instance}, {_counted(self.local_replicas, 'replica')}: holds "
            f"{bytes_text(self.held_bytes)}, and up to {bytes_text(self.temporary_bytes)} more while it computes",
            _table(["held", "", "where", ""], held),
        ]
        if self.kept:
            rows = [[str(each.stage), str(each.micro_batches), bytes_text(each.nbytes)] for each in self.kept]
            blocks.append(_table(["kept by stage", "micro-batches", "of each, at most"], rows))
        if self.programs:
            head = ["program", "arguments", "temporaries", "outputs", "in place", "at once"]
            blocks.append(_table(head, [_row_of(each) for each in self.programs]))
        return "\n\n".join(blocks)


def mean_blocks(replicas: Replicas, buckets: Sequence[Bucket], is_private: bool) -> list[MemoryBlock]:
    """Return the memory of mean gradients and of their exchange.

    Args:
        replicas: Replicas whose gradients they are.
        buckets: Buckets of gradients.
        is_private: Whether no mean lies in a window.
    """
    communicator = replicas.communicator
    total, shared = 0, 0
    for bucket in buckets:
        for number, array in enumerate(bucket.results):
            total += array.nbytes
            if not is_private and number not in bucket.scattered and communicator.is_shared(array.nbytes):
                shared += array.nbytes
    return [
        MemoryBlock("mean gradients", total - shared, HOST),
        MemoryBlock("mean gradients in the window", shared, SHARED, "once for the instances of a host"),
        MemoryBlock("window", communicator.window_bytes, SHARED, "for the exchange between instances"),
    ]


def data_blocks(replicas: Replicas, batch: Batch, nbytes: int, where: str) -> list[MemoryBlock]:
    """Return the memory of a batch, and of the batches that are read ahead.

    Args:
        replicas: Replicas whose batch it is.
        batch: Batch of the local replicas.
        nbytes: Size of the batch in bytes.
        where: Place of the batch, as in `MemoryBlock`.
    """
    dataset = replicas.dataset_of(batch)
    ahead = 0 if dataset is None else dataset.num_read_ahead
    return [
        MemoryBlock("batch", nbytes, where),
        MemoryBlock("batches read ahead", ahead * nbytes, where, f"{ahead} of them"),
    ]


def bytes_text(nbytes: int) -> str:
    """Return a size with the unit that fits it."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} B"


def _row_of(program: ProgramMemory) -> list[str]:
    sizes = (program.arguments, program.temporaries, program.outputs, program.reused)
    return [program.name, *map(bytes_text, sizes), str(program.at_once)]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)
