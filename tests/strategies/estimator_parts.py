"""Parts of the tests of estimators."""

import itertools

import numpy as np

from popdist.compat import ipu
from strategies.compat.estimator import IPURunConfig, RunConfig


class Seen:
    """A hook that keeps the reported losses and global steps."""

    def __init__(self):
        self.losses, self.steps = [], []

    def after_run(self, run_context, run_values):
        self.losses.append(run_values.results["loss"])
        self.steps.append(run_values.results["global_step"])


def config_of(replicas=1, loops=1, shards=1, **options):
    """Return a configuration of workers with so many replicas, iterations per loop, and devices per replica."""
    ipus = ipu.config.IPUConfig()
    ipus.auto_select_ipus = replicas * shards
    devices = IPURunConfig(loops, ipus, num_replicas=replicas, num_shards=shards)
    return RunConfig(ipu_run_config=devices, **options)


def increasing(count, shape=(), batch=None):
    """Return an `input_fn` of elements or batches with the values k mod count, without an end."""

    def input_fn():
        elements = (np.full(shape, k % count, np.float32) for k in itertools.count())
        while batch:
            yield np.stack(list(itertools.islice(elements, batch)))
        yield from elements

    return input_fn
