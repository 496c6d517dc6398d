"""Checks, before anything is computed, that replicas can train a Keras model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import keras

from strategies.errors import StrategyError
from strategies.keras.extensions import ModelOptions
from strategies.keras.patches import TRIED
from strategies.keras.state import ModelClass
from strategies.strategy import Strategy, get_strategy

_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def check_keras_version() -> None:
    """Refuse other backends than JAX, and versions of Keras that were not tried.

    Raises:
        StrategyError: With the backend or the version, and the way out.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise StrategyError(
            f"Keras runs on {backend}, but the replicas of a strategy run on JAX; set KERAS_BACKEND=jax before keras "
            "is imported"
        )
    if not keras.__version__.startswith(tuple(f"{version}." for version in TRIED)):
        raise StrategyError(
            f"this is Keras {keras.__version__}, but models of a strategy were tried with {', '.join(TRIED)}; "
            f"pip install 'keras=={TRIED[-1]}.*'"
        )


def check_usable(model: keras.Model, strategy: Strategy, called: str) -> None:
    """Refuse a strategy's model outside of its scope, and models and settings that replicas cannot use.

    Raises:
        StrategyError: Outside of the scope, with a distribution of Keras, or if layers keep a state per row.
        RuntimeError: If the model is to run without being compiled.
    """
    if get_strategy() is not strategy:
        raise StrategyError(
            f"model {model.name!r} was made inside the scope of a {type(strategy).__name__}, but {called} is called "
            f"outside of it; call it inside: with strategy.scope(): model.{called}(...)"
        )
    if model.run_eagerly:
        raise RuntimeError(
            "run_eagerly is True, but replicas run compiled programs; compile the model without it, and look at values "
            "with jax.debug.print"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise StrategyError(
            f"keras.distribution is a {type(distribution).__name__}, but the strategy spreads rows over replicas; call "
            "keras.distribution.set_distribution(None), or use the model outside of a scope"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional) and layer.stateful:
            raise StrategyError(
                f"layer {layer.name!r} is stateful and keeps a state for each row of a batch, but replicas have "
                "different rows; make it with stateful=False, or use the model outside of a scope"
            )


def is_own(stock: ModelClass, name: str) -> bool:
    """Return whether a class of models overrides a method of Keras."""
    return getattr(stock, name) is not getattr(keras.Model, name)


def check_overrides(model: keras.Model, stock: ModelClass, called: str, steps: Sequence[str]) -> None:
    """Refuse a model that overrides a function of Keras's loops, or a step other than a class's `train_step`.

    Each replica can run an own `train_step`. The other functions stand for the work of all replicas together.

    Args:
        model: Model.
        stock: Class of the model.
        called: Name of the called method, which would get rows of replicas in place of the data.
        steps: Names of the steps that would be made.

    Raises:
        RuntimeError: If the model overrides one of them.
    """
    for name in (called, *steps, *_FUNCTIONS):
        is_of_model = name in steps and name in vars(model)
        if is_of_model or (name != "train_step" and is_own(stock, name)):
            raise RuntimeError(
                f"{f'model {model.name!r}' if is_of_model else stock.__name__} overrides {name}, but a step of all "
                "replicas consists of compute_loss, compute_metrics and the optimizer; override compute_loss instead, "
                f"{'give a class of models its own train_step, ' * (name == 'train_step')}"
                f"{'give the method another name, ' * (name == called)}or use strategies.Trainer"
            )


def check_options_of_own_step(stock: ModelClass, options: ModelOptions, has_checkpoints: bool) -> None:
    """Refuse options that change a strategy's step for a class with its own `train_step`.

    Raises:
        RuntimeError: If such an option is set, or the `train_step` was written for another backend.
    """
    parameters = list(inspect.signature(stock.train_step).parameters)
    if len(parameters) != 3:
        raise RuntimeError(
            f"{stock.__name__}.train_step takes ({', '.join(parameters)}), but on JAX it is called with (state, data) "
            "and returns (logs, state); see https://keras.io/guides/custom_train_step_in_jax, or override compute_loss"
        )
    set_besides = {
        "set_gradient_accumulation_options": options.accumulated is not None or bool(options.step),
        "pipeline stages": options.is_pipelined,
        "strategies.keras.Checkpoints": has_checkpoints,
    }
    for name, is_set in set_besides.items():
        if is_set:
            raise RuntimeError(
                f"{stock.__name__} overrides train_step, and has {name}, which change a step of a strategy; leave one "
                "of them out: override compute_loss instead of train_step, accumulate with the optimizer's own "
                "gradient_accumulation_steps, or keep states with BackupAndRestore"
            )


def check_global_batch_size(found: int, of_all: int | None) -> None:
    """Raise ValueError if a step has `found` rows of all replicas, although `of_all` were asked for."""
    if of_all is not None and found != of_all:
        raise ValueError(
            f"global_batch_size is {of_all}, but the data come in batches that make {found} rows for all replicas; "
            "use batches of another size, or leave global_batch_size out"
        )


def check_trained_layers(model: keras.Model) -> None:
    """Raise ValueError if layers were frozen or unfrozen since the optimizer was built."""
    optimizer = model.optimizer
    if optimizer is None or not optimizer.built:
        return
    inner: keras.Optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    known = inner._trainable_variables
    if {id(variable) for variable in known} != {id(variable) for variable in model.trainable_variables}:
        raise ValueError(
            f"the optimizer was built for {len(known)} variables, but model {model.name!r} now has others to train, "
            f"{len(model.trainable_variables)}; call compile again after trainable was changed"
        )


def check_not_recompiled(model: keras.Model, hook: str) -> None:
    """Refuse a callback of `fit` that has compiled the model, frozen or unfrozen layers: its loop has what was before.

    Raises:
        StrategyError: If the model has no train function any more, or other variables to train.
    """
    trained = list(map(id, model.trainable_variables)) if "epoch" in hook else None
    if model.train_function is None or trained not in (None, model.train_function.function.trained):
        raise StrategyError(
            f"a callback has compiled model {model.name!r}, set options of it, or changed trainable of layers, in fit "
            f"(seen after {hook}), but fit goes on with what was compiled before; do that between two calls of fit"
        )


def check_model_optimizer(optimizer: keras.Optimizer | None, accumulates: bool) -> None:
    """Raise ValueError if the model has no optimizer, or is to accumulate with an optimizer that cannot.

    An optimizer cannot if it accumulates itself, or has its own `minimize`.
    """
    if optimizer is None:
        raise ValueError("the model was compiled with optimizer=None, but is to be trained; give compile an optimizer")
    inner: keras.Optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    if accumulates and inner.gradient_accumulation_steps:
        raise ValueError(
            f"the optimizer has gradient_accumulation_steps={inner.gradient_accumulation_steps}, but the model "
            "accumulates gradients by its own options; use one of them"
        )
    if accumulates and hasattr(inner, "minimize"):
        raise ValueError(
            f"{type(inner).__name__} must not override OptimizerV2.minimize if gradients are accumulated: the step "
            "calls its stateless_apply; leave minimize out"
        )
