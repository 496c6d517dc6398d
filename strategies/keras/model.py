"""A model of Keras that belongs to a strategy: its `fit`, `evaluate`, `predict` and their relatives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np
from keras.utils import unpack_x_y_sample_weight

from strategies.keras.agreement import (
    VariableWatch,
    insist,
    number_of_leader,
    refuse_other_rows,
    terms_of_call,
)
from strategies.keras.batches import own_rows
from strategies.keras.callbacks import Running, described, listed
from strategies.keras.checkpointing import FitCheckpoints, SavedFit, given_in
from strategies.keras.data import DataArguments, KerasFeed, Pass, Shuffle, open_feed, rows_of_replica
from strategies.keras.evaluating import PredictFunction, TestFunction
from strategies.keras.extensions import Extensions, ModelOptions
from strategies.keras.own_steps import OwnTrainFunction
from strategies.keras.patches import begin_with_epoch, train_validation_split
from strategies.keras.protocols import Callbacks, FunctionLike, ModelClass, ModelLike, State
from strategies.keras.refusals import (
    is_own,
    refuse_beside_own_step,
    refuse_changed_layers,
    refuse_optimizer,
    refuse_other_size,
    refuse_own_steps,
    refuse_use,
)
from strategies.keras.state import seeds_of
from strategies.keras.training import TrainFunction
from strategies.strategy import Strategy
from strategies.typing import Batch, Data, Tree

logger = logging.getLogger("strategies.keras")

_NOT_COMPARED = ("self", "x", "y", "verbose", "callbacks")
"""Arguments of `fit` that may differ, or are compared otherwise."""
COMPARED = 3
"""Number of batches of `train_on_batch`, the first ones, whose rows instances compare."""


def _by_chief(name: str) -> Callable[..., object]:
    def write(self: ReplicatedModel, *arguments: object, **named: object) -> object:
        writes = self._running is None or self.strategy.replicas.is_chief
        return getattr(self.stock, name)(self._model, *arguments, **named) if writes else None

    write.__doc__ = f"See `keras.Model.{name}`; from a callback on the chief only."
    return write


class ReplicatedModel:
    """The methods of a model of a strategy in place of Keras's, whose own loops they use.

    Args:
        model: of Keras.
        stock: its class, as the user knows it.
        strategy: in whose scope it was made.
        extensions: have its options.

    Attributes:
        in_scope: the strategy of the scope.
        stock: see above.
    """

    def __init__(self, model: ModelLike, stock: ModelClass, strategy: Strategy, extensions: Extensions) -> None:
        self.in_scope = strategy
        self.stock = stock
        self._model = model
        self._extensions = extensions
        self._running: Running | None = None
        self._compared = 0
        self._feeds: dict[str, KerasFeed] = {}
        self._said: int | None = None  # steps per execution, while Keras counts others
        self._watch = VariableWatch(model)
        self._strategies: dict[int, Strategy] = {}  # by how many devices a replica spans

    @property
    def strategy(self) -> Strategy:
        """The strategy that trains the model: the scope's, or for a model in stages one over the same devices."""
        devices = self._extensions.devices
        if devices not in self._strategies:
            self._strategies[devices] = self.in_scope.for_stages(devices)
        return self._strategies[devices]

    @property
    def options(self) -> ModelOptions:
        """The options of its training."""
        return self._extensions.options

    def fit(
        self,
        x: Data = None,
        y: Data = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Data = None,
        shuffle: Shuffle = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Data = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        global_batch_size: int | None = None,
    ) -> object:
        """See `keras.Model.fit`; batch sizes are those of a replica, but for `global_batch_size`."""
        arguments = {name: value for name, value in locals().items() if name not in _NOT_COMPARED}
        arguments |= {"sample_weight": sample_weight is not None, "validation_data": validation_data is not None}
        checkpoints = given_in(callbacks)
        self._check("fit", "train_step", has_checkpoints=checkpoints is not None)
        self._insist("fit", callbacks, arguments)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        batch_size = rows_of_replica(self.strategy, batch_size, global_batch_size, self.options.micro_batches)
        given = DataArguments(x, y, sample_weight, class_weight, batch_size, steps_per_epoch)
        if checkpoints is not None and steps_per_epoch is not None:
            raise ValueError(
                "there are strategies.keras.Checkpoints, which keep the position in an epoch, and steps_per_epoch, "
                "which cuts epochs elsewhere; leave steps_per_epoch out"
            )
        feed = self._feed(given, trains=True, shuffle=shuffle, seed=None if checkpoints is None else checkpoints.seed)
        refuse_other_size(feed.batch_size, global_batch_size)
        validation: KerasFeed | None = None
        if validation_data is not None:
            size = validation_batch_size or batch_size
            x, y, sample_weight = unpack_x_y_sample_weight(validation_data)
            validation = self._feed(DataArguments(x, y, sample_weight, None, size, validation_steps), trains=False)
        steps = steps_per_epoch or feed.num_batches
        self._say_batch_size(feed)
        stack = ExitStack()

        def resume() -> None:
            if checkpoints is not None:
                stack.enter_context(self._resumed(checkpoints, feed))

        running = Running(self._model, self.strategy, feed.begin_with, self.unite, resume, self._made, self._watch)
        prepared = listed(callbacks, running, verbose=verbose, epochs=epochs, steps=steps, add_history=True)
        with self._while(running, train=feed, test=validation), stack:
            return self.stock.fit(
                self._model,
                feed,
                epochs=epochs,
                callbacks=prepared,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )

    def evaluate(
        self,
        x: Data = None,
        y: Data = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Data = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
        *,
        global_batch_size: int | None = None,
        **named: object,
    ) -> Tree:
        """See `keras.Model.evaluate`: every row counts once."""
        if self._running is not None and named.get("_use_cached_eval_dataset"):  # called by fit, for its validation
            with self._executing(training=False):
                return self.stock.evaluate(
                    self._model, callbacks=callbacks, return_dict=return_dict, steps=steps, **named
                )
        self._check("evaluate", "test_step")
        given = DataArguments(x, y, sample_weight, None, batch_size, steps)
        feed = self._feed_of("evaluate", callbacks, given, global_batch_size, sample_weight=sample_weight is not None)
        running = Running(self._model, self.strategy, steps_made=self._made)
        prepared = listed(callbacks, running, verbose=verbose, epochs=1, steps=steps or feed.num_batches)
        with self._while(running, test=feed):
            return self.stock.evaluate(
                self._model, feed, callbacks=prepared, steps=steps, return_dict=return_dict, **named
            )

    def predict(
        self,
        x: Data,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
        *,
        global_batch_size: int | None = None,
    ) -> Tree:
        """See `keras.Model.predict`: the outputs for all rows, in their order, on every instance."""
        self._check("predict", "predict_step", is_compiled=False)
        given = DataArguments(x, batch_size=batch_size, steps=steps)
        feed = self._feed_of("predict", callbacks, given, global_batch_size)
        self._build(feed.example)
        running = Running(self._model, self.strategy)
        prepared = listed(callbacks, running, verbose=verbose, epochs=1, steps=steps or feed.num_batches)
        with self._while(running, predict=feed):
            return self.stock.predict(self._model, feed, callbacks=prepared, steps=steps)

    def train_on_batch(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Tree:
        """See `keras.Model.train_on_batch`: a batch for all replicas, given on every instance."""
        self._check("train_on_batch", "train_step")
        self._compare_batch((x, y, sample_weight, class_weight))
        with self._outside_of_loops():
            logs = self.stock.train_on_batch(self._model, x, y, sample_weight, class_weight, return_dict)
        self.unite()
        return logs

    def test_on_batch(self, x: Data, y: Data = None, sample_weight: Data = None, return_dict: bool = False) -> Tree:
        """See `keras.Model.test_on_batch`: a batch for all replicas, given on every instance."""
        self._check("test_on_batch", "test_step")
        with self._outside_of_loops():
            return self.stock.test_on_batch(self._model, x, y, sample_weight, return_dict)

    def predict_on_batch(self, x: Data) -> Tree:
        """See `keras.Model.predict_on_batch`: a batch for all replicas, given on every instance."""
        self._check("predict_on_batch", "predict_step", is_compiled=False)
        with self._outside_of_loops():
            return self.stock.predict_on_batch(self._model, x)

    def reset_metrics(self) -> None:
        """See `keras.Model.reset_metrics`."""
        self.stock.reset_metrics(self._model)
        if self._model.test_function is not None:
            self._model.test_function.function.forget()

    def make_train_function(self, force: bool = False) -> None:
        """See Keras, which calls it before it trains."""
        if self._model.train_function is None or force:
            refuse_optimizer(self._model.optimizer, self.options.accumulated is not None)
            steps = self.options.executed(self._steps_per_execution)
            function: OwnTrainFunction | TrainFunction
            if is_own(self.stock, "train_step"):
                function = OwnTrainFunction(self._model, self.stock, self.strategy, steps)
            else:
                staged = self._extensions.staged
                function = TrainFunction(self._model, self.strategy, self.options, steps, self._watch, staged)
            watch = None if self.strategy.replicas.communicator.size == 1 else self._watch
            self._model.train_function = _Called(function, lambda: self._feeds.get("train"), self._alone, watch)

    def make_test_function(self, force: bool = False) -> None:
        """See Keras, which calls it before it evaluates."""
        if force or not self._is_current(self._model.test_function):
            function = TestFunction(self._model, self.strategy, self._evaluated)
            self._model.test_function = _Called(function, lambda: self._feeds.get("test"), self._pass_over)

    def make_predict_function(self, force: bool = False) -> FunctionLike | None:
        """See Keras, which calls it before it predicts."""
        if force or not self._is_current(self._model.predict_function):
            function = PredictFunction(self._model, self.strategy, self._evaluated)
            self._model.predict_function = _Called(function, lambda: self._feeds.get("predict"), self._pass_over)
        return self._model.predict_function

    def _is_current(self, called: FunctionLike | None) -> bool:
        """Return whether a function is there, and no layer was frozen or thawed since it was made."""
        return called is not None and called.function.functions.seeds.flags == seeds_of(self._model)

    def _symbolic_build(self, iterator: Any = None, data_batch: Batch = None) -> None:
        """See Keras: with a batch that was not taken from the data."""
        if iterator is not None:
            data_batch = iterator.data_adapter.example
        self.stock._symbolic_build(self._model, data_batch=data_batch)

    def _made(self) -> int:
        """Return the number of steps that were made."""
        function = self._model.train_function
        return 0 if function is None else int(function.function.steps_made)

    save, save_weights, export = map(_by_chief, ("save", "save_weights", "export"))

    def unite(self) -> None:
        """Have Keras know the whole state; a collective call where instances have parts of it."""
        function = self._model.train_function
        if function is not None:
            function.function.unite()

    def _check(self, called: str, step: str, is_compiled: bool = True, has_checkpoints: bool = False) -> None:
        """Refuse what cannot be done on replicas."""
        refuse_use(self._model, self.in_scope, called)
        refuse_own_steps(self.stock, step)
        if is_compiled:
            self._model._assert_compile_called(called)
        if step == "train_step":
            if is_own(self.stock, step):  # which may have optimizers for parts of the model
                refuse_beside_own_step(self.stock, self.options, has_checkpoints)
            else:
                refuse_changed_layers(self._model)

    def _insist(self, called: str, callbacks: Callbacks, arguments: Mapping[str, object]) -> None:
        """Refuse to begin where instances call a function with other arguments; a collective call."""
        replicas = self.strategy.replicas
        if replicas.communicator.size > 1:
            terms = terms_of_call(self._model, called, described(callbacks), arguments)
            insist(replicas, terms, f"the arguments of {called}")

    def _feed_of(
        self,
        called: str,
        callbacks: Callbacks,
        given: DataArguments,
        global_batch_size: int | None,
        **arguments: object,
    ) -> KerasFeed:
        """Return the feed of `evaluate` or `predict`, on which all instances agree; a collective call."""
        sizes = {"batch_size": given.batch_size, "global_batch_size": global_batch_size, "steps": given.steps}
        self._insist(called, callbacks, sizes | arguments)
        rows = rows_of_replica(self.strategy, given.batch_size, global_batch_size)
        feed = self._feed(replace(given, batch_size=rows), trains=False)
        refuse_other_size(feed.batch_size, global_batch_size)
        return feed

    @contextmanager
    def _resumed(self, checkpoints: FitCheckpoints, feed: KerasFeed) -> Iterator[None]:
        """While `fit` has checkpoints, from the newest of which it goes on; a collective call."""
        assert self._model.train_function is not None  # Keras has made it by now
        function = self._model.train_function.function
        rows = feed.batch_size // self.strategy.num_replicas_in_sync * len(self.strategy.replicas.local_replicas)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), feed.example)
        dataset = feed.dataset
        saved = function.resume(shapes, lambda trainer: SavedFit(checkpoints.open(trainer, dataset), dataset))
        if saved.first_epoch:
            begin_with_epoch(self._model, saved.first_epoch)
        function.saved = saved
        try:
            with saved:
                yield
        finally:
            function.saved = None

    def _feed(
        self, given: DataArguments, *, trains: bool, shuffle: Shuffle = False, seed: int | None = None
    ) -> KerasFeed:
        if not (trains and shuffle):
            seed = 0
        elif seed is None:  # instance 0 draws it from NumPy, as Keras does for each permutation
            drawn = int(np.random.randint(2**31 - 1))
            seed = number_of_leader(self.strategy.replicas, drawn, "seed of a shuffle")
        feed = open_feed(
            given,
            self.strategy,
            trains=trains,
            shuffle=shuffle,
            seed=seed,
            accumulated=self.options.micro_batches if trains else 1,
            prefetch=self.options.prefetch,
        )
        refuse_other_rows(self.strategy.replicas, feed.compared)
        return feed

    def _say_batch_size(self, feed: KerasFeed) -> None:
        count, replicas = self.options.micro_batches, self.strategy.num_replicas_in_sync
        logger.info(
            "fit: global batch %d = batch_size %d x %d accumulated x %d replicas; the last one of an epoch may have "
            "fewer rows",
            feed.batch_size,
            feed.batch_size // (count * replicas),
            count,
            replicas,
        )

    @contextmanager
    def _while(self, running: Running, **feeds: KerasFeed | None) -> Iterator[None]:
        """While one of Keras's loops runs over feeds, maybe called by a callback of another one, which goes on then."""
        outer = self._running, self._feeds
        if self._running is not None:
            self.unite()
        self._begin()
        self._running, self._feeds = running, {name: feed for name, feed in feeds.items() if feed is not None}
        try:
            with self._executing(training=running.watch is not None):
                yield
        finally:
            self._running, self._feeds = outer
        self.unite()
        self._begin()

    @contextmanager
    def _outside_of_loops(self) -> Iterator[None]:
        """While a function is called for a batch of its own, also by a callback of a loop over feeds."""
        feeds, self._feeds = self._feeds, {}
        try:
            yield
        finally:
            self._feeds = feeds

    def _begin(self) -> None:
        """Have whatever comes next begin with instance 0's state."""
        for function in (self._model.train_function, self._model.test_function, self._model.predict_function):
            if function is not None:
                function.function.begin()

    @property
    def _steps_per_execution(self) -> int:
        """The number that the user has said."""
        return int(self._said or self._model.steps_per_execution)

    @property
    def _evaluated(self) -> int:
        return 1 if self.options.each_step else self._steps_per_execution

    @contextmanager
    def _executing(self, training: bool) -> Iterator[None]:
        """While Keras's loops count executions as they are made here."""
        before, said = self._model.steps_per_execution, self._steps_per_execution
        made = self.options.executed(said) if training else self._evaluated
        outer, self._said, self._model.steps_per_execution = self._said, said, made
        try:
            yield
        finally:
            self._said, self._model.steps_per_execution = outer, before

    def _build(self, example: Batch) -> None:
        if not all(layer.built for layer in self._model._flatten_layers()):
            x, _, _ = unpack_x_y_sample_weight(example)
            with keras.StatelessScope():
                self._model(x)

    def _compare_batch(self, given: Data) -> None:
        """Have the next batch begin with instance 0's state; of the first batches the rows are compared too."""
        function = self._model.train_function
        if function is not None and not self.options.step:  # instances may have parts of a state then
            function.function.begin()
        if self._compared < COMPARED:
            self._compared += 1
            refuse_other_rows(self.strategy.replicas, jax.tree.map(np.asarray, given))

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return this instance's rows of a batch for all replicas."""
        batch = jax.tree.map(np.asarray, unpack_x_y_sample_weight(next(batches)))
        return iter([own_rows(self.strategy, batch, self.options.micro_batches)])

    def _pass_over(self, batches: Iterator[Batch]) -> Pass:
        """Return a pass over one batch for all replicas."""
        x, y, sample_weight = unpack_x_y_sample_weight(next(batches))
        rows = len(jax.tree.leaves(x)[0])
        size = -(-rows // self.strategy.num_replicas_in_sync)
        return self._feed(DataArguments(x, y, sample_weight, None, size, None), trains=False).get_jax_iterator()


@dataclass
class _Called:
    """A function as Keras calls it: in its loops, which go through a feed, and elsewhere with a generator of one batch.

    Attributes:
        function: the function.
        feed: tells the feed of the loop, or None.
        of_one: makes batches for this instance of the generator.
        watch: notices what is changed between steps; None where nobody asks.
    """

    function: Any
    feed: Callable[[], KerasFeed | None]
    of_one: Callable[[Iterator[Batch]], Iterator[Batch]]
    watch: VariableWatch | None = None

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Tree, State]:
        feed = self.feed()
        if self.watch is not None:
            self.watch.before_step(state)
        returned, state = self.function(state, self.of_one(iterator) if feed is None else feed.current)
        if self.watch is not None:
            self.watch.after_step(state)
        return returned, state


FORWARDED = [
    "_symbolic_build",
    *(name for name in vars(ReplicatedModel) if name in dir(keras.Model) and name[0] != "_"),
]
"""The methods of a model of a strategy that have names of Keras's."""
