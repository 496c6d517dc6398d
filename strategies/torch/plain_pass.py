"""The losses and gradients of replica 0 computed by plain PyTorch, for a comparison in the first steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch.autograd.graph import Node

import strategies.trees as trees
from strategies.core.options import GradientAccumulationReductionMethod
from strategies.torch.gradient_map import GradientMap
from strategies.torch.options import TorchOptions
from strategies.torch.outcomes import outcome_of, refuse_losses, weighted_loss, weighted_value
from strategies.torch.randomness import drawing_from, seed_of
from strategies.torch.replica_groups import groups_of
from strategies.torch.replica_memory import HOST, ReplicaMemory
from strategies.torch.replica_run import LossFunction
from strategies.torch.tensors import parts_of
from strategies.torch.threads import intra_op_threads
from strategies.torch.undoing import CannotBeUndoneError, undone
from strategies.typing import Batch

logger = logging.getLogger(__name__)

RUNNING_MEAN = GradientAccumulationReductionMethod.RUNNING_MEAN


@dataclass(frozen=True)
class Expected:
    """The losses and gradients that plain PyTorch has computed for a replica.

    Attributes:
        losses: The loss of each micro-batch, times its weight if it has one.
        gradients: The accumulated gradients of the trained parameters, in the order of `named_parameters`.
        names: The names of the trained parameters.
        hooked: The numbers of the parameters whose complete gradients are changed by hooks of the program.
        dtype: The dtype in which forward passes compute, if it is not that of the parameters.
    """

    losses: tuple[float, ...]
    gradients: tuple[torch.Tensor | None, ...]
    names: tuple[str, ...]
    hooked: frozenset[int]
    dtype: torch.dtype | None


def expected_of(
    memory: ReplicaMemory, loss_fn: LossFunction, batch: Batch, step: int, scale: float, options: TorchOptions
) -> Expected | None:
    """Run the forward and backward passes of replica 0 on the module itself, and undo all changes to the module.

    Args:
        memory: The memory of the training's module; nothing else uses the module meanwhile.
        loss_fn: The loss function.
        batch: The batch of replica 0, a pytree of tensors; not changed.
        step: The number of the step.
        scale: The loss scale.
        options: The options of the step.

    Returns:
        The results; None if the step cannot be compared, or plain PyTorch fails. The log gives the reason.
    """
    module = memory.module
    if reason := _reason_to_skip(module):
        logger.debug("step %d is not compared with plain PyTorch: %s", step, reason)
        return None
    own = trees.map(_copied, batch)
    try:
        with undone(module, loss_fn, options.map_gradient), intra_op_threads(options.intra_op_threads):
            return _computed(memory, loss_fn, own, step, scale, options)
    except CannotBeUndoneError as error:
        logger.debug("step %d is not compared with plain PyTorch: %s", step, error)
        return None
    except Exception as error:
        logger.debug("step %d is not compared with plain PyTorch, which fails", step, exc_info=error)
        return None


def _reason_to_skip(module: torch.nn.Module) -> str:
    if any(groups_of(parameter) is not None for parameter in module.parameters()):
        return "a parameter has a row for each group of replicas"
    if any(isinstance(one, torch.nn.SyncBatchNorm) for one in module.modules()):
        return "SyncBatchNorm computes with the rows of all replicas"
    return ""


def _copied(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _computed(
    memory: ReplicaMemory, loss_fn: LossFunction, batch: Batch, step: int, scale: float, options: TorchOptions
) -> Expected:
    module, device = memory.module, memory.device
    mapping = options.mapping()
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    parameters = [one for _, one in named]
    losses = []
    for number, part in enumerate(parts_of(batch, options.gradient_accumulation_count)):
        with memory.current(), drawing_from(seed_of(options.seed, 0, step, number), device):
            narrow = options.autocast_dtype
            with nullcontext() if narrow is None else torch.autocast(device.type, narrow):
                outcome = outcome_of(partial(loss_fn, module, memory.put(part)))
            loss, weight = outcome.loss, outcome.weight
            refuse_losses(loss)
            losses.append(weighted_value(float(loss.detach()), weight))
            if _has_reentrant_checkpoint(loss):
                raise CannotBeUndoneError("torch.autograd.grad does not work with reentrant checkpoints")
            if options.method is RUNNING_MEAN:
                for one in parameters:
                    one.grad = None if one.grad is None else one.grad * (number / (number + 1))
            divisor = options.divisor(number)
            if mapping is None:
                whole = loss if weight is None else weighted_loss(loss, weight)
                gradients = _gradients(whole / divisor * scale, parameters)
            else:
                mapping.begin(number, scale, divisor, weight)
                gradients = _mapped_gradients(mapping, loss * scale, parameters)
            if weight == 0:
                gradients = [None if one is None else torch.zeros_like(one) for one in gradients]
        for one, gradient in zip(parameters, gradients, strict=True):  # backward() would also set other gradients
            if gradient is not None:
                one.grad = gradient if one.grad is None else one.grad + gradient
    hooked = {number for number, one in enumerate(parameters) if getattr(one, "_post_accumulate_grad_hooks", None)}
    return Expected(
        tuple(losses),
        tuple(one.grad for one in parameters),
        tuple(name for name, _ in named),
        frozenset(hooked),
        options.autocast_dtype or _least_exact(device),
    )


def _least_exact(device: torch.device) -> torch.dtype | None:
    """Return the dtype whose precision sets the tolerance; None for the dtype of each gradient.

    On a GPU, two passes may have different bits unless operations are deterministic, and loss functions may use
    `torch.autocast` by themselves.
    """
    is_exact = device.type == HOST.type or torch.are_deterministic_algorithms_enabled()
    return None if is_exact else torch.bfloat16


def _has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    """Return whether a loss was computed through `torch.utils.checkpoint` with `use_reentrant=True`."""
    seen: set[Node] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


def _gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
    return gradients


def _mapped_gradients(
    mapping: GradientMap, loss: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Map gradients in autograd's order, because the function may draw random numbers."""
    hooks = [one.register_hook(partial(mapping, parameter=one)) for one in parameters]
    gradients = _gradients(loss, parameters)
    for hook in hooks:
        hook.remove()
    return gradients


class Comparison:
    """A comparison of replica 0's results with those of plain PyTorch, made in the thread of the replica.

    Attributes:
        difference: The first difference found, in words; empty if there is none.
    """

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self.difference = ""

    def let_go(self) -> None:
        """Release the gradients of plain PyTorch after the comparison."""
        self.__dict__.pop("_norm_of_all", None)
        self._expected = replace(self._expected, gradients=())

    def losses(self, found: Sequence[float]) -> None:
        """Compare the losses of the micro-batches."""
        for number, (mine, other) in enumerate(zip(found, self._expected.losses, strict=True)):
            tolerance = tolerance_of(self._expected.dtype or torch.float32)
            are_both_bad = not math.isfinite(mine) and not math.isfinite(other)
            if not are_both_bad and not math.isclose(mine, other, rel_tol=tolerance):
                self._tell(f"the loss of micro-batch {number} on replica 0 is {mine:.6g}", f"{other:.6g}")

    def gradient(self, number: int, found: torch.Tensor | None) -> None:
        """Compare the gradient of a trained parameter, before it travels."""
        expected = self._expected.gradients[number]
        if number in self._expected.hooked or self._is_alike(found, expected):
            return
        name = self._expected.names[number]
        self._tell(f"the gradient of {name} on replica 0 has {_norm(found)}", _norm(expected))

    def _is_alike(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None:
            return _norm_of(one) == _norm_of(other) == 0
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return bool(one.layout == other.layout)  # the contribution refuses sparse gradients
        if one.shape != other.shape:
            return False
        if torch.equal(one, other):
            return True
        norms = _norm_of(one), _norm_of(other)
        if not all(map(math.isfinite, norms)):
            return not any(map(math.isfinite, norms))
        tolerance = max(tolerance_of(each) for each in (one.dtype, self._expected.dtype or one.dtype))
        noise = self._norm_of_all * tolerance**2  # a gradient may be nothing but rounding errors
        return _norm_of(one.double() - other.double()) <= tolerance * max(norms) + 8 * noise

    @cached_property
    def _norm_of_all(self) -> float:
        return math.hypot(*map(_norm_of, self._expected.gradients))

    def _tell(self, mine: str, other: str) -> None:
        self.difference = self.difference or (
            f"{mine}, but plain PyTorch with the module itself, the same rows and random numbers computes {other}; the "
            "step was not applied. Replicas compute with copies of the module. Likely causes: loss_fn uses another "
            "module than its first argument; something in the module is not copied (a hook, a tensor in an attribute, "
            "compiled code); loss_fn draws random numbers or counts outside of PyTorch. If the difference is intended, "
            "turn the comparison off with verify_steps=0 (docs: torch, What is checked at the first steps)"
        )


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the allowed difference of two results, relative to their norms: half of the digits of a dtype."""
    return math.sqrt(torch.finfo(dtype).eps)


def _norm_of(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.detach().double().norm())


def _norm(tensor: torch.Tensor | None) -> str:
    return "no value" if tensor is None else f"the norm {_norm_of(tensor):.6g}"
