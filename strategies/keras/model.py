"""A Keras model that belongs to a strategy: its `fit`, `evaluate`, `predict` and related methods."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import keras
import numpy as np
from keras.utils import unpack_x_y_sample_weight

from strategies.keras.callbacks import (
    RunningLoop,
    VariableWatch,
    check_same_rows,
    described,
    insist,
    listed,
    number_of_leader,
    terms_of_call,
)
from strategies.keras.checkpointing import FitCheckpoints, SavedFit, given_in
from strategies.keras.checks import (
    check_global_batch_size,
    check_model_optimizer,
    check_options_of_own_step,
    check_overrides,
    check_trained_layers,
    check_usable,
    is_own,
)
from strategies.keras.data import DataArguments, FeedEpoch, KerasFeed, Shuffle, open_feed, rows_of_replica
from strategies.keras.extensions import Extensions, ModelOptions
from strategies.keras.patches import begin_with_epoch, finalized_if_whole, give_back, train_validation_split
from strategies.keras.state import Callbacks, ModelClass, State, seeds_of
from strategies.keras.training import OwnTrainFunction, PredictFunction, StockTrainFunction, TestFunction
from strategies.strategy import Strategy
from strategies.trees import rows_of
from strategies.typing import Batch, Data, Tree

logger = logging.getLogger("strategies.keras")

_NOT_COMPARED = ("self", "x", "y", "verbose", "callbacks")
"""Arguments of `fit` that may differ between instances, or are compared in another way."""
_PASSED = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq")
"""Arguments of `fit` that mean the same for Keras's own."""
COMPARED = 3
"""The number of first batches of `train_on_batch` whose rows instances compare."""


def _by_chief(name: str) -> Callable[..., object]:
    def write(self: ReplicatedModel, *arguments: object, **named: object) -> object:
        writes = self._running is None or self.strategy.replicas.is_chief
        return getattr(self.stock, name)(self._model, *arguments, **named) if writes else None

    write.__doc__ = f"Do what `keras.Model.{name}` does; inside a callback, on the chief only."
    return write


class ReplicatedModel:
    """The methods that replace those of `keras.Model` on a model of a strategy; they use Keras's own loops.

    Args:
        model: Model of Keras.
        stock: Its class, as the user knows it.
        strategy: Strategy in whose scope the model was made.
        extensions: Extensions, with the model's options.

    Attributes:
        in_scope: Strategy of the scope.
        stock: Class of the model.
    """

    def __init__(self, model: keras.Model, stock: ModelClass, strategy: Strategy, extensions: Extensions) -> None:
        self.in_scope = strategy
        self.stock = stock
        self._model = model
        self._extensions = extensions
        self._running: RunningLoop | None = None
        self._compared = 0
        self._feeds: dict[str, KerasFeed] = {}
        self._said: int | None = None  # steps per execution set by the user, while Keras uses another number
        self._watch = VariableWatch(model)
        self._of_devices = cache(strategy.for_stages)

    @property
    def strategy(self) -> Strategy:
        """The strategy that trains the model: the scope's, or one over the same devices for a model in stages."""
        return self._of_devices(self._extensions.devices)

    @property
    def options(self) -> ModelOptions:
        """The options of the training."""
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
        """Train as `keras.Model.fit` does, on all replicas. Collective.

        Every instance calls it with the same arguments and data, and gets the same history. Arguments mean what they
        mean in Keras, with these differences:

        * `batch_size` and `validation_batch_size` are for one replica and micro-batch. `global_batch_size` is for all
          replicas and micro-batches together.
        * Callbacks that only write run on the chief; see `strategies.keras.OnChief`. All others run on every instance,
          and must do the same on all of them.

        Raises:
            StrategyError: If the model, its class or a callback cannot be used on replicas.
            RuntimeError: If the model runs eagerly, or overrides methods that replicas cannot use.
            ValueError: If sizes do not fit, the data have too few rows, or the optimizer does not fit.
            DisagreementError: On all instances, if their arguments, data or variables differ.
        """
        arguments = {name: value for name, value in locals().items() if name not in _NOT_COMPARED}
        arguments |= {"sample_weight": sample_weight is not None, "validation_data": validation_data is not None}
        checkpoints = given_in(callbacks)
        validates = validation_data is not None or bool(validation_split)
        self._check("fit", "train_step", has_checkpoints=checkpoints is not None, validates=validates)
        self._insist("fit", callbacks, arguments)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        batch_size = rows_of_replica(self.strategy, batch_size, global_batch_size, self.options.micro_batches)
        given = DataArguments(x, y, sample_weight, class_weight, batch_size, steps_per_epoch)
        if checkpoints is not None and steps_per_epoch is not None:
            raise ValueError(
                "strategies.keras.Checkpoints keep the position in an epoch, but steps_per_epoch cuts epochs "
                "elsewhere; leave steps_per_epoch out"
            )
        feed = self._feed(given, trains=True, shuffle=shuffle, seed=None if checkpoints is None else checkpoints.seed)
        check_global_batch_size(feed.batch_size, global_batch_size)
        validation: KerasFeed | None = None
        if validation_data is not None:
            size = validation_batch_size or batch_size
            x, y, sample_weight = unpack_x_y_sample_weight(validation_data)
            validation = self._feed(DataArguments(x, y, sample_weight, None, size, validation_steps), trains=False)
        steps = steps_per_epoch or feed.num_batches
        count, replicas = self.options.micro_batches, self.strategy.num_replicas_in_sync
        text = "fit: global batch %d = batch_size %d x %d accumulated x %d replicas; an epoch's last one may be smaller"
        logger.info(text, feed.batch_size, feed.batch_size // (count * replicas), count, replicas)
        stack = ExitStack()

        def resume() -> None:
            if checkpoints is not None:
                stack.enter_context(self._resumed(checkpoints, feed))

        begin_with_epoch(self._model, 0)  # where an earlier `fit` was resumed
        running = RunningLoop(self._model, self.strategy, feed.begin_with, self.unite, resume, self._made, self._watch)
        prepared = listed(callbacks, running, verbose=verbose, epochs=epochs, steps=steps, add_history=True)
        stack.enter_context(finalized_if_whole(self._model.optimizer))
        with self._while(running, train=feed, test=validation), stack:
            passed = {name: arguments[name] for name in _PASSED}
            return self.stock.fit(self._model, feed, callbacks=prepared, validation_data=validation, **passed)

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
        """Evaluate as `keras.Model.evaluate` does, on all replicas. Collective. Every row counts once.

        `batch_size` is for one replica, and `global_batch_size` for all of them.
        """
        if self._running is not None and named.get("_use_cached_eval_dataset"):  # called by fit, for validation
            with self._executing(training=False):
                return self.stock.evaluate(
                    self._model, callbacks=callbacks, return_dict=return_dict, steps=steps, **named
                )
        self._check("evaluate", "test_step")
        given = DataArguments(x, y, sample_weight, None, batch_size, steps)
        feed = self._feed_of("evaluate", callbacks, given, global_batch_size, sample_weight=sample_weight is not None)
        running = RunningLoop(self._model, self.strategy, steps_made=self._made)
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
        """Predict as `keras.Model.predict` does, on all replicas. Collective.

        Every instance gets the outputs for all rows, in the order of the data. `batch_size` is for one replica, and
        `global_batch_size` for all of them.
        """
        self._check("predict", "predict_step", is_compiled=False)
        given = DataArguments(x, batch_size=batch_size, steps=steps)
        feed = self._feed_of("predict", callbacks, given, global_batch_size)
        self._build(feed.example)
        running = RunningLoop(self._model, self.strategy)
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
        """Train as `keras.Model.train_on_batch` does. Collective: every instance gives the batch of all replicas."""
        self._check("train_on_batch", "train_step")
        self._compare_batch((x, y, sample_weight, class_weight))
        with self._outside_of_loops():
            logs = self.stock.train_on_batch(self._model, x, y, sample_weight, class_weight, return_dict)
        self.unite()
        return logs

    def test_on_batch(self, x: Data, y: Data = None, sample_weight: Data = None, return_dict: bool = False) -> Tree:
        """Evaluate as `keras.Model.test_on_batch` does. Collective: every instance gives the batch of all replicas."""
        self._check("test_on_batch", "test_step")
        with self._outside_of_loops():
            return self.stock.test_on_batch(self._model, x, y, sample_weight, return_dict)

    def predict_on_batch(self, x: Data) -> Tree:
        """Predict as `keras.Model.predict_on_batch` does. Collective: each instance gives the batch of all replicas."""
        self._check("predict_on_batch", "predict_step", is_compiled=False)
        with self._outside_of_loops():
            return self.stock.predict_on_batch(self._model, x)

    def reset_metrics(self) -> None:
        """Reset metrics as `keras.Model.reset_metrics` does."""
        self.stock.reset_metrics(self._model)
        if self._model.test_function is not None:
            self._model.test_function.function.forget()

    def make_train_function(self, force: bool = False) -> None:
        """Make the function of training, if it is missing or `force` is set; Keras calls it before it trains."""
        if self._model.train_function is None or force:
            steps = self.options.executed(self._steps_per_execution)
            kind = OwnTrainFunction if is_own(self.stock, "train_step") else StockTrainFunction
            function = kind(self._model, self.strategy, self.options, steps, self._watch, self._extensions.staged)
            watch = None if self.strategy.replicas.communicator.size == 1 else self._watch
            self._model.train_function = _Called(function, lambda: self._feeds.get("train"), self._alone, watch)

    def make_test_function(self, force: bool = False) -> None:
        """Make the function of evaluation, if it is missing or outdated; Keras calls it before it evaluates."""
        if force or not self._is_current(self._model.test_function):
            function = TestFunction(self._model, self.strategy, self._evaluated)
            self._model.test_function = _Called(function, lambda: self._feeds.get("test"), self._pass_over)

    def make_predict_function(self, force: bool = False) -> _Called | None:
        """Make the function of prediction, if it is missing or outdated; Keras calls it before it predicts."""
        if force or not self._is_current(self._model.predict_function):
            function = PredictFunction(self._model, self.strategy, self._evaluated)
            self._model.predict_function = _Called(function, lambda: self._feeds.get("predict"), self._pass_over)
        return self._model.predict_function

    def _is_current(self, called: _Called | None) -> bool:
        """Return whether a function exists, and no layer was frozen or unfrozen since it was made."""
        return called is not None and called.function.functions.seeds.flags == seeds_of(self._model)

    def _symbolic_build(self, iterator: Any = None, data_batch: Batch = None) -> None:
        """Build the model as Keras does, from an example batch that is not taken from the data."""
        if iterator is not None:
            data_batch = iterator.data_adapter.example
        self.stock._symbolic_build(self._model, data_batch=data_batch)

    def _made(self) -> int:
        """Return the number of steps so far."""
        function = self._model.train_function
        return 0 if function is None else int(function.function.steps_made)

    save, save_weights, export = map(_by_chief, ("save", "save_weights", "export"))

    def unite(self) -> None:
        """Give Keras the whole state. Collective if instances hold parts of it."""
        function = self._model.train_function
        if function is not None:
            function.function.unite()

    def _check(
        self, called: str, step: str, is_compiled: bool = True, has_checkpoints: bool = False, validates: bool = False
    ) -> None:
        """Refuse a call that replicas cannot carry out. On a spare, wait for the end of the job."""
        self.in_scope.replicas.journal.begin_unrepeatable(f"{called} of Keras")
        check_usable(self._model, self.in_scope, called)
        check_overrides(self._model, self.stock, called, [step, "test_step"] if validates else [step])
        if is_compiled:
            self._model._assert_compile_called(called)
        if step == "train_step":
            check_model_optimizer(self._model.optimizer, self.options.accumulated is not None)
            if is_own(self.stock, step):  # an own train_step may have optimizers for parts of the model
                check_options_of_own_step(self.stock, self.options, has_checkpoints)
            else:
                check_trained_layers(self._model)

    def _insist(self, called: str, callbacks: Callbacks, arguments: Mapping[str, object]) -> None:
        """Refuse to begin if instances call a function with different arguments. Collective."""
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
        """Return the feed of `evaluate` or `predict`, after all instances agree on it. Collective."""
        sizes = {"batch_size": given.batch_size, "global_batch_size": global_batch_size, "steps": given.steps}
        self._insist(called, callbacks, sizes | arguments)
        rows = rows_of_replica(self.strategy, given.batch_size, global_batch_size)
        feed = self._feed(replace(given, batch_size=rows), trains=False)
        check_global_batch_size(feed.batch_size, global_batch_size)
        return feed

    @contextmanager
    def _resumed(self, checkpoints: FitCheckpoints, feed: KerasFeed) -> Iterator[None]:
        """Resume `fit` from its newest checkpoint, and save checkpoints inside the block. Collective."""
        assert self._model.train_function is not None  # Keras has made it before
        function = self._model.train_function.function
        rows = feed.batch_size // self.strategy.num_replicas_in_sync * len(self.strategy.replicas.local_replicas)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), feed.example)
        saved = function.resume(shapes, lambda trainer: SavedFit(checkpoints.open(trainer, feed.dataset), feed))
        if saved.first_epoch:
            begin_with_epoch(self._model, saved.first_epoch)
        feed.replay()
        function.saved = saved
        try:
            with saved.saving():
                yield
        finally:
            function.saved = None

    def _feed(
        self, given: DataArguments, *, trains: bool, shuffle: Shuffle = False, seed: int | None = None
    ) -> KerasFeed:
        if not trains or not (shuffle or isinstance(given.x, keras.utils.PyDataset)):
            seed = 0
        elif seed is None:  # NumPy draws it on instance 0, as Keras draws each permutation
            seed = number_of_leader(self.strategy.replicas, int(np.random.randint(2**31 - 1)), "seed of the data")
        feed = open_feed(
            given,
            self.strategy,
            trains=trains,
            shuffle=shuffle,
            seed=seed,
            accumulated=self.options.micro_batches if trains else 1,
            prefetch=self.options.prefetch,
        )
        check_same_rows(self.strategy.replicas, feed.compared)
        return feed

    @contextmanager
    def _while(self, running: RunningLoop, **feeds: KerasFeed | None) -> Iterator[None]:
        """Run one of Keras's loops over feeds inside the block."""
        outer = self._running, self._feeds
        self.unite()  # a callback of another loop may have called this one, and an error may have ended the last one
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
        """Let the block call a function for a single batch, even in a callback of a loop over feeds."""
        feeds, self._feeds = self._feeds, {}
        try:
            yield
        finally:
            self._feeds = feeds

    def _begin(self) -> None:
        """Broadcast instance 0's state before the next step, evaluation or prediction."""
        for function in (self._model.train_function, self._model.test_function, self._model.predict_function):
            if function is not None:
                function.function.begin()

    @property
    def _steps_per_execution(self) -> int:
        """The number of steps per execution that the user has set."""
        return int(self._said or self._model.steps_per_execution)

    @property
    def _evaluated(self) -> int:
        return 1 if self.options.each_step else self._steps_per_execution

    @contextmanager
    def _executing(self, training: bool) -> Iterator[None]:
        """Set the model's `steps_per_execution`, inside the block, to the number of steps that one call makes here."""
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
        """Broadcast instance 0's state before the next batch; compare the rows of the first batches."""
        function = self._model.train_function
        if function is not None and not self.options.step:  # with step options, instances may hold parts of the state
            function.function.begin()
        if self._compared < COMPARED:
            self._compared += 1
            check_same_rows(self.strategy.replicas, jax.tree.map(np.asarray, given))

    def _alone(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return this instance's rows of a batch for all replicas and micro-batches, placed for a step.

        Raises:
            ValueError: If the replicas and micro-batches do not divide the rows evenly.
        """
        batch = jax.tree.map(np.asarray, unpack_x_y_sample_weight(next(batches)))
        replicas, count, rows = self.strategy.num_replicas_in_sync, self.options.micro_batches, rows_of(batch)
        if rows % (replicas * count):
            raise ValueError(
                f"a batch of {rows} rows cannot be split among {replicas} replicas x {count} micro-batches; its rows "
                f"must be a multiple of {replicas * count}"
            )
        local, each = self.strategy.replicas.local_replicas, rows // replicas
        own = jax.tree.map(lambda leaf: leaf[local.start * each : local.stop * each], batch)
        return iter([self.strategy.replicas.sharding.batch(own)])

    def _pass_over(self, batches: Iterator[Batch]) -> FeedEpoch:
        """Return a pass over one batch for all replicas."""
        x, y, sample_weight = unpack_x_y_sample_weight(next(batches))
        rows = len(jax.tree.leaves(x)[0])
        size = -(-rows // self.strategy.num_replicas_in_sync)
        return self._feed(DataArguments(x, y, sample_weight, None, size, None), trains=False).get_jax_iterator()


@dataclass
class _Called:
    """A function as Keras calls it: in a loop, which reads a feed, or alone, with a generator of one batch.

    Attributes:
        function: The function.
        feed: Returns the feed of the loop, or None.
        of_one: Returns this instance's batches from the generator of one batch.
        watch: Watcher of changes between steps; None if changes do not matter.
    """

    function: Any
    feed: Callable[[], KerasFeed | None]
    of_one: Callable[[Iterator[Batch]], Iterator[Batch]]
    watch: VariableWatch | None = None

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Tree, State]:
        feed, state = self.feed(), tuple(map(list, state))
        if self.watch is not None:
            self.watch.before_step(state)
        try:
            returned, state = self.function(state, self.of_one(iterator) if feed is None else feed.current)
        except BaseException:
            give_back(self.function.model, state)
            raise
        if self.watch is not None:
            self.watch.after_step(state)
        # Keras keeps the state in an attribute, where it would track each element of a list in each step.
        return returned, tuple(map(deque, state))


FORWARDED = [
    "_symbolic_build",
    *(name for name in vars(ReplicatedModel) if name in dir(keras.Model) and name[0] != "_"),
]
"""The methods of a strategy's model that have names of Keras's methods."""
