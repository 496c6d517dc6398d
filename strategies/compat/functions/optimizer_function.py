"""The result of a pipeline's optimizer function, and stage options of the original's hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import optax

from strategies.argument_checks import wrong_type
from strategies.jax.feeds.outfeed import OutfeedQueue
from strategies.jax.programs.gradient_capture import GradientCaptureContext
from strategies.jax.updates.optimizers import MapGradientOptimizer, unwrapped
from strategies.typing import Tree

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
        if not isinstance(unwrapped(self.opt)[0], optax.GradientTransformation):
            raise wrong_type("opt", self.opt, "use an optax gradient transformation")
        if not hasattr(self.loss, "dtype"):
            raise wrong_type("loss", self.loss, "it must be an array")
        for name in ("compute_gradients", "apply_gradients"):
            self._check_arguments(name)
        if self.tape is not None and self.variables is not None:
            raise ValueError("both variables and a tape are given; variables are enough: leave out the tape")
        if self.tape is not None:
            raise ValueError(
                "a gradient tape is given, but JAX differentiates functions; leave out the tape, and capture gradients "
                "with a gradient_capture_context"
            )
        if isinstance(self.variables, Sequence) and not self.variables:
            raise ValueError(NO_VARIABLES)
        self._check_capture()

    def _check_capture(self) -> None:
        context, outfeed = self.gradient_capture_context, self.captured_gradient_outfeed
        if not isinstance(context, GradientCaptureContext | None):
            raise wrong_type("gradient_capture_context", context, "use a GradientCaptureContext")
        if not isinstance(outfeed, OutfeedQueue | None):
            raise wrong_type("captured_gradient_outfeed", outfeed, "use an OutfeedQueue")
        if outfeed is not None and context is None:
            raise ValueError(
                "a captured_gradient_outfeed is given, but no gradient_capture_context captures anything; give one"
            )

    def _check_arguments(self, name: str) -> None:
        given, named = getattr(self, f"{name}_args"), getattr(self, f"{name}_kwargs")
        if given is not None and not isinstance(given, tuple):
            raise TypeError(f"{name}_args is {given!r}, a {type(given).__name__}; it must be a tuple")
        if named is not None and not isinstance(named, Mapping):
            raise TypeError(f"{name}_kwargs is {named!r}, a {type(named).__name__}; it must be a dictionary")
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
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise wrong_type(name, given, "it must be a dictionary")


def check_stage_options(name: str, options: object, stages: int) -> None:
    """Check a list of one `PipelineStageOptions` for each stage.

    Raises:
        TypeError: If it is not a list of them.
        ValueError: If their number is not the number of stages.
    """
    if options is None:
        return
    if not isinstance(options, Sequence) or not all(isinstance(one, PipelineStageOptions) for one in options):
        raise TypeError(f"{name} is {options!r}; it must be a list of PipelineStageOptions, one for each stage")
    if len(options) != stages:
        raise ValueError(f"{name} has {len(options)} PipelineStageOptions for {stages} stages; give one for each stage")


def check_update_options(name: str, options: object) -> None:
    """Check the options of the update.

    Raises:
        TypeError: If they are not one `PipelineStageOptions`.
    """
    if not isinstance(options, PipelineStageOptions | None):
        raise wrong_type(name, options, "it must be one PipelineStageOptions")
