"""Train models in stages, and print a fingerprint of all that training changes and of the metrics.

    train_pipelines.py [--strategy NAME] [--replicas R] [--schedule NAME] [--recompute] [--leaving] MODEL...

Instance 0 prints a line for each model. The same for every launcher, schedule and number of instances.
With --leaving each instance prints after that whether gradients leave stage by stage.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from leaving_in_stages import have_left
from zoo.pipelines import MODELS, trained

import popdist
import strategies

STRATEGIES = {
    "popdist": strategies.PopDistStrategy,
    "horovod": lambda: strategies.IPUHorovodStrategy(ipus_per_replica=4),
    "multi-worker": lambda: strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), ipus_per_replica=4),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--strategy", choices=STRATEGIES, default="popdist")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--schedule", default="sequential")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--leaving", action="store_true")
    options = parser.parse_args()
    if options.strategy != "multi-worker":
        popdist.init(options.replicas)
    strategy = STRATEGIES[options.strategy]()
    for name in options.models:
        found = line_of(strategy, name, options.schedule, options.recompute)
        if strategy.is_chief:
            print(found, flush=True)
    if options.leaving:
        print(strategy.instance_index, *have_left(strategy), flush=True)


def line_of(strategy, name, schedule="sequential", recompute=False):
    """Train a model, and return the line with its fingerprints."""
    model = MODELS[name]
    mapping = model.mappings[0] if strategy.instance.ipus_per_replica > 1 else [0] * model.stages
    pipeline = strategies.Pipelining(mapping, schedule, recompute)
    return " ".join(map(str, [name, *trained(strategy, model, pipeline)]))


if __name__ == "__main__":
    main()
