"""One instance of `survival.py`: trains until one instance is killed, and says how long that took the others.

usage: survival_rank.py FOLDER MODEL BATCH_SIZE VICTIM STEPS "ahead"|"when needed"
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import median

import jax
import optax
import training_task
from training_jax import first_variables, loss_of

import strategies

THREAD = "compile-ahead"
LIMIT_S = 250.0


class Compiling:
    """How long JAX has traced, lowered and compiled so far, in seconds: here, and in the background."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ahead_s = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **_: object) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        if threading.current_thread().name == THREAD:
            self.ahead_s += seconds
        else:
            self.seconds += seconds

    def wait(self) -> None:
        """Return when nothing is compiled in the background."""
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(LIMIT_S)


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    batch_size, victim, steps = map(int, sys.argv[3:6])
    is_ahead = sys.argv[6] == "ahead"
    compiling = Compiling()
    strategy = strategies.PopDistStrategy()
    me = strategy.instance_index
    optimizer = optax.adam(training_task.LEARNING_RATE)
    trainer = strategies.Trainer(strategy, loss_of(model), optimizer, compile_ahead=is_ahead)
    arrays = training_task.dataset(batch_size, strategy.num_replicas_in_sync)
    dataset = strategy.distribute_dataset(arrays, batch_size=batch_size, shuffle=False)
    state = trainer.init(first_variables(model))
    took_s, compiled_s, ends_s = [], [], []
    for step in range(steps):
        if step % len(dataset) == 0:
            batches = dataset.epoch(step // len(dataset))
        batch = next(batches)
        if step <= steps // 2:
            compiling.wait()
            earlier_s = compiling.ahead_s
        if me == victim and step == steps // 2:
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        began_s, before_s = time.monotonic(), compiling.seconds
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.variables)
        ends_s.append(time.monotonic())
        took_s.append(ends_s[-1] - began_s)
        compiled_s.append(compiling.seconds - before_s)
    killed = steps // 2
    found = {
        "after_s": ends_s[killed] - float((folder / "killed").read_text()),
        "compile_s": compiled_s[killed],
        "step_s": median(took_s[2:killed]),
        "earlier_s": earlier_s,
    }
    (folder / f"{me}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
