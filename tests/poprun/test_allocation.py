from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import slurm_records as records

from poprun.cli.settings import LaunchSettings
from poprun.errors import UsageError
from poprun.hosts.allocation import BATCH_SYSTEMS, HOSTFILES, choose_hosts, describe_use, find_allocation
from poprun.hosts.hosts import Host, check_hosts
from poprun.hosts.schedulers.scheduler import Allocation
from poprun.hosts.schedulers.slurm import expand_counts, expand_nodes
from poprun.launch.plan import RESERVING

PBS_FILE = "/var/spool/pbs/aux/1234.pbs-server"
OPENPBS = {
    "NCPUS": "4",
    "OMP_NUM_THREADS": "4",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBCOOKIE": "0000000067A3B5C2000000003E5F1A2B",
    "PBS_JOBDIR": "/home/alice",
    "PBS_JOBID": "1234.pbs-server",
    "PBS_JOBNAME": "train",
    "PBS_MOMPORT": "15003",
    "PBS_NODEFILE": PBS_FILE,
    "PBS_NODENUM": "0",
    "PBS_O_HOST": "login1",
    "PBS_O_WORKDIR": "/home/alice/run",
    "PBS_QUEUE": "workq",
    "PBS_TASKNUM": "1",
}
"""`qsub -l select=2:ncpus=4:mpiprocs=2`, OpenPBS."""
OPENPBS_FILES = {PBS_FILE: "cn01.cluster\ncn01.cluster\ncn02.cluster\ncn02.cluster\n"}

TORQUE_FILE = "/var/spool/torque/aux//77.head"
TORQUE = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "77.head",
    "PBS_NODEFILE": TORQUE_FILE,
    "PBS_NODENUM": "0",
    "PBS_NP": "5",
    "PBS_NUM_NODES": "2",
    "PBS_NUM_PPN": "3",
    "PBS_VNODENUM": "0",
}
"""`qsub -l nodes=1:ppn=3+1:ppn=2`, Torque, which lists the hosts in descending order."""
TORQUE_FILES = {TORQUE_FILE: "n8\nn8\nn8\nn7\nn7\n"}

LSF = {
    "LSB_BATCH_JID": "11813",
    "LSB_DJOB_HOSTFILE": "/home/lsfadmin/.lsbatch/1239206877.11813.hostfile",
    "LSB_DJOB_NUMPROC": "4",
    "LSB_DJOB_RANKFILE": "/home/lsfadmin/.lsbatch/1239206877.11813.hostfile",
    "LSB_HOSTS": "grid03 grid05 grid01 grid01",
    "LSB_JOBID": "11813",
    "LSB_MCPU_HOSTS": "grid03 1 grid05 1 grid01 2 ",
    "LSB_QUEUE": "normal",
    "LSB_SUB_HOST": "grid03",
}
"""`bsub -n 4`."""
LSF_FILES = {LSF["LSB_DJOB_HOSTFILE"]: "grid03\ngrid05\ngrid01\ngrid01\n"}

MPIJOB = {
    "HOSTNAME": "digits-launcher",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "K_MPI_JOB_ROLE": "launcher",
    "NVIDIA_DRIVER_CAPABILITIES": "",
    "NVIDIA_VISIBLE_DEVICES": "",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "2",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
"""The launcher of an MPIJob with two workers of slotsPerWorker 2, MPI Operator v2beta1."""
MPIJOB_FILES = {
    "/etc/mpi/hostfile": "digits-worker-0.digits.default.svc slots=2\ndigits-worker-1.digits.default.svc slots=2\n"
}

SGE_FILE = "/var/spool/gridengine/execd/h0/active_jobs/1.1/pe_hostfile"
SGE = {
    "ARC": "lx-amd64",
    "HOSTNAME": "h0",
    "JOB_ID": "1",
    "JOB_NAME": "job.sh",
    "NHOSTS": "3",
    "NQUEUES": "4",
    "NSLOTS": "7",
    "PE": "mpi",
    "PE_HOSTFILE": SGE_FILE,
    "QUEUE": "all.q",
    "SGE_CELL": "default",
    "SGE_ROOT": "/var/lib/gridengine",
    "SGE_TASK_ID": "undefined",
    "TMP": "/tmp/1.1.all.q",
}
"""`qsub -pe mpi 7` on three hosts with two queues, Son of Grid Engine 8.1.9."""
SGE_FILES = {
    SGE_FILE: "h0 2 all.q@h0 UNDEFINED\nh1 2 all.q@h1 UNDEFINED\nh2 2 all.q@h2 UNDEFINED\nh0 1 night.q@h0 UNDEFINED\n"
}

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.128.0.5\n10.128.0.6\n",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-27-18-00-00-000000_train_1",
}
"""The first node of a task with `num_nodes: 2` and `accelerators: H100:8`, SkyPilot 0.10."""

FLUX = {"FLUX_URI": "local:///tmp/flux-Yq3mXj/local-0", "FLUX_ENCLOSING_ID": "f2e73NP"}
"""The script of `flux batch -N2`: Flux sets no other variable for it (flux-environment(7))."""
FLUX_R = (
    '{"version": 1, "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-3", "gpu": "0"}}, '
    '{"rank": "2", "children": {"core": "0,2-5"}}], "starttime": 0.0, "expiration": 0.0, '
    '"nodelist": ["fluke[6-7]", "login"]}}'
)
"""A resource set in the format of RFC 20."""

HOSTFILE = {"PRTE_MCA_prte_default_hostfile": "/home/alice/hosts"}
HOSTFILE_FILES = {
    "/home/alice/hosts": "# the lab\nfast slots=4 max_slots=8  # four for us\n\nslow slots=1\nfast slots=1\n"
}

ODD_NAMES = ("-oProxyCommand=x", "a\tb", "a b", "a:2", "user@a")


def find(environ, files=()):
    def read_text(path):
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory")
        return files[path]

    return find_allocation(environ, read_text)


def slots_of(allocation):
    return {host.name: host.slots for host in allocation.hosts}


WITHOUT_TASKS = {name: value for name, value in records.JOB_OF_3.items() if name != "SLURM_TASKS_PER_NODE"}
LARGER_JOB = {
    "SLURM_JOB_NODELIST": "gpu[08-10,12],login",
    "SLURM_TASKS_PER_NODE": "2(x3),1(x2)",
    "SLURM_JOB_NUM_NODES": "5",
}
WITHOUT_PAIRS = {name: value for name, value in LSF.items() if name != "LSB_MCPU_HOSTS"}
WORKERS = {f"digits-worker-{i}.digits.default.svc": 2 for i in (0, 1)}
PATH = "/etc/mpi/hostfile"


@pytest.mark.parametrize(
    ("environ", "files", "slots", "source"),
    [
        pytest.param(records.JOB_OF_3, {}, {"h0": 2, "h1": 1}, "Slurm job", id="salloc"),
        pytest.param(records.BATCH, {}, {"h0": 2, "h1": 1}, "Slurm job", id="sbatch"),
        pytest.param(records.INTERACTIVE_STEP, {}, {"h0": 2, "h1": 1}, "Slurm job", id="interactive-step"),
        pytest.param(records.BATCH_WITHOUT_TASKS, {}, {"h0": 1, "h1": 1}, "Slurm job", id="one-task-on-each-node"),
        pytest.param(
            WITHOUT_TASKS | {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"},
            {},
            {"h0": 4, "h1": 4},
            "Slurm job",
            id="without-tasks-the-processors-count",
        ),
        pytest.param(records.ONLY_TASK, {}, {"h0": 1}, "Slurm job", id="within-a-task-its-step-counts"),
        pytest.param(records.ONLY_TASK_OF_LARGER_JOB, {}, {"h0": 1}, "Slurm job", id="within-a-task-of-a-larger-job"),
        pytest.param(records.TERMINAL_TASK, {}, {"h0": 2, "h1": 1}, "Slurm job", id="a-terminal-has-its-step"),
        pytest.param(records.SUBMITTED_BY_A_TASK, {}, {"h1": 1}, "Slurm job", id="submitted-from-within-a-step"),
        pytest.param(
            records.JOB_OF_3 | LARGER_JOB,
            {},
            {"gpu08": 2, "gpu09": 2, "gpu10": 2, "gpu12": 1, "login": 1},
            "Slurm job",
            id="read-without-scontrol",
        ),
        pytest.param(
            OPENPBS,
            OPENPBS_FILES,
            {"cn01.cluster": 2, "cn02.cluster": 2},
            "PBS job 1234.pbs-server",
            id="a-line-a-slot",
        ),
        pytest.param(TORQUE, TORQUE_FILES, {"n8": 3, "n7": 2}, "PBS job 77.head", id="the-order-of-torque"),
        pytest.param(LSF, {}, {"grid03": 1, "grid05": 1, "grid01": 2}, "LSF job 11813", id="pairs-of-lsf"),
        pytest.param(
            WITHOUT_PAIRS, LSF_FILES, {"grid03": 1, "grid05": 1, "grid01": 2}, "LSF job 11813", id="the-file-of-lsf"
        ),
        pytest.param(MPIJOB, MPIJOB_FILES, WORKERS, "the MPI job of Kubernetes", id="workers-of-an-mpijob"),
        pytest.param(
            {"K_MPI_JOB_ROLE": "launcher", "PRTE_MCA_prte_default_hostfile": PATH},
            MPIJOB_FILES,
            WORKERS,
            "the MPI job of Kubernetes",
            id="the-variable-of-open-mpi-5-set-by-hand",
        ),
        pytest.param(
            {"OMPI_MCA_orte_default_hostfile": PATH},
            MPIJOB_FILES,
            WORKERS,
            "the MPI job of Kubernetes",
            id="a-trainjob-is-known-by-the-path",
        ),
        pytest.param(SGE, SGE_FILES, {"h0": 3, "h1": 2, "h2": 2}, "Grid Engine job 1", id="queues-add-up"),
        pytest.param(
            SKYPILOT,
            {},
            {"10.128.0.5": 8, "10.128.0.6": 8},
            "the task of SkyPilot",
            id="the-gpus-of-skypilot-are-slots",
        ),
        pytest.param(
            records.JOB_OF_3 | SKYPILOT, {}, {"h0": 2, "h1": 1}, "Slurm job", id="skypilot-on-slurm-has-slurm-s-hosts"
        ),
        pytest.param(HOSTFILE, HOSTFILE_FILES, {"fast": 5, "slow": 1}, "the hostfile /home/alice/hosts", id="hostfile"),
        pytest.param(
            {"OMPI_MCA_orte_default_hostfile": "/home/alice/hosts"},
            HOSTFILE_FILES,
            {"fast": 5, "slow": 1},
            "the hostfile /home/alice/hosts",
            id="the-older-variable-of-open-mpi",
        ),
        pytest.param(
            records.BATCH | HOSTFILE, HOSTFILE_FILES, {"h0": 2, "h1": 1}, "Slurm job", id="no-hostfile-in-a-batch-job"
        ),
        pytest.param(
            records.JOB_OF_3 | {"PBS_JOBID": "6", "PBS_NODEFILE": "/run/nodes", "PBS_NP": "3"},
            {"/run/nodes": "h0\nh0\nh1\n"},
            {"h0": 2, "h1": 1},
            "Slurm job 6",
            id="two-batch-systems-that-agree",
        ),
    ],
)
def test_find_allocation_returns_the_reserved_hosts_in_order_with_their_slots(environ, files, slots, source):
    allocation = find(environ, files)
    assert list(slots_of(allocation).items()) == list(slots.items())
    assert allocation.slots == sum(slots.values())
    assert allocation.source.startswith(f"{source} {environ['SLURM_JOB_ID']}" if source == "Slurm job" else source)


@pytest.mark.parametrize(
    "environ",
    [
        {"PATH": "/usr/bin", "HOME": "/root"},
        {"LSB_JOBID": "1", "LSB_QUEUE": "interactive"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "K_MPI_JOB_ROLE": "worker"},
        {"PRTE_MCA_prte_default_hostfile": "none"},
        {"PRTE_MCA_prte_default_hostfile": ""},
    ],
)
def test_without_an_allocation_no_hosts_are_found(environ):
    assert find(environ) is None


@pytest.mark.parametrize(
    ("environ", "files", "message"),
    [
        (records.TASK, {}, r"one of several tasks \(SLURM_STEP_NUM_TASKS=3\).*without srun"),
        (records.PMIX_TASK, {}, r"one of several tasks \(SLURM_STEP_NUM_TASKS=3\).*without srun"),
        (records.HETEROGENEOUS_SHELL, {}, r"SLURM_HET_SIZE=2.*--host"),
        (TORQUE | {"PBS_NP": "6"}, TORQUE_FILES, r"PBS_NP=6, and the hosts have 5 slots; name the hosts"),
        (OPENPBS, {}, f"PBS_NODEFILE={PBS_FILE} cannot be read: No such file.*--host"),
        (OPENPBS, {PBS_FILE: "\n"}, "has no host"),
        *(
            (LSF | {"LSB_MCPU_HOSTS": value}, {}, f"LSB_MCPU_HOSTS={value} is not a list of hosts and slots")
            for value in ("grid03", "grid03 one", "grid03 1 grid05", "grid03 0")
        ),
        (LSF | {"LSB_DJOB_NUMPROC": "8"}, {}, "LSB_DJOB_NUMPROC=8, and the hosts have 4 slots"),
        (SGE | {"NSLOTS": "8"}, SGE_FILES, "Grid Engine contradict .*NSLOTS=8, and the hosts have 7 slots"),
        (SGE, {}, f"PE_HOSTFILE={SGE_FILE} cannot be read"),
        (SGE, {SGE_FILE: "\n"}, "NSLOTS=7, and the hosts have 0 slots"),
        *(
            (SGE, {SGE_FILE: f"n01 7 all.q\n{line}\n"}, f"line 2: '{line}' is not a host with its slots; .*--host")
            for line in ("n02", "n02 two", "n02 0 all.q", "n02 -1", "n02 ²")
        ),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "1"}, {}, r'SKYPILOT_NODE_RANK=1.*if \[ "\$SKYPILOT_NODE_RANK" = 0 \]'),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, {}, "SKYPILOT_NUM_NODES=3, and SKYPILOT_NODE_IPS has 2 addresses"),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0.5"}, {}, "PER_NODE=0.5 is not a whole number"),
        ({"SKYPILOT_NODE_IPS": ""}, {}, "the task of SkyPilot has no host"),
        (FLUX | {"FLUX_JOB_ID": "f9", "FLUX_JOB_SIZE": "4"}, {}, r"one of several tasks \(FLUX_JOB_SIZE=4\)"),
        (FLUX | {"PATH": "/nowhere"}, {}, "FLUX_URI=local:.* but `flux resource R` failed: No such file .*--host"),
        ({"K_MPI_JOB_ROLE": "launcher", "HYDRA_HOST_FILE": PATH}, MPIJOB_FILES, "`mpiImplementation: OpenMPI`"),
        (
            HOSTFILE,
            {"/home/alice/hosts": "fast\nslow cores=3\n"},
            "hostfile /home/alice/hosts, line 2: 'cores=3' is not understood",
        ),
        *((OPENPBS, {PBS_FILE: f"{name}\n"}, "not the name of a host") for name in ODD_NAMES),
        (
            records.JOB_OF_3 | LSF,
            {},
            "^Slurm job 6 has h0: 2, h1: 1, but LSF job 11813 has grid03: 1, grid05: 1, grid01: 2; "
            "name the hosts with --host, or unset the variables of one$",
        ),
    ],
)
def test_an_unreadable_allocation_is_refused_with_the_way_out(environ, files, message):
    with pytest.raises(UsageError, match=message):
        find(environ, files)


def test_nodes_of_skypilot_without_gpus_take_any_number_of_instances():
    allocation = find(SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"})
    assert (slots_of(allocation), allocation.slots) == ({"10.128.0.5": None, "10.128.0.6": None}, None)


def test_daemons_in_a_job_of_grid_engine_are_started_by_ssh():
    assert dict(find(SGE, SGE_FILES).variables) == {"PRTE_MCA_plm_ssh_disable_qrsh": "1"}


class TestFlux:
    @pytest.fixture
    def answering(self, tmp_path):
        """Return a function that puts a command `flux` into PATH; it notes its words and answers."""

        def answer(text="", said="", status=0):
            command = tmp_path / "flux"
            words = tmp_path / "words"
            answers = {"out": text, "err": said}
            for name, content in answers.items():
                (tmp_path / name).write_text(content)
            command.write_text(
                f'#!/bin/sh\necho "$@" >{words}\ncat {tmp_path}/out\ncat {tmp_path}/err >&2\nexit {status}\n'
            )
            command.chmod(0o755)
            return {"PATH": f"{tmp_path}:/usr/bin:/bin"}, words

        return answer

    @pytest.mark.parametrize(
        ("job", "asked", "source"),
        [
            ({}, "resource R", "Flux job f2e73NP"),
            ({"FLUX_JOB_ID": "f9X", "FLUX_JOB_SIZE": "1"}, "job info f9X R", "Flux job f9X"),
        ],
    )
    def test_hosts_have_a_slot_for_each_core(self, answering, job, asked, source):
        path, words = answering(FLUX_R)
        allocation = find(FLUX | path | job)
        assert list(slots_of(allocation).items()) == [("fluke6", 4), ("fluke7", 4), ("login", 5)]
        assert (words.read_text().strip(), allocation.source) == (asked, source)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "null",
            FLUX_R.replace("fluke[6-7]", "fluke6"),
            FLUX_R.replace("fluke[6-7]", "fluke["),
            FLUX_R.replace("0-1", "0-x"),
            FLUX_R.replace('"core": "0-3", ', ""),
            FLUX_R.replace('["fluke[6-7]", "login"]', '"fluke"'),
            FLUX_R.replace("execution", "executions"),
        ],
    )
    def test_an_unknown_answer_is_quoted(self, answering, text):
        path, _ = answering(text)
        with pytest.raises(UsageError, match="the resources of Flux cannot be understood: .*--host"):
            find(FLUX | path)

    def test_the_error_of_flux_is_passed_on(self, answering):
        path, _ = answering(said="flux-resource: ERROR: Unable to connect to Flux\n", status=1)
        with pytest.raises(
            UsageError, match="`flux resource R` failed: flux-resource: ERROR: Unable to connect.*--host"
        ):
            find(FLUX | path)


class TestSlurm:
    def test_mpirun_is_allowed_to_share_a_step(self):
        assert dict(find(records.TERMINAL_TASK).variables) == {"SLURM_OVERLAP": "1", "SLURM_EXPORT_ENV": "ALL"}

    @pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"])
    def test_a_half_set_environment_is_refused_with_the_missing_variable(self, name):
        environ = {key: value for key, value in records.JOB_OF_3.items() if key != name}
        with pytest.raises(UsageError, match=f"{name} unset.*set {name}, or name the hosts with --host"):
            find(environ)

    @pytest.mark.parametrize(
        "change",
        [
            {"SLURM_JOB_NUM_NODES": "3"},
            {"SLURM_JOB_NUM_NODES": "two"},
            {"SLURM_JOB_NODELIST": "h[0-2]"},
            {"SLURM_TASKS_PER_NODE": "3"},
        ],
    )
    def test_contradictions_are_quoted(self, change):
        name, value = next(iter(change.items()))
        with pytest.raises(UsageError, match="contradict each other: SLURM_JOB_NODELIST=.*--host") as refused:
            find(records.JOB_OF_3 | change)
        assert f"{name}={value}" in str(refused.value)
        assert "\n" not in str(refused.value)


class TestSlurmLists:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("h0", "h0"),
            ("h[0-2]", "h0 h1 h2"),
            ("n[08-10]", "n08 n09 n10"),
            ("n[8-10,12]", "n8 n9 n10 n12"),
            ("z1,a[3,1]", "z1 a3 a1"),
            ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
            ("a-b[1].site,c", "a-b1.site c"),
        ],
    )
    def test_expanded_names_keep_the_order_of_the_slots(self, text, names):
        assert " ".join(expand_nodes(text)) == names

    @pytest.mark.parametrize("text", ["", "h[", "h[1", "h]1", "h[1-x]", "h[]", "h[1-2-3]", "a,,b", "h[[1]]", ",h"])
    def test_an_invalid_list_of_nodes_is_refused(self, text):
        with pytest.raises(UsageError, match="cannot be understood; name the hosts with --host"):
            expand_nodes(text)

    @pytest.mark.parametrize(("text", "numbers"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2,4(x2)", [4, 2, 4, 4])])
    def test_counts_are_repeated(self, text, numbers):
        assert list(expand_counts(text)) == numbers

    @pytest.mark.parametrize("text", ["", "two", "2(x)", "2x3", "2(x3", "1,,2", "-1"])
    def test_an_invalid_list_of_counts_is_refused(self, text):
        with pytest.raises(UsageError, match="cannot be understood; name the hosts with --host"):
            expand_counts(text)


def test_a_host_without_slots_accepts_any_number_of_instances():
    allocation = find(HOSTFILE, {"/home/alice/hosts": "fast\nslow slots=2\n"})
    assert (slots_of(allocation), allocation.slots) == ({"fast": None, "slow": 2}, None)


def test_node_files_are_read_from_disk(tmp_path):
    (tmp_path / "nodes").write_text("one\ntwo\n")
    assert slots_of(find_allocation({"PBS_NODEFILE": str(tmp_path / "nodes")})) == {"one": 1, "two": 1}
    (tmp_path / "nodes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not text"):
        find_allocation({"PBS_NODEFILE": str(tmp_path / "nodes")})


def allocation_of(*slots):
    hosts = tuple(Host(f"h{index}", number) for index, number in enumerate(slots))
    return Allocation(hosts, "Slurm job 12", "ask Slurm for more tasks (--ntasks)")


class TestChoosingHosts:
    @pytest.mark.parametrize(
        ("slots", "instances", "names"),
        [
            ((2, 2, 2), 6, "h0 h1 h2"),
            ((2, 2, 2), 3, "h0 h1 h2"),
            ((2, 2, 2), 4, "h0 h1"),
            ((2, 2, 2), 1, "h0"),
            ((1, 2, 2), 4, "h1 h2"),
            ((2, 2, 1), 2, "h0 h1"),
            ((None, None), 8, "h0 h1"),
            ((1, None, None), 8, "h1 h2"),
            ((8,), 5, "h0"),
            ((4, 1, 1), 4, "h0"),
            ((4, 1, 1), 6, "h0 h1 h2"),
            ((4, 2, 2, 1), 6, "h0 h1 h2"),
            ((4, 2, 2, 1), 9, "h0 h1 h2 h3"),
            ((2, 1), 3, "h0 h1"),
        ],
    )
    def test_instances_are_spread_evenly_over_as_many_hosts_as_possible(self, slots, instances, names):
        chosen = choose_hosts(allocation_of(*slots), instances)
        assert " ".join(host.name for host in chosen.hosts) == names
        assert chosen.source == "Slurm job 12"

    def test_more_instances_than_slots_are_refused(self):
        with pytest.raises(UsageError) as refused:
            choose_hosts(allocation_of(2, 1), 4)
        assert str(refused.value) == (
            "4 instances do not fit on the 3 slots of Slurm job 12 (h0: 2, h1: 1): use 3 (--num-instances), "
            "ask Slurm for more tasks (--ntasks), or name the hosts with --host, which counts no slots"
        )

    @pytest.mark.parametrize("slots", [(4, 1, 1), (4, 2, 2, 1), (1, 1, 1, 1, 1)])
    def test_the_advised_number_of_instances_is_accepted(self, slots):
        for replicas in range(1, 13):
            with pytest.raises(UsageError) as refused:
                choose_hosts(allocation_of(*slots), 60, replicas)
            advised = int(re.search(r"use (\d+) \(--num-instances\)", str(refused.value))[1])
            assert replicas % advised == 0
            settings = LaunchSettings(("p",), num_instances=advised, num_replicas=replicas)
            check_hosts(choose_hosts(allocation_of(*slots), advised, replicas).hosts, settings)

    def test_unused_slots_are_reported(self):
        reserved = allocation_of(4, 2, 1)
        used = choose_hosts(reserved, 4).hosts
        assert describe_use(reserved, used, LaunchSettings(("p",), num_instances=4, num_replicas=12), (2, 2)) == (
            "4 instances on the 7 slots of Slurm job 12 (h0: 2 of 4, h1: 2 of 2, h2: 0 of 1): "
            "equal shares come before more hosts, and 4 divide equally over 2 at most; "
            "6 is the most for 12 replicas (--num-instances)"
        )
        everything = choose_hosts(reserved, 7).hosts
        seven = LaunchSettings(("p",), num_instances=7, num_replicas=7)
        assert describe_use(reserved, everything, seven, (4, 2, 1)) == ""
        assert describe_use(allocation_of(None), (Host("h0"),), LaunchSettings(("p",)), (1,)) == ""

    def test_a_long_list_of_hosts_is_shortened_in_messages(self):
        with pytest.raises(UsageError, match=r"\(h0: 1, h1: 1, h2: 1, h3: 1, ... 64 hosts in all\)"):
            choose_hosts(allocation_of(*[1] * 64), 65)


def test_reading_an_allocation_imports_no_heavy_package():
    heavy = "{'numpy', 'mpi4py', 'jax', 'collectives', 'ClusterShell'}"
    program = f"import sys, poprun.hosts.allocation; sys.exit(repr({heavy} & set(sys.modules) or ''))"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert finished.stderr in ("", "''\n")


def test_schedulers_are_asked_if_any_of_their_variables_is_set():
    assert set(RESERVING) == {name for scheduler in (*BATCH_SYSTEMS, *HOSTFILES) for name in scheduler.variables}
