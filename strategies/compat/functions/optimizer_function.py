"""The optimizer function of a pipeline: its result, stage options of the original's hardware, captured gradients.

For each array that stages mark for capture, a handle of the same shape is trained along with the variables. Its value
never changes, and its gradient is the gradient of the marked array. It is accumulated and averaged like all others, and
the optimizer receives it as `captured_grads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from strategies.argument_checks import check_optional, wrong_type
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.gradients.model_state import accumulator_dtypes
from strategies.jax.programs.recomputation import GradientCaptureContext, with_handles
from strategies.jax.replicas.variables import PartOfArray
from strategies.jax.updates.optimizers import AnyOptimizer, MapGradientOptimizer, OptaxOptimizer, unwrapped
from strategies.pipelines.running.arguments import get_current_iteration_counter
from strategies.typing import AccumulationDtype, Function, OptimizerState, Tree, Variables
from strategies.values import TrainState

NO_VARIABLES = "No variables to optimize: the list of trained variables is empty; leave it out to train all variables"


@dataclass(frozen=True)
class OptimizerFunctionOutput:
    """The result of an optimizer function: the optimizer and the loss of a pipeline that trains.

    Semantics: the original's class of that name. An optax optimizer computes no gradients by itself and needs no tape,
    so arguments for these are refused.

    Attributes:
        opt: Optax gradient transformation, or a `MapGradientOptimizer` of one. If it takes extra arguments and
            gradients are captured, it gets `captured_grads`, a dictionary by tag.
        loss: Floating-point scalar.
        compute_gradients_args: Refused with optax, except that an empty list of variables has a message of its own.
        compute_gradients_kwargs: Refused with optax.
        apply_gradients_args: Refused with optax.
        apply_gradients_kwargs: Refused with optax.
        variables: Trained variables, as `trainable` of a `Trainer`; None for all.
        tape: Refused with JAX; use `gradient_capture_context`.
        gradient_capture_context: Receiver of the gradients of the arrays that stages mark with
            `capture_upstream_gradients`. They are accumulated and averaged like gradients of variables. None captures
            nothing.
        captured_gradient_outfeed: Outfeed that also gets the captured gradients, once per update.

    Raises:
        TypeError: If the optimizer or the loss has a wrong type, or arguments are not a tuple or dictionary.
        ValueError: For arguments that optax does not take, or if there are no variables to optimize.
    """

    opt: optax.GradientTransformation | MapGradientOptimizer
    loss: jax.Array
    compute_gradients_args: tuple[object, ...] | None = None
    compute_gradients_kwargs: Mapping[str, object] | None = None
    apply_gradients_args: tuple[object, ...] | None = None
    apply_gradients_kwargs: Mapping[str, object] | None = None
    variables: Tree = None
    tape: object = None
    gradient_capture_context: GradientCaptureContext | None = None
    captured_gradient_outfeed: OutfeedQueue | None = None

    def __post_init__(self) -> None:
        inner = unwrapped(self.opt)[0]
        if not (hasattr(inner, "init") and hasattr(inner, "update")):  # also the wrappers of `ipu.optimizers`
            raise wrong_type("opt", self.opt, "use an optax gradient transformation")
        if not hasattr(self.loss, "dtype"):
            raise wrong_type("loss", self.loss, "it must be an array")
        for name in ("compute_gradients", "apply_gradients"):
            self._check_arguments(name, getattr(self, f"{name}_args"), getattr(self, f"{name}_kwargs"))
        if self.tape is not None and self.variables is not None:
            raise ValueError("both variables and a tape are given; variables are enough: leave out the tape")
        if self.tape is not None:
            raise ValueError(
                "a gradient tape is given, but JAX differentiates functions; leave out the tape, and capture gradients "
                "with a gradient_capture_context"
            )
        if isinstance(self.variables, Sequence) and not self.variables:
            raise ValueError(NO_VARIABLES)
        context, outfeed = self.gradient_capture_context, self.captured_gradient_outfeed
        check_optional("gradient_capture_context", context, GradientCaptureContext)
        check_optional("captured_gradient_outfeed", outfeed, OutfeedQueue)
        if outfeed is not None and context is None:
            raise ValueError(
                "a captured_gradient_outfeed is given, but no gradient_capture_context captures anything; give one"
            )

    @staticmethod
    def _check_arguments(name: str, given: tuple[object, ...] | None, named: Mapping[str, object] | None) -> None:
        check_optional(f"{name}_args", given, tuple, "it must be a tuple")
        check_optional(f"{name}_kwargs", named, Mapping, "it must be a dictionary")
        if name == "compute_gradients" and given and isinstance(given[0], Sequence) and not given[0]:
            raise ValueError(NO_VARIABLES)
        if given or named:
            word = f"{name}_args" if given else f"{name}_kwargs"
            raise ValueError(f"OptimizerFunctionOutput.{word} may not be used with optax optimizers; leave it out")


@dataclass(frozen=True)
class PipelineStageOptions:
    """Options of the original's compiler, which are checked and have no effect here.

    Attributes:
        convolution_options: Options by name.
        matmul_options: Options by name.
        slice_options: Options by name.

    Raises:
        TypeError: If one of them is not a dictionary.
    """

    convolution_options: Mapping[str, object] | None = None
    matmul_options: Mapping[str, object] | None = None
    slice_options: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("convolution_options", "matmul_options", "slice_options"):
            check_optional(name, getattr(self, name), Mapping, "it must be a dictionary")


def accumulators_of(tree: Tree, dtype: AccumulationDtype) -> Tree:
    """Return a tree of zeros in the dtypes in which gradients are accumulated; see `accumulator_dtypes`."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, accumulator_dtypes(tree, dtype), strict=True)
    return jax.tree.unflatten(structure, [jnp.zeros(leaf.shape, own) for leaf, own in pairs])


class _Nameless:
    """An empty part of the path of a variable, so that variables keep the names that their program knows."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class CapturingVariables:
    """Variables, and handles by tag."""

    variables: Variables
    handles: Mapping[str, Tree]

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, Tree], ...], None]:
        """Return the children with their keys, for JAX's `register_pytree_with_keys_class`."""
        return ((_Nameless(), self.variables), (jax.tree_util.GetAttrKey("captured"), self.handles)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Variables, Mapping[str, Tree]]) -> CapturingVariables:
        """Make an object from its children, for JAX's `register_pytree_with_keys_class`."""
        return cls(*children)


class CapturingState(NamedTuple):
    """The state of an optimizer, and the captured gradients of its last update."""

    optimizer: OptimizerState
    captured: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Captures:
    """The gradients that a pipeline captures. By default none, and then every method returns its argument unchanged.

    Attributes:
        shapes: Shapes of the marked arrays, by tag.
        count: Number of micro-batches.
        accumulates: Whether gradients of micro-batches are accumulated; if not, the optimizer gets those of each
            micro-batch, [count, *shape].
        method: Reduction of gradients over micro-batches.
        dtype: Dtype of accumulators.
    """

    shapes: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    count: int = 1
    accumulates: bool = True
    method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM
    dtype: AccumulationDtype = None

    def extended(self, variables: Variables) -> Variables:
        """Return the trained tree: the variables, and an array of zeros for each captured gradient."""
        if not self.shapes:
            return variables
        lead = () if self.accumulates else (self.count,)
        handles = {tag: np.zeros((*lead, *shape.shape), shape.dtype) for tag, shape in self.shapes.items()}
        return CapturingVariables(variables, handles)

    def trainable(self, trainable: Tree) -> Tree:
        """Return the `trainable` of the trained tree, given the `trainable` of the variables."""
        if not self.shapes or trainable is None:
            return trainable
        if callable(trainable):
            handles = {f".captured[{tag!r}]" for tag in self.shapes}
            return lambda name, leaf: name in handles or trainable(name, leaf)
        return CapturingVariables(trainable, dict.fromkeys(self.shapes, True))

    def loss(self, loss_fn: Function) -> Function:
        """Return the loss function of the trained tree, given that of the variables."""
        if not self.shapes:
            return loss_fn

        def extended(trained: CapturingVariables, *arguments: Tree) -> Tree:
            number = get_current_iteration_counter()
            handles = trained.handles
            if not self.accumulates:
                handles = {tag: handle[number] for tag, handle in handles.items()}
            return with_handles(loss_fn)(handles, trained.variables, *arguments)

        return extended

    def optimizer(self, optimizer: optax.GradientTransformation) -> AnyOptimizer:
        """Return the optimizer of the trained tree, which passes `captured_grads` on if `optimizer` takes arguments.

        Handles have other shapes than variables, so parts of the two would not match; the optimizer needs whole arrays.
        """
        if not self.shapes:
            return optimizer
        own = optax.with_extra_args_support(optimizer)

        def init(trained: CapturingVariables) -> CapturingState:
            return CapturingState(own.init(trained.variables), accumulators_of(trained.handles, self.dtype))

        def update(
            gradients: CapturingVariables,
            state: CapturingState,
            trained: CapturingVariables | None = None,
            **extra: object,
        ) -> tuple[CapturingVariables, CapturingState]:
            captured = gradients.handles
            if not self.accumulates and self.method is not GradientAccumulationReductionMethod.SUM:
                captured = jax.tree.map(lambda leaf: leaf * self.count, captured)
            variables = None if trained is None else trained.variables
            changes, new = own.update(gradients.variables, state.optimizer, variables, captured_grads=captured, **extra)
            still = jax.tree.map(jnp.zeros_like, gradients.handles)
            return CapturingVariables(changes, still), CapturingState(new, captured)

        return OptaxOptimizer(optax.GradientTransformationExtraArgs(init, update), needs_whole=True)

    def shown(self, state: TrainState) -> TrainState:
        """Return a state with the variables alone, as the user's program knows them."""
        return replace(state, variables=state.variables.variables) if self.shapes else state

    def of(self, state: TrainState) -> dict[str, np.ndarray]:
        """Return the gradients captured for the last update. Collective if the optimizer state is sharded.

        Args:
            state: State with a `PartOfArray` for each array of which this instance has only a part.
        """
        captured = state.optimizer_state.captured if self.shapes else {}
        return {
            tag: array.gather(f"the captured gradient {tag}") if isinstance(array, PartOfArray) else np.array(array)
            for tag, array in sorted(captured.items())
        }
