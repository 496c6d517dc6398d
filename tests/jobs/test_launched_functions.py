"""Functions that Python programs launch as jobs: from a test, a script and a notebook."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys

import numpy as np
import pytest
from poprun_jobs import LIMIT_S, ROOT_ALLOWED, Finished, Job, await_none, run_alone, start_command
from tiers import only

import popdist

SEVERAL_LIMIT_S = 2 * LIMIT_S
"""Time limit of a script with several launches."""

pytestmark = [pytest.mark.job, pytest.mark.cores(2), pytest.mark.timeout(SEVERAL_LIMIT_S + 50)]

REPLICAS = 4


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process launch jobs, as root too, with the environment of a user."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "POPDIST_", "PJRT_"))]:
        monkeypatch.delenv(name)
    for name, value in ROOT_ALLOWED.items():
        monkeypatch.setenv(name, value)


# ---- from a test


def sum_over(data: np.ndarray, greeting: str) -> tuple[int, bytes]:
    popdist.init()
    popdist.init()
    here = popdist.instance()
    print(greeting, here.index)
    print("trouble", file=sys.stderr)
    own = list(data[here.replica_offset :][: here.local_replicas])
    total = popdist.communicator().ordered_all_reduce(own, np.empty_like(data[0]), "sum")
    return here.index, total.tobytes()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("instances", only([2], [1, 2, 4]))
def test_a_function_of_a_test_has_the_same_bits_on_any_number_of_instances(instances, seed, capsys):
    data = np.random.default_rng(seed).standard_normal((REPLICAS, 1001)).astype(np.float32)
    expected = ((data[0] + data[1]) + (data[2] + data[3])).tobytes()
    found = popdist.launch(sum_over, data, "instance", num_instances=instances, num_replicas=REPLICAS)
    assert found == [(index, expected) for index in range(instances)]
    shown = capsys.readouterr()
    tags = [f"[1,{index}]" for index in range(instances)]
    plain = "" if instances == 1 else "<stdout>:"
    out = [f"{tag * bool(plain)}{plain}instance {index}" for index, tag in enumerate(tags)]
    assert sorted(shown.out.splitlines()) == out
    noted = [line for line in shown.err.splitlines() if " POPRUN [W] " not in line]  # there may be too few cores
    assert sorted(noted) == [f"{tag}<stderr>:trouble" for tag in tags]


# ---- from a script

SCRIPT = """
import atexit, json, os, sys, threading
import numpy as np
import popdist

big = np.arange(4_000_000.)
said = {}


class Unlucky(Exception):
    def __init__(self, index, reason):
        super().__init__(reason)
        self.index = index


class Point:
    def __init__(self, x):
        self.x = x


def use_globals():
    import pytest  # not the installed one

    popdist.init()
    big[0] += popdist.getInstanceIndex() + pytest.hidden
    try:
        popdist.launch(fail)
    except popdist.LifeCycleError as error:
        return Point(float(big.sum())), str(error)


def leave():
    sys.exit(3)


def fail():
    popdist.init()
    if popdist.getInstanceIndex() == 1:
        raise Unlucky(1, "no luck")
    popdist.synchronize()


def nothing_to_send():
    return threading.Lock()


class GivenUp(BaseException):
    pass


def give_up():
    raise GivenUp("no hope")


def fork():
    reader, writer = os.pipe()
    if pid := os.fork():
        atexit.register(os.waitpid, pid, 0)
        atexit.register(os.write, writer, b".")
        return "parent"
    os.read(reader, 1)
    return "child, after its parent"


def tell(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        said[args[0].__name__] = [type(error).__name__, str(error), getattr(error, "exit_status", 0)]


found = popdist.launch(use_globals, num_instances=2)
said["points"] = [isinstance(point, Point) and point.x - big.sum() for point, _ in found]
said["nested"] = found[1][1]
try:
    popdist.launch(fail, num_instances=2)
except Unlucky as error:
    said["unlucky"] = [error.index, error.__notes__[0].split(" on ")[0], str(error.__cause__)]
said["fork"] = popdist.launch(fork)
tell(popdist.launch, nothing_to_send)
tell(popdist.launch, leave)
tell(popdist.launch, give_up)
tell(popdist.launch, fail, num_instances=2, num_replicas=3)
print(json.dumps(said))
"""


def test_a_script_gets_results_and_exceptions_of_its_own_classes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "pytest.py").write_text("hidden = 10")
    finished = run_alone(sys.executable, str(script), limit_s=SEVERAL_LIMIT_S)
    said = json.loads(finished.stdout.splitlines()[-1])
    assert said["points"] == [10.0, 11.0], "modules are found in the same order as in the launching process"
    index, note, trace = said["unlucky"]
    assert (index, note) == (1, "raised by instance 1")
    assert f'File "{script}", line ' in trace
    assert 'raise Unlucky(1, "no luck")' in trace
    assert "launched.py" not in trace
    assert finished.stderr.count("Traceback") == 0, "what the launching process raises is not printed too"
    assert "called inside a job: this process belongs to instance 1 of 2" in said["nested"]
    assert said["fork"] == ["parent"]
    assert said["nothing_to_send"][0] == "TypeError"
    assert "the result of the function, a lock, cannot be pickled" in said["nothing_to_send"][1]
    assert said["leave"][::2] == ["LaunchError", 3]
    assert said["leave"][1] == "the function has ended with SystemExit: 3"
    assert said["give_up"] == ["LaunchError", "the function has ended with GivenUp: no hope", 1]
    assert said["fail"][::2] == ["LaunchError", 2]
    assert "replicas must divide evenly" in said["fail"][1]


WAITING = """
import sys, time
import popdist

def wait():
    print("begun", flush=True)
    time.sleep(1000)

try:
    popdist.launch(wait, num_instances=2)
except KeyboardInterrupt as error:
    print("interrupted:", error)
"""


def waiting() -> Job:
    job = start_command(sys.executable, "-c", WAITING)
    job.wait_for("<stdout>:begun")
    return job


def test_an_interrupt_ends_the_job_and_is_raised_again():
    job = waiting()
    job.process.send_signal(signal.SIGINT)
    finished: Finished = job.finish()
    assert finished.stdout.splitlines()[-1] == "interrupted: the job of wait was ended"
    assert "poprun received SIGINT and ended all instances" in finished.own_text


IN_POPEN = """
import os, sys, time
import popdist

def wait():
    print("begun", flush=True)
    time.sleep(1000)

def interrupt(frame, event, arg):
    if frame.f_code.co_name == "_execute_child" and event in ("call", "return"):
        if event == "return":
            sys.settrace(None)
            print(frame.f_locals["self"].stdout.readline())
            raise KeyboardInterrupt
        return interrupt

sys.settrace(interrupt)
try:
    popdist.launch(wait)
except KeyboardInterrupt:
    print(os.waitpid(-1, 0)[1])
"""


def test_an_interrupt_while_poprun_is_started_ends_it_although_the_launching_process_goes_on():
    """subprocess has started poprun, but has not returned an object that could end it."""
    finished = run_alone(sys.executable, "-c", IN_POPEN)
    assert finished.stdout.split() == ["b'begun\\n'", str((128 + signal.SIGTERM) << 8)]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.complete)])
def test_nothing_is_left_of_a_job_whose_launching_process_is_killed(number):
    job = waiting()
    job.process.send_signal(number)
    job.process.wait(LIMIT_S)
    await_none(job.marker)
    assert job.finish().status == -number


# ---- slower ones


@pytest.mark.complete
@pytest.mark.usefixtures("allowed")
def test_a_function_that_exits_with_success_returns_nothing():
    assert popdist.launch(sys.exit, num_instances=2) == [None, None]


TEST_FILE = """
import popdist
import pytest

class Odd(Exception):
    pass

def helper():
    return popdist.getNumInstances()

def function(value):
    if value:
        raise Odd(helper())
    return helper()

def test_launch():
    assert popdist.launch(function, 0, num_instances=2) == [2, 2]
    with pytest.raises(Odd, match="2"):
        popdist.launch(function, 1, num_instances=2)
"""


@pytest.mark.complete
@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_functions_of_test_files_travel_however_pytest_has_imported_them(tmp_path, mode):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_own.py").write_text(TEST_FILE)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}", "--rootdir", str(tmp_path))
    finished = run_alone(sys.executable, *words, str(tmp_path / "tests"), cwd=tmp_path, limit_s=SEVERAL_LIMIT_S)
    assert "1 passed" in finished.stdout


LOSSES = """
import os, signal, sys
import jax.numpy as jnp
import numpy as np
import popdist

x = np.arange(64, dtype=np.float32)
start = jnp.zeros(())


def train():
    import optax
    import strategies

    strategy = strategies.PopDistStrategy()
    trainer = strategies.Trainer(strategy, lambda w, batch, key: jnp.mean((batch["x"] - w) ** 2), optax.sgd(0.1))
    state = trainer.init(start)
    for batch in strategy.distribute_dataset({"x": x}, batch_size=4, seed=0).epoch(0):
        if state.step == 2 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            if sys.argv[1] == "raise":
                raise ValueError("lost")
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = trainer.step(state, batch)
    return popdist.getInstanceIndex(), strategies.fingerprint(state.variables)


expected = popdist.launch(train, num_instances=1, num_replicas=4)
print([expected, popdist.launch(train, num_instances=2, num_replicas=4, options=sys.argv[2:])])
"""


@pytest.mark.complete
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize(("options", "count"), [(["--on-failure", "shrink"], 1), (["--spares", "1"], 2)])
def test_the_instances_that_are_left_return_results(tmp_path, how, options, count):
    script = tmp_path / "script.py"
    script.write_text(LOSSES)
    finished = run_alone(sys.executable, str(script), how, *options, limit_s=SEVERAL_LIMIT_S)
    [[_, expected]], results = ast.literal_eval(finished.stdout.splitlines()[-1])
    assert results == [(index, expected) for index in range(count)]
    if how == "raise":
        assert "instance 1 on" in finished.stderr
        assert 'raise ValueError("lost")' in finished.stderr
