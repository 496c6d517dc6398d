"""Train models of the zoo, and print the fingerprint of variables and optimizer state after each step.

    train_zoo.py [--replicas R] [--steps 5] [--optimizer momentum] [--cores N] MODEL...

Instance 0 prints a line for each step: model, number of the step, fingerprint. The same with and without poprun.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from zoo import MODELS, OPTIMIZERS, fingerprints

import popdist
import strategies


def read_options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--replicas", type=int, help="in all; poprun's --num-replicas where it starts this")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum")
    parser.add_argument("--cores", type=int, help="use only so many (default: all that the process may use)")
    return parser.parse_args(words)


def main(words=None):
    options = read_options(words)
    if options.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    popdist.init(options.replicas)
    strategy = strategies.PopDistStrategy()
    for name in options.models:
        found = fingerprints(strategy, MODELS[name], options.optimizer, options.steps)
        if strategy.instance_index == 0:
            for step, fingerprint in enumerate(found):
                print(name, step, fingerprint, flush=True)


if __name__ == "__main__":
    main()
