"""Jobs of Kubeflow's operators: their hostfiles, variables, names, keys and sshd, replayed on hosts of the bed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beds import Bed, open_bed
from kubeflow_operators import CLUSTER, HOSTFILE, MANIFESTS, Pods, pods_of_mpijob, pods_of_trainjob
from looping import Traces, await_value, own_lines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

HOME = "/home/mpiuser"
IMAGE = {"ssh_config": "ssh_config", "sshd_config": "sshd_pod_config"}
"""The files of the manifests' image in /etc/ssh, as Containerfile puts them there."""
WAITS = "waiting until digits-node-0-0.digits can be reached (ssh: connect to host"
LIMIT_S = 140.0
ALONE = ("--strategy", "ipu", "--replicas", "4")
SHORT = ("--model", "mlp", "--max-steps", "3")

END_SSHD = 'kill "$(cat "$1")"; while (: </dev/tcp/127.0.0.1/2222) 2>/dev/null; do sleep 0.01; done'

BECOME = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs mpi /etc/mpi
[ -z "$3" ] || printf %s "$3" >/etc/mpi/hostfile
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Provide three hosts without sshd, but with the files of the image and the keys of a job."""
    folder = tmp_path_factory.mktemp("pods")
    etc, keys = folder / "overlay" / "etc", folder / "overlay" / HOME[1:] / ".ssh"
    for each in (etc / "ssh", etc / "mpi", keys, folder / "bed"):
        each.mkdir(parents=True)
    for name, target in IMAGE.items():
        (etc / "ssh" / target).write_bytes((MANIFESTS / name).read_bytes())
    # The hosts of the bed run as root, the pods as a plain user.
    users = re.sub(r"(?m)^(root:.*):[^:]*:([^:]*)$", rf"\1:{HOME}:\2", Path("/etc/passwd").read_text())
    (etc / "passwd").write_text(users)
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa")]
    subprocess.run(make, check=True, timeout=60)
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    with open_bed(folder / "bed", 3, OVERLAY=str(etc.parent)) as hosts:
        for host in hosts.names:
            hosts.on(host, "bash", "-c", END_SSHD, "bash", f"{hosts.shared}/state/run/sshd_{host}.nspid")
        yield hosts


class Cluster:
    """The pods of a job on the hosts of the bed, where the launcher is the first host.

    Args:
        bed: The hosts.
        pods: The pods.
    """

    def __init__(self, bed: Bed, pods: Pods) -> None:
        self.bed, self.pods = bed, pods
        listed = (line.split() for line in (bed.shared / "state" / "etc" / "hosts").read_text().splitlines())
        addresses = {words[-1]: words[0] for words in listed}
        self._hosts = dict(zip(bed.names, pods.names, strict=False))
        self._waiting: list[subprocess.Popen[str]] = []
        for host, pod in self._hosts.items():
            domain = f"{pods.service}.{CLUSTER}"
            lines = [f"{addresses[host]} {pod}.{domain} {pod}"]  # written by the kubelet
            for other, name in self._hosts.items():
                if other != host:  # the cluster's name server does not know a pod yet that has just started
                    lines.append(
                        f"{addresses[other]} {name}.{domain} {name}.{pods.service} {name}.{pods.service}.default.svc"
                    )
            file = bed.shared / f"hosts_{host}"
            file.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
            hostfile = pods.hostfile if host == "h0" else ""
            done = bed.on(host, "sh", "-ec", BECOME, "sh", pod, str(file), hostfile)
            assert done.returncode == 0, done.stderr

    def start_others(self) -> None:
        """Start the commands of the pods besides the launcher."""
        hosts = [host for host in self._hosts if host != "h0"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._waiting = [self.bed.start(host, *self.pods.waiting, **silent) for host in hosts]

    def start(self, *words: str, **environ: str) -> Any:
        """Start a command in the launcher."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        fixed = self.pods.environ | root | {"HOME": HOME, "PATH": path, "POPRUN_SSH_ARGS": ""}
        fixed["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=self.bed.shared)  # a new pod remembers no answers
        return self.bed.start("h0", *words, environ=fixed | environ)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the launcher to its end."""
        with self.start(*words, **environ) as process:
            out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def replace_others(self) -> None:
        """Kill everything in the pods besides the launcher, and start them anew, before poprun can notice it."""
        self.close()
        self.start_others()
        others = list(self._hosts)[1:]
        for host in others:
            name = f"{self._hosts[host]}.{self.pods.service}"
            done = self.run("ssh", "-o", "ConnectionAttempts=60", name, "true")
            assert done.returncode == 0, done.stderr
        for pid in [pid for host in others for pid in self.bed.processes(host)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the pods besides the launcher."""
        for each in self._waiting:
            each.terminate()
        for each in self._waiting:
            each.wait(timeout=60)


@contextlib.contextmanager
def cluster_of(bed: Bed, pods: Pods) -> Iterator[Cluster]:
    cluster = Cluster(bed, pods)
    try:
        yield cluster
    finally:
        cluster.close()


def launcher_words(pods: Pods, instances: int = 2) -> list[str]:
    """Return the words of the manifest's command up to the program, for a number of instances."""
    words = list(pods.command[: pods.command.index("python")])
    words[words.index("--num-instances") + 1] = str(instances)
    return words


def program_of(pods: Pods) -> tuple[str, ...]:
    """Return the words of the manifest's program."""
    return pods.command[pods.command.index("python") :]


JOBS = {
    "trainjob": (pods_of_trainjob(), 2),
    "trainjob-2-a-pod": (pods_of_trainjob(numProcPerNode=2), 4),
    "mpijob": (pods_of_mpijob(), 2),
    "mpijob-launcher-works": (pods_of_mpijob(runLauncherAsWorker=True), 3),
}
MORE = [job for job in JOBS if job != "trainjob"]


@pytest.mark.parametrize("job", ["trainjob", *(pytest.param(job, marks=pytest.mark.complete) for job in MORE)])
def test_each_pod_of_the_hostfile_runs_its_instances(bed: Bed, job: str) -> None:
    pods, instances = JOBS[job]
    listed = [line.split(".")[0] for line in pods.hostfile.splitlines()]
    with cluster_of(bed, pods) as cluster:
        cluster.start_others()
        done = cluster.run(*launcher_words(pods, instances), "--num-replicas", str(instances), "hostname")
    assert done.returncode == 0, done.stderr
    on_each = instances // len(listed)
    assert sorted(done.stdout.splitlines()) == [
        f"[1,{index}]<stdout>:{listed[index // on_each]}" for index in range(instances)
    ]


def test_full_names_asked_of_open_mpi_do_not_send_the_launcher_to_itself(bed: Bed) -> None:
    with cluster_of(bed, pods_of_trainjob()) as cluster:
        cluster.start_others()
        asked = {"PRTE_MCA_prte_keep_fqdn_hostnames": "true", "PRTE_MCA_prte_default_hostfile": HOSTFILE}
        done = cluster.run(*launcher_words(cluster.pods), "hostname", **asked)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


@pytest.mark.complete
def test_the_port_may_stand_in_the_variable_of_open_mpi(bed: Bed) -> None:
    with cluster_of(bed, pods_of_trainjob()) as cluster:
        cluster.start_others()
        port = {"OMPI_MCA_plm_rsh_args": "-F none -p 2222 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"}
        done = cluster.run(*launcher_words(cluster.pods), "hostname", **port)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


@pytest.mark.complete
def test_pods_that_start_later_are_waited_for(bed: Bed) -> None:
    with cluster_of(bed, pods_of_trainjob()) as cluster:
        words = (*launcher_words(cluster.pods), "hostname")
        with cluster.start(*words, OMPI_MCA_plm_rsh_args="") as process:
            waits = any(WAITS in line for line in process.stderr)
            cluster.start_others()
            out, err = process.communicate(timeout=LIMIT_S)
    assert waits
    assert (process.returncode, len(out.splitlines())) == (0, 2), err


@pytest.mark.complete
def test_pods_that_never_start_end_the_launch(bed: Bed) -> None:
    traces = Traces(bed)
    with cluster_of(bed, pods_of_trainjob()) as cluster:
        words = (*launcher_words(cluster.pods), "--start-timeout-s", "2", "hostname")
        done = cluster.run(*words, OMPI_MCA_plm_rsh_args="")
    [said] = own_lines(done.stderr)
    assert re.match(r"host digits-node-0-0\.digits: ssh: .*, for 2 s \(--start-timeout-s\); start sshd there", said)
    assert (done.returncode, done.stdout, traces.left()) == (1, "", set())


def variables_in(done: subprocess.CompletedProcess[str]) -> str:
    """Return the fingerprint of the variables that a run of the example prints."""
    assert done.returncode == 0, done.stderr
    (found,) = re.findall("variables ([0-9a-f]{64})", done.stdout)
    return found


@pytest.mark.complete
@pytest.mark.parametrize("job", ["trainjob", "trainjob-2-a-pod", "mpijob"])
def test_a_manifest_trains_as_a_single_process_does(bed: Bed, job: str) -> None:
    pods, instances = JOBS[job]
    with cluster_of(bed, pods) as cluster:
        cluster.start_others()
        done = cluster.run(*launcher_words(pods, instances), *program_of(pods), *SHORT)
        alone = cluster.run(*program_of(pods), *SHORT, *ALONE)
    assert variables_in(done) == variables_in(alone)


@pytest.mark.complete
def test_a_job_goes_on_with_a_pod_that_replaces_a_lost_one(bed: Bed) -> None:
    pods = pods_of_trainjob()
    folder = Path(tempfile.mkdtemp(dir=bed.shared))
    long = ("--model", "mlp", "--max-steps", "40")
    waiting = ("--inject", "delay:instance=0,step=12,seconds=100")  # until the pod is lost
    options = ("--on-failure", "restart", "--max-restarts", "1", *waiting)
    keeping = ("--checkpoint-dir", str(folder), "--checkpoint-every", "5")
    with cluster_of(bed, pods) as cluster:
        cluster.start_others()
        with cluster.start(*launcher_words(pods), *options, *program_of(pods), *long, *keeping) as process:
            await_value(lambda: [*folder.glob("step_*5")], bool)
            cluster.replace_others()
            out, err = process.communicate(timeout=LIMIT_S)
        alone = cluster.run(*program_of(pods), *long, *ALONE)
    assert "restart 1 of 1: 2 instances on digits-node-0-0.digits, digits-launcher-0-0.digits" in err
    done = subprocess.CompletedProcess([], process.returncode, out, err)
    assert variables_in(done) == variables_in(alone)
