"""How much memory one instance of a training takes, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import jax

from strategies.exchange.means import Bucket
from strategies.jax.gradients.computation import Kept
from strategies.jax.replicas.replicas import Replicas
from strategies.typing import Batch

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
DEVICE, HOST, SHARED = "device", "host", "window"
"""Where memory lies: `SHARED` is in common to the instances of a host, and counted by each of them."""


@dataclass(frozen=True)
class ProgramMemory:
    """What XLA says of one compiled program; all in bytes.

    Attributes:
        name: what it computes.
        arguments: what goes in.
        temporaries: what it needs while it runs.
        outputs: what comes out.
        reused: of the outputs what lies in the memory of arguments.
        at_once: how many of it an instance runs at the same time at most.
    """

    name: str
    arguments: int
    temporaries: int
    outputs: int
    reused: int
    at_once: int

    @classmethod
    def of(cls, name: str, compiled: jax.stages.Compiled, at_once: int) -> ProgramMemory:
        """What a program says, that `jax.jit(...).lower(...).compile()` has returned."""
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
class Held:
    """What an instance holds from one step to the next, or in each of them.

    Attributes:
        what: in words.
        nbytes: how much.
        where: `DEVICE`, `HOST` or `SHARED`.
        note: what there is to say about it.
    """

    what: str
    nbytes: int
    where: str = DEVICE
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """What one instance needs for a training.

    Attributes:
        instance: which one.
        local_replicas: how many it drives.
        held: see there.
        kept: by the stages of a pipeline between the passes of a replica's micro-batches.
        programs: that are compiled for the training; none for engines that compile none.
    """

    instance: int
    local_replicas: int
    held: Sequence[Held]
    kept: Sequence[Kept] = ()
    programs: Sequence[ProgramMemory] = ()

    def nbytes(self, what: str) -> int:
        """How much of one thing is held.

        Raises:
            KeyError: there is no such thing.
        """
        found = [each.nbytes for each in self.held if each.what == what]
        if not found:
            raise KeyError(f"{what}; there are {', '.join(each.what for each in self.held)}")
        return sum(found)

    @property
    def held_bytes(self) -> int:
        """What is held in all, with what stages keep for their backward passes."""
        stashed = sum(each.micro_batches * each.nbytes for each in self.kept)
        return sum(each.nbytes for each in self.held) + self.local_replicas * stashed

    @property
    def temporary_bytes(self) -> int:
        """What the program that needs most needs besides while it runs, as often as it runs at once."""
        return max((each.at_once * each.temporaries for each in self.programs), default=0)

    def to_json(self) -> dict[str, object]:
        """All of it, for `json.dumps`."""
        return {
            **{name.name: _plain(getattr(self, name.name)) for name in fields(self)},
            "held_bytes": self.held_bytes,
            "temporary_bytes": self.temporary_bytes,
        }

    def __str__(self) -> str:
        blocks = [
            f"Instance {self.instance}, {_counted(self.local_replicas, 'replica')}: holds "
            f"{bytes_text(self.held_bytes)}, and up to {bytes_text(self.temporary_bytes)} more while it computes",
            _table(
                ["held", "", "where", ""],
                [[each.what, bytes_text(each.nbytes), each.where, each.note] for each in self.held],
            ),
        ]
        if self.kept:
            rows = [[str(each.stage), str(each.micro_batches), bytes_text(each.nbytes)] for each in self.kept]
            blocks.append(_table(["kept by stage", "micro-batches", "of each, at most"], rows))
        if self.programs:
            head = ["program", "arguments", "temporaries", "outputs", "in place", "at once"]
            blocks.append(_table(head, [_row_of(each) for each in self.programs]))
        return "\n\n".join(blocks)


def held_by_means(replicas: Replicas, buckets: Sequence[Bucket], quantised: int, is_private: bool) -> list[Held]:
    """Return the memory of mean gradients and of their exchange.

    Args:
        replicas: whose gradients they are.
        buckets: of gradients.
        quantised: the bytes of the means of quantised gradients.
        is_private: whether no means lie in a window.
    """
    communicator = replicas.communicator
    total, shared = quantised, 0
    for bucket in buckets:
        for number, array in enumerate(bucket.results):
            total += array.nbytes
            if not is_private and number not in bucket.scattered and communicator.is_shared(array.nbytes):
                shared += array.nbytes
    return [
        Held("mean gradients", total - shared, HOST),
        Held("mean gradients in the window", shared, SHARED, "once for the instances of a host"),
        Held("window", communicator.window_bytes, SHARED, "through which they exchange"),
    ]


def held_by_data(replicas: Replicas, batch: Batch, nbytes: int, where: str) -> list[Held]:
    """Return the memory of a batch, and of those that are read ahead of it.

    Args:
        replicas: whose batch it is.
        batch: of the local replicas.
        nbytes: of the batch.
        where: the batch lies, as in `Held`.
    """
    dataset = replicas.dataset_of(batch)
    ahead = 0 if dataset is None else dataset.num_read_ahead
    return [Held("batch", nbytes, where), Held("batches read ahead", ahead * nbytes, where, f"{ahead} of them")]


def bytes_text(nbytes: int) -> str:
    """A size in the unit that fits it."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} B"


def _row_of(program: ProgramMemory) -> list[str]:
    sizes = (program.arguments, program.temporaries, program.outputs, program.reused)
    return [program.name, *map(bytes_text, sizes), str(program.at_once)]


def _plain(value: int | Sequence[Held | Kept | ProgramMemory]) -> object:
    return value if isinstance(value, int) else [asdict(each) for each in value]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)
