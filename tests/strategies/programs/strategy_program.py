"""An instance of a test job: `strategy_program.py STRATEGY TASK on_host|on_device LOCAL_REPLICAS [ARGUMENTS]`.

STRATEGY is a key of MAKES. Each task ends with one line of JSON. Several tasks are given as TASK,TASK,... with
a place of the variables for each, on_host,on_device,...; the arguments are those of the last task.

rows               the results of the tests of the original's strategy
everything         the roles, the elements that each replica reads, and the end of a training
steps [STEPS [RANK]]
                   train for STEPS, or without STEPS until an error, and print the last step; the instance RANK waits
                   for a line on standard input after the step that all instances announce
beside             make the strategy of Horovod again and another one, and use them in turn
joining STEPS      train for STEPS, with pauses until a lost instance has joined again
digits STEPS FILE  train the models of the main job; the first instance writes their variables into FILE
"""

import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies
from collectives import CollectiveError
from popdist.examples import digits as train_digits
from popdist.examples import digits_data, digits_models
from strategies import get_replica_context

ROWS = np.arange(50, dtype=np.int32)
POINTS = np.random.default_rng(0).standard_normal((96, 3)).astype(np.float32)
STEPS = 12
SAYS_SO_AT_STEP = 5
PAUSE_S = 0.1


# ---- tests of the original for two instances with one replica each; t is the index of this instance


def m01_m02(strategy):
    """Return the roles of the instance and its duties for files."""
    extended = strategy.extended
    return [
        strategy.num_replicas_in_sync,
        extended.experimental_between_graph,
        extended.experimental_should_init,
        extended.should_checkpoint,
        extended.should_save_summary,
    ]


def m04_m05(strategy):
    """Return the place of a variable, and the value after replicas used it on their device."""
    variable = strategy.variable(1.0)

    def use(value):
        return value + 1

    [used] = strategy.run(use, args=(variable.value,))
    return [type(variable).__name__, place_of(strategy, variable.value), float(used)]


def m06(strategy):
    """Sum the squares of x = t + 1."""
    return float(strategy.reduce("SUM", strategy.run(square, args=(one_more_than_index(strategy),))))


def m07(strategy):
    """Create a mirrored variable, which begins with the value of instance 0."""
    variable = strategy.variable(float(strategy.instance_index + 1))
    total = strategy.reduce("SUM", strategy.run(square, args=(variable.value,)))
    return [type(variable).__name__, float(variable.read_value()), float(total)]


def m08(strategy):
    """Create a variable of each replica's own on the device; reads average it."""
    variable = strategy.variable(lambda: float(strategy.instance_index + 1), synchronization="on_read")
    place, before = place_of(strategy, variable.values[0]), float(variable.read_value())
    variable.assign(strategy.run(jnp.add, args=(variable.values, one_more_than_index(strategy))))
    return [type(variable).__name__, place, before, float(variable.values[0]), float(variable.read_value())]


def m10(strategy):
    """Compute gradients on the replicas and update beside them; return the sum of the losses, and w after the step."""
    variable = strategy.variable(1.0)
    losses, gradients = zip(*strategy.run(jax.value_and_grad(jnp.multiply), args=(variable.value, 1.0)), strict=True)
    variable.assign(variable.value - 0.5 * strategy.reduce("mean", strategies.PerReplica(gradients)))
    return [float(strategy.reduce("SUM", strategies.PerReplica(losses))), float(variable.read_value())]


def m11_m12(strategy):
    """Train with `Trainer` and momentum, which has one slot beside the variable."""
    trainer = strategies.Trainer(strategy, lambda v, x, key: v["w"] * x.mean(), optax.sgd(0.5, momentum=0.9))
    state = trainer.init({"w": jnp.float32(strategy.instance_index + 1)})
    slots = len(jax.tree.leaves(state.optimizer_state))
    state, metrics = trainer.step(state, np.ones(1, np.float32))
    total = metrics["loss"] * strategy.num_replicas_in_sync
    return [slots, total, float(state.variables["w"]), float(jax.tree.leaves(state.optimizer_state)[0])]


def m14(strategy):
    """Multiply w = 2 by x = t + 1."""
    variable = strategy.variable(2.0)
    product = strategy.run(jnp.multiply, args=(variable.value, one_more_than_index(strategy)))
    return float(strategy.reduce("SUM", product))


def m15(strategy):
    """Train the host's variables on data shared out by the input context; return w after each of three steps."""
    contexts = []

    def make(context):
        contexts.append(context)
        numbers = np.float32([1, 2])[context.input_pipeline_id :: context.num_input_pipelines]
        return itertools.cycle({"x": x[None], "y": x[None]} for x in numbers)

    def loss_fn(variables, batch, key):
        return jnp.mean((variables["w"] * batch["x"] - batch["y"]) ** 2)

    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.5, momentum=0.0))
    state, found = trainer.init({"w": jnp.float32(2)}), []
    for batch in itertools.islice(strategy.distribute_datasets_from_function(make), 3):
        state, _ = trainer.step(state, batch)
        found.append([state.step, float(state.variables["w"])])
    [context] = contexts
    return [context.num_input_pipelines, context.input_pipeline_id, *found]


def m16(strategy):
    """Normalise a batch by hand with momentum 0; each replica has its own statistics until they are read."""
    gamma, beta = strategy.variable(np.ones(1, np.float32)), strategy.variable(np.zeros(1, np.float32))
    mean, variance = (strategy.variable(np.zeros(1, np.float32), synchronization="on_read") for _ in range(2))

    def normalise(x, gamma, beta):
        return gamma * (x - x.mean(0)) / jnp.sqrt(x.var(0)) + beta, x.mean(0), x.var(0)

    x = strategy.per_replica(lambda r: np.float32([[2 * (r + 1)], [0]]))
    normalised, means, variances = zip(*strategy.run(normalise, args=(x, gamma.value, beta.value)), strict=True)
    mean.assign(strategies.PerReplica(means))
    variance.assign(strategies.PerReplica(variances))
    return {
        "places": [place_of(strategy, variable.value) for variable in (gamma, beta)],
        "normalised": normalised[0].tolist(),
        "local mean": mean.values[0].tolist(),
        "mean": mean.read_value().tolist(),
        "variance": variance.read_value().tolist(),
    }


def m17(strategy):
    """Reduce inside a compiled function, and reduce its result."""

    def fn(x):
        return square(get_replica_context().all_reduce("sum", square(x)))

    return float(strategy.reduce("SUM", strategy.run(fn, args=(one_more_than_index(strategy),))))


def m22(strategy):
    """Sum ten elements 0 + t."""
    dataset = strategy.distribute_datasets_from_function(lambda context: [np.int32([context.input_pipeline_id])] * 10)
    return sum(int(strategy.run(jnp.sum, args=(batch,))[0]) for batch in dataset)


TABLE = [m01_m02, m04_m05, m06, m07, m08, m10, m11_m12, m14, m15, m16, m17, m22]


def rows(strategy):
    return {row.__name__: row(strategy) for row in TABLE}


def square(x):
    return x * x


def one_more_than_index(strategy):
    return strategy.per_replica(lambda r: float(r + 1))


def place_of(strategy, value):
    if isinstance(value, jax.Array):
        assert list(value.devices()) == [strategy.replicas.devices.devices[0]]
        return "device"
    return type(value).__name__


# ---- other features of an instance


def everything(strategy):
    contexts = []

    def make(context):
        contexts.append(context)
        return range(3 + 2 * context.input_pipeline_id)

    uneven = list(strategy.distribute_datasets_from_function(make))
    [context] = contexts
    statistics = strategy.variable(np.zeros(2, np.float32), "on_read", "sum")
    statistics.assign(strategy.per_replica(lambda r: np.float32([r, 1])))
    return {
        "who": [strategy.instance_index, strategy.num_instances, list(strategy.local_replicas)],
        "is leader": strategy.extended.should_checkpoint,
        "context": [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync],
        "per replica": context.get_per_replica_batch_size(2 * strategy.num_replicas_in_sync),
        "uneven": uneven,
        "statistics": statistics.read_value().tolist(),
        "arrays": read(strategy, ROWS),
        "iterable": read(strategy, ROWS.tolist()),
        "trained": trained(strategy, STEPS),
    }


def read(strategy, source):
    """Return, for each step, the elements that each local replica reads."""
    dataset = strategy.distribute_dataset(source, batch_size=2, seed=5)
    return [np.asarray(batch).reshape(len(strategy.local_replicas), 2).tolist() for batch in dataset.epoch(2)]


def beside(strategy):
    again, other = strategies.IPUHorovodStrategy(variables_on_host=True), strategies.PopDistStrategy()
    return {
        "same communicator": again.communicator is strategy.communicator,
        "mechanism": strategy.communicator.mechanism,
        "sums": [float(each.reduce("sum", one_more_than_index(each))) for each in (strategy, other, strategy)],
    }


# ---- training


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch @ variables["first"] + 0.1 * jax.random.normal(key, (5,)))
    error = hidden @ variables["last"] - batch.sum(-1)
    wide = jnp.tanh(batch @ variables["wide"])
    return jnp.mean(error**2) + jnp.mean(wide**2), {"largest": jnp.abs(error).max()}


def begin(strategy):
    """Return a trainer and its first state; values of all instances but the first must not matter.

    One variable is large enough to travel alone.
    """
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(0.01))
    own = 1.0 + strategy.instance_index
    variables = {"first": jnp.full((3, 5), 0.3), "last": jnp.linspace(-1, 1, 5), "wide": jnp.full((3, 100_003), 0.5)}
    return trainer, trainer.init(jax.tree.map(lambda leaf: leaf * own, variables))


def batches(strategy):
    dataset = strategy.distribute_dataset(POINTS, batch_size=4, seed=1)
    return itertools.chain.from_iterable(map(dataset.epoch, itertools.count()))


def trained(strategy, steps):
    """Return the fingerprint after some steps."""
    trainer, state = begin(strategy)
    for batch in itertools.islice(batches(strategy), steps):
        state, _ = trainer.step(state, batch)
    return strategies.fingerprint(state.variables)


def steps(strategy, last="0", waiting=""):
    """Train to a step, or forever with 0; the returned state is always a complete one."""
    waits = waiting == str(strategy.instance_index)  # a survivor gets the number of a lost worker
    trainer, state = begin(strategy)
    try:
        for batch in batches(strategy):
            state, _ = trainer.step(state, batch)
            if state.step == SAYS_SO_AT_STEP:
                print(f"step {state.step}", flush=True)
                if waits:
                    sys.stdin.readline()
            if state.step == int(last):
                break
    except CollectiveError:
        print(json.dumps([state.step, strategies.fingerprint(state.variables)]), flush=True)
        raise
    return [state.step, strategies.fingerprint(state.variables)]


def joining(strategy, last):
    """Train to a step, slowly until a lost instance was started again and has joined."""
    (trainer, state), count, has_shrunk = begin(strategy), strategy.num_instances, strategy.replicas.is_spare
    for batch in itertools.islice(batches(strategy), int(last)):
        state, _ = trainer.step(state, batch)
        if state.step == SAYS_SO_AT_STEP:
            print(f"step {state.step}", flush=True)
        has_shrunk = has_shrunk or strategy.num_instances < count
        if state.step >= SAYS_SO_AT_STEP and not (has_shrunk and strategy.num_instances == count):
            time.sleep(PAUSE_S)
    return [state.step, strategies.fingerprint(state.variables), strategy.num_instances]


def digits(strategy, steps, file):
    """Return the fingerprint of each model of the main job, and the number of collectives of its last step."""
    found, arrays = {}, {}
    for model in digits_models.MODELS:
        variables, calls = digits_trained(strategy, model, int(steps))
        found[model] = {"fingerprint": strategies.fingerprint(variables), "calls": calls}
        arrays |= {f"{model}{place}": leaf for place, leaf in named_leaves(variables)}
    if strategy.instance_index == 0:
        np.savez(file, **arrays)
    return found


def digits_trained(strategy, model, steps):
    """Return the variables after some steps with the defaults of the main job, and the collectives of the last step."""
    options = train_digits.read_options(["--model", model, "--max-steps", str(steps)])
    data = digits_data.load_digits("digits")
    dataset = train_digits.distribute(strategy, data, options)
    built = digits_models.MODELS[model]
    trainer = strategies.Trainer(strategy, train_digits.loss_of(built), optax.adam(options.learning_rate))
    state = trainer.init(built.init(options.seed, data.image_shape))
    for batch in train_digits.batches(dataset, steps):
        before = strategy.communicator.calls_made
        state, _ = trainer.step(state, batch)
    return state.variables, strategy.communicator.calls_made - before


def named_leaves(variables):
    """Return the arrays of a tree, with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]


# ---- the strategies


def multi_worker(variables_on_host, local_replicas):
    return strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), variables_on_host, local_replicas)


def surviving_workers(variables_on_host, local_replicas):
    resolver = popdist.TFConfigClusterResolver()
    return strategies.IPUMultiWorkerStrategy(resolver, variables_on_host, local_replicas, on_failure="shrink")


def horovod(variables_on_host, local_replicas):
    popdist.init(local_replicas * popdist.instance().count)
    return strategies.IPUHorovodStrategy(variables_on_host)


MAKES = {"multi-worker": multi_worker, "surviving-workers": surviving_workers, "horovod": horovod}
TASKS = {each.__name__: each for each in (rows, everything, beside, steps, joining, digits)}


def main(strategy, tasks, places, local_replicas, *arguments):
    make = MAKES[strategy]
    *before, last = zip(tasks.split(","), places.split(","), strict=True)
    for task, place, words in (*((*each, ()) for each in before), (*last, arguments)):
        print(json.dumps(TASKS[task](make(place == "on_host", int(local_replicas)), *words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
