"""The slow link keeps to its rate and its delay, and leaves nothing behind."""

import signal
import socket
import subprocess
import sys

import pytest
from benchmark_runs import BENCHMARKS

sys.path.append(str(BENCHMARKS))

from slow_link import SlowLinkError, bytes_per_s, check_possible, slow_link  # noqa: E402

LIMIT_S = 60.0
NBYTES = 3_000_001
ALLOWANCE = 200_000  # what may pass at once: the bucket, and what was in it before

# Sends and receives `nbytes` at the same time, after 20 single bytes there and back; prints the shortest round trip
# (of use at the second host, which begins each of them), when it began to send and when it had all, in seconds.
TALK = """
import socket, sys, threading, time
is_first, address, nbytes = sys.argv[1] == "0", sys.argv[2], int(sys.argv[3])
if is_first:
    with socket.create_server((address, 4040)) as listener:
        print("listens", flush=True)
        connected = listener.accept()[0]
else:
    connected = socket.create_connection((address, 4040), 30)
connected.settimeout(30)
round_trips = []
for _ in range(20):
    began = time.perf_counter()
    if is_first:
        connected.recv(1)
    connected.sendall(b"x")
    if not is_first:
        connected.recv(1)
    round_trips.append(time.perf_counter() - began)
began = time.perf_counter()
sender = threading.Thread(target=connected.sendall, args=(bytes(nbytes),))
sender.start()
received = 0
while received < nbytes:
    received += len(connected.recv(1 << 16))
print(min(round_trips), began, time.perf_counter())
sender.join()
"""


def talk(link):
    """What both hosts of a link print."""
    address = link.hosts[0].address
    commands = [
        host.command([sys.executable, "-c", TALK, str(index), address, str(NBYTES)])
        for index, host in enumerate(link.hosts)
    ]
    with subprocess.Popen(commands[0], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "listens\n"
        second = subprocess.run(commands[1], capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return [[float(word) for word in line.split()] for line in (first.stdout.read(), second.stdout)]


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.fixture
def possible():
    """Skips where there is no slow link."""
    try:
        with slow_link():
            pass
    except SlowLinkError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("rate", "expected"), [("200mbit", 25e6), ("1.5gbit", 187.5e6), ("8kbit", 1e3)])
def test_a_rate_is_a_number_of_bits_and_a_unit(rate, expected):
    assert bytes_per_s(rate) == expected


@pytest.mark.parametrize("rate", ["", "200", "mbit", "0mbit", "-1mbit", "fastmbit", "200mbps", "infgbit", "nangbit"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        bytes_per_s(rate)


def test_a_user_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SlowLinkError, match="need root, this is user 1000; run it as root"):
        check_possible()


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlowLinkError, match="ip and tc cannot be found; install iproute2"):
        check_possible()


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.usefixtures("possible")
def test_a_round_trip_takes_twice_the_delay_and_bytes_go_both_ways_at_the_rate():
    with slow_link("80mbit", delay_s=0.003) as link:
        (_, first_began, first_ended), (round_trip_s, second_began, second_ended) = talk(link)
        took_s = (first_ended - second_began, second_ended - first_began)  # by one clock, that of this machine
        assert round_trip_s >= 2 * link.delay_s
        assert min(took_s) >= (NBYTES - ALLOWANCE) / link.bytes_per_s


@pytest.mark.job
@pytest.mark.usefixtures("possible")
def test_without_delay_nothing_delays():
    with slow_link("1gbit", delay_s=0) as link:
        assert link.delayed_by == "nothing"
        talk(link)


@pytest.mark.job
@pytest.mark.usefixtures("possible")
def test_two_links_exist_side_by_side():
    with slow_link() as one, slow_link() as other:
        assert len({host.namespace for link in (one, other) for host in link.hosts} & namespaces()) == 4


@pytest.mark.job
@pytest.mark.usefixtures("possible")
def test_nothing_is_left_after_an_error():
    with pytest.raises(ZeroDivisionError), slow_link() as link:
        raise ZeroDivisionError
    assert not {host.namespace for host in link.hosts} & namespaces()


@pytest.mark.job
@pytest.mark.usefixtures("possible")
def test_nothing_is_left_after_sigterm():
    program = f"""
import signal, sys
sys.path.append({str(BENCHMARKS)!r})
from slow_link import slow_link
with slow_link() as link:
    print(*(host.namespace for host in link.hosts), flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        made = set(process.stdout.readline().split())
        assert len(made & namespaces()) == 2
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not {name for name in namespaces() if name.startswith(f"slow-{process.pid}-")}


@pytest.mark.job
@pytest.mark.usefixtures("possible")
def test_hosts_reach_nothing_but_each_other():
    with slow_link() as link, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        refused = subprocess.run(
            link.hosts[0].command([sys.executable, "-c", program]), capture_output=True, text=True, check=False
        )
        assert "ConnectionRefusedError" in refused.stderr
