"""An instance of `survival.py`, which trains until an instance is killed, and writes the others' recovery times.

usage: survival_rank.py FOLDER MODEL BATCH_SIZE VICTIM STEPS [SPARES]

The victim waits until all spares have made their first step, so that they sleep when it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

import jax
import optax
import training_task
from training_jax import first_variables, loss_of

import strategies

LIMIT_S = 60.0
SETTLE_S = 0.5
"""The time in which a spare that has made its first step comes to the end of the journal, and falls asleep."""


class Compiling:
    """A counter of the seconds that JAX has spent tracing, lowering and compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    batch_size, victim, steps, spares = map(int, [*sys.argv[3:], "0"][:4])
    me = int(os.environ["OMPI_COMM_WORLD_RANK"])  # a spare's instance_index is that of an instance
    is_spare = "POPDIST_SPARE" in os.environ
    compiling = Compiling()
    strategy = strategies.PopDistStrategy()
    trainer = strategies.Trainer(strategy, loss_of(model), optax.adam(training_task.LEARNING_RATE))
    arrays = training_task.dataset(batch_size, strategy.num_replicas_in_sync)
    dataset = strategy.distribute_dataset(arrays, batch_size=batch_size, shuffle=False)
    state = trainer.init(first_variables(model))
    took_s, compiled_s, ends_s = [], [], []
    for step in range(steps):
        if step % len(dataset) == 0:
            batches = dataset.epoch(step // len(dataset))
        batch = next(batches)
        if me == victim and step == steps // 2:
            wait_for(folder, spares)
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        began_s, before_s = time.monotonic(), compiling.seconds
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.variables)
        ends_s.append(time.monotonic())
        took_s.append(ends_s[-1] - began_s)
        compiled_s.append(compiling.seconds - before_s)
        if is_spare and step == 0:
            (folder / f"{me}.ready").touch()
    killed = steps // 2
    found = {
        "after_s": ends_s[killed] - float((folder / "killed").read_text()),
        "compile_s": compiled_s[killed],
        "step_s": median(took_s[2:killed]),
        "later_s": median(took_s[killed + 1 :]),
        "is_spare": is_spare,
    }
    (folder / f"{me}.json").write_text(json.dumps(found))


def wait_for(folder: Path, spares: int) -> None:
    """Wait until all spares have made their first step, and have slept for a moment."""
    deadline_s = time.monotonic() + LIMIT_S
    while len(list(folder.glob("*.ready"))) < spares:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the spares have not made a step within {LIMIT_S:g} s")
        time.sleep(0.05)
    time.sleep(SETTLE_S if spares else 0)


if __name__ == "__main__":
    main()
