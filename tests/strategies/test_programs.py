"""Programs of a single device: compiled once per shape, as if for one core, and run by many threads."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies.jax.programs.compilation import DeviceProgram, compiler_options, jit

DEVICE = jax.local_devices()[0]


def test_xla_does_not_divide_programs_among_cores():
    assert compiler_options({}) == {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}


def test_passes_disabled_by_the_user_stay_disabled():
    flags = "--xla_disable_hlo_passes=fusion --xla_cpu_enable_fast_math=false --xla_disable_hlo_passes=cse,dce"
    disabled = compiler_options({"XLA_FLAGS": flags})
    assert disabled == {"xla_disable_hlo_passes": "cse,dce,cpu-parallel-task-assigner"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_that_xla_would_divide_stays_whole():
    def divided(program):
        text = program.lower(np.zeros((2000, 2000), np.float32)).compile().as_text()
        return "outer_dimension_partitions" in text

    def function(x):
        return jnp.tanh(x) * jnp.exp(x)

    assert divided(jax.jit(function))
    assert not divided(jit(function))


def test_a_program_is_compiled_once_for_shapes_and_dtypes():
    traced = []
    program = DeviceProgram(lambda x, y: traced.append(1) or x + y, None)
    first = program.compiled(DEVICE, np.float32(1), np.zeros(3, np.float32))
    assert program.compiled(DEVICE, np.float32(2), jnp.ones(3)) is first
    assert program.compiled(DEVICE, np.float32(2), jax.ShapeDtypeStruct((3,), np.float32)) is first
    assert program.compiled(DEVICE, np.float32(2), np.zeros(4, np.float32)) is not first
    assert len(traced) == 2
    np.testing.assert_array_equal(first(np.float32(1), np.arange(3, dtype=np.float32)), [1, 2, 3])


def test_numbers_of_python_stay_weak():
    program = DeviceProgram(lambda x, y: x * y, None)
    half = np.ones(2, jnp.bfloat16)
    assert program.compiled(DEVICE, half, 2.0)(half, 2.0).dtype == jnp.bfloat16
    assert program.compiled(DEVICE, half, np.float32(2))(half, np.float32(2)).dtype == np.float32


def test_programs_use_the_jax_settings_of_the_calling_thread():
    """Settings belong to a thread, and programs run in other threads."""
    program = DeviceProgram(lambda x: x * np.float64(2), None)
    x = np.ones(2, np.float32)
    plain = program.compiled(DEVICE, x)
    with jax.default_matmul_precision("highest"):
        assert program.compiled(DEVICE, x) is not plain
    assert program.compiled(DEVICE, x) is plain


def test_threads_run_the_same_executable_concurrently():
    all_here, found = threading.Barrier(3), {}

    def meet(x):
        all_here.wait(60)
        return x

    def function(x):
        return jax.pure_callback(meet, jax.ShapeDtypeStruct((), np.float32), x) + 1

    executable = DeviceProgram(function, None).compiled(DEVICE, np.float32(0))
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: float(executable(np.float32(n)))})) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 1.0, 1: 2.0, 2: 3.0}


def test_results_take_over_donated_memory():
    program = DeviceProgram(lambda x, y: y + 1, None, donated=[1])
    taken = jax.block_until_ready(jax.jit(lambda: jnp.zeros(4096))())
    place = taken.unsafe_buffer_pointer()
    result = program.compiled(DEVICE, np.float32(0), taken)(np.float32(0), taken)
    assert taken.is_deleted()
    assert result.unsafe_buffer_pointer() == place
