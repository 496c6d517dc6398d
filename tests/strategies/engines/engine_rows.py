"""Engines under test in this folder, each with the same model, optimizer and data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_engine import MOMENTUM, RATE, NumpyEngine, NumpyOptions, NumpyRows

import strategies
from strategies.core.engine import Engine
from strategies.core.evaluation import Evaluator
from strategies.core.step import StepLoop
from strategies.data.every_row import every_row
from strategies.defaults import Defaults
from strategies.values import TrainState

REPLICAS = 6
STEPS = 5
BATCH_SIZE = 2
EVALUATED = 3
"""The step before which a training is evaluated."""
ROWS_OF_TEST = 31
INPUTS, OUTPUTS = 7, 3  # replicas have unequal parts of both weights and biases

Batch = Mapping[str, np.ndarray]


@dataclass
class Training:
    """A running training of an engine.

    Attributes:
        loop: The loop of the engine.
        state: The newest state.
        evaluate: (state, data set) -> means over the rows of the data set.
        predict: (state, data set) -> the outputs for the batches of the data set.
    """

    loop: StepLoop[Any, Any]
    state: Any
    evaluate: Callable[[Any, Any], Mapping[str, float]]
    predict: Callable[[Any, Any], Iterable[np.ndarray]]

    def step(self, batch: Batch) -> dict[str, float]:
        self.state, metrics = self.loop.make_step(self.state, batch)
        return dict(metrics)

    @property
    def engine(self) -> Engine[Any, Any]:
        return self.loop._engine

    @property
    def bits(self) -> dict[str, tuple[str, bytes]]:
        """The bits that equal states share."""
        return {name: (str(array.dtype), array.tobytes()) for name, array in self.engine.digest(self.state).items()}


def nothing() -> None: ...


@dataclass(frozen=True)
class Row:
    """The row of an engine.

    Attributes:
        name: Name of the framework.
        training: Begins a training, given the strategy, a function called before the loss is computed, and options
            named as in `StepOptions`; a collective call.
        transfers: Dtypes in which gradients may travel.
        library: The library that must be installed.
        defaults: Defaults of the strategy for instances on threads that are never lost.
        survives: Whether instances with these defaults carry on after a loss.
        is_long: Whether the tests belong to the complete tier, since they compile for several devices.
    """

    name: str
    training: Callable[..., AbstractContextManager[Training]]
    transfers: tuple[str, ...] = ("float16", "bfloat16")
    library: str = "numpy"
    defaults: Defaults | None = None
    survives: bool = False
    is_long: bool = False

    @property
    def of_survivors(self) -> Defaults | None:
        """The defaults of a strategy whose instances may be lost."""
        return self.defaults if self.survives else None

    @property
    def as_parameter(self) -> Any:
        is_missing = importlib.util.find_spec(self.library) is None
        marks = [pytest.mark.skip(reason=f"{self.library} is not installed")] if is_missing else []
        return pytest.param(self, id=self.name, marks=[*marks, *[pytest.mark.complete] * self.is_long])


def variables() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    shapes = {"b": OUTPUTS, "w": (INPUTS, OUTPUTS)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def rows(count: int = STEPS * BATCH_SIZE * REPLICAS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(count, INPUTS)).astype(np.float32)
    return {"x": x, "y": x[:, :OUTPUTS] + 0.1 * draw.normal(size=(count, OUTPUTS)).astype(np.float32)}


@contextmanager
def in_numpy(
    strategy: strategies.Strategy, before_loss: Callable[[], object] = nothing, **options: Any
) -> Iterator[Training]:
    given = NumpyOptions(before_loss=before_loss, **options)
    replicas, engine = strategy.replicas, NumpyEngine(strategy.replicas, given)
    loop = StepLoop(replicas, engine, given.rules, given.loss_scaling, None)
    evaluator = Evaluator(replicas, engine, every_row, given.rules.unrecoverable_part, loop.transfer)
    first = engine.restore(TrainState(variables(), None, 0))
    yield Training(
        loop,
        loop.start(lambda: engine.share(first, 0), lambda: first),
        lambda state, dataset: evaluator.evaluate(NumpyRows(False), state, dataset),
        lambda state, dataset: evaluator.predict(NumpyRows(True), state, dataset, True),
    )


@contextmanager
def in_jax(
    strategy: strategies.Strategy, before_loss: Callable[[], object] = nothing, **options: Any
) -> Iterator[Training]:
    def outputs_of(variables, batch, key):
        return batch["x"] @ variables["w"] + variables["b"]

    def loss_fn(variables, batch, key):
        before_loss()
        return jnp.mean((outputs_of(variables, batch, key) - batch["y"]) ** 2)

    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    trainer = strategies.Trainer(strategy, loss_fn, optimizer, min_elements_for_sharding=1, **options)
    state = trainer.init(variables())
    yield Training(trainer._loop, state, trainer.evaluate, lambda *given: trainer.predict(*given, outputs_of))


@contextmanager
def in_torch(
    strategy: strategies.Strategy, before_loss: Callable[[], object] = nothing, **options: Any
) -> Iterator[Training]:
    import torch

    import strategies.torch

    def loss_fn(module, batch):
        before_loss()
        return ((module(batch["x"]) - batch["y"]) ** 2).mean()

    class Counting(torch.nn.Linear):
        """A linear layer with a buffer, which is a part of the state."""

        def __init__(self):
            super().__init__(INPUTS, OUTPUTS)
            self.register_buffer("rows", torch.tensor(0))
            self.load_state_dict({name: torch.from_numpy(array) for name, array in first.items()})

        def forward(self, x):
            if self.training:
                self.rows += len(x)
            return super().forward(x)

    first = {"bias": variables()["b"], "weight": variables()["w"].T.copy(), "rows": np.array(0)}
    module = Counting()
    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, optimizer, min_elements_for_sharding=1, **options)
    with closing(trainer):
        yield Training(
            trainer._loop,
            trainer._training,
            lambda _, dataset: trainer.evaluate(dataset),
            lambda _, dataset: trainer.predict(dataset, lambda own, batch: own(batch["x"])),
        )


def in_torch_on_a_device(
    strategy: strategies.Strategy, before_loss: Callable[[], object] = nothing, **options: Any
) -> AbstractContextManager[Training]:
    return in_torch(strategy, before_loss, replica_device="cpu", **options)


ROWS = (
    Row("numpy", in_numpy),
    Row("jax", in_jax),
    Row("jax on devices", in_jax, ("float16", "bfloat16"), "numpy", Defaults(exchange="window"), True, is_long=True),
    Row("torch", in_torch, library="torch"),
    Row("torch on a device", in_torch_on_a_device, ("float16", "bfloat16"), "torch", Defaults(exchange="compiled")),
)
EVERY = pytest.mark.parametrize("row", [row.as_parameter for row in ROWS])
ALWAYS = pytest.mark.parametrize("row", [replace(row, is_long=False).as_parameter for row in ROWS])
"""Every row, in the default tier: for tests whose coverage no other test repeats."""


def batches(strategy: strategies.Strategy) -> Iterator[Batch]:
    return strategy.distribute_dataset(rows(), BATCH_SIZE, seed=1).epoch(0)


def copied(batch: Batch) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in batch.items()}


def evaluated(strategy: strategies.Strategy, training: Training) -> tuple[object, ...]:
    """Return the evaluation and the predictions of rows that replicas and batches divide unevenly."""
    dataset = strategy.distribute_dataset(rows(ROWS_OF_TEST), BATCH_SIZE, shuffle=False, remainder="pad")
    found = dict(training.evaluate(training.state, dataset))
    return found, np.concatenate(list(training.predict(training.state, dataset))).tobytes()


def train(strategy: strategies.Strategy, row: Row, evaluates: bool = False, **options: Any) -> tuple[Any, ...]:
    """Return the metrics of every step, an optional evaluation, and the step and bits at the end."""
    with row.training(strategy, **options) as training:
        found: list[object] = []
        for step, batch in enumerate(batches(strategy)):
            if evaluates and step == EVALUATED:
                found.append(evaluated(strategy, training))
            found.append(training.step(batch))
        return found, training.state.step, training.bits
