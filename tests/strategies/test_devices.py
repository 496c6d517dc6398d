"""Devices of replicas: one thread each on a device, and the memory of arrays."""

import re
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import page_text

from strategies.exchange.flat import FlatLayout
from strategies.jax.gradients.gradient_programs import zeros_for
from strategies.jax.replicas.devices import THREADS, ReplicaDevices, borrow, choose_grid, is_key

LIMIT_S = 60.0


@pytest.mark.parametrize("replicas", [1, 6, 9, 11])
def test_on_a_cpu_all_replicas_share_a_device(replicas):
    devices = choose_grid(range(5, 5 + replicas)).first
    assert devices.devices == (jax.local_devices()[0],) * replicas
    assert (devices.width, devices.waves, devices.is_lockstep, devices.is_cpu) == (replicas, 1, True, True)


def test_replicas_of_other_instances_do_not_change_the_devices():
    assert choose_grid(range(4), local_index=1).first.devices == choose_grid(range(4)).first.devices


@dataclass(frozen=True)
class Accelerator:
    """A stand-in for an accelerator of JAX, which this machine need not have."""

    number: int
    platform = "gpu"


def rows_about_gpus():
    """Yield the rows of the table in gpus.md: instances, replicas of each, devices of each, and waves."""
    page = page_text("gpus.md")
    for row in re.findall(r"^\| (\d+) \| (\d+) \| (.*) \| (\d+) \|$", page, flags=re.MULTILINE):
        devices = [[int(number) for number in cell.split(", ")] for cell in re.split(r" *\| *", row[2]) if cell]
        yield int(row[0]), int(row[1]), devices, int(row[3])


@pytest.mark.parametrize(("instances", "local", "devices", "waves"), list(rows_about_gpus()))
def test_accelerators_are_shared_out_as_documented(instances, local, devices, waves, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(number) for number in range(4)])
    found = [choose_grid(range(index * local, (index + 1) * local), index).first for index in range(instances)]
    assert [[device.number for device in each.devices] for each in found] == devices
    assert {each.waves for each in found} == {waves}


def test_a_batch_is_whole_on_the_device_and_cut_without_a_copy():
    devices = choose_grid(range(3)).first
    placed = devices.place({"x": np.arange(6, dtype=np.float32), "y": np.ones((3, 2))})
    assert placed["x"].device == jax.local_devices()[0]
    parts = devices.parts(placed)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["x"].ctypes.data - placed["x"].unsafe_buffer_pointer() for part in parts] == [0, 8, 16]
    assert [part["y"].shape for part in parts] == [(1, 2)] * 3


def test_a_single_replica_gets_the_batch_unchanged():
    batch = {"x": np.zeros(3)}
    assert choose_grid(range(1)).first.parts(batch) == [batch]


def test_the_shape_for_a_replica_is_a_share_of_the_rows():
    leaf = np.zeros((24, 5), np.float64)
    assert choose_grid(range(12)).first.replica_shape(leaf) == jax.ShapeDtypeStruct((2, 5), np.float32)


@pytest.mark.parametrize("shape", [(), (5,), (7, 3)])
def test_rows_that_replicas_cannot_share_are_refused(shape):
    with pytest.raises(ValueError, match="for 3 local replicas; its first axis must be a multiple of their number"):
        choose_grid(range(3)).first.replica_shape(np.zeros(shape))


def test_zeros_are_memory_of_a_replica_alone():
    devices = choose_grid(range(2)).first
    layout = FlatLayout.of([jax.ShapeDtypeStruct((4096,), np.float32)], 0)
    zeros = [zeros_for(layout, devices.device_of(position))[-1] for position in range(2)]
    assert [array.shape for array in zeros] == [(4096,)] * 2
    assert zeros[0].unsafe_buffer_pointer() != zeros[1].unsafe_buffer_pointer()


class TestThreads:
    """Threads of replicas, one for each."""

    def test_threads_run_all_replicas_concurrently_and_return_results_in_order(self):
        devices = choose_grid(range(4)).first
        all_here = threading.Barrier(4)

        def work(position):
            all_here.wait(LIMIT_S)
            return position, threading.current_thread().name.startswith(THREADS)

        assert devices.each(work) == [(position, True) for position in range(4)]

    def test_one_replica_runs_in_the_main_thread(self):
        assert choose_grid(range(1)).first.each(lambda position: threading.current_thread()) == [
            threading.main_thread()
        ]

    def test_at_most_one_thread_per_device_runs_at_a_time(self):
        """Further replicas wait for their wave."""
        devices = ReplicaDevices((jax.local_devices()[0],) * 2, range(6))
        assert (devices.width, devices.waves, devices.is_lockstep) == (2, 3, False)
        running, most = set(), []

        def work(position):
            running.add(position)
            most.append(len(running))
            running.remove(position)
            return position

        assert devices.each(work) == list(range(6))
        assert max(most) <= 2

    def test_threads_raise_the_error_of_the_first_replica_after_all_have_ended(self):
        devices = choose_grid(range(3)).first
        others_may_end, told, ended = threading.Event(), [], []

        def work(position):
            if position == 1:
                raise KeyError("broken")
            others_may_end.wait(LIMIT_S)
            ended.append(position)

        def failed(error):
            told.append(error)
            others_may_end.set()

        with pytest.raises(KeyError, match="broken"):
            devices.each(work, failed)
        assert len(told) == 1
        assert sorted(ended) == [0, 2]

    def test_threads_end_with_their_devices(self):
        devices = choose_grid(range(3)).first
        threads = devices.each(lambda position: threading.current_thread())
        del devices
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)


ON_DEVICES = """\
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import strategies
from strategies.jax.replicas import devices, replicas

def loss_fn(variables, batch, key):
    kept = jax.random.bernoulli(key, 0.8, (4, 5))
    return jnp.mean((jnp.tanh(batch @ variables) * kept) ** 2), {"kept": kept.mean()}

def compute():
    strategy = strategies.IPUStrategy(4)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9))
    state = trainer.init(np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5))
    data = np.random.default_rng(0).standard_normal((96, 3)).astype(np.float32)
    for batch in strategy.distribute_dataset(data, batch_size=4).epoch(0):
        state, metrics = trainer.step(state, batch)
    squares = strategy.run(lambda x: x * x, args=(strategy.per_replica(float),))
    print(strategies.fingerprint(state.variables), dict(metrics), [float(square) for square in squares])
    try:
        total = strategy.run(lambda x: strategies.get_replica_context().all_reduce("sum", x), args=(1.0,))
        print([float(x) for x in total])
    except strategies.DeviceError as error:
        print(error)

if "one" in sys.argv:
    compute()
column = lambda replicas: devices.ReplicaDevices(tuple(jax.local_devices()), replicas)
replicas.choose_grid = lambda local, *_, **named: devices.DeviceGrid((column(local),))
compute()
"""


@pytest.mark.complete
def test_replicas_on_a_device_each_or_in_waves_compute_the_same(in_new_process):
    """Several devices of JAX stand for accelerators, each with an executable of its own."""
    on_one, all_at_once, *on_four = in_new_process(ON_DEVICES, "one").splitlines()
    assert all_at_once == "[4.0, 4.0, 4.0, 4.0]"
    assert on_four == [on_one, all_at_once]
    two = "--xla_force_host_platform_device_count=2"
    in_waves, refusal = in_new_process(ON_DEVICES, XLA_FLAGS=two).splitlines()
    assert in_waves == on_one
    assert refusal.startswith("4 replicas have to wait for each other on 2 devices")


ON_ONE_CORE = """\
import os, sys
import jax, numpy as np, optax
import strategies

if "one" in sys.argv:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
strategy = strategies.IPUStrategy(1)
trainer = strategies.Trainer(strategy, lambda variables, batch, key: (batch @ variables).var(), optax.adam(0.1))
state = trainer.init(np.linspace(-1, 1, 300, dtype=np.float32).reshape(30, 10))
for _ in range(3):
    state, _ = trainer.step(state, np.linspace(-2, 1, 1200, dtype=np.float32).reshape(40, 30))
print(jax.config.values["jax_cpu_enable_async_dispatch"], strategies.fingerprint(state.variables))
"""


@pytest.mark.complete
def test_on_one_core_programs_run_in_the_calling_thread_with_the_same_bits(in_new_process):
    is_async, bits = in_new_process(ON_ONE_CORE, "one").split()
    assert is_async == "False"
    assert in_new_process(ON_ONE_CORE).split()[1] == bits


def test_a_borrowed_array_is_viewed_in_place_and_not_kept_alive():
    array = jax.block_until_ready(jnp.arange(100.0) + 1)
    view = borrow(array)
    assert view.ctypes.data == array.unsafe_buffer_pointer()
    assert not view.flags.writeable
    del view
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


@pytest.mark.parametrize("array", [jnp.ones(3, jnp.bfloat16), jnp.zeros((0, 3)), np.float32(2), jnp.array([True])])
def test_other_arrays_can_be_borrowed(array):
    np.testing.assert_array_equal(borrow(array), np.asarray(array))


def test_keys_stay_keys():
    key = jax.random.key(0)
    assert is_key(key)
    assert borrow(key) is key
    assert not is_key(jnp.ones(2, jnp.uint32))
