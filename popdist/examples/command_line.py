"""The options of the command line that several examples have, and the strategy that they choose."""

import argparse

import popdist
import strategies

STRATEGIES = ("local", "popdist", "multi-worker", "horovod", "ipu")


def parser_of(description: str, *, strategy: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options `--data`, `--epochs` and `--batch-size`.

    Args:
        description: First line of the help text.
        strategy: Whether `--strategy` and `--replicas` are options, too; `make_strategy` takes their values.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    if strategy:
        add("--strategy", choices=STRATEGIES, default="popdist", help="the strategy; ipu is local (%(default)s)")
        add("--replicas", type=int, metavar="N", help="replicas of all instances; default: from poprun, else one each")
    add("--data", default="digits", metavar="digits|PATH", help="MNIST as a directory of IDX files or an npz file")
    add("--epochs", type=int, metavar="N", help="passes over the data")
    add("--batch-size", type=int, default=16, metavar="N", help="images per replica and step (%(default)s)")
    return parser


def make_strategy(name: str, replicas: int | None) -> strategies.Strategy:
    """Make a strategy with the replicas of all instances, or of one process for "local" and "ipu".

    Args:
        name: One of `STRATEGIES`.
        replicas: Number of replicas of all instances; None for poprun's number, or for one each.

    Raises:
        ValueError: The replicas cannot be divided evenly among the workers of TF_CONFIG.
        popdist.PopDistError: The instances cannot be connected, or TF_CONFIG cannot be used.
    """
    if name in ("local", "ipu"):
        return strategies.LocalStrategy(num_replicas=replicas or 1)
    if name == "multi-worker":
        resolver = popdist.TFConfigClusterResolver()
        workers = len(resolver.cluster.addresses)
        local, rest = divmod(replicas or workers, workers)
        if rest or not local:
            raise ValueError(
                f"--replicas {replicas} on {workers} workers; each has equally many: use a multiple of {workers}"
            )
        return strategies.IPUMultiWorkerStrategy(resolver, variables_on_host=True, num_local_replicas=local)
    popdist.init(replicas)
    return strategies.IPUHorovodStrategy() if name == "horovod" else strategies.PopDistStrategy()
