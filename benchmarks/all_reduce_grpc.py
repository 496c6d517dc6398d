"""The part of `all_reduce.py` that compares our ring over gRPC with a bare pair of gRPC byte streams.

The columns: "grpc" and "bare" in ms and in GB/s of buffer; "grpc/bare" is the ratio of the times. Both run in a pair of
processes of their own on loopback, one core each, and take turns. Below the table: the peak of the memory that the
first all-reduce of the largest size takes besides its arrays, on the rank where it is larger.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster import free_addresses
from control import Coordinator, Group
from timing import environment, medians, pinned_command

HERE = Path(__file__).parent
SIZES = [(1 << 16) << power for power in range(11)]  # 64 KiB to 64 MiB
RANKS = 2
FEWEST = 3  # exchanges in a turn
ANSWER_S = 120.0


class Pairs:
    """The two pairs of processes.

    Args:
        coordinator: starts them.
        cpus: one for each rank.
    """

    def __init__(self, coordinator: Coordinator, cpus: Sequence[str]) -> None:
        ours, bare = (free_addresses(RANKS) for _ in range(2))
        words = {"grpc": [[str(rank), *ours] for rank in range(RANKS)], "bare": [["0", *bare], ["1", *bare[::-1]]]}
        programs = {"grpc": "all_reduce_grpc_rank.py", "bare": "bare_streams.py"}
        self._groups: dict[str, Group] = {}
        for name, program in programs.items():
            command = [sys.executable, str(HERE / program), coordinator.path]
            commands = [pinned_command(cpu, [*command, *of]) for cpu, of in zip(cpus, words[name], strict=True)]
            self._groups[name] = coordinator.start(name, RANKS, commands, environment())

    def extra_memory(self, nbytes: int) -> int:
        """Bytes on the rank where it is larger."""
        of_ranks: list[int] = self._groups["grpc"].ask(do="memory", nbytes=nbytes)
        return max(of_ranks)

    def measure(self, nbytes: int, rounds: int, block_s: float) -> dict[str, Any]:
        """One row: both take their turn in each of the rounds."""
        has_same_bits = all(self._groups["grpc"].ask(do="prepare", nbytes=nbytes))
        self._groups["bare"].ask(do="prepare", nbytes=nbytes)
        ways = ("grpc", "bare")
        repeats = {way: max(FEWEST, round(block_s / self._turn_s(way, FEWEST))) for way in ways}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                times[way].append(1e3 * self._turn_s(way, repeats[way]))
        ms = medians(times)
        return {
            "bytes": nbytes,
            "ms": ms,
            "gb_per_s": {way: 1e-6 * nbytes / ms[way] for way in ways},
            "grpc_over_bare": ms["grpc"] / ms["bare"],
            "rounds_ms": times,
            "has_same_bits": has_same_bits,
        }

    def _turn_s(self, way: str, repeats: int) -> float:
        """Seconds per all-reduce or exchange, on the slower rank."""
        of_ranks: list[float] = self._groups[way].ask(do="turn", repeats=repeats)
        return max(of_ranks)


def measure(sizes: Sequence[int], rounds: int, block_s: float, cpus: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The extra memory of the largest size, then a row for each size."""
    with tempfile.TemporaryDirectory(prefix="all-reduce-") as folder, Coordinator(folder, ANSWER_S) as coordinator:
        pairs = Pairs(coordinator, cpus)
        yield {"bytes": max(sizes), "extra_memory_bytes": pairs.extra_memory(max(sizes))}
        for nbytes in sizes:
            yield pairs.measure(nbytes, rounds, block_s)


def print_header() -> None:
    print("2 processes over gRPC on loopback, one core each; medians in ms, and in brackets GB/s of buffer")
    print(f"{'size':>7}{'grpc':>18}{'bare':>18}{'grpc/bare':>11}", flush=True)


def print_row(row: dict[str, Any], size: str) -> None:
    cells = [f"{row['ms'][way]:>10.3f} ({row['gb_per_s'][way]:>5.3f})" for way in ("grpc", "bare")]
    print(f"{size:>7}{''.join(cells)}{row['grpc_over_bare']:>11.2f}", flush=True)


def print_memory(figures: dict[str, Any], size: str) -> None:
    extra = figures["extra_memory_bytes"] / (1 << 20)
    print(f"an all-reduce of {size} takes {extra:.1f} MiB besides its arrays, at its peak", flush=True)


def faults(row: dict[str, Any]) -> list[str]:
    """In words, what is wrong with the result of a row."""
    return [] if row["has_same_bits"] else [f"grpc: the sum of {row['bytes']} bytes is wrong"]
