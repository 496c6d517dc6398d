"""Jobs on several hosts over ssh: their environment, their end, and their remains."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time

import pytest
from beds import ROOT
from looping import POPRUN, Looping, looping, run, words

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(170),
]

SILENCE_S = 4
DIGITS = str(ROOT / "popdist" / "examples" / "digits.py")
TRAINING = [sys.executable, DIGITS, "--model", "mlp", "--max-steps", "3", "--json", "-", "--replicas", "6"]


def looping_job(bed, hosts, instances, *options, **loop):
    return Looping(bed, [*words(hosts, instances, *options), *looping(**loop)])


WHO = """
import json, os, popdist
popdist.init()
everywhere = ("VIRTUAL_ENV", "XLA_FLAGS", "PYTHONPATH")
print(json.dumps([
    popdist.getInstanceIndex(), popdist.getLocalInstanceIndex(), popdist.getReplicaIndexOffset(),
    os.uname().nodename, {name: os.environ.get(name) for name in everywhere}, os.getcwd(),
]))
popdist.synchronize()
"""


def test_instances_are_placed_in_blocks_with_the_same_environment(hosts):
    environ = {"VIRTUAL_ENV": "/some/where", "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = run(hosts, hosts.names, 8, sys.executable, "-c", WHO, **environ)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert [each[:4] for each in found] == [[i, i % 2, i, f"h{i // 2}"] for i in range(8)]
    expected = environ | {"PYTHONPATH": hosts.environ["PYTHONPATH"]}
    for each in found:
        flags = each[4]["XLA_FLAGS"].split()  # poprun may have added a flag
        assert each[4] | {"XLA_FLAGS": flags[0]} == expected
    assert {each[5] for each in found} == {os.getcwd()}


@pytest.fixture(scope="module")
def alone(bed):
    """Return the digest of the variables that a single process trains."""
    done = bed.on("h0", *TRAINING, "--strategy", "ipu", limit_s=100.0)
    return digest_in(done)


def digest_in(done):
    assert done.returncode == 0, done.stderr
    found = re.search(r'"variables_sha256": "(\w+)"', done.stdout)
    assert found, done.stderr
    return found[1]


def by_slots(bed, slots):
    """Return the first words of a command that starts one instance for each slot of h0, h1 and so on."""
    file = bed.shared / "hostfile"
    file.write_text("".join(f"h{index} slots={number}\n" for index, number in enumerate(slots)))
    job = ["--hostfile", str(file), "--num-instances", str(sum(slots)), "--num-replicas", "6"]
    return [*POPRUN, *job, "--tag-host"]


@pytest.mark.parametrize("slots", [(2, 1), (4, 1, 1)])
def test_hosts_take_instances_by_their_slots(hosts, slots):
    who = hosts.on("h0", *by_slots(hosts, slots), "hostname")
    wanted = [f"h{index}" for index, number in enumerate(slots) for _ in range(number)]
    assert [line.rpartition(":")[2] for line in sorted(who.stdout.splitlines())] == wanted, who.stderr


def test_uneven_hosts_train_the_variables_of_a_single_process(hosts, alone):
    assert digest_in(hosts.on("h0", *by_slots(hosts, (2, 1)), *TRAINING, limit_s=120.0)) == alone


def test_slow_links_do_not_change_the_variables(hosts, alone):
    """Six replicas run on three hosts, over links of 1 Gbit/s with 0.5 ms."""
    hosts.link("all", "rate=1gbit", "delay=0.5ms")
    assert digest_in(run(hosts, hosts.names[:3], 3, *TRAINING, options=("--num-replicas", "6"))) == alone


def test_login_messages_are_not_part_of_the_jobs_output(hosts):
    hosts.on("h1", "mount", "-t", "tmpfs", "none", "/etc/ssh")
    try:
        hosts.on("h1", "sh", "-c", "echo 'echo Welcome to h1' > /etc/ssh/sshrc")
        done = run(hosts, hosts.names[:2], 2, "hostname")
    finally:
        hosts.on("h1", "umount", "/etc/ssh")
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:h0", "[1,1]<stdout>:h1"]
    assert "Welcome to h1" in done.stderr.splitlines()


def test_hosts_that_cannot_connect_to_each_other_end_a_job_with_the_message_of_open_mpi(hosts):
    """No check has found that before; each host reaches h0."""
    program = "import popdist; popdist.init(); popdist.synchronize()"
    hosts.on("h1", "ip", "route", "add", "blackhole", "10.77.0.12/32")
    try:
        done = run(hosts, hosts.names[:3], 3, sys.executable, "-c", program, options=("--skip-checks",))
    finally:
        hosts.on("h1", "ip", "route", "del", "blackhole", "10.77.0.12/32")
    assert done.returncode not in (0, 1)
    assert re.search(r"failed to TCP connect|Unable to connect to the peer", done.stderr), done.stderr
    assert 'calling\n"abort"' in done.stderr  # the message of mpirun itself


@pytest.mark.parametrize(
    ("deed", "status", "words_"),
    [
        ("raise", 1, r"instance 1 on host h1 \(pid \d+\) ended with exit status 1, after collective 50"),
        ("kill", 137, r"instance 1 on host h1 \(pid \d+\) was killed by SIGKILL, after collective 50"),
        ("exit", 3, r"instance 1 on host h1 \(pid \d+\) ended with exit status 3, after collective 50"),
    ],
)
def test_an_instance_that_fails_on_another_host_ends_the_job_and_is_named(hosts, deed, status, words_):
    job = looping_job(hosts, hosts.names[:3], 3, victim=1, deed=deed)
    job.await_start()
    found, lines = job.end()
    assert found == status
    assert re.match(words_, lines[0]), lines
    assert job.left() == set()


def test_a_killed_daemon_ends_the_job_and_its_host_is_named(hosts):
    job = looping_job(hosts, hosts.names[:3], 3)
    job.await_start()
    daemons = [pid for pid, command in hosts.processes("h1").items() if re.match(r"\S*prted ", command)]
    os.kill(min(daemons), signal.SIGKILL)  # a child of the daemon has the same name
    status, lines = job.end()
    assert status != 0
    assert "h1" in "".join(lines), lines
    assert job.left() == set()


def test_a_host_with_a_cut_link_ends_the_job_and_cleans_itself_up(hosts):
    job = looping_job(hosts, hosts.names[:3], 3, "--host-timeout-s", str(SILENCE_S))
    job.await_start()
    hosts.link("h2", "down")
    status, lines = job.end()
    assert status != 0
    assert "h2" in "".join(lines), lines
    assert job.left() == set()  # its link is still down


def test_a_network_failure_of_two_seconds_ends_nothing(hosts):
    job = looping_job(hosts, hosts.names[:2], 2, count=400)
    job.await_start()
    hosts.link("h1", "down")
    time.sleep(2.0)  # the fault itself
    hosts.link("h1", "up")
    out, error = job.process.communicate(timeout=100)
    assert job.process.returncode == 0, error
    assert out.count("count 400") == 2


def test_ctrl_c_leaves_no_process_on_any_host(hosts):
    job = looping_job(hosts, hosts.names, 4)
    job.await_start()
    job.process.send_signal(signal.SIGINT)
    status, _ = job.end()
    assert status == 130
    assert job.left() == set()


def test_without_checks_the_network_is_found(hosts):
    done = run(hosts, hosts.names[1:3], 2, "hostname", options=("--skip-checks",))
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == ["h1", "h2"]


def test_program_words_like_those_of_mpirun_reach_the_programs_on_other_hosts(hosts):
    given = [":", "--", "-np", "3", "@file", "--hostfile", "/none", "-x", "A=1", "--mca", "a", "b c", "", "--prtemca"]
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = run(hosts, ["h0", "h1"], 2, sys.executable, "-c", program, *given)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line.partition(":")[2]) for line in done.stdout.splitlines()] == [given, given]


LISTENING = """
import pathlib
def listening():
    tables = [pathlib.Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
"""
PORTS = f"""{LISTENING}
import os, sys, time, popdist
popdist.init()
popdist.synchronize()
if popdist.getInstanceIndex() == 0:
    print(*listening(), flush=True)
    for _ in range(600):
        if os.path.exists(sys.argv[1]):
            break
        time.sleep(0.1)
popdist.synchronize()
"""
CALLS = """
import socket, sys
for port in sys.argv[1:]:
    try:
        socket.create_connection(("h0", int(port)), timeout=10).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


def test_other_hosts_cannot_connect_to_a_job_on_one_host(hosts):
    """Daemons of the host itself stay reachable."""
    go_on = hosts.shared / "go-on"
    daemons = set(hosts.python("h0", f"{LISTENING}print(*listening())").stdout.split())
    command = [*words(["h0"], 2), sys.executable, "-c", PORTS, str(go_on)]
    with hosts.start("h0", *command) as job:
        ports = set(job.stdout.readline().partition(":")[2].split()) - daemons
        called = hosts.python("h1", CALLS, *ports, "2222", limit_s=100.0)
        go_on.touch()
        _, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert called.returncode == 0, called.stderr
    assert len(ports) > 3
    assert called.stdout.split() == ["2222"]


@pytest.mark.parametrize("moment", ["unchecked", "after a good check"])
def test_no_program_runs_on_a_host_without_the_working_directory(hosts, moment):
    folder = "/tmp/only here"
    unchecked = ["--skip-checks"] if moment == "unchecked" else []
    command = shlex.join([*words(["h0", "h1"], 2, *unchecked), "pwd"])
    for host in ("h0", "h1"):
        assert hosts.on(host, "mkdir", folder).returncode == 0
    try:
        if not unchecked:
            done = hosts.on("h0", "sh", "-c", f"cd '{folder}' && {command}", limit_s=100.0)
            assert sorted(done.stdout.splitlines()) == [f"[1,{index}]<stdout>:{folder}" for index in range(2)]
        hosts.on("h1", "rmdir", folder)
        done = hosts.on("h0", "sh", "-c", f"cd '{folder}' && {command}", limit_s=100.0)
        assert done.returncode == 127
        assert f"[1,0]<stdout>:{folder}" in done.stdout or done.stdout == ""
        assert "<stdout>" not in done.stdout.replace(f"[1,0]<stdout>:{folder}", "")
        assert f"poprun: cannot start pwd: the working directory {folder} of poprun cannot be used here" in done.stderr
    finally:
        for host in ("h0", "h1"):
            hosts.on(host, "rmdir", folder)
