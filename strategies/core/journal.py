"""The journal of a job with spares: the results of operations, their bytes, and their replay on a spare.

Entries come from other processes. Reading one runs no code of the sender, and takes memory in proportion to its size.

An operation is work that all active instances do together, such as a step or an evaluation. On a spare it does nothing
but return the result of the others. So the program of a spare, with its counters and decisions, comes to the place
where the others are. If the spare becomes active, it takes part in the operation at which it is.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import ml_dtypes
import numpy as np

from collectives import PeerLostError
from collectives.arrays import MOVABLE
from collectives.calls import MOST_OF_PEERS, foreign
from popdist.membership.standby import joined, separated
from strategies.errors import SpareError
from strategies.typing import Tree

DEEPEST = 64
"""The most levels of lists, dictionaries and other nodes in a value."""

_NARROW = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
_NAMES = {dtype: dtype.name for dtype in map(np.dtype, (*MOVABLE, np.complex64, np.complex128, *_NARROW))}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_WRITE = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode
_FLOAT = struct.Struct(">d")


class Nodes(Protocol):
    """The values of other classes, such as nodes of pytrees, which travel as a name and parts."""

    def to_parts(self, value: Tree) -> tuple[str, Sequence[Tree]] | None:
        """Return a name for the class of a value, and its parts; None if the value cannot be taken apart."""

    def from_parts(self, name: str, parts: Sequence[Tree]) -> Tree:
        """Return the value with the name and parts of `to_parts`. Both come from another process.

        Raises:
            ValueError: There is no such class, or the parts do not fit it.
        """


@dataclass(frozen=True)
class Entry:
    """An entry of the journal.

    Attributes:
        kind: The kind of the operation.
        done: `InstanceProgress.done` after it.
        passes: `InstanceProgress.passes` after it.
        value: The result: None, a bool, a number, a text, an array or a scalar of NumPy, or a list, a tuple, a
            dictionary or a node of these.
        obstacle: The reason why the operation cannot be replayed, or "".
    """

    kind: str
    done: int
    passes: int
    value: Tree = None
    obstacle: str = ""

    def encode(self, nodes: Nodes) -> bytes:
        """Encode the entry.

        Raises:
            TypeError: The value has a part of another class.
            ValueError: An integer has too many digits.
        """
        arrays: list[bytes] = []
        head = [self.kind, self.done, self.passes, self.obstacle, _described(self.value, arrays, nodes, 0)]
        return joined([_WRITE(head).encode(), *arrays])

    @classmethod
    def decode(cls, data: bytes, nodes: Nodes) -> Entry:
        """Decode an entry that another process has sent. Arrays, numbers and classes are those that were encoded.

        Raises:
            SpareError: The entry is damaged.
        """
        try:
            return _decoded(memoryview(data), nodes)
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise SpareError(
                f"an entry of the journal is damaged: {foreign(str(error), MOST_OF_PEERS)}. The job goes on without "
                "this spare; give all instances the same versions of their packages, and check the network"
            ) from error


# ---- writing


def _described(value: Tree, arrays: list[bytes], nodes: Nodes, depth: int) -> object:
    """Return a description of a value for JSON, and append the bytes of its arrays."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", _FLOAT.pack(value).hex()]
    if kind is np.ndarray or isinstance(value, np.generic):
        if value.dtype not in _NAMES:
            raise TypeError(f"an array of {value.dtype} cannot be sent; use an array of numbers")
        is_turned = value.flags.fnc  # sums over it have the bits of its order in memory
        arrays.append(value.tobytes("F" if is_turned else "C"))
        return ["array" if kind is np.ndarray else "scalar", _NAMES[value.dtype], list(value.shape), is_turned]
    if depth == DEEPEST:
        raise TypeError(f"it has more than {DEEPEST} levels (DEEPEST)")
    head: list[str]
    parts: Sequence[Tree]
    if kind is dict:
        head, parts = ["dict"], [part for item in value.items() for part in item]
    elif kind is tuple or kind is list:
        head, parts = [kind.__name__], value
    elif (found := nodes.to_parts(value)) is not None:
        head, parts = ["node", found[0]], found[1]
    else:
        raise TypeError(
            f"a value of {kind.__module__}.{kind.__qualname__} cannot be sent; use numbers, arrays, or a node of "
            "pytrees whose class has a name in its module"
        )
    return [*head, *[_described(part, arrays, nodes, depth + 1) for part in parts]]


# ---- reading


def _decoded(data: memoryview, nodes: Nodes) -> Entry:
    head, *arrays = separated(data)
    remaining = iter(arrays)
    match json.loads(head.tobytes()):
        case [str(kind), int(done), int(passes), str(obstacle), described]:
            value = _value_of(described, remaining, nodes, 0)
        case _:
            raise ValueError("its description is not [kind, done, passes, obstacle, value]")
    if next(remaining, None) is not None:
        raise ValueError("it has more arrays than its description")
    return Entry(kind, done, passes, value, foreign(obstacle, MOST_OF_PEERS))


def _value_of(described: object, arrays: Iterator[memoryview], nodes: Nodes, depth: int) -> Tree:
    if described is None or isinstance(described, str | int | float):  # True and False are integers
        return described
    if depth > DEEPEST:
        raise ValueError(f"its value has more than {DEEPEST} levels (DEEPEST)")
    match described:
        case ["float", str(bits)]:
            return _FLOAT.unpack(bytes.fromhex(bits))[0]
        case ["array" | "scalar" as tag, str(dtype), list(shape), bool(is_turned)]:
            array = _array_of(dtype, shape, is_turned, next(arrays, memoryview(b"")))
            return array if tag == "array" else array[()]
        case ["node", str(name), *parts]:
            return nodes.from_parts(name, [_value_of(part, arrays, nodes, depth + 1) for part in parts])
        case ["list" | "tuple" | "dict" as tag, *parts]:
            values = [_value_of(part, arrays, nodes, depth + 1) for part in parts]
            if tag == "dict":
                return dict(zip(values[::2], values[1::2], strict=True))
            return values if tag == "list" else tuple(values)
        case [str(tag), *_]:
            raise ValueError(f"its value has a part of the unknown form {tag!r}")
    raise ValueError(f"its value has a part without a form, a {type(described).__name__}")


def _array_of(name: str, shape: Sequence[int], is_turned: bool, data: memoryview) -> np.ndarray:
    """Return a new array of these bytes; its size is checked before it is allocated."""
    if name not in _DTYPES:
        raise ValueError(f"an array has the dtype {name!r}, which no entry has")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array has the shape {shape!r}, which is not of lengths")
    dtype = _DTYPES[name]
    if math.prod(shape) * dtype.itemsize != data.nbytes:
        raise ValueError(f"an array of {dtype}{list(shape)} has {data.nbytes} bytes")
    return np.ndarray(shape, dtype, data, order="F" if is_turned else "C").copy("K")


# ---- the journal

T = TypeVar("T")


class BecameSpareError(BaseException):
    """The change of this instance into a spare, in the middle of an operation. `Journal.perform` handles it."""


class JoinsNowError(PeerLostError):
    """The change of this spare into an active instance, at the beginning of an operation."""

    def __init__(self) -> None:
        super().__init__("this spare takes the place of a lost instance")


@dataclass
class InstanceProgress:
    """The progress of an instance in the sequence of operations that all instances do together.

    After a loss, the progress of two instances differs by at most one operation, because every operation needs all
    instances.

    Attributes:
        done: Number of complete operations; every batch of an evaluation counts.
        entries: Number of complete operations that have an entry in the journal.
        passes: Number of passes through data sets, without training, that have ended.
        batches: Number of batches of the present pass whose results have arrived; 0 outside of a pass.
        is_past: Whether this instance has used up the state before the present operation: the operation can only be
            completed, and not be repeated. All instances can complete it then.
        at_change: Functions that adapt states to a change of the instances, in the same order on all instances. They
            are called after each change, before the interrupted operation goes on. Collective.
        share: Function that hands the result of the last operation to instances that lack it, given a rank that has it.
            Collective. None if they need nothing.
    """

    done: int = 0
    entries: int = 0
    passes: int = 0
    batches: int = 0
    is_past: bool = False
    at_change: list[Callable[[], object]] = field(default_factory=list)
    share: Callable[[int], object] | None = None

    def complete(self, share: Callable[[int], object] | None = None) -> None:
        """Note that one more operation is complete on all instances."""
        self.done += 1
        self.is_past = False
        self.share = share


class JournalMember(Protocol):
    """The part of an instance in the journal: an active one adds to it, and a spare reads it.

    The module `popdist.membership.spares` is the part of this process in its job.
    """

    def is_spare(self) -> bool:
        """Return whether this instance waits to take the place of a lost one, and takes no part in the training yet."""

    def keeps_journal(self) -> bool:
        """Return whether other instances may join later, so that the results of all operations are kept for them."""

    def may_change(self, is_so: bool, was_so: bool = False) -> None:
        """Note whether this instance is in an operation that can be repeated, so that the members may change in it.

        Args:
            is_so: Whether it is in one.
            was_so: Whether it begins one, and the operation before could be repeated too; others may still be in that.
        """

    def takes_values(self) -> None:
        """Note that this instance, which was a spare, has got the variables of the others."""

    def publish(self, entry: Callable[[], bytes]) -> None:
        """Keep the result of an operation for instances that join later; every active instance calls this.

        Args:
            entry: Function that encodes the result. It may be called later, when the result is complete.
        """

    def next_entry(self) -> bytes | None:
        """Return the result of the next operation of the others. A spare calls this in place of the operation.

        The call sleeps until the others have completed the operation.

        Returns:
            The encoded result. None if this spare has become active: then it has returned all results that the others
            have published, and takes part in the operation after them. `Membership.join_survivors` returns its new
            identity.

        Raises:
            SystemExit: With status 0, at the end of the job.
        """


class NoJournal(JournalMember):
    """The part of an instance in a job whose instances stay the same, or of which some are lost."""

    def is_spare(self) -> bool:
        """Return False."""
        return False

    def keeps_journal(self) -> bool:
        """Return False."""
        return False

    def may_change(self, is_so: bool, was_so: bool = False) -> None:
        """Do nothing."""

    def takes_values(self) -> None:
        """Do nothing."""

    def publish(self, entry: Callable[[], bytes]) -> None:
        """Do nothing."""

    def next_entry(self) -> bytes | None:
        """Refuse to read."""
        raise AssertionError("an instance that is no spare reads no journal")


class TransferableState(Protocol):
    """A state that joining instances get; `StateTransfer` is the implementation."""

    @property
    def facts(self) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Facts to compare with a joining instance: required ones, and ones compared only if both know them."""

    @property
    def obstacle(self) -> str:
        """The reason why this state cannot be handed over, or ""."""

    def holds(self, state: object) -> bool:
        """Return whether this is the latest state."""

    def note(self, state: Tree) -> None:
        """Note the state that the trainer has made, or was given, last."""

    def hand_over(self, source: int, joins: bool) -> None:
        """Take over the state of rank `source` if this instance joins. Collective."""

    def digest(self) -> tuple[int, int]:
        """Return a digest of the latest state."""


@dataclass(slots=True)
class Recorded(Generic[T]):
    """The way in which the result of an operation is kept.

    Attributes:
        kind: The kind of the operation; a spare compares it with the kind of its own operation.
        pack: Returns a function that returns the result as a small value of an `Entry`. It may be called later, and
            only on one instance.
        unpack: Returns the result on a spare, given that value.
    """

    kind: str
    pack: Callable[[T], Callable[[], object]]
    unpack: Callable[[Tree], T]


def _encode(nodes: Nodes, kind: str, done: int, passes: int, read: Callable[[], object], obstacle: str) -> bytes:
    if not obstacle:
        try:
            return Entry(kind, done, passes, read()).encode(nodes)
        except Exception as error:
            obstacle = f"its result cannot be kept: {type(error).__name__}: {error}"
    return Entry(kind, done, passes, None, obstacle).encode(nodes)


def _unpacked(recorded: Recorded[T], entry: Entry) -> T:
    try:
        return recorded.unpack(entry.value)
    except SpareError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise SpareError(
            f"the result of {entry.kind!r} of the active instances has another form than this program's: {error}. "
            "The job goes on without this spare; give all instances the same versions of their packages"
        ) from error


class Journal:
    """The journal as one instance sees it: an active one writes, a spare reads.

    If an operation contains others, only the outermost one has an entry. Without spares nothing is kept.

    The newest entry stays here until the next operation is complete, or the members change. Only then is it certain
    that all instances have completed its operation. Otherwise a spare might know a result that no survivor has.

    Args:
        member: This instance's membership.
        progress: This instance's progress.
        nodes: The classes of results, besides those of Python and NumPy.

    Attributes:
        is_kept: Whether operations are recorded or replayed at all.
        is_joining: Whether this instance has been a spare, and still lacks the state of the others.
        has_joined: Whether this instance was a spare, so that it may hold placeholders with values.
        transfers: The holders of states that joining instances get, in the order of their construction.
    """

    def __init__(self, member: JournalMember, progress: InstanceProgress, nodes: Nodes) -> None:
        self.is_kept = member.keeps_journal() or member.is_spare()
        self.is_joining = self.has_joined = False
        self.transfers: list[TransferableState] = []
        self._member = member
        self._progress = progress
        self._nodes = nodes
        self._is_inside = self._is_repeatable = False  # the latter: whether the last operation is
        self._held: Callable[[], bytes] | None = None
        self._next: Entry | None = None  # read, and not yet replayed

    @property
    def replays(self) -> bool:
        """Whether an operation that begins now is replayed: this instance is a spare, and in no other operation."""
        return self.is_kept and self._member.is_spare() and not self._is_inside

    # ---- operations

    def perform(self, recorded: Recorded[T], body: Callable[[], T], survives: bool = True) -> T:
        """Return the result of an operation: computed and recorded on an active instance, replayed on a spare.

        If a spare becomes active here, it calls `body` with `is_joining` set. `body` then begins with
        `strategies.core.survival.repeated`, which connects this instance with the others.

        Args:
            recorded: The way in which the result is kept.
            body: The operation.
            survives: Whether `body` can be repeated after a loss. If not, no spare can become active in it.

        Raises:
            SpareError: The spare cannot replay the operation, or the others have done another one.
        """
        if self._is_inside or not self.is_kept:
            return body()
        while True:
            if self._member.is_spare():
                entry = self._replayed(recorded.kind)
                if entry is not None:
                    return _unpacked(recorded, entry)
                if not survives:
                    raise SpareError(
                        f"an instance was lost in {recorded.kind!r}, which the others cannot repeat, so no spare can "
                        "take its place"
                    )
            self._is_inside = True  # without a context manager, because each step comes here
            self._member.may_change(survives, self._is_repeatable)
            self._is_repeatable = survives
            try:
                done = body()
            except BecameSpareError:
                self.is_joining = False  # it may have been about to join
                continue
            except Exception as error:
                self.record(recorded.kind, obstacle=f"it has raised {type(error).__name__}: {error}")
                raise
            finally:
                self._is_inside = False
                self._member.may_change(False)
            self.record(recorded.kind, recorded.pack(done))
            return done

    def begin_unrepeatable(self, kind: str) -> None:
        """Begin an operation that cannot be replayed. On a spare, wait for the end of the job.

        Raises:
            SpareError: The active instances have done the operation.
            SystemExit: The job has ended.
        """
        if not self.is_kept or self._is_inside:
            return
        self._is_repeatable = False
        if self._replayed(kind) is None and not self.is_joining:
            self.record(kind, obstacle="spares do not have its results")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take the block for a part of one operation: nothing in it has entries."""
        outer, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = outer

    # ---- on an active instance

    def record(self, kind: str, read: Callable[[], object] = lambda: None, obstacle: str = "") -> None:
        """Add the result of an operation to the journal.

        Args:
            kind: The kind of the operation.
            read: Returns the result; called later.
            obstacle: The reason why a spare cannot replay the operation.
        """
        progress = self._progress
        progress.entries += 1
        self.flush()
        self._held = partial(_encode, self._nodes, kind, progress.done, progress.passes, read, obstacle)

    def flush(self) -> None:
        """Publish the entry of the last operation, before the members change."""
        held, self._held = self._held, None
        if held is not None:
            self._member.publish(held)

    def takes_values(self) -> None:
        """Mark this instance as active: it has received the states, and takes part in the operation."""
        if self.is_joining:
            self.is_joining = False
            self._member.takes_values()

    def replaced(self, state: object, new: object) -> None:
        """Note that the program goes on with another state, such as one from a checkpoint."""
        for transfer in self.transfers:
            if transfer.holds(state):
                transfer.note(new)

    # ---- on a spare

    def _replayed(self, kind: str) -> Entry | None:
        """Return the next entry; None if this instance is active, or becomes active now."""
        if not self._member.is_spare() or self.is_joining:
            return None
        entry = self._read()
        if entry is None:
            return None
        if entry.kind != kind:
            raise SpareError(
                f"the program of this spare does {kind!r} where the active instances have done {entry.kind!r}, so it "
                "cannot take the place of one of them; use the same program and arguments, and take no decision by "
                "instance_index or by values that only one instance has"
            )
        if entry.obstacle:
            raise SpareError(
                f"a spare cannot replay {kind!r} of the active instances: {entry.obstacle}. The job goes on without "
                "this spare"
            )
        self._next = None
        progress = self._progress
        progress.entries += 1
        progress.done, progress.passes, progress.share = entry.done, entry.passes, None
        return entry

    def _read(self) -> Entry | None:
        if self._next is None:
            data = self._member.next_entry()
            if data is None:
                self.is_joining = self.has_joined = True
                return None
            self._next = Entry.decode(data, self._nodes)
        return self._next

    def wait_for_values(self, join: Callable[[], object]) -> None:
        """Wait on a spare, outside of operations, until it gets values of the active instances.

        Args:
            join: Function that joins the active instances, and takes over their states.

        Raises:
            SpareError: The active instances have gone on meanwhile; or this instance is no spare.
            SystemExit: The job has ended.
        """
        if not self.replays:
            return
        if not self.is_joining and self._read() is not None:
            raise SpareError(
                "the program reads a variable or a batch, which a spare does not have before it becomes active; read "
                "them in strategy.on_chief, or use metrics. The job goes on without this spare"
            )
        try:
            with self.inside():
                join()
        except BecameSpareError:  # before it had joined
            self.is_joining = False
            self.wait_for_values(join)
