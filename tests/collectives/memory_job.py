"""One worker that measures the memory of its all-reduces as JSON: `memory_job.py RANK ADDRESS...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from test_ring_traffic import CountingLink

from collectives import Communicator, Limits, Settings
from collectives.backends.grpc import ALL, GrpcLink
from collectives.factory import RankGroup, assemble
from collectives.network.addresses import Address
from collectives.network.node import Node
from collectives.network.security import Security

MEBIBYTE = 1 << 20
BUFFER_BYTES = 64 * MEBIBYTE
CALLS = 3
LIMITS = Limits(timeout_s=60, connect_timeout_s=60)


def main(rank: int, texts: Sequence[str]) -> None:
    node = Node([Address.parse(text) for text in texts], texts, rank, "", Security(), LIMITS)
    node.join()
    members = range(len(texts))
    links = [counted(GrpcLink(node, ALL, channel, members, epoch=0)) for channel in (0, 1)]
    group = RankGroup(rank, texts, members, lambda awaited: node.lost(awaited, members))
    with assemble(Settings(limits=LIMITS, spins=0), group, (links[0], links[1]), False, no_subgroup) as communicator:
        buffer = np.ones(BUFFER_BYTES // 4, np.float32)
        communicator.all_reduce(np.ones(7))
        first = extra_mebibytes(communicator, buffer)
        before = links[0].sent_bytes
        later = extra_mebibytes(communicator, buffer)
        sent = (links[0].sent_bytes - before) // CALLS
        assert (buffer == float(len(texts)) ** (2 * CALLS)).all()
    node.leave()  # the original links would do that
    print(json.dumps({"first": first, "later": later, "sent_bytes": sent}))


def counted(link: GrpcLink) -> CountingLink:
    """Return the link with a counter of its sent bytes."""
    counting = CountingLink(link, range(link.size), link.sizes)
    counting.pause = link.pause
    return counting


def no_subgroup(ranks: Sequence[int]) -> Communicator:
    raise NotImplementedError


def extra_mebibytes(communicator: Communicator, buffer: np.ndarray) -> float:
    """Return the growth of this process's peak memory during some all-reduces, in MiB."""
    communicator.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
    before = mebibytes("VmRSS")
    for _ in range(CALLS):
        communicator.all_reduce(buffer)
    return mebibytes("VmHWM") - before


def mebibytes(fact: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{fact}:")]
    return int(line.split()[1]) * 1024 / MEBIBYTE


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
