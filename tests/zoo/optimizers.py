"""The optimizers, by name."""

from __future__ import annotations

import optax
from optax import contrib

import strategies

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.01),
    "clipped_adamw": optax.chain(strategies.clip_by_global_norm(0.5), optax.adamw(0.01)),
    "adafactor": optax.adafactor(0.01),
    "lion": optax.lion(0.001),
    "schedule_free": contrib.schedule_free_sgd(0.1, warmup_steps=2),
    "multi_steps": optax.MultiSteps(optax.adam(0.01), every_k_schedule=2),
}
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name != "adafactor")
"""Optimizers whose state can be sharded."""
