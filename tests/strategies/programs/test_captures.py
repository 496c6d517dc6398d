"""Values that a traced function reads from outside: changes are followed by a new compilation, or refused."""

from __future__ import annotations

import collections
import datetime
import functools
import gc
import itertools
import math
import os
import random
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from surviving_instances import run_instances

import strategies
from strategies.jax.programs import captures
from strategies.jax.programs.captures import CapturedValues

factor = 1.0
ONE = np.float32(1)


@pytest.fixture(scope="module")
def alone():
    return strategies.IPUStrategy(1)


class Scaled:
    """An object with attributes, some of which a function reads."""

    def __init__(self):
        self.scale, self.count = 1.0, 0

    def __call__(self, x):
        return x * self.scale

    @property
    def twice(self):
        return 2 * self.scale

    def by_property(self, x):
        return x * self.twice / 2

    def grow(self):
        self.scale += 1


class Slotted:
    __slots__ = ("scale",)


def times_factor(x):
    return x * factor


jitted = jax.jit(times_factor)


def scanned(carry, _):
    return carry * factor, None


def set_factor(value):
    global factor
    factor = value


def followed():
    """Yield functions of 1 whose result grows from 1 to 2 when a value that they read changes."""
    one, array, values, name_space = Scaled(), np.ones(1, np.float32), {"list": [1.0]}, SimpleNamespace(scale=1.0)
    slotted, kept = Slotted(), [jnp.float32(1)]
    slotted.scale = 1.0
    local = 1.0

    def grow_local():
        nonlocal local
        local = 2.0

    yield "a global", times_factor, lambda: set_factor(2.0)
    yield "a global in a function that it calls", lambda x: times_factor(x), lambda: set_factor(2.0)
    yield "a global in a jitted function", lambda x: jitted(x), lambda: set_factor(2.0)
    yield "a global in the body of a loop", lambda x: jax.lax.scan(scanned, x, length=1)[0], lambda: set_factor(2.0)
    yield "a variable of a closure", lambda x: x * local, grow_local
    yield "an attribute", lambda x: x * one.scale, one.grow
    yield "an attribute of a method's object", Scaled().__call__, None
    yield "a property", one.by_property, lambda: setattr(one, "scale", 2.0)
    yield "an object that is called", one, lambda: setattr(one, "scale", 2.0)
    yield "an object that it calls", lambda x: one(x), one.grow
    yield "a slot", lambda x: x * slotted.scale, lambda: setattr(slotted, "scale", 2.0)
    yield "a name space", lambda x: x * name_space.scale, lambda: setattr(name_space, "scale", 2.0)
    yield "an array that is written to", lambda x: x * array[0], lambda: array.fill(2)
    yield "an array in a list", lambda x: x * kept[0], lambda: kept.__setitem__(0, jnp.float32(2))
    yield "a list in a dictionary", lambda x: x * values["list"][0], lambda: values["list"].__setitem__(0, 2.0)
    named = SimpleNamespace(scale=1.0)
    yield "getattr", lambda x: x * getattr(named, "scale"), lambda: setattr(named, "scale", 2.0)  # noqa: B009
    yield "an argument of a partial", functools.partial(lambda x, by: x * by.scale, by=one), one.grow


NAMES = [name for name, *_ in followed()]


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_values_that_a_function_reads_are_followed(alone, name):
    set_factor(1.0)
    function, change = next((function, change) for each, function, change in followed() if each == name)
    if name == "an attribute of a method's object":
        change = function.__self__.grow
    if name in ("a property", "an object that is called"):
        change = (function.__self__ if name == "a property" else function).grow
    found = [float(alone.run(function, (ONE,)).values[0])]
    change()
    found.append(float(alone.run(function, (ONE,)).values[0]))
    assert found == [1, 2]


def test_dictionary_keys_that_a_function_does_not_read_can_change(alone):
    config, traces = {"scale": 1.0, "step": 0, "nested": {"by": 1.0}}, []

    def function(x):
        traces.append(1)
        return x * config["scale"] * config["nested"]["by"]

    for step in range(3):
        alone.run(function, (ONE,))
        config |= {"step": step, f"loss {step}": 0.5}
    assert len(traces) == 1
    config["nested"]["by"] = 2.0
    assert float(alone.run(function, (ONE,)).values[0]) == 2


def test_all_keys_of_a_dictionary_that_another_function_gets_are_read(alone):
    config = {"scale": 1.0, "others": 1.0}
    product = lambda: math.prod(config.values())  # noqa: E731  # reads them all
    function = lambda x: x * product() / config["scale"]  # noqa: E731  # the same each time
    found = [float(alone.run(function, (ONE,)).values[0])]
    config["others"] = 3.0
    assert [*found, float(alone.run(function, (ONE,)).values[0])] == [1, 3]


def test_an_element_that_a_function_has_added_and_the_program_changes_is_followed(alone):
    weights, traces = collections.defaultdict(lambda: 1.0), []

    def function(x):
        traces.append(1)
        return x * weights["first"]

    found = [float(alone.run(function, (ONE,)).values[0])]
    weights["another"] = 5.0
    found.append(float(alone.run(function, (ONE,)).values[0]))
    assert len(traces) == 1
    weights["first"] = 2.0
    assert [*found, float(alone.run(function, (ONE,)).values[0])] == [1, 1, 2]


def test_a_module_that_a_function_imports_is_followed(alone, tmp_path, monkeypatch):
    (tmp_path / "settings_of_a_program.py").write_text("scale = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import settings_of_a_program

    def function(x):
        import settings_of_a_program

        return x * settings_of_a_program.scale

    found = [float(alone.run(function, (ONE,)).values[0])]
    settings_of_a_program.scale = 2.0
    assert [*found, float(alone.run(function, (ONE,)).values[0])] == [1, 2]


def test_a_loop_called_from_python_follows_changes():
    set_factor(1.0)
    body = lambda x: times_factor(x)  # noqa: E731  # the same function each time
    found = [float(strategies.loops.repeat(2, body, [1.0]))]
    set_factor(3.0)
    assert [*found, float(strategies.loops.repeat(2, body, [1.0]))] == [1, 9]


def test_a_list_to_which_functions_only_add_is_no_constant(alone):
    """Records of traced values are appended by other functions too."""
    traces, one = [], Watching()

    def function(x):
        traces.append("function")
        one.seen.append("function")
        return x

    for _ in range(3):
        alone.run(function, (ONE,))
        traces.append("another one")
        one.seen.append("another one")
    assert traces == one.seen == ["function", *["another one"] * 3]


def test_an_unchanged_function_is_not_compiled_again(alone):
    traces = []
    one = Scaled()

    def function(x):
        traces.append(one.scale)
        return x * one.scale

    for count in range(3):
        alone.run(function, (ONE,))
        one.count = count  # an attribute that the function does not read
    assert traces == [1.0]


def refused():
    """Yield functions whose reads differ each time and would become constants, with the messages."""
    elements, pairs = iter([1.0, 2.0]), [iter([1.0])]
    numbers, own = itertools.count(), random.Random(0)
    generator, counts, queue = np.random.default_rng(0), {"calls": 0}, [2.0, 1.0]
    now = time.perf_counter

    def counting():
        counts["calls"] += 1
        return jnp.float32(counts["calls"])

    def drawing():
        return [jnp.float32(number) for number in numbers][:1]

    yield "next", lambda: jnp.float32(next(elements)), "elements is an iterator, a list_iterator"
    yield "a loop over an iterator", drawing, "numbers is an iterator, a count"
    yield "an iterator in a list", lambda: jnp.float32(next(pairs[0])), r"pairs\[0\] is an iterator"
    yield "the time", lambda: jnp.float32(time.time()), "calls time.time, the time"
    yield "a clock by its name", lambda: jnp.float32(now()), "calls now, the time"
    yield "the day", lambda: jnp.float32(datetime.datetime.now().second), "calls datetime.datetime.now, the time"
    yield "random", lambda: jnp.float32(random.random()), "calls random.random, a random number"
    yield "numpy.random", lambda: jnp.float32(np.random.rand()), "calls np.random.rand, a random number"
    made = lambda: np.random.default_rng().normal()  # noqa: E731 - the function calls it, as helpers are called
    yield "a generator without a seed", lambda: jnp.float32(made()), "calls np.random.default_rng, a generator without"
    yield "Random without a seed", lambda: jnp.float32(random.Random().random()), "calls random.Random, a generator"
    yield (
        "a seed of None",
        lambda: jnp.float32(np.random.default_rng(seed=None).normal()),
        "calls np.random.default_rng",
    )
    bits = lambda: np.random.Generator(np.random.PCG64(None)).normal()  # noqa: E731
    yield "bits without a seed", lambda: jnp.float32(bits()), "calls np.random.PCG64, a generator without a seed"
    yield "a generator of NumPy", lambda: jnp.float32(generator.normal()), "has drawn from generator"
    yield "a generator of Python", lambda: jnp.float32(own.random()), "has drawn from own"
    yield "a counter", counting, r"has changed what is in counts|has changed counts"
    yield "a list that is emptied", lambda: jnp.float32(queue.pop()), "has changed what is in queue"


@pytest.mark.parametrize("name", [name for name, *_ in refused()])
def test_values_that_differ_at_each_read_are_refused(alone, name):
    function, message = next((function, message) for each, function, message in refused() if each == name)
    with pytest.raises(RuntimeError, match=message):
        alone.run(function)


def test_a_function_can_draw_from_its_own_generator_with_a_seed(alone):
    function = lambda: jnp.float32(np.random.default_rng(7).random())  # noqa: E731
    assert float(alone.run(function).values[0]) == np.float32(np.random.default_rng(7).random())


def test_a_function_can_read_files_and_its_own_numbers(alone):
    def function(x):
        names = itertools.count()
        return {f"{next(names)}": x + next(iter([1, 2]))}

    assert float(alone.run(function, (ONE,)).values[0]["0"]) == 2


class Watching:
    """An object with a method that is a callback."""

    def __init__(self):
        self.seen = []

    def log(self, value):
        self.seen.append((time.time(), float(value)))

    def of_method(self, x):
        jax.debug.callback(self.log, x)
        return x

    def of_lambda(self, x):
        jax.debug.callback(lambda value: self.seen.append(value), x)
        return x

    def of_function(self, x):
        def log(value):
            self.log(value)
            return value

        return jax.pure_callback(log, jax.ShapeDtypeStruct((), np.float32), x)


@pytest.mark.parametrize("name", ["of_method", "of_lambda", "of_function"])
def test_values_that_callbacks_read_and_change_are_no_constants(alone, name):
    one = Watching()
    for count in range(3):
        alone.run(getattr(one, name), (ONE,))
        jax.effects_barrier()
        assert len(one.seen) == count + 1
    reads = CapturedValues(getattr(one, name))
    one.seen.append(None)
    assert reads.is_same()


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_arrays_of_every_size_are_compared_by_elements(size):
    array = np.zeros(size, np.float32)
    reads = CapturedValues(lambda x: x + array)
    assert reads.is_same()
    array += 1
    assert reads.changed == "the elements of array"


def test_values_that_a_function_reads_are_not_kept_alive():
    """Programs live longer than the objects in lists that they read."""
    held = [Scaled()]
    reads, gone = CapturedValues(lambda x: held[0](x)), weakref.ref(held[0])
    held.clear()
    gc.collect()
    assert gone() is None
    assert reads.changed == "what is in held"


def test_a_variable_that_the_body_of_a_loop_reads_is_followed(alone):
    """JAX caches the trace of a body, which no longer reads the variable."""
    variable = alone.variable(np.float32(1))

    def body(carry, _):
        return carry * variable.value, None

    def function(x):
        return jax.lax.scan(body, x, length=2)[0]

    found = [float(alone.run(function, (ONE,)).values[0])]
    variable.assign(np.float32(3))
    assert [*found, float(alone.run(function, (ONE,)).values[0])] == [1, 9]


def test_a_trainer_refuses_changed_values_that_its_loss_function_reads(alone):
    one, array = Scaled(), np.ones(2, np.float32)
    trainer = strategies.Trainer(alone, lambda v, x, key: ((v - x) * array * one.scale).sum() ** 2, optax.sgd(0.1))
    state, batch = trainer.init(np.zeros(2, np.float32)), np.ones((1, 2), np.float32)
    state, _ = trainer.step(state, batch)
    state, _ = trainer.step(state, batch)
    one.grow()
    with pytest.raises(
        RuntimeError, match="reads one.scale, which is a constant of the compiled function but has changed since"
    ):
        trainer.step(state, batch)
    one.scale = 1.0
    array *= 2
    with pytest.raises(RuntimeError, match=r"reads the elements of array, .* or make a new Trainer"):
        trainer.step(state, batch)


def first_step_with_a_schedule(strategy, one):
    """Make a step whose learning rate is read from an object; return the trainer, its state and the batch."""
    optimizer = optax.chain(optax.clip(1.0), optax.sgd(lambda step: one.scale * 0.1))
    trainer = strategies.Trainer(strategy, lambda v, x, key: ((v - x) ** 2).sum(), optimizer)
    state, batch = trainer.init(np.zeros(1, np.float32)), np.ones((1, 1), np.float32)
    state, _ = trainer.step(state, batch)
    return trainer, state, batch


def test_a_trainer_refuses_changed_values_that_a_schedule_reads(alone):
    one = Scaled()
    trainer, state, batch = first_step_with_a_schedule(alone, one)
    one.grow()
    with pytest.raises(RuntimeError, match="reads one.scale, which .* has changed .* the state of the optimizer"):
        trainer.step(state, batch)


class Settings:
    """Values that `CapturedValues` does not find."""

    def __init__(self, monkeypatch):
        self.scale, self.change = 1.0, lambda: setattr(self, "scale", 2.0)
        self.setenv = lambda value: monkeypatch.setenv("SCALE_OF_A_TEST", value)

    def computed_name(self, x):
        return x * getattr(self, "".join(["sca", "le"]))

    def all_attributes(self, x):
        return x * sum(each for each in vars(self).values() if isinstance(each, float))

    def environment(self, x):
        self.change = lambda: self.setenv("2")
        return x * float(os.environ.get("SCALE_OF_A_TEST", "1"))

    def setting_of_numpy(self, x):
        self.change = lambda: np.set_printoptions(precision=3)
        return x * np.get_printoptions()["precision"]

    def jitted(self, x):
        return jax.jit(self.computed_name)(x)

    def body_of_a_loop(self, x):
        return jax.lax.scan(self.of_iteration, x, length=2)[0]

    def of_iteration(self, x, _):
        return self.computed_name(x), None


HIDDEN = ["computed_name", "all_attributes", "environment", "setting_of_numpy", "jitted", "body_of_a_loop"]


def trained(function, options=None, schedule=None):
    trainer = strategies.Trainer(
        strategies.LocalStrategy(2),
        lambda v, x, key: (function(v - x) ** 2).mean(),
        optax.sgd(0.1 if schedule is None else schedule, momentum=0.9),
        **(options or {}),
    )
    state, batch = trainer.init(np.zeros(2, np.float32)), np.ones((4, 2), np.float32)
    while True:
        state, _ = trainer.step(state, batch)
        yield


@pytest.mark.parametrize("name", HIDDEN)
def test_a_function_that_is_traced_anew_shows_values_that_nothing_else_finds(name, monkeypatch):
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    settings = Settings(monkeypatch)
    steps = trained(getattr(settings, name))
    for _ in range(4):
        next(steps)
    with np.printoptions():
        settings.change()
        with pytest.raises(RuntimeError, match=r"has changed since .*; hand the value over in the batch"):
            next(steps)  # the fourth after the first


def test_a_function_is_traced_anew_although_several_steps_are_one_call(monkeypatch):
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    settings = Settings(monkeypatch)
    trainer = strategies.Trainer(
        strategies.LocalStrategy(1), lambda v, x, key: (settings.computed_name(v - x) ** 2).mean(), optax.sgd(0.1)
    )
    state, rows = trainer.init(np.zeros(1, np.float32)), np.ones((40, 1), np.float32)
    dataset = trainer.strategy.distribute_dataset(rows, batch_size=1, seed=0)
    changes = iter([lambda: None, lambda: setattr(settings, "scale", 2.0)])
    with pytest.raises(RuntimeError, match="has changed since it was compiled"):
        trainer.run(state, dataset, steps_per_execution=10, after_execution=lambda *_: next(changes)())
    assert list(changes) == []


def test_an_optimizer_that_is_traced_anew_shows_values_of_its_schedule(monkeypatch):
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    settings = Settings(monkeypatch)
    steps = trained(jnp.square, schedule=lambda count: settings.computed_name(0.1))
    for _ in range(2):
        next(steps)
    settings.scale = 2.0
    with pytest.raises(RuntimeError, match="has changed since it was compiled"):
        next(steps)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_count": 2}, {"replicated_optimizer_state_sharding": True}]
)
def test_functions_that_can_be_traced_again_train_on(options, monkeypatch):
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    traces, others = [], {"unused": 0}

    def function(x):
        traces.append(len(traces))
        return jitted(x) * others.get("scale", 1.0)

    set_factor(1.0)
    steps = trained(function, options)
    next(steps)
    once = len(traces)
    for number in range(4):
        others["unused"] = number
        next(steps)
    assert len(traces) == 5 * once  # anew in each of these steps: one is due, and three have changed values


def test_a_change_with_an_effect_is_refused_after_changes_without_one():
    settings = SimpleNamespace(epoch=0)
    steps = trained(lambda x: x * (1 if settings.epoch < 5 else 100))
    for settings.epoch in range(5):
        next(steps)
    settings.epoch = 5
    with pytest.raises(RuntimeError, match=r"reads settings.epoch, .* has changed since"):
        next(steps)


def test_another_mask_of_the_same_numbers_is_refused():
    half = np.float32([1] * 8 + [0] * 8)
    settings = SimpleNamespace(mask=half)
    steps = trained(lambda x: x.sum() * (jnp.arange(16.0) * settings.mask).sum())
    next(steps)
    settings.mask = 1 - half
    with pytest.raises(RuntimeError, match=r"reads settings.mask, .* has changed since"):
        next(steps)


def test_many_changes_without_an_effect_are_compared_less_often_with_a_warning(caplog):
    traces, settings = [], SimpleNamespace(epoch=0)

    def function(x):
        traces.append(len(traces))
        return x if settings.epoch < 10_000 else -x

    steps = trained(function)
    next(steps)
    once = len(traces)
    for settings.epoch in range(1, 2 * captures.MANY_CHANGES):
        next(steps)
    assert len(traces) == (captures.MANY_CHANGES + 1) * once
    assert "reads settings.epoch, which changes again and again" in caplog.text


def test_a_changed_schedule_is_refused_although_an_evaluation_was_compiled_with_the_change(alone):
    one = Scaled()
    trainer, state, batch = first_step_with_a_schedule(alone, one)
    trainer.evaluate(state, [batch], fn=lambda v, x, key: (x * one.scale).sum())
    one.grow()
    trainer.evaluate(state, [batch], fn=lambda v, x, key: (x * one.scale).sum())  # clears JAX's caches
    with pytest.raises(RuntimeError, match=r"reads one.scale, .* has changed since"):
        trainer.step(state, batch)


def test_a_function_is_not_traced_for_replicas_of_before(monkeypatch):
    """After `rest` the step is prepared anew, as after the loss of an instance."""
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    one = Scaled()
    trainer = strategies.Trainer(
        strategies.LocalStrategy(2), lambda v, x, key: ((v - x * one.scale) ** 2).sum(), optax.sgd(0.1)
    )
    state, batch = trainer.init(np.zeros(1, np.float32)), np.ones((2, 1), np.float32)
    state, _ = trainer.step(state, batch)
    trainer._programs.rest()
    state, _ = trainer.step(state, batch)
    trainer._programs.rest()
    one.grow()
    with pytest.raises(RuntimeError, match=r"reads one.scale, .* has changed since"):
        trainer.step(state, batch)


@pytest.mark.parametrize("survives", [False, True])
def test_all_instances_trace_anew_in_the_same_step(survives, monkeypatch):
    """The second instance has waited less, and would not trace; both refuse, and none trains on alone."""
    own, is_cheap = threading.local(), captures.RepeatedTrace.is_cheap
    monkeypatch.setattr(captures, "TRACES_APART", 0)
    monkeypatch.setattr(captures.RepeatedTrace, "is_cheap", lambda *given: own.is_first and is_cheap(*given))
    settings, refused = Settings(monkeypatch), []

    def function(strategy):
        own.is_first = strategy.instance_index == 0
        trainer = strategies.Trainer(
            strategy, lambda v, x, key: (settings.computed_name(v - x) ** 2).mean(), optax.sgd(0.1)
        )
        dataset = strategy.distribute_dataset(np.ones((96, 1), np.float32), batch_size=2, seed=0)
        state = trainer.init(np.zeros(1, np.float32))
        for batch in dataset.epoch(0):
            if state.step == 7:
                strategy.communicator.barrier()  # both have made the seventh step
                settings.scale = 2.0
            try:
                state, _ = trainer.step(state, batch)
            except RuntimeError as error:
                refused.append((state.step, str(error)))
                raise

    with pytest.raises(RuntimeError, match="has changed since it was compiled"):
        run_instances(2, 4, function, mechanism="ring", survives=survives)
    assert [step for step, _ in refused] == [8, 8]
    assert all("has changed since it was compiled" in text for _, text in refused)


def test_a_function_is_traced_anew_only_when_a_trace_costs_little(monkeypatch):
    traces = []
    steps = trained(lambda x: traces.append(1) or x)
    next(steps)
    once = len(traces)
    for _ in range(20):
        next(steps)
    assert len(traces) == once


def test_a_pipeline_refuses_changed_values_that_its_stages_read():
    one = Scaled()
    net = strategies.pipelining_ops.pipeline(
        [lambda v, x: x * one.scale, lambda v, x: x + 1],
        4,
        infeed_queue=strategies.InfeedQueue([np.float32(k) for k in range(12)]),
        outfeed_queue=strategies.OutfeedQueue(),
        device_mapping=[0, 1],
    )
    state = net(net.init({}))
    one.grow()
    with pytest.raises(RuntimeError, match="reads one.scale, .* or call init again"):
        net(state)


def test_an_evaluation_follows_changes_of_values_that_its_function_reads(alone):
    one = Scaled()
    trainer = strategies.Trainer(alone, lambda v, x, key: ((v - x) ** 2).sum(), optax.sgd(0.1))
    state = trainer.init(np.zeros(1, np.float32))
    batches = [np.ones((2, 1), np.float32)]
    found = []
    for _ in range(2):
        found.append(trainer.evaluate(state, batches, fn=lambda v, x, key: ((v - x) ** 2).sum() * one.scale)["loss"])
        one.grow()
    assert found == [1, 2]


def test_reads_of_functions_have_one_order_in_all_processes():
    """Models of Keras are compared between instances in this order, and sets of names differ in each process."""
    names = [f"value_{number:02}" for number in range(20)]
    space = {"one": SimpleNamespace(**dict.fromkeys(names, 1.0)), **dict.fromkeys(names, 1.0)}
    exec(f"def function(): return {' + '.join(f'{name} + one.{name}' for name in reversed(names))}", space)
    found = [read.name for read in CapturedValues(space["function"])._reads]
    assert found == ["one", *names, *(f"one.{name}" for name in names)]
