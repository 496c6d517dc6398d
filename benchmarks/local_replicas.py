"""The processor time of a step for each local replica of a tiny model, in one instance.

    python benchmarks/local_replicas.py [--replicas 1 2 4 8 16 32] [--rounds 7] [--steps 100]

The model has 208 parameters and each replica 4 rows, so a step is little more than its calls. Each number of replicas
has a process of its own. Figures are medians over the rounds: milliseconds of processor time per step and per replica,
and of time per step. "more" is the processor time of one more replica, from the smallest number to the largest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

from timing import Machine, command_line, output_lines

LIMIT_S = 300.0
ROWS = 4
WARM_UP_STEPS = 20


def measure(replicas: int, rounds: int, steps: int) -> dict[str, float]:
    """Return milliseconds per step: "cpu" and "wall"."""
    import jax
    import numpy as np
    import optax

    import strategies

    rng = np.random.default_rng(0)
    variables = {"in": rng.standard_normal((8, 16)), "bias": np.zeros(16), "out": rng.standard_normal((16, 4))}

    def loss_fn(variables: Any, batch: Any, key: Any) -> Any:
        logits = jax.nn.relu(batch["x"] @ variables["in"] + variables["bias"]) @ variables["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    trainer = strategies.Trainer(strategies.LocalStrategy(replicas), loss_fn, optax.adam(1e-3))
    state = trainer.init({name: value.astype(np.float32) for name, value in variables.items()})
    rows = ROWS * replicas
    batch = {"x": rng.standard_normal((rows, 8), np.float32), "y": rng.integers(0, 4, rows).astype(np.int32)}
    times: dict[str, list[float]] = {"cpu": [], "wall": []}
    for number in range(rounds + 1):
        count = steps if number else WARM_UP_STEPS
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.variables)
        if number:
            times["cpu"].append((time.process_time() - began_cpu) / count * 1e3)
            times["wall"].append((time.perf_counter() - began) / count * 1e3)
    return {name: median(each) for name, each in times.items()}


def main() -> None:
    """Print a line for each number of replicas."""
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each number (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn (%(default)s)")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.rounds, options.steps)), flush=True)
        return
    machine = Machine()
    words = [sys.executable, __file__, f"--rounds={options.rounds}", f"--steps={options.steps}"]
    figures: dict[int, dict[str, float]] = {}
    print("replicas  CPU ms per step  per replica  ms per step", flush=True)
    for replicas in options.replicas:
        *_, line = output_lines([*words, f"--measure={replicas}"], LIMIT_S)
        found = figures[replicas] = json.loads(line)
        print(f"{replicas:8}{found['cpu']:17.3f}{found['cpu'] / replicas:13.3f}{found['wall']:13.3f}", flush=True)
    least, most = min(figures), max(figures)
    more = (figures[most]["cpu"] - figures[least]["cpu"]) / max(1, most - least)
    print(f"one more replica: {more:.3f} ms of processor time")
    machine.write(options, ("replicas", "rounds", "steps"), ms_per_step=figures, more_cpu_ms=more)


if __name__ == "__main__":
    main()
