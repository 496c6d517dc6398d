"""A model of Keras that belongs to a strategy: what its `fit`, `evaluate`, `predict` and their relatives do instead."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from keras.src import api_export
from keras.src.callbacks import CallbackList
from keras.src.saving import object_registration
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights,
    unpack_x_y_sample_weight,
)

from strategies.errors import StrategyError
from strategies.keras.callbacks import placed
from strategies.keras.data import Feed, open_feed
from strategies.keras.evaluating import PredictFunction, TestFunction
from strategies.keras.options import ModelOptions
from strategies.keras.training import TrainFunction
from strategies.roles import Batch
from strategies.strategy import Strategy, get_strategy

_NAME = "_replicated"
_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def replicate(model: Any, strategy: Strategy) -> None:
    """Make a model, whose constructor is running, one of a strategy."""
    stock = type(model)
    object.__setattr__(model, _NAME, ReplicatedModel(model, stock, strategy))
    object.__setattr__(model, "__class__", _class_of(stock))


def replicated(model: Any) -> ReplicatedModel:
    """What a model of a strategy does instead of Keras.

    Raises:
        StrategyError: if it belongs to none.
    """
    found = model.__dict__.get(_NAME)
    if found is None:
        raise StrategyError(f"model {model.name!r} belongs to no strategy; make it inside of strategy.scope()")
    return found  # type: ignore[no-any-return]


class ReplicatedModel:
    """What a model of a strategy does instead of Keras, whose own functions it uses.

    Args:
        model: of Keras.
        stock: its class, as the user knows it.
        strategy: whose replicas train it.

    Attributes:
        strategy: see above.
        stock: see above.
        options: how it is trained.
    """

    def __init__(self, model: Any, stock: type, strategy: Strategy) -> None:
        self.strategy = strategy
        self.stock: Any = stock
        self.options = ModelOptions()
        self._model = model
        self._is_in_fit = False

    # ---- what Keras has by the same names

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        global_batch_size: int | None = None,
    ) -> Any:
        """See `keras.Model.fit`; batch sizes are those of a replica, but for `global_batch_size`."""
        self._check("fit", "train_step")
        model = self._model
        model._assert_compile_called("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        batch_size = self._rows_of_replica(batch_size, global_batch_size, self.options.micro_batches)
        feed = self._feed(x, y, sample_weight, class_weight, batch_size, steps_per_epoch, trains=True, shuffle=shuffle)
        feed.epoch = initial_epoch
        validation = None
        if validation_data is not None:
            given = unpack_x_y_sample_weight(validation_data)
            size = validation_batch_size or batch_size
            validation = self._feed(*given, None, size, validation_steps, trains=False)
        steps = steps_per_epoch or feed.num_batches
        listed = self._callbacks(callbacks, verbose, epochs, steps, history=True)
        with self._fitting():
            return self.stock.fit(
                model,
                feed,
                epochs=epochs,
                callbacks=listed,
                validation_data=validation,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        global_batch_size: int | None = None,
        **named: Any,
    ) -> Any:
        """See `keras.Model.evaluate`: every row counts once."""
        self._check("evaluate", "test_step")
        if self._is_in_fit and named.get("_use_cached_eval_dataset"):
            return self.stock.evaluate(self._model, callbacks=callbacks, return_dict=return_dict, steps=steps, **named)
        self._model._assert_compile_called("evaluate")
        feed = self._feed(
            x, y, sample_weight, None, self._rows_of_replica(batch_size, global_batch_size), steps, trains=False
        )
        listed = self._callbacks(callbacks, verbose, 1, steps or feed.num_batches)
        self._begin("test_function")
        return self.stock.evaluate(self._model, feed, callbacks=listed, steps=steps, return_dict=return_dict, **named)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        global_batch_size: int | None = None,
    ) -> Any:
        """See `keras.Model.predict`: the outputs for all rows, in their order, on every instance."""
        self._check("predict", "predict_step")
        feed = self._feed(
            x, None, None, None, self._rows_of_replica(batch_size, global_batch_size), steps, trains=False
        )
        self._build_with(feed.example)
        listed = self._callbacks(callbacks, verbose, 1, steps or feed.num_batches)
        self._begin("predict_function")
        return self.stock.predict(self._model, feed, callbacks=listed, steps=steps)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """See `keras.Model.train_on_batch`: a batch for all replicas, given on every instance."""
        self._check("train_on_batch", "train_step")
        return self.stock.train_on_batch(self._model, x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """See `keras.Model.test_on_batch`: a batch for all replicas, given on every instance."""
        self._check("test_on_batch", "test_step")
        return self.stock.test_on_batch(self._model, x, y, sample_weight, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """See `keras.Model.predict_on_batch`: a batch for all replicas, given on every instance."""
        self._check("predict_on_batch", "predict_step")
        return self.stock.predict_on_batch(self._model, x)

    def make_train_function(self, force: bool = False) -> None:
        """See Keras, which calls it before it trains."""
        if self._model.train_function is None or force:
            steps = self.options.steps_of(self._model.steps_per_execution)
            self._model.train_function = _Train(self, TrainFunction(self._model, self.strategy, self.options, steps))

    def make_test_function(self, force: bool = False) -> None:
        """See Keras, which calls it before it evaluates."""
        if self._model.test_function is None or force:
            steps = self._model.steps_per_execution
            self._model.test_function = _Other(self, TestFunction(self._model, self.strategy, steps))

    def make_predict_function(self, force: bool = False) -> Any:
        """See Keras, which calls it before it predicts."""
        if self._model.predict_function is None or force:
            steps = self._model.steps_per_execution
            self._model.predict_function = _Other(self, PredictFunction(self._model, self.strategy, steps))
        return self._model.predict_function

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """See Keras: with a batch that was not taken from the data."""
        if iterator is not None:
            data_batch = iterator.data_adapter.example
        self.stock._symbolic_build(self._model, data_batch=data_batch)

    # ---- how

    def _feed(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: Any,
        batch_size: int | None,
        steps: int | None,
        *,
        trains: bool,
        shuffle: Any = False,
    ) -> Feed:
        return open_feed(
            x,
            y,
            sample_weight,
            class_weight,
            self.strategy,
            batch_size=batch_size,
            steps=steps,
            trains=trains,
            shuffle=shuffle,
            seed=self._agreed_seed() if trains and shuffle else 0,
            accumulated=self.options.micro_batches if trains else 1,
            prefetch=self.options.prefetch,
        )

    def _agreed_seed(self) -> int:
        """A seed that instance 0 draws from NumPy, as Keras does for each permutation."""
        drawn = np.array(np.random.randint(2**31 - 1), np.int64)
        self.strategy.communicator.broadcast(drawn, 0, name="seed of a shuffle")
        return int(drawn)

    def _rows_of_replica(self, batch_size: int | None, of_all: int | None, accumulated: int = 1) -> int | None:
        """The rows of a replica and micro-batch.

        Raises:
            ValueError: if both sizes are given, or that of all replicas cannot be divided.
        """
        if of_all is None:
            return batch_size
        if batch_size is not None:
            raise ValueError("batch_size is that of a replica and global_batch_size of all of them; give one of them")
        parts = self.strategy.num_replicas_in_sync * accumulated
        if of_all % parts or of_all < parts:
            raise ValueError(
                f"global_batch_size is {of_all}, and there are {self.strategy.num_replicas_in_sync} replicas x "
                f"{accumulated} micro-batches; use a multiple of {parts}"
            )
        return of_all // parts

    def _callbacks(self, callbacks: Any, verbose: Any, epochs: int, steps: int | None, history: bool = False) -> Any:
        if not isinstance(callbacks, CallbackList):
            callbacks = CallbackList(
                callbacks,
                add_history=history,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=steps,
                model=self._model,
            )
        return placed(callbacks, self.strategy)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        self._begin("train_function")
        self._begin("test_function")
        self._is_in_fit = True
        steps = self._model.steps_per_execution
        try:
            yield
        finally:
            self._is_in_fit = False
            self._model.steps_per_execution = steps

    def _begin(self, name: str) -> None:
        """Have the next call of a function begin with instance 0's variables."""
        function = getattr(self._model, name)
        if function is not None:
            function.function.begin()

    def _check(self, called: str, step: str) -> None:
        """Refuse what cannot be trained on replicas.

        Raises:
            StrategyError: outside of the scope, eagerly, or with a step or a function of the user's own.
        """
        if get_strategy() is not self.strategy:
            raise StrategyError(
                f"model {self._model.name!r} was made inside of the scope of {type(self.strategy).__name__}, and "
                f"{called} is called outside of it; call it inside: with strategy.scope(): model.{called}(...)"
            )
        if self._model.run_eagerly:
            raise StrategyError(
                "run_eagerly=True: replicas run compiled programs; compile the model without it, and look at values "
                "with jax.debug.print"
            )
        for name in (step, "make_train_function", "make_test_function", "make_predict_function"):
            if _is_overridden(self.stock, name):
                raise StrategyError(
                    f"{self.stock.__name__} overrides {name}, which has no meaning on replicas: a step is made of "
                    "compute_loss, compute_metrics and the optimizer; override compute_loss, or use strategies.Trainer"
                )

    def _build_with(self, example: Batch) -> None:
        if not all(layer.built for layer in self._model._flatten_layers()):
            import keras

            x, _, _ = unpack_x_y_sample_weight(example)
            with keras.StatelessScope():
                self._model(x)

    def rows_of_batch(self, batch: Any) -> Batch:
        """This instance's rows of a batch for all replicas.

        Raises:
            ValueError: if it cannot be divided.
        """
        batch = unpack_x_y_sample_weight(batch)
        parts = self.strategy.num_replicas_in_sync * self.options.micro_batches
        [rows] = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
        if rows % parts:
            raise ValueError(
                f"a batch of {rows} rows for {self.strategy.num_replicas_in_sync} replicas x "
                f"{self.options.micro_batches} micro-batches; its rows must be a multiple of {parts}"
            )
        local, each = self.strategy.replicas.local_replicas, rows // self.strategy.num_replicas_in_sync
        own = slice(local.start * each, local.stop * each)
        cut = jax.tree.map(lambda leaf: np.asarray(leaf)[own], batch)
        return self.strategy.replicas.dealing.batch(cut)


class _Train:
    """The train function as Keras calls it, also with single batches."""

    def __init__(self, owner: ReplicatedModel, function: TrainFunction) -> None:
        self._owner = owner
        self.function = function

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        if not isinstance(iterator, Iterator) or hasattr(iterator, "gi_frame"):
            iterator = map(self._owner.rows_of_batch, iterator)
        return self.function(state, iterator)


class _Other:
    """The test or the predict function as Keras calls it, also with single batches."""

    def __init__(self, owner: ReplicatedModel, function: TestFunction | PredictFunction) -> None:
        self._owner = owner
        self.function = function

    def __call__(self, state: Any, iterator: Any) -> Any:
        if hasattr(iterator, "gi_frame"):
            x, y, sample_weight = unpack_x_y_sample_weight(next(iterator))
            rows = len(jax.tree.leaves(x)[0])
            size = -(-rows // self._owner.strategy.num_replicas_in_sync)
            feed = self._owner._feed(x, y, sample_weight, None, size, None, trains=False)
            iterator = feed.get_jax_iterator()
        return self.function(state, iterator)


# ---- the class of a model


_FORWARDED = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "_symbolic_build",
)


def _class_of(stock: type) -> type:
    """A class like a stock one, whose models train on replicas; files say of them that they are of the stock one."""
    if stock not in _classes:
        namespace: dict[str, Any] = {name: _forwarding(stock, name) for name in _FORWARDED}
        namespace |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        made = type(stock)(stock.__name__, (stock,), namespace)
        _classes[stock] = made
        if (public := api_export.get_name_from_symbol(stock)) is not None:
            api_export.REGISTERED_OBJS_TO_NAMES[made] = public
        if stock in object_registration.GLOBAL_CUSTOM_NAMES:
            object_registration.GLOBAL_CUSTOM_NAMES[made] = object_registration.GLOBAL_CUSTOM_NAMES[stock]
    return _classes[stock]


def _forwarding(stock: Any, name: str) -> Any:
    @functools.wraps(getattr(stock, name))
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(replicated(self), name)(*arguments, **named)

    return method


def _is_overridden(stock: Any, name: str) -> bool:
    """Whether a class has another function of that name than Keras."""
    from keras import Model

    return getattr(stock, name) is not getattr(Model, name)


__all__ = ["ReplicatedModel", "Sequence", "class_weight_to_sample_weights", "replace", "replicate", "replicated"]
