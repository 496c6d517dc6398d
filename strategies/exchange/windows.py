"""Windows: one memory region per instance, mapped by all instances of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives import Communicator
from collectives.cuda.device import CudaDevice
from collectives.cuda.regions import CudaMemory
from collectives.errors import CollectiveError, MappingError
from collectives.mapped import MappedMemory, Region
from collectives.shared_memory.host_regions import HostMemory

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
