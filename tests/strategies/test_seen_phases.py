"""Events of a training for instruments: steps, phases in order, and their collectives."""

import threading

import jax.numpy as jnp
import numpy as np
import optax
from connected import ConnectedStrategy

import collectives
from collectives.instruments import CHECKPOINT, COMPILE, DATA, EXCHANGE, FORWARD_BACKWARD, UPDATE, Instruments
from popdist import Instance
from strategies import Trainer
from strategies.checkpoints.checkpoints import Checkpoints

ROWS = {"x": np.arange(48, dtype=np.float32).reshape(16, 3)}


class Eyes:
    """An observer of threads; each thread is an instance."""

    def __init__(self):
        self._of_threads = {}

    @property
    def seen(self):
        return self._of_threads.setdefault(threading.get_ident(), [])

    def step_begins(self, step):
        self.seen.append(f"step {step}")

    def phase_begins(self, phase):
        self.seen.append(phase)

    def phase_ends(self, phase):
        self.seen.append(f"end of {phase}")

    def operation_begins(self, number, call):
        self.seen.append(call.title)


def trained(strategy, eyes, folder=None):
    """Return the events of two steps, a batch each, and of the time before them."""
    dataset = strategy.distribute_dataset(ROWS, batch_size=2, shuffle=False)
    trainer = Trainer(strategy, lambda variables, batch, key: jnp.mean(batch["x"] @ variables), optax.sgd(0.1))
    state = trainer.init(np.ones(3, np.float32))
    eyes.seen.clear()
    for batch in dataset.epoch(0):
        state, _ = trainer.step(state, batch)
    if folder is not None:
        with Checkpoints(folder, trainer) as checkpoints:
            checkpoints.save(state)
    return list(eyes.seen)


def alone(eyes):
    single = collectives.connect("single", collectives.Settings(progress=Instruments(eyes)))
    return ConnectedStrategy(Instance(0, 1, 4, 0, 4, 0), single)


def whole(phase, *inside):
    return [phase, *inside, f"end of {phase}"]


def step(number, *prepared):
    """Return the events of a step whose gradients are one bucket: its last wait ends without another bucket."""
    return [
        *whole(DATA),
        f"step {number}",
        *whole(FORWARD_BACKWARD, *prepared),
        *whole(FORWARD_BACKWARD),
        *whole(EXCHANGE, "ordered_all_reduce 'gradients/float32'"),
        *whole(FORWARD_BACKWARD),
        *whole(UPDATE),
    ]


def test_a_step_has_its_phases_in_order():
    """The second step compiles nothing. At the end of the epoch the wait for data does not end."""
    eyes = Eyes()
    assert trained(alone(eyes), eyes) == [*step(0, "allocate", *whole(COMPILE)), *step(1), DATA]


def test_a_checkpoint_is_a_phase(tmp_path):
    eyes = Eyes()
    assert trained(alone(eyes), eyes, tmp_path)[-3:] == [DATA, *whole(CHECKPOINT)]


def test_an_instance_compiles_in_its_own_threads_only():
    """A thread for each replica runs the program that one of them has compiled."""
    eyes = Eyes()
    strategy = alone(eyes)
    strategy.run(lambda x: 2 * x, args=(np.float32(1),))
    assert [each for each in eyes.seen if COMPILE in each] == whole(COMPILE)
    assert [thread for thread, seen in eyes._of_threads.items() if seen] == [threading.get_ident()]
