"""Things that a background thread prepares: who gets them, and how the thread and the process end."""

import logging
import threading

import pytest

import strategies
from strategies.background import Background

LIMIT_S = 60
NAME = "prepares-for-a-test"


@pytest.fixture
def background():
    return Background(NAME)


@pytest.fixture
def gate():
    """Something to prepare that begins, and then waits until it is opened."""

    class Gate:
        def __init__(self):
            self.has_begun, self.is_open = threading.Event(), threading.Event()

        def __call__(self):
            self.has_begun.set()
            assert self.is_open.wait(LIMIT_S)
            return "behind the gate"

    gate = Gate()
    yield gate
    gate.is_open.set()


def wait_for_the_end():
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_what_was_prepared_is_there_once(background):
    made_by = []
    background.prepare("key", lambda: made_by.append(threading.current_thread().name) or "thing")
    wait_for_the_end()
    assert made_by == [NAME]
    assert background.take("key") == "thing"
    assert background.take("key") is None


def test_it_is_prepared_in_the_context_of_whoever_asks(background):
    strategy = strategies.IPUStrategy(num_replicas=2)
    with strategy.scope():
        background.prepare("key", strategies.get_strategy)
    wait_for_the_end()
    assert background.take("key") is strategy


def test_nothing_is_prepared_twice(background, gate):
    made = []
    background.put("there", 1)
    background.prepare("there", lambda: made.append("there"))
    background.prepare("gate", gate)
    assert gate.has_begun.wait(LIMIT_S)
    background.prepare("gate", lambda: made.append("gate"))
    for _ in range(2):
        background.prepare("waiting", lambda: made.append("waiting"))
    gate.is_open.set()
    wait_for_the_end()
    assert made == ["waiting"]
    assert background.take("there") == 1


class OpensForWhoWaits(threading.Condition):
    """Opens a gate as soon as somebody waits."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def wait_for(self, *arguments):
        self.gate.is_open.set()
        return super().wait_for(*arguments)


def test_who_takes_what_is_being_prepared_waits_for_it(background, gate):
    background._changed = OpensForWhoWaits(gate)
    background.prepare("gate", gate)
    assert gate.has_begun.wait(LIMIT_S)
    assert background.take("gate") == "behind the gate"


def test_who_takes_what_has_not_begun_makes_it_alone(background, gate):
    made = []
    background.prepare("gate", gate)
    background.prepare("next", lambda: made.append("next"))
    assert gate.has_begun.wait(LIMIT_S)
    assert background.take("next") is None
    gate.is_open.set()
    wait_for_the_end()
    assert made == []


def test_what_is_not_wanted_any_more_is_dropped_wherever_it_is(background, gate):
    made = []
    background.put("there", 1)
    background.put("kept", 2)
    background.prepare("gate", gate)
    background.prepare("waiting", lambda: made.append("waiting"))
    assert gate.has_begun.wait(LIMIT_S)
    background.keep(lambda key: key == "kept")
    assert background.take("gate") is None  # at once
    gate.is_open.set()
    wait_for_the_end()
    assert [background.take(key) for key in ("there", "gate", "waiting", "kept")] == [None, None, None, 2]
    assert made == []


@pytest.mark.parametrize("error", [ValueError("of the loss"), SystemExit(3)])
def test_an_error_is_logged_and_what_follows_is_prepared(background, caplog, error):
    def fail():
        raise error

    with caplog.at_level(logging.WARNING):
        background.prepare("bad", fail)
        background.prepare("good", lambda: "thing")
        wait_for_the_end()
    assert background.take("bad") is None
    assert background.take("good") == "thing"
    assert "failed; it is made when it is needed" in caplog.text
    assert repr(error).partition("(")[0] in caplog.text


ENDING = """\
import threading
import jax, jax.numpy as jnp, numpy as np
from strategies.background import Background

def function(x):
    for number in range(40):
        x = jnp.tanh(x @ x) + number * jnp.sin(x)
    return x

def compile():
    print("begins", flush=True)
    has_begun.set()
    lowered.compile()
    print("compiled", flush=True)

lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((32, 32), np.float32))
has_begun = threading.Event()
background = Background("compiles")
background.prepare(1, compile)
background.prepare(2, compile)
assert has_begun.wait(60)
"""


def test_a_process_that_ends_waits_for_the_compiler_only(in_new_process):
    """Without that it aborts, with status 134."""
    assert in_new_process(ENDING).split() == ["begins", "compiled"]
