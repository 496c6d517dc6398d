"""The parts of `popdist.launch` without jobs: greeting, packing, reports and refusals."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from test_spawned import LAUNCHERS

from popdist.environments.poprun import ADDRESS_VARIABLE, TOKEN_VARIABLE
from popdist.environments.single import ALONE_VARIABLE
from popdist.errors import LaunchError, LifeCycleError
from popdist.launcher import job_environment, launch, poprun_words
from popdist.launching import channel
from popdist.launching.channel import LaunchMessage, MessageKind
from popdist.launching.reception import FunctionReception
from popdist.launching.reports import InstanceFailure, InstanceResult, ReportSender, cause_of, read_report, results_of
from popdist.launching.travelling import pack, pack_call, sources_of_main, unpack
from popdist.records.proofs import RANDOM_BYTES, prove
from popdist.xla import POOL_VARIABLE, fix_thread_pool, without_own_setting

LIMIT_S = 60.0
PROOF_BYTES = 32


sprung: list[str] = []


class Trap:
    """An object that notes in `sprung` that it was unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return spring, ()


def spring() -> None:
    sprung.append("sprung")


@pytest.fixture
def reception() -> Iterator[FunctionReception]:
    with FunctionReception(pack_call(len, ["abc"])) as opened:
        yield opened


def stranger_at(reception: FunctionReception) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LIMIT_S)
    connection.connect("\0" + reception.variables[ADDRESS_VARIABLE])
    return connection


def answer_on(connection: socket.socket) -> bytes:
    """Return the next bytes; none if the other side ends the connection, in whatever way."""
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def asked_function(reception: FunctionReception) -> list[object]:
    caller = channel.call(reception.variables)
    caller.limit(LIMIT_S)
    caller.send(LaunchMessage(MessageKind.READY))
    _, *parts = caller.receive().parts
    caller.close()
    return unpack(parts)


# ---- who may connect


def test_a_caller_with_the_token_gets_the_function(reception):
    assert asked_function(reception) == (len, ("abc",))


@pytest.mark.parametrize("token", ["", "00" * 16, "another"])
def test_a_caller_without_the_token_gets_only_the_challenge(reception, token):
    with stranger_at(reception) as connection:
        challenge = connection.recv(RANDOM_BYTES)
        own = bytes(RANDOM_BYTES)
        connection.sendall(own + prove(token, b"instance", challenge + own))
        assert answer_on(connection) == b""


def test_a_pickle_of_a_stranger_is_never_loaded(reception):
    trap = pickle.dumps(Trap())
    pickle.loads(trap)
    assert sprung.pop() == "sprung"
    with stranger_at(reception) as connection:
        challenge = connection.recv(RANDOM_BYTES)
        connection.sendall(trap.ljust(RANDOM_BYTES + PROOF_BYTES, b"."))
        assert len(challenge) == RANDOM_BYTES
        assert answer_on(connection) == b""
    assert asked_function(reception) == (len, ("abc",)), "the launching process still serves instances"
    assert reception.last_reports() == []
    assert sprung == []


def test_a_proof_cannot_be_used_again_or_sent_back(reception):
    token = reception.variables[TOKEN_VARIABLE]
    own = bytes(RANDOM_BYTES)
    with stranger_at(reception) as first, stranger_at(reception) as second:
        challenge, other = first.recv(RANDOM_BYTES), second.recv(RANDOM_BYTES)
        second.sendall(own + prove(token, b"instance", challenge + own))
        assert answer_on(second) == b"", "the proof answers another challenge"
        first.sendall(own + prove(token, b"launcher", challenge + own))
        assert answer_on(first) == b"", "the proof is that of the other side"
    assert challenge != other


def test_silent_strangers_do_not_keep_instances_waiting(reception):
    strangers = [stranger_at(reception) for _ in range(16)]
    assert asked_function(reception) == (len, ("abc",))
    for connection in strangers:
        connection.close()


def test_an_instance_waits_for_a_place_in_a_full_backlog():
    name = f"popdist-test-{os.getpid()}"
    variables = {ADDRESS_VARIABLE: name, TOKEN_VARIABLE: "secret"}
    begins = threading.Event()

    def serve() -> None:
        begins.wait(LIMIT_S)
        listening.accept()[0].close()
        channel.admit(listening.accept()[0], "secret").close()

    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(f"\0{name}")
        listening.listen(0)
        first.connect(f"\0{name}")
        thread = threading.Thread(target=serve)
        thread.start()
        begins.set()
        channel.call(variables).close()
        thread.join(LIMIT_S)


def test_an_instance_takes_nothing_from_a_false_launcher():
    name = f"popdist-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        answers: list[bytes] = []

        def pretend() -> None:
            connection, _ = listening.accept()
            connection.sendall(bytes(RANDOM_BYTES))
            answers.append(connection.recv(RANDOM_BYTES + PROOF_BYTES))
            connection.sendall(bytes(PROOF_BYTES) + pickle.dumps(Trap()))
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(LaunchError, match="does not know the token"):
            channel.call({ADDRESS_VARIABLE: name, TOKEN_VARIABLE: "secret"})
        thread.join(LIMIT_S)
    assert sprung == []
    assert b"secret" not in answers[0]


def test_a_launcher_that_has_ended_is_named():
    with FunctionReception([b""]) as ended:
        variables = ended.variables
    with pytest.raises(LaunchError, match=r"the process that called popdist\.launch cannot be reached"):
        channel.call(variables)
    with pytest.raises(LaunchError, match="cannot be reached"):
        channel.call({})


def test_a_reception_leaves_no_thread_and_wakes_the_callers_that_wait():
    with FunctionReception(pack_call(len, ["abc"])) as opened:
        caller = channel.call(opened.variables)
    with pytest.raises(OSError, match=r".*"):
        caller.receive()
    caller.close()
    for thread in threading.enumerate():
        if thread.name == "popdist-launch":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


# ---- packing


def test_large_arrays_travel_beside_the_pickle_without_a_copy_and_can_be_written():
    array = np.arange(1000.0)
    pickled, *buffers = pack({"array": array, "strided": array[::2]})
    assert len(pickled) < array.nbytes
    assert any(np.shares_memory(np.frombuffer(each, np.uint8), array) for each in buffers)
    found = unpack([bytes(pickled), *map(bytearray, buffers)])
    assert np.array_equal(found["array"], array)
    assert np.array_equal(found["strided"], array[::2])
    found["array"][0] = 7


def test_a_function_keeps_its_file_for_tracebacks():
    source = compile("def outer():\n    return lambda: 1 / 0\n", "<cell 3>", "exec")
    names: dict[str, object] = {"__name__": "__main__"}
    exec(source, names)
    function = unpack(pack(names["outer"]))
    assert function.__code__.co_filename == "<cell 3>"
    assert function().__code__.co_filename == "<cell 3>"


def test_the_lines_of_sources_without_a_file_are_sent_along(monkeypatch):
    import linecache

    monkeypatch.setitem(linecache.cache, "<cell 4>", (5, None, ["x=1\n"], "<cell 4>"))
    assert sources_of_main()["<cell 4>"] == ["x=1\n"]
    assert linecache.__file__ not in sources_of_main()


def test_an_object_that_cannot_travel_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent to instances, because it refers to lock, a lock, which"):
        pack_call(lambda: lock, ())
    with pytest.raises(TypeError, match="because it gets argument 2, a lock, which cannot be pickled"):
        pack_call(print, [1, lock])


def test_an_array_of_jax_on_an_accelerator_is_refused():
    device = SimpleNamespace(platform="gpu")
    on_gpu = type("ArrayImpl", (), {"__module__": "jaxlib._jax", "devices": lambda self: [device]})()
    with pytest.raises(TypeError, match="refers to on_gpu, a ArrayImpl, which .* an array of JAX on a gpu would start"):
        pack_call(lambda: on_gpu, ())


def test_without_cloudpickle_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(LaunchError, match=r"pip install cloudpickle"):
        pack_call(print, ())


def test_functions_of_modules_that_instances_cannot_import_travel_by_value(monkeypatch):
    module = type(sys)("in_memory_only")
    exec("def double(x):\n    return 2 * x\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "in_memory_only", module)
    packed = pack_call(module.double, ())
    wrapped = pack_call(functools.partial(module.double, 4), ())
    del sys.modules["in_memory_only"]
    assert unpack(packed)[0](3) == 6
    assert unpack(wrapped)[0]() == 8


# ---- reports


def sent(report: InstanceResult | InstanceFailure) -> InstanceResult | InstanceFailure:
    message = report.pack()
    return read_report(LaunchMessage(message.kind, [bytes(part) for part in message.parts]))


def result(value: object, index: int, count: int = 2, attempt: int = 0, may_lose: bool = False) -> InstanceResult:
    found = sent(InstanceResult(ReportSender(index, count, "h0", attempt, may_lose), pack(value)))
    assert isinstance(found, InstanceResult)
    return found


def failure(
    error: Exception, index: int = 0, follows: bool = False, parts: list[bytes] | None = None, attempt: int = 0
) -> InstanceFailure:
    parts = pack(error) if parts is None else parts
    sender = ReportSender(index, 2, "h0", attempt)
    found = sent(InstanceFailure(sender, f"{type(error).__name__}: {error}", "  in f\n", follows, parts))
    assert isinstance(found, InstanceFailure)
    return found


def test_results_come_in_the_order_of_the_instances():
    assert results_of([result("b", 1), result("a", 0)], 0) == ["a", "b"]


def test_only_results_of_the_last_attempt_count():
    old, new = result("old", 0), [result("new", 0, attempt=1), result("newer", 1, attempt=1)]
    assert results_of([failure(ValueError()), *new, old], 0) == ["new", "newer"]


@pytest.mark.parametrize(("reports", "missing"), [([], 0), ([0], 1), ([1], 0)])
def test_a_missing_result_is_an_error(reports, missing):
    with pytest.raises(LaunchError, match=f"no result has come from instance {missing}; let") as caught:
        results_of([result("a", index) for index in reports], 0)
    assert caught.value.exit_status == 0


def test_the_exception_that_follows_from_no_other_instances_end_is_the_cause():
    error = cause_of([failure(OSError("peer lost"), 0, follows=True), failure(KeyError("real"), 1)], 1)
    assert isinstance(error, KeyError)
    assert "instance 1 on h0:\n  in f" in str(error.__cause__)
    assert error.__notes__ == ["raised by instance 1 on h0", "instance 0 on h0 also failed: OSError: peer lost"]
    assert cause_of([result("a", 0)], 1) is None
    assert cause_of([failure(OSError("peer lost"), 0, follows=True)], 1) is None, "instance 1 was killed"


def test_the_exception_of_the_last_attempt_is_the_cause():
    error = cause_of([failure(OSError("first")), failure(KeyError("last"), 1, attempt=1)], 1)
    assert isinstance(error, KeyError)


def test_a_job_that_goes_on_without_lost_instances_returns_the_other_results():
    assert results_of([result("c", 2, 3, may_lose=True), result("a", 0, 3, may_lose=True)], 0) == ["a", "c"]
    early, left = result("a", 0, 4, may_lose=True), [result(each, i, 2, may_lose=True) for i, each in enumerate("cd")]
    assert results_of([*left, early], 0) == ["a", "c", "d"], "the last two were numbered anew"
    with pytest.raises(LaunchError, match="no result has come from instance 0"):
        results_of([failure(ValueError())], 0)


@pytest.mark.parametrize("parts", [[], [b"no pickle"], [pickle.dumps("no exception")]])
def test_an_exception_that_cannot_be_unpickled_is_described(parts):
    error = cause_of([failure(ValueError("text"), parts=parts)], 1)
    assert isinstance(error, LaunchError)
    assert str(error) == "ValueError: text"
    assert "in f" in str(error.__cause__)


ATTRIBUTES = ("part", "filename", "value")


class Composed(ValueError):
    def __init__(self, part: str, whole: str) -> None:
        super().__init__(f"{part} of {whole}")
        self.part = part


class Named(KeyError):
    pass


@pytest.mark.parametrize(
    "error", [Composed("a", "b"), Named("x"), FileNotFoundError(2, "gone", "a.txt"), StopIteration(4)]
)
def test_an_exception_keeps_its_class_text_and_attributes(error):
    error.add_note("noted")
    found = cause_of([failure(error)], 1)
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
    assert [getattr(found, name, None) for name in ATTRIBUTES] == [getattr(error, name, None) for name in ATTRIBUTES]
    assert found.__notes__[0] == "noted"


# ---- refusals


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launching_inside_a_job_is_refused_unless_the_process_has_left_it(launcher):
    with pytest.raises(LifeCycleError, match=r"popdist\.launch was called inside a job: .* instance 1 of 2"):
        job_environment(LAUNCHERS[launcher])
    alone = job_environment({**LAUNCHERS[launcher], ALONE_VARIABLE: "1", "HOME": "/root"})
    assert alone["HOME"] == "/root"
    assert not any(name.startswith(("POPDIST_", "OMPI_", "PMIX_", "TF_CONFIG")) for name in alone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_instances": "2"}, "num_instances is '2'; give a whole number"),
        ({"num_replicas": 2.0}, "num_replicas is 2.0"),
        ({"num_replicas": True}, "num_replicas is True"),
        ({"options": "--timeline run.json"}, r"give a list of words, such as \['--timeline', 'run.json'\]"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(changes, said):
    given = {"num_instances": 1, "num_replicas": None, "hosts": (), "options": ()} | changes
    with pytest.raises(TypeError, match=said):
        poprun_words(**given)


def test_hosts_are_passed_on_as_poprun_expects_them():
    assert poprun_words(np.int64(2), None, ["h0", "h1"], ["-v"]) == ["--num-instances", "2", "--host", "h0,h1", "-v"]
    assert poprun_words(1, 4, "h[0-3]", ())[2:] == ["--num-replicas", "4", "--host", "h[0-3]"]


def test_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="launch was called with 3; give a function"):
        launch(3)


def test_a_job_does_not_inherit_the_pool_of_this_processs_own_replicas():
    environ = {"PATH": "/bin"}
    fix_thread_pool(environ, 16)
    assert environ[POOL_VARIABLE] == "16"
    assert without_own_setting(environ) == {"PATH": "/bin"}
    assert without_own_setting({POOL_VARIABLE: "32"}) == {POOL_VARIABLE: "32"}, "the user's own"
