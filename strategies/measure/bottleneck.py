"""The command that measures a program's data set, and tells whether data or compute limits the training.

python -m strategies.dataset_benchmark program.py:make_dataset [program.py:make_step] [options]
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TypeVar

import jax

from strategies.data.datasets import DistributedDataset
from strategies.local_strategy import LocalStrategy
from strategies.measure.input_benchmarks import EpochRate, endless, measured
from strategies.typing import Batch, Data, Function, Tree

_T = TypeVar("_T", int, float)

WARM_UP_BATCHES = 4
WARM_UP_STEPS = 2
TIMED_STEPS = 10
COLUMNS = "{:>5}  {:>7}  {:>12}  {:>8}  {:>12}"


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; if an argument is wrong, end the process with one line on stderr."""
    parser = _parser()
    options = parser.parse_intermixed_args(words)
    if options.make_step is not None and options.step_ms is not None:
        parser.error("give --step-ms or a function that makes the step, not both")
    try:
        make_dataset, make_step = _function(options.make_dataset), options.make_step and _function(options.make_step)
    except ValueError as error:
        parser.error(str(error))
    strategy = LocalStrategy(num_replicas=options.replicas)
    with strategy.scope():
        dataset = _called(make_dataset, strategy)
        if options.batch_size is not None:
            if isinstance(dataset, DistributedDataset):
                parser.error("argument --batch-size: the function has distributed its data set; leave --batch-size out")
            try:
                dataset = strategy.distribute_dataset(dataset, options.batch_size)
            except (TypeError, ValueError) as error:
                parser.error(f"argument --batch-size: {error}")
        rates = _print_rates(dataset, options.epochs, options.batches)
        data_ms = median(1e3 / rate.elements_per_second for rate in rates)
        size = rates[0].rows_processed / rates[0].elements_processed
        print(f"data: {data_ms:.3f} ms per batch of {size:g} elements (median of the epochs)")
        if options.step_ms is not None:
            _print_verdict(data_ms, options.step_ms)
        elif make_step is not None:
            _print_verdict(data_ms, _step_ms(_called(make_step, strategy), next(endless(dataset))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strategies.dataset_benchmark",
        usage="%(prog)s PROGRAM.py:FUNCTION [PROGRAM.py:FUNCTION] [options]",
        description="Measure the speed of a data set, and tell whether data or compute limits the training.",
        epilog="A function that takes an argument gets the strategy. Functions are called in the strategy's scope: "
        "import Keras at the top of the program.",
    )
    parser.add_argument("make_dataset", metavar="PROGRAM.py:FUNCTION", help="makes the data set")
    parser.add_argument(
        "make_step",
        nargs="?",
        metavar="PROGRAM.py:FUNCTION",
        help="makes the step: a function of a batch that returns arrays; the command times it",
    )
    parser.add_argument("--step-ms", type=_positive(float), help="milliseconds of a step, if they are known")
    parser.add_argument(
        "--batch-size",
        type=_positive(int),
        help="elements per replica: distributes the data set of FUNCTION; without it FUNCTION must yield batches",
    )
    parser.add_argument("--replicas", type=_positive(int), default=1, help="number of replicas (default: %(default)s)")
    parser.add_argument("--epochs", type=_positive(int), default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument(
        "--batches", type=_positive(int), default=100, help="batches of an epoch (default: %(default)s)"
    )
    return parser


def _positive(kind: type[_T]) -> Callable[[str], _T]:
    def parse(word: str) -> _T:
        try:
            number = kind(word)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{word!r} is not a positive {kind.__name__}")
        return number

    return parse


def _function(name: str) -> Function:
    """Return the function that PROGRAM.py:FUNCTION names; raise ValueError if there is none."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not file or not function or not path.is_file():
        raise ValueError(f"{name!r} does not name a function; write PROGRAM.py:FUNCTION, with the path of a file")
    module = _module(path)
    found = getattr(module, function, None)
    if not callable(found):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{file} has no function {function!r}; it has {', '.join(own) or 'none'}")
    return found  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    """Return the program as a module, loaded once and importable by the processes that it starts."""
    folder = str(path.resolve().parent)
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python program")
    sys.path.insert(0, folder)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _called(function: Function, strategy: LocalStrategy) -> Tree:
    takes_strategy = any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    )
    return function(strategy) if takes_strategy else function()


def _print_rates(dataset: Data, epochs: int, batches: int) -> list[EpochRate]:
    """Return the rates of the epochs; print each as soon as it is known."""
    print(COLUMNS.format("epoch", "batches", "elements/s", "GB/s", "ms per batch"))
    rates = []
    for epoch, rate in enumerate(measured(dataset, epochs, batches, warm_up=WARM_UP_BATCHES)):
        columns = (rate.rows_processed / rate.time_elapsed, rate.bandwidth, 1e3 / rate.elements_per_second)
        print(COLUMNS.format(epoch, rate.elements_processed, *(f"{column:.3f}" for column in columns)), flush=True)
        rates.append(rate)
    return rates


def _step_ms(step: Function, batch: Batch) -> float:
    """Return the median time of the program's own step, on a batch that is loaded already."""
    times = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        begin = time.perf_counter()
        jax.block_until_ready(step(batch))
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[WARM_UP_STEPS:])


def _print_verdict(data_ms: float, step_ms: float) -> None:
    print(f"compute: {step_ms:.3f} ms per step")
    if data_ms > step_ms:
        print(
            f"Data is the bottleneck: the devices wait {100 * (1 - step_ms / data_ms):.0f} % of the time. Load with "
            "more processes (strategies.GrainSource), or move fewer bytes (transfer_dtype, strategies.casting)."
        )
    else:
        print(f"Compute is the bottleneck: the data are ready in {100 * data_ms / step_ms:.0f} % of a step's time.")
