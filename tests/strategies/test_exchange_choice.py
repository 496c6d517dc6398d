"""The choice of the exchange, from the facts of all instances."""

import json
import logging
import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from connected import Connected, ConnectedStrategy
from losing import Lost
from surviving_instances import run_instances

import strategies
from collectives import LayoutMismatchError
from collectives.backends.thread import run_on_threads
from popdist import Instance
from popdist.timeline.recorder import Recorder, RingBuffer
from strategies.core.survival import surviving
from strategies.defaults import Defaults
from strategies.errors import DeviceError
from strategies.exchange.choice import (
    ON_CPUS,
    InstanceFacts,
    agreed_choice,
    are_facts_needed,
    asked_exchange,
    choose_exchange,
)
from strategies.jax.replicas.devices import exchange_of, expected_platform, machine_of

A, B, C = (InstanceFacts("gpu", f"GPU-{name}", "host one") for name in "abc")
PROCESSOR = InstanceFacts("cpu", "", "host one", has_nccl=False)


def elsewhere(facts):
    return replace(facts, machine="host two")


def all_with(facts, **changes):
    return [replace(each, **changes) for each in facts]


FOUND = {
    "CPUs": ([PROCESSOR, PROCESSOR], "host", False, "on CPUs"),
    "one instance on a GPU": ([A], "local", True, "one instance"),
    "one that may be left alone": (all_with([A], can_carry_on=True), "local", True, "one instance"),
    "a GPU for each": ([A, B, C], "compiled", True, "GPU of its own"),
    "a GPU for each on two hosts": ([A, elsewhere(B)], "compiled", True, "GPU of its own"),
    "a shared GPU": ([A, B, A], "window", True, "instances 0 and 2 share the GPU GPU-a"),
    "a shared GPU on two hosts": ([A, A, elsewhere(C)], "host", False, "share the GPU GPU-a.*on 2"),
    "no NCCL": ([A, replace(B, has_nccl=False)], "window", True, "NCCL is not installed for instance 1"),
    "no NCCL on two hosts": (all_with([A, elsewhere(B)], has_nccl=False), "host", False, "NCCL.*on 2"),
    "lost in place": (all_with([A, B], can_carry_on=True), "window", True, "shrink"),
    "lost in place on two hosts": (all_with([A, elsewhere(B)], can_carry_on=True), "host", False, "shrink"),
    "JAX has started": ([A, replace(B, can_connect=False)], "window", True, "JAX started on instance 1"),
    "GPUs of another maker": (all_with([A, B], gpu=""), "host", False, "the CUDA driver does not know"),
    "gRPC": (all_with([A, B], transport="gRPC"), "host", False, "gRPC"),
    "Horovod": (all_with([A, B], transport="Horovod"), "host", False, "Horovod"),
    "variables on the host": (all_with([A, B], variables_on_host=True), "host", False, "variables_on_host"),
    "one with variables on the host": (all_with([A], variables_on_host=True), "host", False, "variables_on_host"),
    "one TPU": (all_with([A], platform="tpu", gpu=""), "local", True, "one instance"),
    "TPUs": (all_with([A, B], platform="tpu", gpu=""), "host", False, "tpu"),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_automatic_choice_follows_from_the_facts(case):
    facts, word, is_on_device, reason = FOUND[case]
    chosen = choose_exchange(facts, "auto")
    assert (chosen.path_name, chosen.is_on_device, chosen.connects) == (word, is_on_device, word == "compiled")
    assert re.search(reason, chosen.reason)


ASKED = {
    "compiled over gloo": ("compiled", [PROCESSOR, PROCESSOR], "compiled", True),
    "compiled with one on the CPU": ("compiled", [PROCESSOR], "local", True),
    "compiled": ("compiled", [A, B], "compiled", True),
    "compiled where JAX has started": ("compiled", all_with([A, B], can_connect=False), "compiled", True),
    "compiled over gRPC": ("compiled", all_with([A, B], transport="gRPC"), "compiled", True),
    "window": ("window", [A, B], "window", True),
    "window with one": ("window", [A], "local", True),
    "window with one on the CPU": ("window", [PROCESSOR], "local", True),
    "window on CPUs": ("window", [PROCESSOR, PROCESSOR], "window", True),
    "host on CPUs": ("host", [PROCESSOR, PROCESSOR], "host", False),
    "host with one": ("host", [A], "host", False),
    "host": ("host", [A, B], "host", False),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_forced_exchange_is_taken_if_it_can_work(case):
    asked, facts, word, is_on_device = ASKED[case]
    chosen = choose_exchange(facts, asked)
    assert (chosen.path_name, chosen.is_on_device) == (word, is_on_device)
    assert chosen.connects == (word == "compiled" and facts[0].can_connect)


REFUSED = {
    "compiled, lost in place": ("compiled", all_with([A, B], can_carry_on=True), "use --on-failure restart"),
    "compiled on CPUs, lost in place": (
        "compiled",
        all_with([PROCESSOR] * 2, can_carry_on=True),
        "--on-failure restart",
    ),
    "compiled, a shared GPU": ("compiled", [A, A], "0 and 1 share the GPU GPU-a.*use the exchange 'window'"),
    "compiled, no NCCL": ("compiled", all_with([A, B], has_nccl=False), "install the nvidia-nccl package"),
    "compiled, Horovod": ("compiled", all_with([A, B], transport="Horovod"), "use PopDistStrategy"),
    "compiled, variables": ("compiled", all_with([A, B], variables_on_host=True), "leave variables_on_host out"),
    "window, two hosts": ("window", [A, elsewhere(B)], "on 2; use the exchange 'compiled'"),
    "window, TPUs": ("window", all_with([A, B], platform="tpu", gpu=""), "windows need GPUs"),
    "window, no driver": ("window", [A, replace(B, gpu="")], "instance 1 has none"),
    "window, Horovod": ("window", all_with([A, B], transport="Horovod"), "Horovod"),
    "a mixture": ("auto", [A, PROCESSOR], "instance 0 computes on 'gpu' and instance 1 on 'cpu'.*JAX_PLATFORMS=cpu"),
    "a mixture on the host": ("host", [A, PROCESSOR], "JAX_PLATFORMS=cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_word_that_cannot_work_is_refused_with_the_way_out(case):
    asked, facts, way_out = REFUSED[case]
    with pytest.raises(DeviceError, match=way_out):
        choose_exchange(facts, asked)


@pytest.mark.parametrize(
    ("default", "environ", "word"),
    [
        ("auto", {}, "auto"),
        ("auto", {"POPDIST_EXCHANGE": "window"}, "window"),
        ("auto", {"POPDIST_EXCHANGE": ""}, "auto"),
        ("host", {"POPDIST_EXCHANGE": "window"}, "host"),
    ],
)
def test_the_environment_decides_if_the_program_does_not(default, environ, word):
    assert asked_exchange(default, environ) == word


@pytest.mark.parametrize(
    ("default", "environ", "said_by"),
    [("fast", {}, "Defaults.exchange is 'fast'"), ("host", {"POPDIST_EXCHANGE": "nccl"}, "POPDIST_EXCHANGE is 'nccl'")],
)
def test_an_unknown_word_is_an_error_with_the_known_ones(default, environ, said_by):
    with pytest.raises(ValueError, match=f"{said_by}.* use one of auto, compiled, window, host"):
        asked_exchange(default, environ)


def test_facts_are_needed_on_accelerators_and_for_paths_on_devices_only():
    assert not are_facts_needed("cpu", "auto")
    assert not are_facts_needed("cpu", "host")
    assert are_facts_needed("cpu", "compiled")
    assert are_facts_needed("gpu", "auto")


def test_packed_facts_are_unpacked_unchanged():
    facts = replace(A, transport="gRPC", can_carry_on=True)
    assert facts.pack().shape == (1024,)
    assert InstanceFacts.unpack(facts.pack()) == facts
    assert json.loads(facts.pack().tobytes())["gpu"] == "GPU-a"


def test_instances_choose_alike_and_the_first_one_logs_the_choice(caplog):
    caplog.set_level(logging.INFO, "strategies.exchange")
    chosen = run_on_threads(3, lambda each: agreed_choice(each, (A, B, A)[each.rank], "auto"))
    assert chosen == [replace(choose_exchange([A, B, A], "auto"), shares_gpu=True)] * 3
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("exchange window: gradients are added on the device (all instances are on one host, and ")


def test_instances_with_and_without_an_accelerator_are_an_error_without_deadlock():
    def one(communicator):
        with pytest.raises(LayoutMismatchError, match="facts of instances on accelerators"):
            steps[communicator.rank](communicator)

    steps = (
        lambda communicator: agreed_choice(communicator, A, "auto"),
        lambda communicator: communicator.broadcast(np.zeros(3), name="the variables"),
    )
    run_on_threads(2, one)


def instance_of(communicator):
    return Instance(communicator.rank, 2, 2, 2 * communicator.rank, 4, communicator.rank)


def test_a_strategy_on_cpus_sends_nothing():
    def one(communicator):
        strategy = ConnectedStrategy(instance_of(communicator), communicator)
        return communicator.calls_made, strategy.replicas.exchange

    assert run_on_threads(2, one) == [(0, ON_CPUS)] * 2


@pytest.mark.parametrize(("platform", "gpu", "word"), [("cpu", "", "compiled"), ("gpu", "GPU-a", "window")])
def test_instances_send_their_facts_once(platform, gpu, word):
    def one(communicator):
        membership = Connected(instance_of(communicator), communicator, Defaults(exchange=word))
        return exchange_of(membership, platform, False, gpu), communicator.calls_made

    [(chosen, calls), other] = run_on_threads(2, one)
    assert (chosen.path_name, chosen.is_on_device, calls) == (word, True, 1)
    assert other == (chosen, calls)


@pytest.mark.parametrize(("instances", "then"), [(3, "window"), (2, "local")])
def test_survivors_choose_again(monkeypatch, instances, then):
    monkeypatch.setenv("POPDIST_EXCHANGE", "window")

    def function(strategy):
        replicas = strategy.replicas
        words = [replicas.exchange.path_name]

        def attempt():
            if replicas.first_index == 1:
                raise Lost
            return strategy.reduce("sum", strategy.per_replica(np.int32)).item()

        total = surviving(replicas, attempt, lambda: None)
        return total, [*words, replicas.exchange.path_name]

    found = run_instances(instances, 6, function)
    assert found.pop(1) is None
    assert found == [(15, ["window", then])] * (instances - 1)


def test_the_choice_is_in_the_timeline():
    recorder = Recorder(RingBuffer(1 << 10))
    on_device = Defaults(exchange="compiled")
    strategy = strategies.IPUStrategy(2, attached=[recorder], defaults=on_device)
    assert strategy.replicas.exchange.path_name == "local"
    assert {"name": "exchange local"} in recorder.take_new_names().values()


def test_options_that_need_the_host_are_refused_if_the_environment_forces_a_device(monkeypatch):
    monkeypatch.setenv("POPDIST_EXCHANGE", "compiled")
    strategy = strategies.IPUStrategy(2)
    pipeline = strategies.Pipelining([0, 0])
    trainer = strategies.Trainer(
        strategy, lambda v, b, k: (v * b["x"]).mean(), optax.sgd(0.1), pipeline=pipeline, gradient_accumulation_count=1
    )
    with pytest.raises(
        ValueError, match="the exchange 'compiled' keeps gradients on the device, but replicas are pipelines"
    ):
        trainer.step(trainer.init(jnp.ones(300)), {"x": np.ones((2, 300), np.float32)})


def test_jax_on_the_cpu_counts_as_cpu_before_it_starts(in_new_process):
    program = (
        "from strategies.jax.replicas.devices import expected_platform as e\n"
        "from strategies.jax.programs.xla_pitfalls import jax_has_started as s\n"
        "print(e(), s())"
    )
    assert in_new_process(program, JAX_PLATFORMS="cpu").split() == ["cpu", "False"]
    assert in_new_process(program, JAX_PLATFORMS="cuda,cpu").split() == ["gpu", "False"]
    assert in_new_process(program).split() == ["cpu", "False"]
    assert expected_platform() == "cpu"


def test_processes_of_one_host_name_the_same_machine():
    first, second = (Instance(index, 2, 1, index, 2, index) for index in range(2))
    assert machine_of(first) == machine_of(second)
