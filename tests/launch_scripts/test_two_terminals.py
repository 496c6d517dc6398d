"""The script that starts the workers of TF_CONFIG in one terminal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fakes import fake

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch_scripts" / "two_terminals.sh"
LIMIT_S = 100


class Terminal:
    """A run of the script in a separate session, and its output."""

    def __init__(self, folder, *arguments, worker=f'exec "{sys.executable}" "$@"', **environ):
        """`worker` is the body of a shell script that stands for Python, once Python is known to be recent."""
        fake(folder / "bin", "python", f'case "$*" in *pip* | *version_info*) exit 0;; esac\n{worker}')
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("POPDIST_", "PJRT_", "TF_CONFIG"))}
        self.process = subprocess.Popen(
            ["sh", str(SCRIPT), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env=variables | {"VIRTUAL_ENV": str(folder), "PYTHONPATH": str(ROOT)} | environ,
        )
        self.lines = {"stdout": [], "stderr": []}
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self.lines]
        for reader in self._readers:
            reader.start()

    def _read(self, name):
        with getattr(self.process, name) as stream:
            for line in stream:
                with self._changed:
                    self.lines[name].append(line.rstrip("\n"))
                    self._changed.notify_all()

    def wait_for(self, *lines):
        with self._changed:
            assert self._changed.wait_for(lambda: set(lines) <= {*sum(self.lines.values(), [])}, LIMIT_S), self.lines

    def end(self):
        """Wait for the end, check that no process of the session is left, and return the exit status."""
        try:
            status = self.process.wait(LIMIT_S)
            assert others_of(self.process.pid) == []
        finally:
            self.dispose()
        for reader in self._readers:
            reader.join(LIMIT_S)
        return status

    def dispose(self):
        for pid in [*others_of(self.process.pid), *([self.process.pid] if self.process.poll() is None else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


def others_of(session):
    """Return the processes of a session except its leader, see proc(5)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of_session) == session and state != "Z" and int(stat.parent.name) != session:
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def _signals_as_in_a_terminal():
    """Restore SIGHUP: a shell cannot trap a signal that was ignored when it started, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def terminal(tmp_path):
    with ExitStack() as stack:

        def start(*arguments, **options):
            started = Terminal(tmp_path / "env", *arguments, **options)
            stack.callback(started.dispose)
            return started

        yield start


FOREVER = "exec tail -f /dev/null"


@pytest.mark.parametrize(("variables", "ports"), [({}, [3737, 3738]), ({"WORKERS": "3", "PORT": "99"}, [99, 100, 101])])
def test_each_worker_gets_its_configuration_and_arguments(terminal, variables, ports):
    script = terminal("--data", "my file", worker='echo "$TF_CONFIG" "$*"; echo error >&2', **variables)
    assert script.end() == 0
    for index in range(len(ports)):
        [line] = [line for line in script.lines["stdout"] if line.startswith(f"[worker {index}] ")]
        config, rest = json.JSONDecoder().raw_decode(line.removeprefix(f"[worker {index}] "))
        assert config == {
            "cluster": {"worker": [f"localhost:{port}" for port in ports]},
            "task": {"type": "worker", "index": index},
        }, rest
        assert line.endswith(" -m popdist.examples.digits --strategy multi-worker --data my file")
        assert f"[worker {index}] error" in script.lines["stderr"]


def test_each_worker_s_command_line_is_shown(terminal):
    script = terminal("--data", "my file", worker="exit 0")
    assert script.end() == 0
    for index in range(2):
        assert (
            f"[worker {index}] + TF_CONFIG='"
            '{"cluster":{"worker":["localhost:3737","localhost:3738"]},"task":{"type":"worker","index":' + str(index)
        ) + "}}' python -m popdist.examples.digits --strategy multi-worker --data 'my file'" in script.lines["stderr"]


def test_output_lines_come_through_unchanged(terminal):
    script = terminal(worker=r"printf '  a\\tb *\n\nlast'", WORKERS="1")
    assert script.end() == 0
    assert script.lines["stdout"] == ["[worker 0]   a\\tb *", "[worker 0] ", "[worker 0] last"]


def test_the_status_is_that_of_the_first_failure(terminal, tmp_path):
    """The other worker ends by itself, as workers do that have lost a peer."""
    os.mkfifo(tmp_path / "first")
    body = f'case "$TF_CONFIG" in *:1}}}}) exit 7;; *) cat "{tmp_path}/first"; echo "I have lost it"; exit 1;; esac'
    script = terminal(worker=body)
    with (tmp_path / "first").open("w"):
        script.wait_for("error: worker 1 ended with exit status 7")
    assert script.end() == 7
    script.wait_for("[worker 0] I have lost it", "error: worker 0 ended with exit status 1")


def test_a_worker_that_does_not_end_is_ended(terminal, tmp_path):
    """In this test `sleep` takes no time."""
    fake(tmp_path / "env" / "bin", "sleep", "exit 0")
    script = terminal(worker=f'case "$TF_CONFIG" in *:1}}}}) exit 7;; esac\n{FOREVER}')
    assert script.end() == 7


@pytest.mark.parametrize("is_at_terminal", [True, False], ids=["Ctrl-C", "kill"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_workers(terminal, number, status, is_at_terminal):
    script = terminal(worker=f"echo begins\n{FOREVER}", WORKERS="3")
    script.wait_for(*(f"[worker {index}] begins" for index in range(3)))
    (os.killpg if is_at_terminal else os.kill)(script.process.pid, number)
    assert script.end() == status
    assert not any("error" in line for line in script.lines["stderr"])


STOPS = """sh -c 'kill -STOP $PPID
while ! grep -q "^State:.T" /proc/$PPID/status; do :; done
echo stopped'"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_worker_receives_the_signal(terminal, number):
    worker = f"trap 'echo told; exit 1' TERM\ncase \"$TF_CONFIG\" in *:1}}}}) {STOPS};; *) {FOREVER};; esac"
    script = terminal(worker=worker)
    script.wait_for("[worker 1] stopped")
    os.kill(script.process.pid, number)
    assert script.end() == 128 + number
    assert "[worker 1] told" in script.lines["stdout"]


@pytest.mark.parametrize("ending", [STOPS, f"trap '' TERM\n{FOREVER}"], ids=["stopped", "deaf"])
def test_a_stopped_or_deaf_worker_does_not_delay_the_end(terminal, tmp_path, ending):
    """In this test `sleep` takes no time."""
    fake(tmp_path / "env" / "bin", "sleep", "exit 0")
    os.mkfifo(tmp_path / "first")
    body = f'case "$TF_CONFIG" in *:1}}}}) cat "{tmp_path}/first"; exit 7;; esac\necho begins\n{ending}'
    script = terminal(worker=body)
    script.wait_for("[worker 0] stopped" if ending is STOPS else "[worker 0] begins")
    with (tmp_path / "first").open("w"):
        pass
    assert script.end() == 7


def test_workers_share_a_secret_that_is_never_shown(terminal):
    """All workers of a run have the same secret, each run a new one, unless the user gives one."""
    tokens = []
    for _ in range(2):
        script = terminal(worker='echo "$POPDIST_JOB_TOKEN" | tr 0-9a-f g-v')
        assert script.end() == 0
        lines = script.lines["stdout"]
        assert len(lines) == 2
        assert len({line.partition("] ")[2] for line in lines}) == 1
        token = lines[0].partition("] ")[2].translate(str.maketrans("ghijklmnopqrstuv", "0123456789abcdef"))
        assert re.fullmatch("[0-9a-f]{32}", token)
        assert token not in "\n".join(script.lines["stderr"])
        tokens.append(token)
    assert tokens[0] != tokens[1]
    script = terminal(worker='echo "$POPDIST_JOB_TOKEN"', POPDIST_JOB_TOKEN="mine")
    assert script.end() == 0
    assert sorted(script.lines["stdout"]) == ["[worker 0] mine", "[worker 1] mine"]


@pytest.mark.parametrize("index", [0, 2])
def test_a_signal_during_the_start_of_workers_ends_all(terminal, index, tmp_path):
    """In this test `sleep` takes no time: a worker that has not begun hears no signal, and is killed then."""
    fake(tmp_path / "env" / "bin", "sleep", "exit 0")
    script = terminal(worker=f'case "$TF_CONFIG" in *:{index}}}}}) kill -INT $PPID;; esac\n{FOREVER}', WORKERS="3")
    assert script.end() == 130


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"WORKERS": "0"}, "WORKERS=0 is not a whole number of 1 to 64"),
        ({"WORKERS": "two"}, "WORKERS=two is not a whole number of 1 to 64"),
        ({"WORKERS": "999999999999999999999"}, "WORKERS=999999999999999999999 is not a whole number of 1 to 64"),
        ({"PORT": "65535"}, "PORT=65535 is not a whole number of 1 to 65534"),
    ],
)
def test_unusable_numbers_are_quoted(terminal, variables, error):
    script = terminal(**variables)
    assert script.end() == 1
    assert script.lines["stderr"][-1] == f"error: {error}"


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
def test_two_workers_train_together(terminal):
    script = terminal("--replicas", "4", "--max-steps", "2", "--model", "mlp", "--json", "-", PORT=str(free_ports(2)))
    assert script.end() == 0, script.lines
    [result] = [json.loads(line.removeprefix("[worker 0] ")) for line in script.lines["stdout"]]
    assert (result["strategy"], result["instances"], result["replicas"]) == ("multi-worker", 2, 4)
    assert re.fullmatch("[0-9a-f]{64}", result["variables_sha256"])


def free_ports(count):
    """Return the first of `count` consecutive free ports."""
    for first in range(19_500, 20_000 - count, count):  # below the ports of benchmarks
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no port is free")
