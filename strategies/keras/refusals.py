"""Refusals of what replicas cannot do for a model of Keras, before anything is computed; errors name the way out."""

from __future__ import annotations

import inspect

import keras

from strategies.errors import StrategyError
from strategies.keras.extensions import ModelOptions
from strategies.keras.protocols import ModelClass, ModelLike
from strategies.strategy import Strategy, get_strategy

_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def refuse_use(model: ModelLike, strategy: Strategy, called: str) -> None:
    """Refuse a model of a strategy outside of its scope, and models and settings that replicas cannot have.

    Raises:
        StrategyError: outside of the scope, beside a distribution of Keras's own, or if layers keep states of rows.
        RuntimeError: if the model is to run without being compiled.
    """
    if get_strategy() is not strategy:
        raise StrategyError(
            f"model {model.name!r} was made inside of the scope of a {type(strategy).__name__}, and {called} is called "
            f"outside of it; call it inside: with strategy.scope(): model.{called}(...)"
        )
    if model.run_eagerly:
        raise RuntimeError(
            "run_eagerly is True, and replicas run compiled programs; compile the model without it, and look at values "
            "with jax.debug.print"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise StrategyError(
            f"keras.distribution is a {type(distribution).__name__}, and the strategy spreads rows over replicas; call "
            "keras.distribution.set_distribution(None), or use the model outside of a scope"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional) and layer.stateful:
            raise StrategyError(
                f"layer {layer.name!r} is stateful and keeps a state for each row of a batch, and replicas have other "
                "rows; make it with stateful=False, or use the model outside of a scope"
            )


def is_own(stock: ModelClass, name: str) -> bool:
    """Return whether a class of models has a method of its own in place of Keras's."""
    return getattr(stock, name) is not getattr(keras.Model, name)


def refuse_own_steps(stock: ModelClass, step: str) -> None:
    """Refuse (RuntimeError) an own step or function of the class, which stands for what all replicas do together.

    The name of the step that would be made is `step`; a `train_step` of the user's own is made by each replica.
    """
    for name in _FUNCTIONS if step == "train_step" else (step, *_FUNCTIONS):
        if is_own(stock, name):
            raise RuntimeError(
                f"{stock.__name__} overrides {name}, and a step of all replicas is made of compute_loss, "
                f"compute_metrics and the optimizer; override compute_loss instead of {name}, or use strategies.Trainer"
            )


def refuse_beside_own_step(stock: ModelClass, options: ModelOptions, has_checkpoints: bool) -> None:
    """Refuse (RuntimeError) what the step of a strategy does, where a model has a `train_step` of its own.

    So is a `train_step` that is written for another backend.
    """
    parameters = list(inspect.signature(stock.train_step).parameters)
    if len(parameters) != 3:
        raise RuntimeError(
            f"{stock.__name__}.train_step takes ({', '.join(parameters)}), and on JAX it is called with (state, data) "
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
                "of both out: override compute_loss instead of train_step, accumulate by the optimizer's own "
                "gradient_accumulation_steps, and keep states by BackupAndRestore"
            )


def refuse_other_size(found: int, of_all: int | None) -> None:
    """Refuse (ValueError) that a step has `found` rows of all replicas, where it was to have `of_all`."""
    if of_all is not None and found != of_all:
        raise ValueError(
            f"global_batch_size is {of_all}, and the data come in batches that make {found} rows for all replicas; "
            "make them of another size, or leave global_batch_size out"
        )


def refuse_changed_layers(model: ModelLike) -> None:
    """Refuse (ValueError) to train if layers were frozen or thawed since the optimizer was built."""
    optimizer = model.optimizer
    if optimizer is None or not optimizer.built:
        return
    inner: keras.Optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    known = inner._trainable_variables
    if {id(variable) for variable in known} != {id(variable) for variable in model.trainable_variables}:
        raise ValueError(
            f"the optimizer was built for {len(known)} variables, and model {model.name!r} has others to train now, "
            f"{len(model.trainable_variables)}; call compile again after trainable was changed"
        )


def refuse_compiled(model: ModelLike, hook: str) -> None:
    """Refuse (StrategyError) a model that a callback of `fit` has compiled: its loop has a function that is gone."""
    if model.train_function is None:
        raise StrategyError(
            f"a callback has compiled model {model.name!r}, or set options of it, in fit (seen behind {hook}), and "
            "fit goes on with what was compiled before; do that between two calls of fit"
        )


def refuse_optimizer(optimizer: keras.Optimizer | None, accumulates: bool) -> None:
    """Refuse (ValueError) to train without an optimizer, or to accumulate with one that cannot.

    One that accumulates itself, or has a `minimize` of its own, cannot.
    """
    if optimizer is None:
        raise ValueError("the model was compiled with optimizer=None, and is to be trained; give compile one")
    inner: keras.Optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer
    if accumulates and inner.gradient_accumulation_steps:
        raise ValueError(
            f"the optimizer has gradient_accumulation_steps={inner.gradient_accumulation_steps}, and the model "
            "accumulates gradients by its own options; use one of them"
        )
    if accumulates and hasattr(inner, "minimize"):
        raise ValueError(
            f"{type(inner).__name__} must not override OptimizerV2.minimize where gradients are accumulated: the step "
            "calls its stateless_apply; leave minimize out"
        )
