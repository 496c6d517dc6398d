"""The simulation of plans, chains and rings on a virtual clock."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from collectives.plans.choice import Width
from collectives.plans.comparing import relays
from collectives.plans.planning import plan_for
from collectives.plans.spread import Spread
from collectives.simulation import Network, Traffic, chain, of_comparison, of_plan, ring, simulate, steady_s
from collectives.simulation.__main__ import bytes_of, main
from collectives.simulation.comparing import SimulatedJob, compared
from collectives.simulation.traffic import Wave

MEGABYTE = 10**6
IDEAL = Network(0, 0, 1e9, 0, 0, 1e18, 1e18)
GIGABIT = Network(100e-6, 10e-6, 1e9, 1e-6, 1e-6, 8e9, 10e9)


def alone(source: list[int], to: list[int], nbytes: float, hosts: list[int]) -> Traffic:
    wave = Wave(np.array(source), np.array(to), np.full(len(source), float(nbytes)))
    return Traffic("alone", np.array(hosts), 1, lambda: [wave])


# ---- messages


def test_a_message_costs_its_handling_its_latency_and_its_bytes() -> None:
    outcome = simulate(alone([0], [1], MEGABYTE, [0, 1]), GIGABIT)
    assert outcome.seconds == pytest.approx(2 * 10e-6 + 100e-6 + 1e-3)
    assert outcome.critical == pytest.approx(
        {"adding": 0, "messages": 20e-6, "latency": 100e-6, "bytes": 1e-3, "busy links and ranks": 0}, abs=1e-12
    )
    assert outcome.link_bytes.tolist() == [MEGABYTE, 0]


def test_a_message_inside_of_a_host_uses_no_link() -> None:
    outcome = simulate(alone([0], [1], MEGABYTE, [0, 0]), GIGABIT)
    assert outcome.seconds == pytest.approx(3e-6 + MEGABYTE / 8e9)
    assert outcome.link_bytes.tolist() == [0]


@pytest.mark.parametrize(
    ("source", "to", "hosts"),
    [([0, 1], [2, 3], [0, 0, 1, 2]), ([0, 1], [2, 2], [0, 1, 2]), ([0, 0], [1, 2], [0, 1, 2])],
)
def test_messages_in_one_direction_of_a_link_are_sequential(source: list[int], to: list[int], hosts: list[int]) -> None:
    assert simulate(alone(source, to, MEGABYTE, hosts), IDEAL).seconds == pytest.approx(2e-3)


def test_opposite_directions_and_different_links_are_independent() -> None:
    assert simulate(alone([0, 1, 2, 3], [1, 0, 3, 2], MEGABYTE, [0, 1, 2, 3]), IDEAL).seconds == pytest.approx(1e-3)


def test_a_rank_adds_before_it_sends() -> None:
    wave = Wave(np.array([0]), np.array([1]), np.array([0.0]), np.array([1e9, 0]))
    traffic = Traffic("adds", np.array([0, 1]), 1, lambda: [wave])
    assert simulate(traffic, GIGABIT).seconds == pytest.approx(0.1 + 120e-6)


def test_a_token_bucket_is_full_after_a_pause_and_empty_in_a_sequence_of_calls() -> None:
    shaped = replace(IDEAL, latency_s=1e-4, burst_bytes=MEGABYTE)
    traffic = alone([0, 1], [1, 0], MEGABYTE, [0, 1])
    assert simulate(traffic, shaped).seconds == pytest.approx(1e-4)
    assert steady_s([traffic], shaped) == pytest.approx(1e-3)
    slow = replace(shaped, latency_s=5e-3)  # the bucket is refilled meanwhile
    assert steady_s([traffic], slow) == pytest.approx(5e-3)


def test_a_sequence_of_calls_takes_the_sum_of_their_times_if_nothing_is_left_over() -> None:
    traffic = alone([0, 1], [1, 0], MEGABYTE, [0, 1])
    alone_s = simulate(traffic, GIGABIT).seconds
    assert steady_s([traffic, traffic], GIGABIT) == pytest.approx(2 * alone_s)


def test_the_comparison_of_calls_has_its_rounds() -> None:
    hosts = np.repeat(np.arange(4), 2)
    inside, between, news = relays(tuple(hosts.tolist()))
    traffic = of_comparison(hosts, [inside, between, news], 64)
    assert [wave.nbytes.tolist() for wave in traffic.waves()] == [[64.0] * 8, [128.0] * 12, [6 * 64.0] * 4]
    outcome = simulate(traffic, replace(IDEAL, latency_s=1e-3))
    assert outcome.seconds == pytest.approx(1e-3, rel=1e-2)
    assert outcome.link_bytes.tolist() == [3 * 128] * 4


# ---- reductions


@pytest.mark.parametrize("hosts", [2, 3, 4, 8])
def test_without_latency_a_reduction_takes_the_time_of_its_bytes(hosts: int) -> None:
    elements = 24 * MEGABYTE
    least = 2 * (hosts - 1) / hosts * 4 * elements / 1e9
    for way in ("direct", "halving"):
        outcome = simulate(of_plan(plan_for(Spread.apart([1] * hosts), way), elements, Width(4, 4)), IDEAL)
        if way == "direct" or hosts & (hosts - 1) == 0:
            assert outcome.seconds == pytest.approx(least)
        assert outcome.seconds <= 1.51 * least
    assert simulate(ring(np.arange(hosts), 4 * elements), IDEAL).seconds == pytest.approx(least)


def test_a_chain_sends_everything_twice_and_is_filled_once() -> None:
    chunk = MEGABYTE
    outcome = simulate(chain(np.arange(5), 100 * MEGABYTE, chunk), IDEAL)
    assert max(outcome.link_bytes) == pytest.approx(200 * MEGABYTE)
    hops = 2 * 4
    assert (100 + hops - 1) * 1e-3 <= outcome.seconds * 1.0001
    assert outcome.seconds <= (200 + hops) * 1e-3


def test_many_equal_waves_are_simulated_at_once() -> None:
    """The times equal those of single waves."""
    hosts = np.arange(40)
    whole = ring(hosts, 10 * MEGABYTE)
    adding, copying = whole.waves()
    singles = [Wave(each.source, each.to, each.nbytes, each.added) for each in (adding, copying) for _ in range(39)]
    one_by_one = simulate(Traffic("", hosts, 1, lambda: singles), GIGABIT)
    at_once = simulate(whole, GIGABIT)
    assert at_once.seconds == pytest.approx(one_by_one.seconds)
    assert at_once.link_bytes == pytest.approx(one_by_one.link_bytes)
    assert at_once.critical == pytest.approx(one_by_one.critical, abs=1e-9)


def test_pieces_overlap_additions_and_transfers() -> None:
    plan = plan_for(Spread.apart([1] * 8), "halving")
    slow_memory = Network(0, 0, 1e9, 0, 0, 8e9, 2e9)
    whole, cut = (simulate(of_plan(plan, 4 * MEGABYTE, Width(4, 4), pieces), slow_memory) for pieces in (1, 8))
    assert cut.seconds < 0.85 * whole.seconds
    assert cut.link_bytes == pytest.approx(whole.link_bytes)


def test_the_critical_path_is_as_long_as_the_simulation() -> None:
    for name, outcome in compared(SimulatedJob(4, 2, 2, MEGABYTE), GIGABIT):
        assert sum(outcome.critical.values()) == pytest.approx(outcome.seconds), name


@pytest.mark.complete
def test_the_tree_is_close_to_the_minimum_on_thousands_of_hosts_and_the_chain_is_not() -> None:
    job, network = SimulatedJob(1024, 1, 1, 100 * MEGABYTE), Network()
    ((_, outcome),) = compared(job, network, "tree, halving")
    assert outcome.seconds <= 1.3 * job.least_s(network)
    ((_, of_ring),) = compared(job, network, "ring")
    assert outcome.seconds < of_ring.seconds


# ---- the command


@pytest.mark.parametrize(
    ("text", "nbytes"), [("65536", 65536), ("100M", 10**8), ("64KiB", 65536), ("1.5Gi", 3 << 29), ("2kb", 2000)]
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert bytes_of(text) == nbytes


def test_the_command_compares_ways_of_an_all_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = tmp_path / "net.json"
    GIGABIT.write(network)
    assert Network.read(network) == GIGABIT
    options = ["--hosts", "4", "--instances-per-host", "2", "--size", "1M", "--network", str(network)]
    assert main(["all-reduce", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["chain", "ring"]
    assert {line.split(",")[1].strip().split()[0] for line in lines if line.startswith("tree")} == {
        "direct",
        "halving",
        "doubling",
    }
    assert lines[-1].split() == ["least", "1.500"]


@pytest.mark.complete
def test_a_plot_is_written_in_two_formats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="curves need matplotlib")
    assert main(["plot", "--most-hosts", "8", "--size", "1M", "--output", str(tmp_path / "plot")]) == 0
    drawn = (tmp_path / "plot.svg").read_text()
    assert {"least: lower bound", "ring", "tree, direct", "tree, halving"} <= set(re.findall(r"<!-- (.+?) -->", drawn))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_matplotlib_names_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = ["--instances-per-host", "0"]  # refused by a simulation, which does not begin here
    assert main(["plot", *refused, "--most-hosts", "2", "--output", str(tmp_path / "plot")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["all-reduce", "--hosts", "4"], ["--help"]])
def test_a_closed_reader_ends_the_command_silently(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        finished = _simulate(words, writing)
    finally:
        os.close(writing)
    assert (finished.returncode, finished.stderr) == (141, "")


@pytest.mark.parametrize("words", [["all-reduce", "--hosts", "4"], ["--help"]])
def test_a_full_disk_is_reported_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        finished = _simulate(words, full.fileno())
    told = f"poprun simulate: standard output cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert (finished.returncode, finished.stderr) == (1, told)


def _simulate(words: list[str], output: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collectives.simulation", *words]
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}  # without a buffer argparse ignores write errors
    piped = subprocess.PIPE
    return subprocess.run(command, stdout=output, stderr=piped, text=True, timeout=60, check=False, env=environ)


def test_a_network_is_measured_into_a_file(tmp_path: Path) -> None:
    """TCP over loopback is measured first, then the memory between ranks of a host."""
    path = tmp_path / "net.json"
    assert main(["measure", "--output", str(path)]) == 0
    assert main(["measure", "--over", "memory", "--local", "--network", str(path), "--output", str(path)]) == 0
    network = Network.read(path)
    assert min(network.bytes_per_s, network.local_bytes_per_s) > 1e6
    assert min(network.message_s, network.local_message_s) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all-reduce", "--hosts", "0"], "hosts is 0"),
        (["plot", "--most-hosts", "1", "--output", "x"], "begins with 2"),
        (["all-reduce", "--hosts", "2", "--network", "{}"], "unknown keys speed; use only latency_s"),
        (["all-reduce", "--hosts", "2", "--network", "nowhere.json"], "nowhere.json"),
    ],
)
def test_an_impossible_simulation_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    path.write_text(json.dumps({"speed": 1}))
    assert main([str(path) if each == "{}" else each for each in arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_invalid_network_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="not describe a network"):
        Network.read(path)
    with pytest.raises(ValueError, match="bytes_per_s of a network is 0"):
        Network(bytes_per_s=0)
