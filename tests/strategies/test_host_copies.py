"""Gradients that the CUDA driver copies to the host and back, with a driver in host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cuda_fake import FakeLibrary

import strategies
from collectives import Communicator, run_on_threads
from collectives.cuda.device import CudaDevice
from collectives.cuda.driver import Driver
from collectives.dlpack import CPU
from collectives.errors import CudaError
from strategies.exchange.flat import FlatLayout
from strategies.exchange.host_copies import HostCopies, Source
from strategies.exchange.means import Bucket, Means
from strategies.jax.gradients.gradient_programs import GradientCopies
from strategies.jax.replicas.devices import ReplicaDevices

ELEMENTS = 300_001


@pytest.fixture
def library(tmp_path: Path) -> FakeLibrary:
    return FakeLibrary(tmp_path)


@pytest.fixture
def device(library: FakeLibrary) -> CudaDevice:
    return CudaDevice(0, Driver(library, CPU))


def source(array: np.ndarray) -> Source:
    return Source(array.__array_interface__["data"][0], array.size, array.dtype)


def test_arrays_arrive_in_page_locked_memory_that_is_used_again(library: FakeLibrary, device: CudaDevice) -> None:
    copies = HostCopies(device)
    sent = [[np.full(ELEMENTS, value, np.float32) for value in (1, 2)], [np.arange(5, dtype=np.float16)] * 2]
    for _ in range(2):
        arriving = copies.fetch("all", [[source(array) for array in of_buffer] for of_buffer in sent])
        for want, got in zip(sent, arriving, strict=True):
            assert all(one.dtype == other.dtype and (one == other).all() for one, other in zip(want, got, strict=True))
    assert library.calls.count("cuMemHostRegister_v2") == 1
    assert library.calls.count("cuEventSynchronize") == 4
    del copies, arriving, got
    assert library.registered == {}


def test_a_bucket_that_arrives_has_as_many_items_as_buffers(device: CudaDevice) -> None:
    arrays = [np.zeros(3), np.ones(4)]
    arriving = HostCopies(device).fetch(0, [[source(array)] for array in arrays])
    assert len(arriving) == 2
    assert [len(of_buffer[0]) for of_buffer in arriving[0:2]] == [3, 4]


def test_means_are_copied_to_their_places_on_the_host(device: CudaDevice) -> None:
    whole, other = np.zeros(ELEMENTS, np.float32), np.zeros(7, np.float32)
    means = HostCopies(device).means([whole[:1024], whole[1024:], other])
    whole[:], other[:] = np.arange(ELEMENTS), 5
    for part in (whole[:1024], whole[1024:], other):
        means.begin(part)
    means.wait()
    on_device = means.on_device(whole[64 : 64 + 6].reshape(2, 3))
    assert on_device is not None
    assert (np.asarray(jnp.from_dlpack(on_device)) == np.arange(64, 70).reshape(2, 3)).all()
    assert means.on_device(np.zeros(7, np.float32)) is None


def test_copies_work_without_page_locked_memory(
    library: FakeLibrary, device: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    library.refuses["cuMemHostRegister_v2"] = 1
    sent = np.ones(ELEMENTS, np.float32)
    with caplog.at_level(logging.WARNING):
        (arrived,) = HostCopies(device).fetch(0, [[source(sent)]])
    assert (arrived[0] == sent).all()
    assert "gradients are copied slowly to and from the GPU: cuMemHostRegister_v2" in caplog.text


def loss(variables: dict[str, jnp.ndarray], batch: np.ndarray, key: object) -> tuple[jnp.ndarray, dict[str, object]]:
    total = jnp.tanh(batch @ variables["wide"]).sum() * variables["scale"].sum()
    return total / batch.shape[0], {}


def trained() -> tuple[str, list[float]]:
    strategy = strategies.IPUStrategy(num_replicas=2)
    trainer = strategies.Trainer(strategy, loss, optax.adam(1e-2))
    state = trainer.init({"wide": np.full((8, 40_000), 0.1, np.float32), "scale": np.ones(3, np.float32)})
    losses = []
    for number in range(3):
        batch = np.random.default_rng(number).standard_normal((4, 8)).astype(np.float32)
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    return strategies.fingerprint(state.variables), losses


def test_a_training_has_the_same_bits_with_copies_by_the_driver(
    library: FakeLibrary, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained()

    def by_driver(devices: ReplicaDevices, communicator: Communicator, buckets: Sequence[Bucket]) -> GradientCopies:
        return GradientCopies(device, buckets)

    monkeypatch.setattr("strategies.jax.preparation.copies_for", by_driver)
    assert trained() == expected
    assert library.calls.count("cuMemcpyAsync") >= 3 * (2 * 2 + 2)  # two buffers of two replicas, and their means


def test_two_instances_add_arriving_gradients_and_send_the_means_back(tmp_path: Path) -> None:
    layout = FlatLayout(((ELEMENTS,), (7,), (ELEMENTS,)), (np.dtype(np.float32),) * 3, 2)

    def on_rank(communicator: Communicator) -> list[bytes]:
        device = CudaDevice(0, Driver(FakeLibrary(tmp_path), CPU))
        bucket = Bucket.of("all", layout, communicator.allocate, {}, {})
        copies, means = GradientCopies(device, [bucket]), Means(communicator)
        random = np.random.default_rng(communicator.rank)
        given = [[random.standard_normal(buffer.size).astype(np.float32)] for buffer in layout.buffers]
        means.reduce(bucket, given)
        expected = [result.tobytes() for result in bucket.results]
        communicator.barrier()
        arrays = jax.block_until_ready([[jnp.array(array) for array in of_buffer] for of_buffer in given])
        for is_shared in (False, True):
            if is_shared:
                copies.share(communicator, [1, 1])
            for result in bucket.results:
                result[...] = 0
            communicator.barrier()
            means.reduce(bucket, copies.fetch(0, arrays))
            on_device = [np.array(mean) for mean in copies.means(list(bucket.results))]
            assert [mean.tobytes() for mean in on_device] == expected
            communicator.barrier()
        return expected

    one, other = run_on_threads(2, on_rank)
    assert one == other


def test_no_memory_on_the_gpu_is_an_error_that_names_the_call(library: FakeLibrary, device: CudaDevice) -> None:
    library.refuses["cuMemAlloc_v2"] = 2
    with pytest.raises(CudaError, match="cuMemAlloc_v2"):
        HostCopies(device).means([np.zeros(4)])
