from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import slurm_records as records

from poprun.cli.settings import Settings
from poprun.errors import UsageError
from poprun.hosts.allocation import choose_hosts, describe_use, find_allocation
from poprun.hosts.hosts import Host, check_hosts
from poprun.hosts.schedulers.scheduler import Allocation
from poprun.hosts.schedulers.slurm import expand_counts, expand_nodes

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
    "/etc/mpi/hostfile": "digits-worker-0.digits-worker.default.svc slots=2\n"
    "digits-worker-1.digits-worker.default.svc slots=2\n"
}

HOSTFILE = {"PRTE_MCA_prte_default_hostfile": "/home/alice/hosts"}
HOSTFILE_FILES = {
    "/home/alice/hosts": "# the lab\nfast slots=4 max_slots=8  # four for us\n\nslow slots=1\nfast slots=1\n"
}


def find(environ, files=()):
    def read_text(path):
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory")
        return files[path]

    return find_allocation(environ, read_text)


def slots_of(allocation):
    return {host.name: host.slots for host in allocation.hosts}


class TestSlurm:
    @pytest.mark.parametrize(
        "environ", [records.JOB_OF_3, records.BATCH, records.INTERACTIVE_STEP], ids=["salloc", "sbatch", "interactive"]
    )
    def test_a_job_has_its_tasks_on_each_node(self, environ):
        allocation = find(environ)
        assert slots_of(allocation) == {"h0": 2, "h1": 1}
        assert (allocation.slots, allocation.source) == (3, f"Slurm job {environ['SLURM_JOB_ID']}")

    def test_a_job_without_tasks_has_one_on_each_node(self):
        assert slots_of(find(records.BATCH_WITHOUT_TASKS)) == {"h0": 1, "h1": 1}

    def test_without_tasks_at_all_the_processors_count(self):
        environ = {name: value for name, value in records.JOB_OF_3.items() if name != "SLURM_TASKS_PER_NODE"}
        assert slots_of(find(environ | {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"})) == {"h0": 4, "h1": 4}

    @pytest.mark.parametrize("environ", [records.ONLY_TASK, records.ONLY_TASK_OF_LARGER_JOB])
    def test_within_a_task_only_its_step_counts(self, environ):
        assert slots_of(find(environ)) == {"h0": 1}

    def test_a_shell_with_a_terminal_has_its_step(self):
        assert slots_of(find(records.TERMINAL_TASK)) == {"h0": 2, "h1": 1}

    def test_a_job_submitted_from_within_a_step_has_its_own_hosts(self):
        assert slots_of(find(records.SUBMITTED_BY_A_TASK)) == {"h1": 1}

    def test_mpirun_may_share_a_step(self):
        assert dict(find(records.TERMINAL_TASK).variables) == {"SLURM_OVERLAP": "1", "SLURM_EXPORT_ENV": "ALL"}

    @pytest.mark.parametrize("environ", [records.TASK, records.PMIX_TASK])
    def test_poprun_does_not_run_once_for_each_task(self, environ):
        with pytest.raises(UsageError, match=r"one of several tasks \(SLURM_STEP_NUM_TASKS=3\).*without srun"):
            find(environ)

    @pytest.mark.parametrize("environ", [records.HETEROGENEOUS_SHELL])
    def test_a_job_of_unlike_parts_is_refused(self, environ):
        with pytest.raises(UsageError, match=r"SLURM_HET_SIZE=2.*--host"):
            find(environ)

    @pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"])
    def test_a_half_set_environment_is_refused_naming_what_is_missing(self, name):
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

    def test_another_step_of_a_larger_job_is_read_without_scontrol(self):
        environ = records.JOB_OF_3 | {
            "SLURM_JOB_NODELIST": "gpu[08-10,12],login",
            "SLURM_TASKS_PER_NODE": "2(x3),1(x2)",
            "SLURM_JOB_NUM_NODES": "5",
        }
        assert slots_of(find(environ)) == {"gpu08": 2, "gpu09": 2, "gpu10": 2, "gpu12": 1, "login": 1}


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
    def test_names_keep_their_order_to_which_the_slots_belong(self, text, names):
        assert " ".join(expand_nodes(text)) == names

    @pytest.mark.parametrize("text", ["", "h[", "h[1", "h]1", "h[1-x]", "h[]", "h[1-2-3]", "a,,b", "h[[1]]", ",h"])
    def test_what_is_no_list_of_names_is_refused(self, text):
        with pytest.raises(UsageError, match="cannot be understood; name the hosts with --host"):
            expand_nodes(text)

    @pytest.mark.parametrize(("text", "numbers"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2,4(x2)", [4, 2, 4, 4])])
    def test_counts_are_repeated(self, text, numbers):
        assert list(expand_counts(text)) == numbers

    @pytest.mark.parametrize("text", ["", "two", "2(x)", "2x3", "2(x3", "1,,2", "-1"])
    def test_what_is_no_list_of_counts_is_refused(self, text):
        with pytest.raises(UsageError, match="cannot be understood; name the hosts with --host"):
            expand_counts(text)


class TestPbs:
    def test_the_file_has_a_line_for_each_slot(self):
        allocation = find(OPENPBS, OPENPBS_FILES)
        assert slots_of(allocation) == {"cn01.cluster": 2, "cn02.cluster": 2}
        assert allocation.source == "PBS job 1234.pbs-server"

    def test_its_order_is_kept(self):
        assert [host.name for host in find(TORQUE, TORQUE_FILES).hosts] == ["n8", "n7"]

    def test_torque_counts_the_slots_too(self):
        with pytest.raises(UsageError, match=r"PBS_NP=6, and the hosts have 5 slots; name the hosts"):
            find(TORQUE | {"PBS_NP": "6"}, TORQUE_FILES)

    def test_a_file_that_is_elsewhere_is_named(self):
        with pytest.raises(UsageError, match=f"PBS_NODEFILE={PBS_FILE} cannot be read: No such file.*--host"):
            find(OPENPBS)

    def test_an_empty_file_is_refused(self):
        with pytest.raises(UsageError, match="has no host"):
            find(OPENPBS, {PBS_FILE: "\n"})


class TestLsf:
    def test_hosts_and_slots_come_in_pairs(self):
        allocation = find(LSF)
        assert slots_of(allocation) == {"grid03": 1, "grid05": 1, "grid01": 2}
        assert allocation.source == "LSF job 11813"

    def test_where_the_list_is_too_long_for_a_variable_the_file_counts(self):
        environ = {name: value for name, value in LSF.items() if name != "LSB_MCPU_HOSTS"}
        assert find(environ, LSF_FILES).hosts == find(LSF).hosts

    @pytest.mark.parametrize("value", ["grid03", "grid03 one", "grid03 1 grid05", "grid03 0"])
    def test_what_are_no_pairs_is_quoted(self, value):
        with pytest.raises(UsageError, match=f"LSB_MCPU_HOSTS={value} is not a list of hosts and slots"):
            find(LSF | {"LSB_MCPU_HOSTS": value})

    def test_the_number_of_slots_is_checked(self):
        with pytest.raises(UsageError, match="LSB_DJOB_NUMPROC=8, and the hosts have 4 slots"):
            find(LSF | {"LSB_DJOB_NUMPROC": "8"})

    def test_an_interactive_shell_has_no_hosts(self):
        assert find({"LSB_JOBID": "1", "LSB_QUEUE": "interactive"}) is None


class TestKubernetes:
    def test_the_workers_of_an_mpijob(self):
        allocation = find(MPIJOB, MPIJOB_FILES)
        assert slots_of(allocation) == {f"digits-worker-{i}.digits-worker.default.svc": 2 for i in (0, 1)}
        assert allocation.source == "the MPIJob of Kubernetes"

    def test_the_variable_of_open_mpi_5_may_be_set_by_hand(self):
        environ = {"K_MPI_JOB_ROLE": "launcher", "PRTE_MCA_prte_default_hostfile": "/etc/mpi/hostfile"}
        assert find(environ, MPIJOB_FILES) == find(MPIJOB, MPIJOB_FILES)

    def test_operators_that_set_no_role_are_known_by_the_path(self):
        environ = {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
        assert find(environ, MPIJOB_FILES) == find(MPIJOB, MPIJOB_FILES)

    def test_a_job_for_another_mpi_is_refused(self):
        environ = {"K_MPI_JOB_ROLE": "launcher", "HYDRA_HOST_FILE": "/etc/mpi/hostfile"}
        with pytest.raises(UsageError, match="`mpiImplementation: OpenMPI`"):
            find(environ, MPIJOB_FILES)

    def test_other_pods_have_no_hosts(self):
        assert find({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "K_MPI_JOB_ROLE": "worker"}) is None


class TestOpenMPIHostfile:
    def test_slots_and_comments_are_those_of_open_mpi(self):
        allocation = find(HOSTFILE, HOSTFILE_FILES)
        assert slots_of(allocation) == {"fast": 5, "slow": 1}
        assert "/home/alice/hosts" in allocation.source

    def test_a_host_without_slots_takes_any_number(self):
        allocation = find(HOSTFILE, {"/home/alice/hosts": "fast\nslow slots=2\n"})
        assert (slots_of(allocation), allocation.slots) == ({"fast": None, "slow": 2}, None)

    def test_the_older_variable_counts_too(self):
        environ = {"OMPI_MCA_orte_default_hostfile": "/home/alice/hosts"}
        assert find(environ, HOSTFILE_FILES).hosts == find(HOSTFILE, HOSTFILE_FILES).hosts

    @pytest.mark.parametrize("value", ["none", ""])
    def test_no_file_may_be_asked_for(self, value):
        assert find({"PRTE_MCA_prte_default_hostfile": value}) is None

    def test_a_line_that_cannot_be_understood_is_named(self):
        with pytest.raises(UsageError, match="hostfile /home/alice/hosts, line 2: 'cores=3' is not understood"):
            find(HOSTFILE, {"/home/alice/hosts": "fast\nslow cores=3\n"})


class TestSeveral:
    def test_nobody_reserves_hosts_at_home(self):
        assert find({"PATH": "/usr/bin", "HOME": "/root"}) is None

    def test_a_hostfile_does_not_count_in_a_batch_job(self):
        assert slots_of(find(records.BATCH | HOSTFILE, HOSTFILE_FILES)) == {"h0": 2, "h1": 1}

    def test_two_batch_systems_may_say_the_same(self):
        environ = records.JOB_OF_3 | {"PBS_JOBID": "6", "PBS_NODEFILE": "/run/nodes", "PBS_NP": "3"}
        assert find(environ, {"/run/nodes": "h0\nh0\nh1\n"}).source == "Slurm job 6"

    def test_two_batch_systems_that_contradict_each_other_are_refused(self):
        with pytest.raises(UsageError) as refused:
            find(records.JOB_OF_3 | LSF)
        assert str(refused.value) == (
            "Slurm job 6 has h0: 2, h1: 1, but LSF job 11813 has grid03: 1, grid05: 1, grid01: 2; "
            "name the hosts with --host, or unset the variables of one"
        )

    @pytest.mark.parametrize("name", ["-oProxyCommand=x", "a\tb", "a b", "a:2", "user@a"])
    def test_names_that_are_no_hosts_are_refused(self, name):
        with pytest.raises(UsageError, match="not the name of one"):
            find(OPENPBS, {PBS_FILE: f"{name}\n"})

    def test_files_are_read_from_disk(self, tmp_path):
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
            "4 instances on the 3 slots of Slurm job 12 (h0: 2, h1: 1): use 3 (--num-instances), "
            "ask Slurm for more tasks (--ntasks), or name the hosts with --host, which counts no slots"
        )

    @pytest.mark.parametrize("slots", [(4, 1, 1), (4, 2, 2, 1), (1, 1, 1, 1, 1)])
    def test_what_is_advised_is_not_refused(self, slots):
        for replicas in range(1, 13):
            with pytest.raises(UsageError) as refused:
                choose_hosts(allocation_of(*slots), 60, replicas)
            advised = int(re.search(r"use (\d+) \(--num-instances\)", str(refused.value))[1])
            assert replicas % advised == 0
            settings = Settings(("p",), num_instances=advised, num_replicas=replicas)
            check_hosts(choose_hosts(allocation_of(*slots), advised, replicas).hosts, settings)

    def test_what_is_not_used_is_said(self):
        reserved = allocation_of(4, 2, 1)
        used = choose_hosts(reserved, 4).hosts
        assert describe_use(reserved, used, Settings(("p",), num_instances=4, num_replicas=12)) == (
            "4 instances on the 7 slots of Slurm job 12 (h0: 2 of 4, h1: 2 of 2, h2: 0 of 1), "
            "for equal shares go before more hosts, and 4 are equal on 2 at most; "
            "6 is the most for 12 replicas (--num-instances)"
        )
        everything = choose_hosts(reserved, 7).hosts
        assert describe_use(reserved, everything, Settings(("p",), num_instances=7, num_replicas=7)) == ""
        assert describe_use(allocation_of(None), (Host("h0"),), Settings(("p",))) == ""

    def test_many_hosts_are_cut_short_in_messages(self):
        with pytest.raises(UsageError, match=r"\(h0: 1, h1: 1, h2: 1, h3: 1, ... 64 hosts in all\)"):
            choose_hosts(allocation_of(*[1] * 64), 65)


def test_reading_an_allocation_costs_no_heavy_import():
    heavy = "{'numpy', 'mpi4py', 'jax', 'collectives', 'ClusterShell'}"
    program = f"import sys, poprun.hosts.allocation; sys.exit(repr({heavy} & set(sys.modules) or ''))"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert finished.stderr in ("", "''\n")
