"""Metrics of a step, and notices between instances."""

import jax.numpy as jnp
import numpy as np
import pytest
from connected import ConnectedStrategy

import collectives
from collectives.instruments import Instruments
from popdist.instance import Instance
from strategies import Metrics
from strategies.core.metrics import StepNotice, report_step
from strategies.trees import rows_of


@pytest.fixture
def metrics():
    return Metrics(("loss", "accuracy"), np.array([0.5, 0.25, 99], np.float32))  # further values may follow the means


def test_means_are_found_under_their_names(metrics):
    assert (metrics["loss"], metrics["accuracy"]) == (0.5, 0.25)
    assert type(metrics["loss"]) is float


def test_metrics_are_a_mapping_of_the_names_alone(metrics):
    assert dict(metrics) == {"loss": 0.5, "accuracy": 0.25}
    assert list(metrics) == ["loss", "accuracy"]
    assert len(metrics) == 2
    assert repr(metrics) == "Metrics({'loss': 0.5, 'accuracy': 0.25})"


def test_an_unknown_name_is_a_key_error(metrics):
    with pytest.raises(KeyError, match="recall"):
        metrics["recall"]
    assert metrics.get("recall", 3.0) == 3.0


class Counter:
    """A counter of the steps that are made."""

    def __init__(self):
        self.seen = []

    def steps_made(self, steps, rows, loss):
        self.seen.append((steps, rows, loss))


def counted(means, **more):
    """Return the counts of steps, rows and loss of a job of one instance with two replicas."""
    counter = Counter()
    single = collectives.connect("single", collectives.Settings(progress=Instruments(counter)))
    replicas = ConnectedStrategy(Instance(0, 1, 2, 0, 2, 0), single).replicas
    metrics, batch = Metrics(("loss",), means), {"x": np.zeros((4, 8)), "n": 3}
    report_step(replicas, replicas.instruments, lambda: rows_of(batch), 2, metrics, 5, **more)
    ((steps, rows, loss),) = counter.seen
    return steps, rows, loss()


@pytest.mark.parametrize("arrays", [np, jnp])
def test_step_counters_get_the_steps_the_rows_and_a_loss_that_is_ready(arrays):
    means = arrays.array([0.5, 2.0], np.float32)
    if arrays is jnp:
        means.block_until_ready()
    assert counted(means) == (1, 4, 0.5)
    assert counted(means, tails=arrays.ones((5, 2), np.float32)) == (5, 20, 0.5)


def test_a_missing_loss_is_unknown():
    gone = jnp.array([0.5])
    gone.delete()
    assert Metrics(("loss",), gone).loss_at_hand() is None
    assert Metrics((), np.zeros(0, np.float32)).loss_at_hand() is None


# ---- notices that reach all instances at the same step


def test_a_new_notice_is_not_given():
    notice = StepNotice()
    assert (notice.is_given, notice.number, notice.is_agreed) == (False, 0, False)


def test_a_local_notice_is_agreed_only_after_a_step_has_carried_it():
    notice = StepNotice()
    notice.give(15)
    assert (notice.is_given, notice.number, notice.is_agreed) == (True, 15, False)


def test_a_notice_to_any_single_replica_is_enough():
    notice = StepNotice()
    notice.agree(1 / 1024)
    assert (notice.is_given, notice.is_agreed) == (False, True)
    notice.agree(0.0)
    assert not notice.is_agreed
