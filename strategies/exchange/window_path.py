"""The exchange through windows: each instance of a host adds one slice of the sums of all instances.

Each instance copies its sums into its own window. When all have done that, instance j makes the mean of slice j
straight from all windows, in the order of the tree. It copies the mean into all windows. When all have done that, each
instance takes the means out of its own window. For S bytes of gradients an instance copies 2 S and reads S, and the
ranks meet twice, however many they are.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import final

import numpy as np
from typing_extensions import override

from collectives import Communicator
from collectives.cuda.device import CudaDevice
from collectives.cuda.memory import PageLocked
from collectives.cuda.regions import CudaMemory
from collectives.errors import CollectiveError, CudaError, MappingError
from collectives.mapped import Copied, MappedMemory, Region
from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.shared_memory.host_regions import HostMemory
from collectives.shared_memory.reduction import slice_bounds
from collectives.tree import TreeNode, halves, root_of, subtrees
from strategies.exchange.choice import LOCAL, WINDOW, DeviceArithmetic, DeviceArray, DevicePath, DeviceViews

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # the discard service (RFC 863); nothing is sent there


def own_address_towards(host: str) -> str:
    """Return the address from which this machine sends to a host, or this machine's name if the address is unknown.

    Nothing is sent: the kernel looks up the route.

    Args:
        host: Name or address of the host.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return socket.gethostname()


_LOCKED_BYTES = 1 << 20
"""The least size of arrays whose pages are locked; the driver copies smaller arrays through its own memory."""


def lock_pages(arrays: Iterable[np.ndarray], gpu: int) -> list[PageLocked]:
    """Return locks on large arrays, for a framework that copies between them and a GPU; none without a driver.

    Args:
        arrays: Arrays of the host; kept alive.
        gpu: Ordinal of the GPU among those that this process sees.
    """
    try:
        device = gpu_of(gpu)
    except CudaError as error:
        logger.warning("gradients are copied slowly to and from the GPU: %s", error)
        return []
    return locked(device, arrays)


@cache
def gpu_of(ordinal: int) -> CudaDevice:
    """Return the GPU with that ordinal; it stays open until the process ends."""
    return CudaDevice(ordinal)


def locked(device: CudaDevice, arrays: Iterable[np.ndarray]) -> list[PageLocked]:
    """Return locks on the large arrays, as many as the driver allows.

    Without a lock copies are only slower.
    """
    found = []
    for array in arrays:
        if array.nbytes < _LOCKED_BYTES:
            continue
        try:
            found.append(PageLocked(device, array))
        except CudaError as error:
            logger.warning("gradients are copied slowly to and from the GPU: %s", error)
            break
    return found


# ---- windows

_LETTER_BYTES = 512  # holds a handle or an error message
_REFUSED = "all instances know that memory cannot be shared"


def memory_of(gpu: int | None) -> MappedMemory:
    """Return the kind of memory that instances map on the device where they compute.

    Args:
        gpu: Ordinal of this instance's GPU among those that this process sees; None on CPUs.

    Raises:
        CudaError: There is no such GPU, or no driver.
    """
    return HostMemory() if gpu is None else CudaMemory(CudaDevice(gpu))


def share_windows(communicator: Communicator, memory: MappedMemory, nbytes: int) -> Windows:
    """Return one window of each instance. Collective.

    Args:
        communicator: Communicator of the instances, all on one host.
        memory: Kind of memory.
        nbytes: Size of each window in bytes, the same for all instances.

    Raises:
        MappingError: An instance cannot make its window, or map another one. All raise it, and no memory remains.
    """
    regions: list[Region | None] = [None] * communicator.size
    rank = communicator.rank
    try:
        handles = _agreed(communicator, "windows are made", lambda: _made(regions, rank, memory, nbytes))
        _agreed(communicator, "windows are mapped", lambda: _open_all(regions, memory, handles, nbytes))
    except BaseException:
        _close(regions, rank)
        raise
    finally:
        memory.settle()
    return Windows(rank, [region for region in regions if region is not None], nbytes)


class Windows:
    """The windows of all instances, made by `share_windows`.

    Args:
        rank: Rank of this instance.
        regions: Region of each instance.
        nbytes: Size of each region in bytes.
    """

    def __init__(self, rank: int, regions: Sequence[Region], nbytes: int) -> None:
        self.rank = rank
        self.nbytes = nbytes
        self._regions = regions

    @property
    def own(self) -> Region:
        """The window of this instance."""
        return self._regions[self.rank]

    def of(self, rank: int) -> Region:
        """Return the window of an instance."""
        return self._regions[rank]

    def unmap(self) -> None:
        """Unmap the windows of the other instances, which may then release them."""
        _close([None if rank == self.rank else region for rank, region in enumerate(self._regions)], self.rank)

    def close(self) -> None:
        """Unmap the windows of the others, release this instance's own, and set `nbytes` to 0. Not collective."""
        self.nbytes = 0
        _close(self._regions, self.rank)


def _made(regions: list[Region | None], rank: int, memory: MappedMemory, nbytes: int) -> bytes:
    regions[rank], handle = memory.make(nbytes)
    return handle


def _open_all(regions: list[Region | None], memory: MappedMemory, handles: Sequence[bytes], nbytes: int) -> bytes:
    for rank, handle in enumerate(handles):
        if regions[rank] is None:
            regions[rank] = memory.open(handle, nbytes)
    return b""


def _close(regions: Sequence[Region | None], own: int) -> None:
    """Close the regions of the other instances, then the own one."""
    for rank in sorted(range(len(regions)), key=lambda rank: rank == own):
        region = regions[rank]
        if region is not None:
            region.close()


def _agreed(communicator: Communicator, name: str, act: Callable[[], bytes]) -> list[bytes]:
    """Return the bytes that `act` returns on each instance; raise if it fails on one of them. Collective.

    If an instance is lost, another one may close its window before this one maps it. The true reason is then the loss,
    not the memory. So the instances meet in a barrier before they raise; after a loss the barrier raises it.
    """
    letter, error = np.zeros(_LETTER_BYTES, np.uint8), None
    try:
        said, has_failed = act(), 0
    except (OSError, CollectiveError) as failure:
        error, said, has_failed = failure, str(failure).encode()[: _LETTER_BYTES - 3], 1
    content = bytes([has_failed, *len(said).to_bytes(2, "big"), *said])
    letter[: len(content)] = np.frombuffer(content, np.uint8)
    letters = [bytes(row) for row in communicator.all_gather(letter, name=name)]
    texts = [row[3 : 3 + int.from_bytes(row[1:3], "big")] for row in letters]
    for rank, row in enumerate(letters):
        if row[0]:
            communicator.barrier(name=_REFUSED)
            raise MappingError(
                f"instance {rank} cannot share memory with the others of this host: "
                f"{texts[rank].decode(errors='replace')}; set POPDIST_EXCHANGE=host to exchange gradients without it"
            ) from error
    return texts


# ---- the layout of a bucket

ALIGNMENT_BYTES = 256
"""XLA reads memory in place from multiples of 64 bytes (CPUs) or 256 (GPUs)."""


@dataclass(frozen=True)
class BufferGroup:
    """Buffers of one dtype, placed one after another, so that one program makes all of their means.

    Attributes:
        reduction: Mean of arrays of this dtype.
        numbers: Numbers of the buffers in the bucket, without empty ones.
        sizes: Sizes of these buffers in elements.
    """

    reduction: Reduction
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def alignment(self) -> int:
        """The alignment in elements: each buffer begins at a multiple of it."""
        return ALIGNMENT_BYTES // self.reduction.dtype.itemsize

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        lengths = (-(-size // self.alignment) * self.alignment for size in self.sizes)
        return tuple(accumulate(lengths, initial=0))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each buffer."""
        return self._bounds[:-1]

    @property
    def elements(self) -> int:
        """The number of elements of all buffers, with the gaps between them."""
        return self._bounds[-1]

    def bytes_of(self, node: TreeNode) -> int:
        """Return the size in bytes of the sums of a node."""
        return self.elements * self.reduction.dtype_of(node).itemsize


@dataclass(frozen=True)
class WindowSlice:
    """The place of an array in a window.

    Attributes:
        group: Buffers that lie there.
        start: Byte at which the array begins.
        dtype: Dtype of its elements.
    """

    group: BufferGroup
    start: int
    dtype: np.dtype

    def at(self, element: int) -> int:
        """Return the byte at which an element begins."""
        return self.start + element * self.dtype.itemsize


class WindowLayout:
    """The layout of a bucket in the window of every instance, the same on all instances.

    If a mean is as wide as the first sum, it takes the sum's place: no other instance reads the slice that an instance
    adds.

    Args:
        spread: Spread of the replicas over the instances.
        sizes: Sizes of the buffers in elements.
        dtypes: Dtypes of the means.

    Attributes:
        groups: Non-empty buffers, grouped by dtype.
        sums: Places of an instance's nodes, for each instance and group.
        means: Place of the means, for each instance and group.
        nbytes: Size of the largest window in bytes.
    """

    def __init__(self, spread: Spread, sizes: Sequence[int], dtypes: Sequence[np.dtype]) -> None:
        self.groups = tuple(_groups(sizes, dtypes))
        self.sums: list[list[list[WindowSlice]]] = []
        self.means: list[list[WindowSlice]] = []
        self.nbytes = 0
        in_place = [all(_is_narrow(group, nodes[0]) for nodes in spread.sums) for group in self.groups]
        for nodes in spread.sums:
            end = 0
            of_sums, of_means = [], []
            for group, is_in_place in zip(self.groups, in_place, strict=True):
                lengths = [group.bytes_of(node) for node in nodes]
                *starts, end = accumulate(lengths, initial=end)
                places = zip(starts, nodes, strict=True)
                of_sums.append([WindowSlice(group, start, group.reduction.dtype_of(node)) for start, node in places])
                dtype = group.reduction.dtype
                of_means.append(WindowSlice(group, starts[0] if is_in_place else end, dtype))
                end += 0 if is_in_place else group.elements * dtype.itemsize
            self.sums.append(of_sums)
            self.means.append(of_means)
            self.nbytes = max(self.nbytes, end)
        self._instances = spread.size

    def slice_of(self, group: BufferGroup, rank: int) -> tuple[int, int]:
        """Return the slice of a group whose mean an instance makes, as (first element, end)."""
        bounds = slice_bounds(group.elements, self._instances, group.alignment)
        return bounds[rank], bounds[rank + 1]


def _groups(sizes: Sequence[int], dtypes: Sequence[np.dtype]) -> Iterator[BufferGroup]:
    for dtype in dict.fromkeys(dtypes):
        numbers = tuple(number for number, own in enumerate(dtypes) if own == dtype and sizes[number])
        if numbers:
            yield BufferGroup(Reduction("mean", dtype), numbers, tuple(sizes[number] for number in numbers))


def _is_narrow(group: BufferGroup, node: TreeNode) -> bool:
    return group.reduction.dtype_of(node) == group.reduction.dtype


# ---- one instance


@final
class LocalPath(DevicePath):
    """The path of a job of one instance; the last addition and the division are one operation.

    A spare that rehearses a step alone has some of the replicas. The "means" of its path have the right shapes and
    dtypes, and no meaning.

    Args:
        replicas: R.
        arithmetic: Arithmetic that adds and divides.
        own: Replicas of this instance; None for all.
    """

    path_name = LOCAL

    def __init__(self, replicas: int, arithmetic: DeviceArithmetic, own: range | None = None) -> None:
        super().__init__(Spread.together([replicas]), 0)
        self._arithmetic = arithmetic
        self._own = range(replicas) if own is None else own

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The terms of the last addition: the halves of the tree, or the root if there is one replica.

        On a spare, the nodes that it would add up.
        """
        root = root_of(self.spread.replicas)
        if len(self._own) < self.spread.replicas:
            return subtrees(self._own.start, self._own.stop, self.spread.replicas)
        return (root,) if root.is_leaf else halves(root)

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        if self.spread.replicas == 1:
            return [of_buffer[0] for of_buffer in sums]
        if len(self._own) < self.spread.replicas:
            return [of_buffer[0].astype(dtype) for of_buffer, dtype in zip(sums, dtypes, strict=True)]
        return self._arithmetic.means(self.nodes, list(zip(*sums, strict=True)), dtypes, self.spread.replicas)

    @override
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        return own[None]


# ---- the path

logger = logging.getLogger("strategies.exchange")

_LEAST_BYTES = 1 << 16
"""The size of the first window, which shows whether the instances can map each other's memory."""


def windows_if_possible(asked: str, make: Callable[[], WindowPath]) -> WindowPath | None:
    """Return a path through windows, or None if the instances cannot map each other's memory. Collective.

    Args:
        asked: Exchange that the job asks for, one of `EXCHANGES`.
        make: Function that makes the path.

    Raises:
        MappingError: The job asks for windows, and the instances cannot map each other's memory.
    """
    try:
        return make()
    except MappingError as error:
        if asked == WINDOW:
            raise
        logger.warning("gradients go through the host: %s", error)
        return None


@final
class WindowPath(DevicePath):
    """The path through memory that the instances of a host map. Making a path is a collective call.

    The caller owns the arrays that `means` and `gather` return: the path neither writes nor reads them later. Both
    methods wait for the device.

    Args:
        spread: Spread of the replicas over the instances, all on one host.
        communicator: Communicator of the instances.
        memory: Memory of the device on which this instance adds; the path closes it, also if making the path fails.
        arithmetic: Arithmetic of the engine's framework.
        views: Views of the same framework.

    Raises:
        MappingError: The instances cannot map each other's memory; all raise it.
    """

    path_name = WINDOW

    def __init__(
        self,
        spread: Spread,
        communicator: Communicator,
        memory: MappedMemory,
        arithmetic: DeviceArithmetic,
        views: DeviceViews,
    ) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator = communicator
        self._memory = memory
        self._arithmetic = arithmetic
        self._views = views
        self._all_nodes = [node for nodes in spread.sums for node in nodes]
        self._layout = lru_cache(64)(lambda sizes, dtypes: WindowLayout(spread, sizes, dtypes))
        try:
            self._windows = share_windows(communicator, memory, _LEAST_BYTES)
        except BaseException:
            memory.close()
            raise

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        layout = self._layout(tuple(of_buffer[0].shape[0] for of_buffer in sums), tuple(dtypes))
        windows = self._windows_of(layout.nbytes)
        self._put(layout, windows, sums)
        self._communicator.barrier(name=f"{name}: sums are in windows")
        for number in range(len(layout.groups)):
            self._reduce(layout, windows, number)
        self._communicator.barrier(name=f"{name}: means are in windows")
        return self._taken(layout, windows, dtypes)

    @override
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        dtype, shape = self._views.dtype_of(own), (own.shape[0],)
        nbytes = shape[0] * dtype.itemsize
        windows = self._windows_of(nbytes)
        self._memory.copy([Copied(windows.own.address, self._views.addresses([own])[0], nbytes)])
        self._communicator.barrier(name=f"{name}: rows are in windows")
        rows = [self._views.view(windows.of(rank).array(shape, dtype)) for rank in range(self.spread.size)]
        gathered = self._views.stacked(rows)
        self._communicator.barrier(name=f"{name}: rows have been read")
        return gathered

    @override
    def close(self) -> None:
        self._windows.close()
        self._memory.close()

    def _windows_of(self, nbytes: int) -> Windows:
        """Return windows of at least that size. Collective if larger windows have to be made."""
        if nbytes > self._windows.nbytes:
            self._windows.unmap()
            self._communicator.barrier(name="windows are unmapped")
            self._windows.close()
            self._windows = share_windows(self._communicator, self._memory, nbytes)
        return self._windows

    def _put(self, layout: WindowLayout, windows: Windows, sums: Sequence[Sequence[DeviceArray]]) -> None:
        """Wait until this instance's sums have been computed, and copy them into its window."""
        arrays: list[DeviceArray] = []
        places: list[tuple[int, int]] = []
        for of_nodes, group in zip(layout.sums[self.rank], layout.groups, strict=True):
            for buffer, start, size in zip(group.numbers, group.starts, group.sizes, strict=True):
                arrays += sums[buffer]
                places += [(windows.own.address + one.at(start), size * one.dtype.itemsize) for one in of_nodes]
        sources = self._views.addresses(arrays)
        self._memory.copy([Copied(to, source, nbytes) for (to, nbytes), source in zip(places, sources, strict=True)])

    def _reduce(self, layout: WindowLayout, windows: Windows, number: int) -> None:
        """Make the mean of this instance's slice of a group, and copy it into all windows."""
        group = layout.groups[number]
        first, stop = layout.slice_of(group, self.rank)
        if first == stop:
            return
        shape = (stop - first,)
        sources = [
            self._views.view(windows.of(rank).array(shape, place.dtype, place.at(first)))
            for rank in range(self.spread.size)
            for place in layout.sums[rank][number]
        ]
        mean = self._arithmetic.mean(self._all_nodes, sources, group.reduction.dtype, self.spread.replicas)
        (source,), nbytes = self._views.addresses([mean]), shape[0] * group.reduction.dtype.itemsize
        places = [windows.of(rank).address + layout.means[rank][number].at(first) for rank in range(self.spread.size)]
        self._memory.copy([Copied(to, source, nbytes) for to in places if to != source])

    def _taken(self, layout: WindowLayout, windows: Windows, dtypes: Sequence[np.dtype]) -> list[DeviceArray]:
        """Return copies of the means of all buffers; only copies may be given to programs of users."""
        found: list[DeviceArray] = [None] * len(dtypes)
        for place in layout.means[self.rank]:
            group = place.group
            view = self._views.view(windows.own.array((group.elements,), place.dtype, place.start))
            for number, mean in zip(group.numbers, self._views.taken(view, group.starts, group.sizes), strict=True):
                found[number] = mean
        for number, dtype in enumerate(dtypes):
            if found[number] is None:
                empty = self._views.view(windows.own.array((0,), dtype))
                (found[number],) = self._views.taken(empty, (0,), (0,))
        return found
