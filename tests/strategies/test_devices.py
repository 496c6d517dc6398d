"""Where replicas run: how many at a time, and what lies where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies.devices import ReplicaDevices, borrow, choose_devices, is_key


@pytest.mark.parametrize(
    ("replicas", "width", "waves"), [(1, 1, 1), (6, 6, 1), (8, 8, 1), (9, 3, 3), (11, 1, 11), (12, 6, 2), (16, 8, 2)]
)
def test_as_many_run_at_once_as_divide_them_evenly(replicas, width, waves):
    assert len(jax.local_devices()) == 8
    devices = choose_devices(range(5, 5 + replicas))
    assert (devices.width, devices.waves, devices.is_lockstep) == (width, waves, waves == 1)
    assert devices.devices == tuple(jax.local_devices()[:width])


def test_every_wave_gets_its_rows():
    batch = {"x": np.arange(24).reshape(12, 2)}
    waves = list(choose_devices(range(12)).cut_into_waves(batch))
    assert [wave["x"][:, 0].tolist() for wave in waves] == [list(range(0, 12, 2)), list(range(12, 24, 2))]
    assert list(choose_devices(range(4)).cut_into_waves(batch)) == [batch]


def test_a_batch_lies_on_the_devices_of_its_replicas():
    devices = choose_devices(range(3))
    placed = devices.place(np.arange(6, dtype=np.float32))
    assert [shard.data.tolist() for shard in placed.addressable_shards] == [[0, 1], [2, 3], [4, 5]]
    assert devices.placed_shape(np.zeros((6, 2), np.float32)).sharding == devices.split
    assert choose_devices(range(12)).place("stays on the host") == "stays on the host"


def test_the_shape_of_a_wave_is_a_share_of_the_rows():
    leaf = np.zeros((24, 5), np.float64)
    assert choose_devices(range(12)).wave_shape(leaf) == jax.ShapeDtypeStruct((12, 5), np.float32)


@pytest.mark.parametrize("shape", [(), (5,), (7, 3)])
def test_rows_that_replicas_cannot_share_are_refused(shape):
    with pytest.raises(ValueError, match="for 3 local replicas; its first axis must be a multiple of their number"):
        choose_devices(range(3)).wave_shape(np.zeros(shape))


def test_every_replica_runs_the_same_program_on_its_part():
    devices = choose_devices(range(3))
    program = devices.compile(lambda own, all_: own * 2 + all_.sum(), [True, False])
    found = program(np.arange(6, dtype=np.float32), np.ones(2, np.float32))
    assert found.tolist() == [2, 4, 6, 8, 10, 12]
    assert [view.tolist() for view in devices.views(found)] == [[2, 4], [6, 8], [10, 12]]


def test_the_equations_are_those_of_one_replica():
    traced = choose_devices(range(3)).trace(
        lambda x: x + 1, [jax.ShapeDtypeStruct((6, 2), np.float32)], is_split=[True]
    )
    assert [aval.shape for aval in traced.in_avals] == [(2, 2)]


def test_zeros_are_those_of_all_replicas():
    devices = choose_devices(range(3))
    zeros = devices.zeros(4, np.dtype(np.float32))
    assert (zeros.shape, zeros.sharding) == ((12,), devices.split)
    assert devices.zeros_shape(4, np.dtype(np.float32)).shape == zeros.shape


def test_what_is_borrowed_is_seen_in_place_and_not_kept():
    array = jax.block_until_ready(jnp.arange(100.0) + 1)
    view = borrow(array)
    assert view.ctypes.data == array.unsafe_buffer_pointer()
    assert not view.flags.writeable
    del view
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


@pytest.mark.parametrize("array", [jnp.ones(3, jnp.bfloat16), jnp.zeros((0, 3)), np.float32(2), jnp.array([True])])
def test_other_arrays_are_borrowed_too(array):
    np.testing.assert_array_equal(borrow(array), np.asarray(array))


def test_keys_stay_keys():
    key = jax.random.key(0)
    assert is_key(key)
    assert borrow(key) is key
    assert not is_key(jnp.ones(2, jnp.uint32))


def test_replicas_of_other_instances_do_not_change_the_devices():
    assert choose_devices(range(4), local_index=1).devices == choose_devices(range(4)).devices
    assert isinstance(choose_devices(range(4)), ReplicaDevices)
