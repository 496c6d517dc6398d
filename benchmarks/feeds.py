"""The cost of feeds: a training loop with batches on the device, against one with batches from an infeed.

The loop is `strategies.loops.repeat` of SGD steps of the MLP of `train_step.py` inside `strategy.run`. One process
drives all replicas. Usage:

    python benchmarks/feeds.py [--replicas 1 2] [--batch-size 64] [--rounds 9] [--steps 50]
                               [--prefetch-depth 3] [--json PATH]

Columns, in ms per step, medians of turns: "device" takes batches that are on the device, "infeed" takes them from an
`InfeedQueue`, "both" also puts the loss of each step into an `OutfeedQueue`. "device/infeed" and "device/both" are
throughputs relative to "device", medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import training_task
from timing import Machine, command_line, medians

import strategies  # isort: skip  # timing makes the project importable

SETTINGS = ("batch_size", "rounds", "steps", "prefetch_depth")
WIDTHS = {"replicas": 8, "device": 9, "infeed": 9, "both": 9, "device/infeed": 15, "device/both": 13}
WAYS = ("device", "infeed", "both")


def main() -> None:
    options = read_options()
    machine = Machine()
    print(
        f"mlp, batch {options.batch_size} per replica, {options.steps} steps in a loop, prefetch_depth "
        f"{options.prefetch_depth}; ms per step, medians"
    )
    print("".join(f"{title:>{width}}" for title, width in WIDTHS.items()), flush=True)
    strategies.LocalStrategy(max(options.replicas))  # fixes the size of XLA's thread pool
    rows = [measure_and_print(replicas, options) for replicas in options.replicas]
    machine.write(options, SETTINGS, rows=rows)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2], metavar="R", help="(1 2)")
    add("--batch-size", type=int, default=64, metavar="N", help="rows per replica (%(default)s)")
    add("--rounds", type=int, default=9, metavar="N", help="turns of each way (%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="steps of a turn (%(default)s)")
    add("--prefetch-depth", type=int, default=3, metavar="N", help="prefetch depth of the infeed (%(default)s)")
    return parser.parse_args()


def measure_and_print(replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    row = measure(replicas, options)
    cells = {
        "replicas": str(replicas),
        **{way: f"{row['ms_per_step'][way]:.2f}" for way in WAYS},
        "device/infeed": f"{row['device_over_infeed']:.3f}",
        "device/both": f"{row['device_over_both']:.3f}",
    }
    print("".join(f"{cells[title]:>{width}}" for title, width in WIDTHS.items()), flush=True)
    return row


def measure(replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways in turns, in this process."""
    batches = Batches(options.batch_size, replicas)
    with strategies.InfeedQueue(batches, options.prefetch_depth) as infeed, strategies.OutfeedQueue() as outfeed:
        ways = programs(replicas, infeed, outfeed, options)
        for run in ways.values():
            run()
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for place in range(len(WAYS)):
                way = WAYS[(number + place) % len(WAYS)]  # each way is first in turn
                began = time.perf_counter()
                ways[way]()
                times[way].append(1e3 * (time.perf_counter() - began) / options.steps)
        losses = outfeed.dequeue()
    ratios = {way: median(a / b for a, b in zip(times["device"], times[way], strict=True)) for way in WAYS}
    return {
        "replicas": replicas,
        "ms_per_step": medians(times),
        "device_over_infeed": ratios["infeed"],
        "device_over_both": ratios["both"],
        "losses": len(losses),
        "rounds_ms": times,
    }


class Batches:
    """An endless iterable of the batches of all replicas, by step and then by replica."""

    def __init__(self, batch_size: int, replicas: int) -> None:
        of_replicas = [training_task.batches_of(replica, batch_size, replicas) for replica in range(replicas)]
        self._batches = [batch for step in zip(*of_replicas, strict=True) for batch in step]

    def __iter__(self) -> Iterator[training_task.Arrays]:
        return itertools.cycle(self._batches)


def programs(
    replicas: int, infeed: strategies.InfeedQueue, outfeed: strategies.OutfeedQueue, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    strategy = strategies.LocalStrategy(replicas)
    variables = training_task.first_variables("mlp")

    def loss_of(variables: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        values = image.reshape(image.shape[0], -1)
        for name in ("hidden1", "hidden2"):
            values = jax.nn.relu(values @ variables[name]["kernel"] + variables[name]["bias"])
        logits = values @ variables["logits"]["kernel"] + variables["logits"]["bias"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1))

    def step(variables: Any, image: jax.Array, label: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(variables, image, label)
        return jax.tree.map(lambda v, g: v - training_task.LEARNING_RATE * g, variables, gradients), loss

    def on_device(variables: Any, batches: Any) -> Any:
        replica = strategies.get_replica_context().replica_id_in_sync_group

        def body(number: jax.Array, variables: Any) -> list[Any]:
            batch = jax.tree.map(lambda leaf: leaf[replica, number % training_task.BATCHES], batches)
            return [number + 1, step(variables, **batch)[0]]

        return checksum(strategies.loops.repeat(options.steps, body, [0, variables])[1])

    def with_infeed(variables: Any) -> Any:
        def body(variables: Any, image: jax.Array, label: jax.Array) -> Any:
            return step(variables, image, label)[0]

        return checksum(strategies.loops.repeat(options.steps, body, [variables], infeed))

    def with_both(variables: Any) -> Any:
        def body(variables: Any, image: jax.Array, label: jax.Array) -> Any:
            variables, loss = step(variables, image, label)
            outfeed.enqueue(loss)
            return variables

        return checksum(strategies.loops.repeat(options.steps, body, [variables], infeed))

    def checksum(variables: Any) -> jax.Array:
        """Return a checksum instead of the variables, so that no time goes into the results of many replicas."""
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(variables))

    def batches_of(replica: int) -> Any:
        batches = training_task.batches_of(replica, options.batch_size, replicas)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[batches_of(replica) for replica in range(replicas)])
    shared, lying = jax.device_put((variables, stacked), strategy.replicas.variables_device)
    return {
        "device": lambda: strategy.run(on_device, args=(shared, lying)),
        "infeed": lambda: strategy.run(with_infeed, args=(shared,)),
        "both": lambda: strategy.run(with_both, args=(shared,)),
    }


if __name__ == "__main__":
    main()
