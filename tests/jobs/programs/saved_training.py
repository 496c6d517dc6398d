"""Small training of four replicas that saves checkpoints and resumes from them, under poprun or alone.

usage: saved_training.py DIRECTORY LAST_STEP HOW

HOW is "plain"; "save": it saves every 3 steps; or "die": and instance 0 is killed while it saves step 6. Instance 0
prints `resumed at STEP`, `in step 5`, and `done at STEP FINGERPRINT`.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies

ROWS = np.random.default_rng(0).standard_normal((90, 3)).astype(np.float32)


def loss_fn(variables, batch, key):
    return ((batch @ variables["w"]).sum() + variables["b"].mean() - jax.random.normal(key)) ** 2


def train(strategy, directory, last_step, how="plain", say=lambda text: None):
    """Train four replicas, and return the first step and the fingerprint of the state at the end."""
    dataset = strategy.distribute_dataset(ROWS, batch_size=2, seed=1)
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.01, momentum=0.9), seed=2)
    state = trainer.init({"w": jnp.ones((3, 2)), "b": jnp.zeros(1)})
    every = 10**9 if how == "plain" else 3
    with strategies.Checkpoints(directory, trainer, dataset, every=every) as checkpoints:
        state = checkpoints.restore(state)
        first_step = state.step
        say(f"resumed at {first_step}")
        while state.step < last_step:
            for batch in dataset.epoch(dataset.position().epoch):
                state, _ = trainer.step(state, batch)
                if state.step == 5:
                    say("in step 5")
                checkpoints.after_step(state)
                if state.step == 5:
                    checkpoints.wait()  # so that the next checkpoint is not late
                if state.step == last_step:
                    break
    return first_step, strategies.fingerprint((state.variables, state.optimizer_state))


def main(directory, last_step, how):
    popdist.init(4)
    strategy = strategies.PopDistStrategy()
    is_first = strategy.instance_index == 0
    if how == "die" and is_first:
        sys.addaudithook(die_before_step_6_is_complete)

    def say(text):
        if is_first:
            print(text, flush=True)

    _, fingerprint = train(strategy, directory, last_step, how, say)
    say(f"done at {last_step} {fingerprint}")


def die_before_step_6_is_complete(event, arguments):
    """Kill this process when the writer is about to give the folder its final name."""
    if event == "os.rename" and Path(arguments[1]).name == "step_00000006":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
