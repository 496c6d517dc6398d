"""The result of a `model_fn`, and its optimizers: gradients are handles, because the step computes and applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from strategies.argument_checks import wrong_type
from strategies.compat.estimator.run_config import ModeKeys
from strategies.compat.estimator.variables import current_call
from strategies.jax.updates.optimizers import AnyOptimizer
from strategies.typing import Function, Leaf, Metric, Tree


@dataclass(frozen=True, eq=False)
class Gradient:
    """A handle of the gradient of a loss by a variable."""

    optimizer: EstimatorOptimizer
    loss: Leaf
    name: str
    variable: Leaf


@dataclass(frozen=True, eq=False)
class Update:
    """An update of variables by the gradients of a loss."""

    optimizer: EstimatorOptimizer
    loss: Leaf
    names: frozenset[str]


class EstimatorOptimizer:
    """An optimizer of optax with the methods of TensorFlow's.

    A step averages the gradients of all workers, as if each had divided its loss by their number and they were added.
    """

    def __init__(self, opt: AnyOptimizer | EstimatorOptimizer, averages_replicas: bool = False) -> None:
        self.opt: AnyOptimizer = opt.opt if isinstance(opt, EstimatorOptimizer) else opt
        self.averages_replicas = averages_replicas

    def minimize(self, loss: Leaf, global_step: object = None, var_list: Sequence[Leaf] | None = None) -> Update:
        """Return the update by the gradients of a loss, as a `train_op`."""
        return self.apply_gradients(self.compute_gradients(loss, var_list), global_step)

    def compute_gradients(self, loss: Leaf, var_list: Sequence[Leaf] | None = None) -> list[tuple[Gradient, Leaf]]:
        """Return a handle of the gradient for each variable, and the variable.

        Args:
            loss: Floating-point scalar, or an `Outcome`.
            var_list: Results of `get_variable`, or Keras variables; None for all that `model_fn` has read.

        Raises:
            ValueError: If there is no variable, or one is not known.
        """
        known = current_call("compute_gradients").trained
        asked = list(known.values()) if var_list is None else list(var_list)
        chosen = [(name, one) for own in asked for name, one in known.items() if one is own]
        if not chosen or len(chosen) < len(asked):
            raise ValueError(f"No variables to optimize, or other ones than {', '.join(known) or 'none'}")
        return [(Gradient(self, loss, name, one), one) for name, one in chosen]

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Leaf, Leaf]], global_step: object = None) -> Update:
        """Return the update by gradients that `compute_gradients` of this optimizer returned, as a `train_op`.

        Raises:
            TypeError: If a gradient is anything else, for example a changed one.
            ValueError: If there is no gradient, gradients are of several losses, or a variable is not the gradient's
                own. If there is a `global_step`, because the estimator counts the steps.
        """
        pairs = list(grads_and_vars)
        if not pairs or global_step is not None:
            raise ValueError("No gradients provided for any variable, or a global_step, which the estimator increments")
        for one, variable in pairs:
            if not isinstance(one, Gradient) or one.optimizer is not self:
                raise TypeError(
                    f"apply_gradients gets {one!r}, not a gradient of its optimizer's compute_gradients; to change "
                    "gradients, give EstimatorOptimizer a MapGradientOptimizer or an optax.chain"
                )
            if variable is not one.variable or one.loss is not pairs[0][0].loss:
                raise ValueError("a gradient is of another variable or loss; keep the pairs, and add several losses")
        return Update(self, pairs[0][0].loss, frozenset(one.name for one, _ in pairs))


def CrossReplicaOptimizer(opt: AnyOptimizer | EstimatorOptimizer) -> EstimatorOptimizer:
    """Return an optimizer that averages over the replicas of a worker too; needed if `num_replicas` is above 1."""
    return EstimatorOptimizer(opt, averages_replicas=True)


@dataclass(frozen=True, eq=False)
class IPUEstimatorSpec:
    """The model in a mode. Semantics: the original's class of that name.

    Attributes:
        mode: A member of `ModeKeys`.
        predictions: Array, or dictionary of arrays, with a row for each row of the features.
        loss: Scalar, the mean over the rows of the batch; an `Outcome` with a `weight` for weighted means.
        train_op: Result of an `EstimatorOptimizer`, or an optimizer of optax; an array leaves that to `host_call`.
        eval_metric_ops: Metrics by name: scalars, averaged over batches, or `strategies.Mean`.
        eval_metrics: `(function, arrays)`; the function returns metrics by name, given NumPy arrays of a batch.
        host_call: `(function, arrays)`; after each step the function is called for each worker, with NumPy arrays and
            gradients of `compute_gradients`, for which it must return the result of `apply_gradients`. There,
            `get_variable` returns a NumPy array of the worker, which the function may change in place.
        training_hooks: Objects as for `IPUEstimator.train`; also `evaluation_hooks` and `prediction_hooks`.

    Raises:
        TypeError: If an attribute has the wrong type.
        ValueError: If the mode needs another attribute, or both kinds of metrics are given.
    """

    mode: str
    predictions: Tree = None
    loss: Leaf = None
    train_op: Update | AnyOptimizer | Leaf = None
    eval_metric_ops: Mapping[str, Metric] | None = None
    eval_metrics: tuple[Function, Sequence[Leaf] | Mapping[str, Leaf]] | None = None
    host_call: tuple[Function, Sequence[Leaf]] | None = None
    training_hooks: Sequence[object] | None = None
    evaluation_hooks: Sequence[object] | None = None
    prediction_hooks: Sequence[object] | None = None

    def __post_init__(self) -> None:
        needed = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        if self.mode not in needed:
            raise ValueError(f"mode is {self.mode!r}; use a member of ModeKeys")
        if missing := [name for name in needed[self.mode] if getattr(self, name) is None]:
            raise ValueError(f"Missing {missing[0]}; IPUEstimatorSpec needs it in mode {self.mode!r}")
        if self.mode == ModeKeys.EVAL and (self.eval_metric_ops is None) == (self.eval_metrics is None):
            raise ValueError("give exactly one of eval_metric_ops and eval_metrics in mode 'eval'")
        for name, kinds in (("host_call", list | tuple), ("eval_metrics", list | tuple | Mapping)):
            call = getattr(self, name)
            is_call = isinstance(call, tuple) and len(call) == 2 and callable(call[0]) and isinstance(call[1], kinds)
            if call is not None and not is_call:
                raise wrong_type(name, call, "use a tuple of a function and a list of arrays")

    @property
    def host_arguments(self) -> Sequence[Leaf]:
        """The arguments of the function of `host_call`."""
        return self.host_call[1] if self.host_call else ()

    def update(self) -> Update | None:
        """Return the update of a training step; None if it changes no variable. Call it inside of `model_fn`."""
        handles = [one for one in self.host_arguments if isinstance(one, Gradient)]
        if hasattr(self.train_op, "shape"):
            return handles[0].optimizer.apply_gradients((one, one.variable) for one in handles) if handles else None
        if handles:
            raise ValueError("both train_op and host_call update variables; give the loss as train_op")
        given = self.train_op
        return given if isinstance(given, Update) else EstimatorOptimizer(given).minimize(self.loss)
