"""A program that trains a small network on handwritten digits with R replicas, on any number of instances.

    python -m popdist.examples.digits --strategy local --replicas 4
    poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.digits
    TF_CONFIG=... python -m popdist.examples.digits --strategy multi-worker --replicas 4    (once per worker)
    mpirun -np 2 python -m popdist.examples.digits --strategy horovod --replicas 4
    poprun --num-instances 2 --num-replicas 4 --ipus-per-replica 2 python -m popdist.examples.digits \
        --pipeline-stages 2 --schedule grouped

The first three print the same fingerprint of the variables. Horovod adds gradients in its own order, and the pipeline
accumulates the gradients of several micro-batches per update.

With --checkpoint-dir the program continues where its last run with that folder ended. The bits do not depend on the
number of instances.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import optax

import collectives
import popdist
import strategies
from popdist.examples.digits_data import DataError, Digits, load_digits
from popdist.examples.digits_models import MODELS, Model

TEST_BATCH_SIZE = 512

# The CNN gets 95.0 to 97.5 % of the test set right with 4 replicas (ten seeds); 92.8 to 98.3 % with 1 and 8 (three).
DEFAULT_EPOCHS = {"cnn": 50, "mlp": 10}
DEFAULT_LEARNING_RATE = {"cnn": 0.01, "mlp": 0.001}
DEFAULT_CHECKPOINT_EVERY = 100


class UsageError(Exception):
    """Unusable arguments; nothing has been trained."""


def make_local(replicas: int | None, stages: int) -> strategies.Strategy:
    """Make a strategy with all replicas in this process, each with one device per stage."""
    return strategies.LocalStrategy(num_replicas=replicas or 1, ipus_per_replica=stages)


def make_popdist(replicas: int | None, stages: int) -> strategies.Strategy:
    """Make a strategy with the replicas of all instances that the launcher has started."""
    popdist.init(replicas)
    return strategies.PopDistStrategy(ipus_per_replica=devices_for(stages))


def devices_for(stages: int) -> int | None:
    """Return one device per stage for each replica, or None if poprun has fixed the number of devices."""
    return stages if popdist.getNumIpusPerReplica() == 1 else None


def make_multi_worker(replicas: int | None, stages: int) -> strategies.Strategy:
    """Make a strategy with the replicas of all workers of TF_CONFIG."""
    resolver = popdist.TFConfigClusterResolver()
    workers = len(resolver.cluster.addresses)
    local, rest = divmod(replicas or workers, workers)
    if rest or not local:
        raise UsageError(
            f"--replicas {replicas} on {workers} workers; each has equally many: use a multiple of {workers}"
        )
    return strategies.IPUMultiWorkerStrategy(
        resolver, variables_on_host=True, num_local_replicas=local, ipus_per_replica=stages
    )


def make_horovod(replicas: int | None, stages: int) -> strategies.Strategy:
    """Make a strategy like `make_popdist`, but with sums by Horovod."""
    popdist.init(replicas)
    return strategies.IPUHorovodStrategy(ipus_per_replica=devices_for(stages))


STRATEGIES: dict[str, Callable[[int | None, int], strategies.Strategy]] = {
    "local": make_local,
    "popdist": make_popdist,
    "multi-worker": make_multi_worker,
    "horovod": make_horovod,
    "ipu": make_local,
}


@dataclass(frozen=True)
class Result:
    """The result that `--json` writes.

    Attributes:
        strategy: Name of the strategy on the command line.
        model: Name of the model on the command line.
        instances: Number of instances.
        replicas: Number of replicas of all instances, R.
        epochs: Number of epochs begun.
        steps: Number of updates of the variables.
        effective_batch_size: Images per update: micro-batch x gradient accumulation count x replicas.
        final_loss: Mean over all replicas in the last step; null if no step was left.
        final_accuracy: Mean accuracy on the training data in the last step; null if no step was left.
        test_accuracy: Fraction of the test set that the model gets right.
        seconds_per_step: Mean without the first step, which compiles; null if there was no other step.
        samples_per_second: Images of all replicas per second, in the same time.
        variables_sha256: Fingerprint of the final variables.
    """

    strategy: str
    model: str
    instances: int
    replicas: int
    epochs: int
    steps: int
    effective_batch_size: int
    final_loss: float | None
    final_accuracy: float | None
    test_accuracy: float
    seconds_per_step: float | None
    samples_per_second: float | None
    variables_sha256: str

    def __str__(self) -> str:
        each, left_over = divmod(self.replicas, self.instances)  # after a loss, replicas may not divide evenly
        layout = f"{self.instances} x {each} replicas"
        if left_over:
            layout = f"{self.replicas} replicas in {self.instances} instances"
        loss = "" if self.final_loss is None else f", loss {self.final_loss:.4f}"
        speed = "" if self.seconds_per_step is None else f", {self.seconds_per_step * 1e3:.2f} ms per step"
        return (
            f"{self.model} on {layout} ({self.strategy}): {self.steps} steps{loss}, "
            f"test accuracy {self.test_accuracy:.1%}{speed}\nvariables {self.variables_sha256}"
        )


def main() -> int:
    """Run the program; the exit status is 2 if its arguments cannot be used."""
    options = read_options()
    try:
        data = load_digits(options.data)
        strategy = STRATEGIES[options.strategy](options.replicas, options.pipeline_stages or 1)
        dataset = distribute(strategy, data, options)
    except (DataError, UsageError, ValueError, popdist.PopDistError, collectives.CollectiveError) as error:
        print(f"digits.py: error: {error}", file=sys.stderr)
        return 2
    try:
        training = train(strategy, dataset, data, options)
    except (UsageError, strategies.CheckpointError, strategies.FailedPreconditionError) as error:
        print(f"digits.py: error: {error}", file=sys.stderr)
        return 2
    strategy.on_chief(lambda: report(result_of(training, strategy, dataset, options), options.json))
    return 0


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with status 2 and a message if it cannot be used."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.", allow_abbrev=False)
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="popdist", help="the strategy; ipu is local (%(default)s)")
    add("--model", choices=MODELS, default="cnn", help="the network (%(default)s)")
    add(
        "--data",
        default="digits",
        metavar="digits|PATH",
        help="MNIST as a directory of IDX files or an npz file",
    )
    add("--epochs", type=count, metavar="N", help=f"passes over the data ({described(DEFAULT_EPOCHS)})")
    add("--max-steps", type=count, metavar="N", help="stop after N steps")
    add("--batch-size", type=count, default=16, metavar="N", help="images per replica and step (%(default)s)")
    add(
        "--gradient-accumulation-count",
        type=count,
        metavar="N",
        help="micro-batches per update (default: 1; with a pipeline 2 per stage)",
    )
    add("--pipeline-stages", type=stages, metavar="2|3", help="cut the network into stages on devices of a replica")
    add("--schedule", metavar="NAME", help="pipeline schedule: grouped, interleaved, sequential, ... (grouped)")
    add("--compute-dtype", choices=("bfloat16", "float16"), help="dtype of the network's computation (float32)")
    add("--loss-scaling", type=scaling, metavar="X|dynamic", help="scale of the loss, for float16")
    add("--gradient-transfer-dtype", choices=("bfloat16", "float16"), help="dtype of gradients in transit")
    add("--shard-optimizer-state", action="store_true", help="shard the optimizer state over replicas")
    add("--learning-rate", type=rate, metavar="X", help=f"learning rate of Adam ({described(DEFAULT_LEARNING_RATE)})")
    add(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of the variables and of the order of the data (%(default)s)",
    )
    add("--replicas", type=count, metavar="N", help="replicas of all instances; default: from poprun, else one each")
    add("--check-numerics", action="store_true", help="stop at the first gradient that is not finite")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save here, and continue from the newest checkpoint here")
    add("--checkpoint-every", type=count, metavar="K", help=f"save every K steps ({DEFAULT_CHECKPOINT_EVERY})")
    add("--json", metavar="PATH", help="write the result to this file; '-' is standard output")
    options = parser.parse_args(arguments)
    if options.epochs is None:
        options.epochs = DEFAULT_EPOCHS[options.model]
    if options.learning_rate is None:
        options.learning_rate = DEFAULT_LEARNING_RATE[options.model]
    if options.schedule and not options.pipeline_stages:
        parser.error("argument --schedule: there is no pipeline; give --pipeline-stages as well")
    if options.gradient_accumulation_count is None:
        options.gradient_accumulation_count = 2 * options.pipeline_stages if options.pipeline_stages else 1
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"argument --json: {Path(options.json).absolute().parent} is no directory")
    if options.checkpoint_every and not options.checkpoint_dir:
        parser.error("argument --checkpoint-every: there is no folder; give --checkpoint-dir as well")
    return options


def distribute(
    strategy: strategies.Strategy, data: Digits, options: argparse.Namespace
) -> strategies.DistributedDataset:
    """Distribute the training data over the replicas."""
    total = strategy.num_replicas_in_sync
    images, micro_batches = len(data.train_images), options.gradient_accumulation_count
    if options.batch_size * micro_batches * total > images:
        shares = total * micro_batches
        advice = f"at most {images // shares}" if images >= shares else f"at most {images} replicas"
        accumulation = f", {micro_batches} times," if micro_batches > 1 else ""
        raise UsageError(
            f"--batch-size {options.batch_size} on each of {total} replicas{accumulation} takes "
            f"{options.batch_size * shares} images per step and there are {images} to train on; use {advice}"
        )
    arrays = {"image": data.train_images, "label": data.train_labels}
    return strategy.distribute_dataset(
        arrays, batch_size=options.batch_size, seed=options.seed, gradient_accumulation_count=micro_batches
    )


@dataclass(frozen=True)
class Training:
    """The outcome of the training.

    Attributes:
        state: State after the last step.
        metrics: Metrics of the last step; None if no step was left.
        seconds_per_step: Mean without the first step; None if there was no other step.
        test_accuracy: Fraction of the test set that the model gets right.
    """

    state: strategies.TrainState
    metrics: strategies.Metrics | None
    seconds_per_step: float | None
    test_accuracy: float


def train(
    strategy: strategies.Strategy,
    dataset: strategies.DistributedDataset,
    data: Digits,
    options: argparse.Namespace,
) -> Training:
    """Train, and evaluate the variables on the test set; a collective call."""
    model = MODELS[options.model]
    trainer = strategies.Trainer(
        strategy,
        loss_of(model, options.pipeline_stages or 1),
        optax.adam(options.learning_rate),
        seed=options.seed,
        check_numerics=options.check_numerics,
        gradient_accumulation_count=options.gradient_accumulation_count,
        compute_dtype=options.compute_dtype,
        loss_scaling=options.loss_scaling,
        gradient_transfer_dtype=options.gradient_transfer_dtype,
        replicated_optimizer_state_sharding=options.shard_optimizer_state,
        pipeline=pipeline_of(strategy, options),
    )
    state = trainer.init(model.init(options.seed, data.image_shape))
    steps = int(min(options.epochs * len(dataset), options.max_steps or math.inf))
    stopwatch = Stopwatch()
    metrics: strategies.Metrics | None = None
    with checkpoints_of(trainer, dataset, options) as checkpoints:
        state = resumed(checkpoints, state, steps, strategy.is_chief, options)
        with Progress(steps, len(dataset), state.step, is_shown=lambda: strategy.is_chief) as progress:
            for batch in batches(dataset, steps):
                state, metrics = trainer.step(state, batch)
                progress.update(metrics)
                stopwatch.step(state.variables)
                if checkpoints:
                    checkpoints.after_step(state)
        seconds = stopwatch.seconds_per_step(state.variables)
        if checkpoints:
            checkpoints.save(state)
    found = trainer.evaluate(state, test_set(strategy, data), metrics_fn=accuracy_of(model))
    return Training(state, metrics, seconds, found["accuracy"])


def result_of(
    training: Training,
    strategy: strategies.Strategy,
    dataset: strategies.DistributedDataset,
    options: argparse.Namespace,
) -> Result:
    """Return the result to report."""
    metrics, seconds, steps = training.metrics, training.seconds_per_step, training.state.step
    effective_batch_size = options.batch_size * options.gradient_accumulation_count * strategy.num_replicas_in_sync
    return Result(
        strategy=options.strategy,
        model=options.model,
        instances=strategy.num_instances,
        replicas=strategy.num_replicas_in_sync,
        epochs=-(-steps // len(dataset)),
        steps=steps,
        effective_batch_size=effective_batch_size,
        final_loss=None if metrics is None else metrics["loss"],
        final_accuracy=None if metrics is None else metrics["accuracy"],
        test_accuracy=training.test_accuracy,
        seconds_per_step=seconds,
        samples_per_second=seconds and effective_batch_size / seconds,
        variables_sha256=strategies.fingerprint(training.state.variables),
    )


def checkpoints_of(
    trainer: strategies.Trainer, dataset: strategies.DistributedDataset, options: argparse.Namespace
) -> AbstractContextManager[strategies.Checkpoints | None]:
    """Return the checkpoints of the training, or None without --checkpoint-dir."""
    if options.checkpoint_dir is None:
        return nullcontext()
    every = options.checkpoint_every or DEFAULT_CHECKPOINT_EVERY
    return strategies.Checkpoints(options.checkpoint_dir, trainer, dataset, every=every)


def resumed(
    checkpoints: strategies.Checkpoints | None,
    state: strategies.TrainState,
    steps: int,
    is_first: bool,
    options: argparse.Namespace,
) -> strategies.TrainState:
    """Restore the state of the newest checkpoint, if there is one."""
    if checkpoints is None:
        return state
    state = checkpoints.restore(state)
    if state.step > steps:
        raise UsageError(f"{options.checkpoint_dir} is at step {state.step} and {steps} were asked for; ask for more")
    if state.step and is_first:
        print(f"resuming at step {state.step} of {steps} from {options.checkpoint_dir}", file=sys.stderr, flush=True)
    return state


def batches(dataset: strategies.DistributedDataset, steps: int) -> Iterator[Any]:
    """Yield the batches up to the end of step `steps`, from the data set's position, over as many epochs as needed."""
    begin = dataset.position()
    for epoch in range(begin.epoch, -(-steps // len(dataset))):
        done = epoch * len(dataset) + (begin.step if epoch == begin.epoch else 0)
        for _, batch in zip(range(steps - done), dataset.epoch(epoch), strict=False):
            yield batch


def pipeline_of(strategy: strategies.Strategy, options: argparse.Namespace) -> strategies.Pipelining | None:
    """Assign the stages to the devices of a replica in turn; return None without a pipeline."""
    if not options.pipeline_stages:
        return None
    devices = strategy.replicas.grid.ipus_per_replica
    try:
        return strategies.Pipelining([stage % devices for stage in range(options.pipeline_stages)], options.schedule)
    except ValueError as error:
        raise UsageError(f"--schedule {options.schedule}: {error}") from error


def loss_of(model: Model, stages: int = 1) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """Return a loss function for one replica's micro-batch: mean cross-entropy, and the accuracy."""

    def loss_fn(variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = model.apply(variables, batch["image"], stages)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    return loss_fn


def test_set(strategy: strategies.Strategy, data: Digits) -> strategies.DistributedDataset:
    """Distribute the whole test set over the replicas."""
    arrays = {"image": data.test_images, "label": data.test_labels}
    size = max(1, TEST_BATCH_SIZE // strategy.num_replicas_in_sync)
    return strategy.distribute_dataset(arrays, size, shuffle=False, remainder="pad")


def accuracy_of(model: Model) -> Callable[[Any, Any, jax.Array, jax.Array], dict[str, strategies.Mean]]:
    """Return a function that computes the accuracy of all rows except padding."""

    def metrics_fn(variables: Any, batch: Any, mask: jax.Array, key: jax.Array) -> dict[str, strategies.Mean]:
        is_right = model.apply(variables, batch["image"]).argmax(-1) == batch["label"]
        return {"accuracy": strategies.Mean.of(is_right, mask)}

    return metrics_fn


class Stopwatch:
    """A stopwatch for all steps except the first, which compiles."""

    def __init__(self) -> None:
        self._steps = 0
        self._begin = 0.0

    def step(self, variables: Any) -> None:
        """Note the end of a step, with the variables that it made."""
        if self._steps == 0:
            wait_for(variables)
            self._begin = time.perf_counter()
        self._steps += 1

    def seconds_per_step(self, variables: Any) -> float | None:
        """Return the mean time per step until `variables` are ready; None before the second step."""
        wait_for(variables)
        if self._steps < 2:
            return None
        return (time.perf_counter() - self._begin) / (self._steps - 1)


def wait_for(variables: Any) -> None:
    """Wait until all variables are computed."""
    for leaf in jax.tree.leaves(variables):
        leaf.block_until_ready()


class Progress:
    """The progress on stderr: a progress bar on a terminal, else one line per epoch; with means of the present epoch.

    Args:
        steps: Number of steps of the whole training.
        steps_per_epoch: Number of steps between lines.
        done: Number of steps made before.
        is_shown: Whether this instance prints; called after every step, because instances may be lost.
    """

    def __init__(self, steps: int, steps_per_epoch: int, done: int = 0, *, is_shown: Callable[[], bool]) -> None:
        self._steps = steps
        self._steps_per_epoch = steps_per_epoch
        self._is_shown = is_shown
        self._done = done
        self._counted = 0
        self._sums = dict.fromkeys(("loss", "accuracy"), 0.0)  # of the present epoch
        self._bar = self._make_bar() if is_shown() and sys.stderr.isatty() and sys.stdout.isatty() else None

    def _make_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(total=self._steps, initial=self._done, unit="step", file=sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, metrics: strategies.Metrics) -> None:
        """Note the end of a step."""
        if self._done % self._steps_per_epoch == 0:
            self._counted, self._sums = 0, dict.fromkeys(self._sums, 0.0)
        self._done += 1
        self._counted += 1
        self._sums = {name: total + metrics[name] for name, total in self._sums.items()}
        if not self._is_shown():
            return
        means = {name: total / self._counted for name, total in self._sums.items()}
        text = f"loss {means['loss']:.4f}, accuracy {means['accuracy']:.1%}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._done % self._steps_per_epoch == 0 or self._done == self._steps:
            print(f"epoch {-(-self._done // self._steps_per_epoch)}: {text}", file=sys.stderr, flush=True)


def report(result: Result, json_path: str | None) -> None:
    """Print the result, and write it as JSON if --json asks for it."""
    if json_path != "-":
        print(result, flush=True)
    if json_path is not None:
        text = json.dumps(asdict(result)) + "\n"
        if json_path == "-":
            sys.stdout.write(text)
        else:
            Path(json_path).write_text(text, encoding="utf-8")


def count(text: str) -> int:
    """Parse an integer above zero."""
    return whole(text, at_least=1)


def stages(text: str) -> int:
    """Parse a number of stages, at most the number of layers of every network."""
    number = whole(text, at_least=2)
    most = min(len(model.layers) for model in MODELS.values())
    if number > most:
        raise argparse.ArgumentTypeError(f"{text} stages are too many; the networks have {most} layers")
    return number


def natural(text: str) -> int:
    """Parse an integer that is not negative."""
    return whole(text, at_least=0)


def whole(text: str, at_least: int) -> int:
    """Parse an integer; raise ArgumentTypeError if the text is none or the number is too small."""
    number = int(text) if text.lstrip("+-").isdecimal() else None
    if number is None or number < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {at_least}")
    return number


def scaling(text: str) -> float | str:
    """Parse a finite number above zero, or "dynamic"."""
    return text if text == "dynamic" else rate(text)


def rate(text: str) -> float:
    """Parse a finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return number


def described(defaults: dict[str, Any]) -> str:
    """Format the defaults of each model, for the help text."""
    return ", ".join(f"{name}: {value}" for name, value in defaults.items())


if __name__ == "__main__":
    sys.exit(main())
