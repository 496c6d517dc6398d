"""Instances and allocations in a real Slurm of four nodes with two processors each."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time

import pytest
from beds import ROOT
from installing import stamp
from slurm_bed import Slurm

from poprun.hosts.allocation import find_allocation
from poprun.hosts.schedulers.slurm import expand_nodes
from poprun.launch.program import find_mpirun

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.complete, pytest.mark.timeout(240)]

WHO = """
import sys
import numpy as np
import popdist

popdist.init(int(sys.argv[1]) if len(sys.argv) > 1 else None)
i = popdist.instance()
total = popdist.allreduce(np.int64(i.index + 1))
print(i.launcher, i.index, i.count, i.local_index, i.host, *i.local_replica_range, "sum", total, flush=True)
"""

FAILS = """
import sys, time
import popdist

popdist.init()
popdist.synchronize()
if popdist.getInstanceIndex() == 1:
    exec(sys.argv[1])
if sys.argv[2] == "waits":
    popdist.synchronize()
time.sleep(300)
"""

ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture
def slurm(hosts, slurm_conf):
    cluster = Slurm(hosts, slurm_conf)
    cluster.require_pmix()
    cluster.free_all()
    return cluster


@pytest.fixture
def srun(slurm):
    """Return a function that runs a Python program with srun and returns its sorted lines."""

    def call(*options, program=WHO, words=(), **environ):
        done = slurm.run("srun", "--quiet", *options, sys.executable, "-c", program, *words, **environ)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    return call


class TestSrun:
    def test_tasks_are_instances_that_find_each_other_through_pmix(self, srun):
        assert srun("--mpi=pmix", "-N3", "-n5") == [
            "slurm 0 5 0 h0 0 sum 15",
            "slurm 1 5 1 h0 1 sum 15",
            "slurm 2 5 0 h1 2 sum 15",
            "slurm 3 5 1 h1 3 sum 15",
            "slurm 4 5 0 h2 4 sum 15",
        ]

    def test_the_program_may_ask_for_replicas(self, srun):
        assert srun("--mpi=pmix", "-N2", "-n2", words=["6"]) == [
            "slurm 0 2 0 h0 0 1 2 sum 3",
            "slurm 1 2 0 h1 3 4 5 sum 3",
        ]

    def test_tasks_may_be_distributed_cyclically(self, srun):
        assert [line.split()[1:5] for line in srun("--mpi=pmix", "-N2", "-n4", "-m", "cyclic")] == [
            ["0", "4", "0", "h0"],
            ["1", "4", "0", "h1"],
            ["2", "4", "1", "h0"],
            ["3", "4", "1", "h1"],
        ]

    def test_a_single_task_is_one_instance(self, srun):
        assert srun("-n1", words=["2"]) == ["slurm 0 1 0 h0 0 1 sum 1"]

    @pytest.mark.parametrize("mpi", ["none", "pmi2"])
    def test_several_unconnected_tasks_are_refused(self, slurm, mpi):
        done = slurm.run("srun", f"--mpi={mpi}", "-N2", "-n2", sys.executable, "-c", WHO)
        assert done.returncode == 1
        assert "srun started 2 tasks (SLURM_PROCID=" in done.stderr
        assert "each task would run alone; start them with `srun --mpi=pmix`" in done.stderr

    @pytest.mark.parametrize(
        ("fails", "blamed"),
        [
            ("raise ValueError('no such data')", "ValueError: no such data"),
            ("sys.exit(3)", "task 1: Exited with exit code 3"),
            ("import os; os.kill(os.getpid(), 9)", "task 1: Killed"),
        ],
    )
    def test_a_failed_instance_ends_the_ones_that_wait_for_it(self, slurm, fails, blamed):
        program = [sys.executable, "-c", FAILS, fails, "waits"]
        done = slurm.run("srun", "--mpi=pmix", "-N2", "-n2", *program)
        assert done.returncode != 0
        assert blamed in done.stderr

    def test_srun_kill_on_bad_exit_ends_all_other_instances(self, slurm):
        program = [sys.executable, "-c", FAILS, "sys.exit(3)", "sleeps"]
        done = slurm.run("srun", "-K1", "--mpi=pmix", "-N2", "-n2", *program)
        assert done.returncode != 0


class TestShells:
    def test_the_shell_of_an_allocation_is_one_instance(self, slurm):
        done = slurm.run("salloc", "--quiet", "-N2", "-n3", sys.executable, "-c", WHO, "4")
        assert done.stdout == "single 0 1 0 h0 0 1 2 3 sum 1\n"

    def test_the_script_of_a_job_with_several_tasks_is_one_instance(self, slurm):
        script = slurm.script(WHO)
        done = slurm.submit(script, "4", options=("-N2", "-n3"))
        assert done.stdout == "single 0 1 0 h0 0 1 2 3 sum 1\n"

    def test_mpirun_in_an_allocation_counts_as_mpirun(self, slurm):
        mpirun = [find_mpirun(sys.executable, slurm.bed.environ), "--allow-run-as-root", "--bind-to", "none"]
        done = slurm.run("salloc", "--quiet", "-N2", "-n3", *mpirun, "-n", "3", sys.executable, "-c", WHO)
        assert sorted(done.stdout.splitlines()) == [
            "mpirun 0 3 0 h0 0 sum 6",
            "mpirun 1 3 1 h0 1 sum 6",
            "mpirun 2 3 0 h1 2 sum 6",
        ]


class TestAllocations:
    """The allocations that poprun reads and Slurm states."""

    @pytest.mark.parametrize(
        ("options", "slots"),
        [
            (("-N2", "-n3"), {"h0": 2, "h1": 1}),
            (("-N3",), {"h0": 1, "h1": 1, "h2": 1}),
            (("-N2", "--exclusive"), {"h0": 2, "h1": 2}),
            (("--ntasks=3", "--cpus-per-task=2"), {"h0": 1, "h1": 1, "h2": 1}),
            (("-w", "h[1,3]", "--ntasks-per-node=2"), {"h1": 2, "h3": 2}),
        ],
        ids=" ".join,
    )
    def test_hosts_and_slots_are_read_in_salloc_and_sbatch(self, options, slots, slurm):
        shell = slurm.run("salloc", "--quiet", *options, sys.executable, "-c", ENVIRON)
        slurm.free_all()
        script = slurm.script(ENVIRON)
        job = slurm.submit(script, options=options)
        for environ in map(json.loads, (shell.stdout, job.stdout)):
            allocation = find_allocation(environ)
            assert allocation is not None
            assert {host.name: host.slots for host in allocation.hosts} == slots

    def test_a_step_of_a_larger_job_has_the_hosts_of_the_step(self, slurm):
        step = ["srun", "--quiet", "-n1", sys.executable, "-c", ENVIRON]
        done = slurm.run("salloc", "--quiet", "-N3", *step)
        allocation = find_allocation(json.loads(done.stdout))
        assert allocation is not None
        assert [(host.name, host.slots) for host in allocation.hosts] == [("h0", 1)]

    def test_a_job_submitted_by_a_step_has_its_own_hosts(self, slurm):
        script = slurm.script(ENVIRON)
        output = slurm.folder / "inner"
        words = ["sbatch", "--wait", "--quiet", "--output", str(output), "-w", "h3", "-n1", str(script)]
        inner = f"import os, subprocess\nif os.environ['SLURM_PROCID'] == '1': subprocess.run({words}, check=True)"
        slurm.run("srun", "--quiet", "--mpi=pmix", "-N1", "-n2", sys.executable, "-c", inner)
        allocation = find_allocation(json.loads(output.read_text()))
        assert allocation is not None
        assert [(host.name, host.slots) for host in allocation.hosts] == [("h3", 1)]

    @pytest.mark.parametrize("names", ["h[0-3]", "n[08-11,20],login", "r[1-2]n[0-1],a"])
    def test_lists_of_hosts_are_read_as_by_scontrol(self, names, slurm):
        assert slurm.run("scontrol", "show", "hostnames", names).stdout.split() == list(expand_nodes(names))


POPRUN = [sys.executable, "-m", "poprun", "--allow-run-as-root", "yes"]


def said_by(done):
    """Return the lines of standard output without poprun's tags, sorted."""
    return sorted(line.partition(":")[2] for line in done.stdout.splitlines())


class TestPopRun:
    def test_a_job_that_exports_nothing_runs(self, slurm):
        words = [*POPRUN, "--num-instances", "2", "--num-replicas", "2", "hostname"]
        script = slurm.folder / "exports_nothing"
        script.write_text(f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\nexec {shlex.join(words)}\n")
        job = slurm.submit(script, options=("-N2", "-n2", "--export=NONE"))
        assert said_by(job) == ["h0", "h1"], job.stdout

    def test_doctor_asks_the_hosts_of_the_allocation_without_ssh(self, slurm):
        doctor = [sys.executable, "-m", "poprun", "doctor", "--json"]
        done = slurm.run("salloc", "--quiet", "-N2", "-n2", *doctor, POPRUN_SSH_ARGS="-p 1")
        assert done.returncode == 0, done.stdout
        report = json.loads(done.stdout)
        assert {each["host"] for each in report["findings"] if each["check"] == "program"} == {"h0", "h1"}
        assert not [each for each in report["findings"] if each["check"].startswith("ssh ")]

    def test_the_network_is_the_one_used_by_srun(self, slurm):
        """The first network of the hosts leads nowhere."""
        hosts = {"h0": "192.168.5.10/24", "h1": "192.168.5.11/24"}
        for host, address in hosts.items():
            slurm.bed.on(host, "ip", "address", "add", address, "dev", "lo")
        try:
            words = ["--num-instances", "2", "--num-replicas", "2", "hostname"]
            cache = {"XDG_CACHE_HOME": str(slurm.folder / "cache")}
            done = slurm.run("salloc", "--quiet", "-w", "h[0-1]", "-n2", *POPRUN, *words, **cache)
        finally:
            for host, address in hosts.items():
                slurm.bed.on(host, "ip", "address", "del", address, "dev", "lo")
        assert said_by(done) == ["h0", "h1"], done.stderr

    def test_hosts_come_from_the_allocation_and_need_no_ssh(self, slurm):
        words = ["--num-instances", "4", "--num-replicas", "8", sys.executable, "-c", WHO]
        nobody = {"POPRUN_SSH_ARGS": "-p 1"}
        done = slurm.run("salloc", "--quiet", "-N2", "--ntasks-per-node=2", *POPRUN, *words, **nobody)
        assert said_by(done) == [
            "poprun 0 4 0 h0 0 1 sum 10",
            "poprun 1 4 1 h0 2 3 sum 10",
            "poprun 2 4 0 h1 4 5 sum 10",
            "poprun 3 4 1 h1 6 7 sum 10",
        ]

    def test_more_instances_than_slots_are_refused_before_the_start(self, slurm):
        done = slurm.run(
            "salloc", "--quiet", "-N2", "-n3", *POPRUN, *("--num-instances", "4", "--num-replicas", "4"), "true"
        )
        assert done.returncode == 2
        assert re.search(
            r"4 instances do not fit on the 3 slots of Slurm job \d+ \(h0: 2, h1: 1\): use 2 ", done.stderr
        )

    def test_poprun_started_by_every_task_is_refused(self, slurm):
        done = slurm.run("srun", "-N2", "-n2", *POPRUN, "true")
        assert done.returncode == 2
        assert "one of several tasks (SLURM_STEP_NUM_TASKS=2)" in done.stderr

    def test_a_shell_with_a_terminal_shares_its_step_with_mpirun(self, slurm):
        shell = slurm.folder / "shell"
        words = shlex.join([*POPRUN, "--num-instances", "2", "--num-replicas", "2", sys.executable, "-c", WHO])
        shell.write_text(f"[ $SLURM_PROCID = 0 ] || exit 0\n{words}\n")
        done = slurm.run("script", "-qec", f"srun --pty -N2 -n2 sh {shell}", "/dev/null")
        assert done.stdout.count("sum 3") == 2, done.stdout


def installed(slurm):
    """Make an environment in which the launch scripts find nothing to install."""
    environment = slurm.folder / "environment"
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    for name, words in {"python": [sys.executable], "poprun": [sys.executable, "-m", "poprun"]}.items():
        (environment / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (environment / "bin" / name).chmod(0o755)
    (environment / "popdist-everywhere-dev").write_text(stamp())
    return str(environment)


@pytest.mark.cores(2)
def test_the_main_job_has_the_same_bits_in_sbatch_and_srun_as_alone(slurm):
    """launch_scripts/slurm.sbatch is submitted as users do, and the same program is started by srun alone."""
    program, words = str(ROOT / "popdist" / "examples" / "digits.py"), ["--epochs", "1"]
    alone = slurm.bed.on("h0", sys.executable, program, "--strategy", "ipu", "--replicas", "4", *words, limit_s=120)
    wanted = re.search(r"variables [0-9a-f]{64}", alone.stdout)
    assert wanted is not None, alone.stderr

    script = ROOT / "launch_scripts" / "slurm.sbatch"
    batch = slurm.submit(script, *words, limit_s=200, VIRTUAL_ENV=installed(slurm))
    assert "in 2 instances on h[0-1]" in batch.stdout
    assert wanted[0] in batch.stdout, batch.stdout

    task = [sys.executable, program, "--replicas", "4", *words]
    assert wanted[0] in slurm.run("srun", "--mpi=pmix", "-N2", "-n2", *task, limit_s=120).stdout


@pytest.mark.cores(2)
@pytest.mark.parametrize("whom", [("--batch",), ()], ids=["the_script", "all_steps"])
def test_a_warning_signal_before_the_time_limit_makes_the_main_job_save(whom, slurm):
    """`sbatch --signal=USR1@60`, with and without `B:`, sends the signal, here in the second epoch."""
    pytest.importorskip("orbax.checkpoint")
    output, folder = slurm.folder / "output", slurm.folder / f"checkpoints{len(whom)}"
    script, environment = ROOT / "launch_scripts" / "slurm.sbatch", installed(slurm)

    def warn():
        deadline = time.monotonic() + 120
        while "epoch 1: loss" not in output.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        slurm.run("scancel", *whom, "--signal=USR1", "--user=root")

    output.write_text("")
    warner = threading.Thread(target=warn)
    warner.start()
    words = ("--epochs", "2000", "--checkpoint-dir", str(folder))
    done = slurm.submit(script, *words, limit_s=200, VIRTUAL_ENV=environment)
    warner.join()
    assert done.returncode == 138, done.stdout
    [step] = set(re.findall(r"SIGUSR1: leaving after step (\d+)", done.stdout))  # poprun may repeat the last line
    assert f"step_{int(step):08d}" in [path.name for path in folder.iterdir()]
