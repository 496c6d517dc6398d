"""The comparison of a replica's turn with its repetition, which finds programs whose results depend on the spread.

In steps 1, 2, 4, 8 and so on the first local replica computes once more, after the others or at once. Whatever a turn
changes and nobody puts back makes a difference then: a counter in a closure, an object that a hook fills, a generator
of the program, a clock, a network outside of the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from strategies.core.agreement import Digest, Members, broadcast_text
from strategies.errors import StrategyError
from strategies.jax.comparing.agreement import digest_of
from strategies.torch.replicas.module_parts import Slot, is_compiled
from strategies.torch.tensors import ThreadValue, as_array, bits_of, have_same_bits, nodes_behind
from strategies.typing import Tree

_StrayGradient: TypeAlias = tuple[Callable[[], torch.Tensor | None], int, str]
"""A gradient that replicas have left, PyTorch's counter of writes to it, and its parameter in words."""


def _check_no_stray_gradients(
    left: Mapping[torch.Tensor, _StrayGradient], optimizer: torch.optim.Optimizer, *arguments: object
) -> None:
    """Raise if an optimizer is about to use a gradient that replicas have left."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient, version, name = left.get(parameter, (lambda: None, 0, ""))
            if (now := gradient()) is not None and now is parameter.grad and now._version == version:
                raise StrategyError(
                    f"{type(optimizer).__name__} would use a gradient that the loss function of a Trainer has left in "
                    f"the {name}, which is outside of the Trainer's module. It is no mean over all replicas: each "
                    "instance has its own; put the parameter into the Trainer's module, or call zero_grad() and "
                    "compute its gradient by itself (docs: torch_modules, Networks outside of the module)"
                )


_WORD = 1 << 64
_PIECE = 1 << 22  # elements
REASONS = (
    "an object outside of the module that a replica changes and reads, as a list, a counter or a dictionary in a "
    "closure or a global variable, a torch.Generator of the program, a clock, or a tensor in an attribute. Replicas "
    "take turns, so each would see what others have left there; keep such values in buffers of the module, or in "
    "attributes that are numbers, strings, lists or dictionaries (docs: torch_modules, What is checked)"
)


class Compared(Protocol):
    """The results of a turn that must have the same bits if it is repeated.

    Attributes:
        losses: The loss of each micro-batch.
        slots: Buffers and frozen parameters afterwards.
    """

    @property
    def losses(self) -> Sequence[torch.Tensor]:
        """The loss of each micro-batch."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The buffers and frozen parameters afterwards."""


_guard: ThreadValue[RepetitionGuard | None] = ThreadValue(None)


class RepetitionGuard:
    """The comparisons of one module.

    Args:
        module: The module.

    Attributes:
        found: What has differed in the last step, in words; "" if nothing has.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        setattr(torch.autograd, _plainly.__name__, _backward)  # to see those passes, too, that a turn nests in its own
        self._module = module
        self.found = ""
        self._kept: list[tuple[str, Digest | None]] = []
        self._turn = 0
        self._outside: dict[int, tuple[_OutsideMarks, set[int]]] = {}
        self._strangers: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()  # parameters outside of the module
        self._before: list[tuple[torch.Tensor, str, torch.Tensor | None, int]] = []  # with their gradients
        self._left: MutableMapping[torch.Tensor, _StrayGradient] = WeakIdKeyDictionary()
        self._watches_optimizers = self._searches = False

    # ---- networks outside of the module

    @contextmanager
    def watching(self, is_repeated: bool) -> Iterator[None]:
        """Watch the networks and parameters outside of the module that replicas use in a step.

        Args:
            is_repeated: Whether the step is one whose first turn is repeated; in other steps nothing is searched.
        """
        self.found, self._turn, self._searches, self._outside = "", 0, is_repeated, {}
        self._before = []
        self._record(self._strangers)
        with ExitStack() as hooks:
            if is_repeated and not is_compiled(self._module):  # such a hook would make torch.compile start anew
                self._own = set(map(id, self._module.modules()))
                hooks.callback(register_module_forward_pre_hook(self._called).remove)
            yield
        outside, self._outside = self._outside, {}
        for marks, turns in outside.values():
            if len(turns) > 1 and (name := marks.written()):
                self._find(
                    f"replicas have written {name} of a {marks.kind} outside of the module. It is one "
                    "network for all replicas of an instance; make it a part of the module, call its eval(), or update "
                    "it between steps (docs: torch_modules, Networks outside of the module)"
                )
        self._remember_left()

    @contextmanager
    def of_turn(self) -> Iterator[None]:
        """Watch the networks that this thread calls in one turn."""
        self._turn += 1
        with _guard.using(self):
            yield

    def _called(self, network: torch.nn.Module, _: object) -> None:
        """Handle a module that is called. PyTorch calls this in all threads."""
        if _guard.now is not self or id(network) in self._own:
            return
        if (known := self._outside.get(id(network))) is not None:
            known[1].add(self._turn)
            return
        marks = _OutsideMarks(network)
        self._outside[id(network)] = marks, {self._turn}
        own = [(name, one) for name, one in network._parameters.items() if isinstance(one, torch.nn.Parameter)]
        self._watch({one: f"parameter {name!r} of a {marks.kind}" for name, one in own})

    def search(self, tensors: Iterable[object]) -> None:
        """Find the parameters outside of the module of which tensors are computed, if this step searches them."""
        if self._searches:
            own = set(map(id, self._module.parameters()))
            nodes = [node for one in tensors if isinstance(one, torch.Tensor) for node in nodes_behind(one)]
            found = [getattr(node, "variable", None) for node in nodes]
            leaves = [one for one in found if isinstance(one, torch.Tensor) and one.is_leaf and id(one) not in own]
            self._watch({one: f"parameter of the shape {list(one.shape)}" for one in leaves})

    def _watch(self, named: Mapping[torch.Tensor, str]) -> None:
        new = {one: name for one, name in named.items() if one.requires_grad and one not in self._strangers}
        self._strangers.update(new)
        self._record(new)

    def _record(self, parameters: Mapping[torch.Tensor, str]) -> None:
        """Record the gradients of parameters outside of the module, before replicas add to them."""
        pairs = [(one, name, one.grad) for one, name in parameters.items()]
        self._before += [(*pair, 0 if pair[-1] is None else pair[-1]._version) for pair in pairs]

    def _remember_left(self) -> None:
        """Remember the gradients that backward passes of replicas have left outside of the module.

        Nothing adds those of other instances. From the first one on, an optimizer that steps with one of them is
        refused. A gradient that the program has replaced or written since is its own.
        """
        for parameter, name, gradient, version in self._before:
            if (now := parameter.grad) is not None and (now._version != version or now is not gradient):
                self._left[parameter] = weakref.ref(now), now._version, name
        self._before = []
        if self._left and not self._watches_optimizers:
            self._watches_optimizers = True
            hook = register_optimizer_step_pre_hook(partial(_check_no_stray_gradients, self._left))
            weakref.finalize(self, hook.remove)

    # ---- the repetition

    def keep(self, compared: Compared, gradients: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        """Remember the results of the first replica.

        Args:
            compared: The results.
            gradients: The gradients of the trained parameters.
            names: The names of these parameters.
        """
        self._kept = _digests(compared, gradients, names)

    def compare(
        self, replica: int, again: Callable[[], tuple[Compared, Sequence[torch.Tensor | None]]], names: Sequence[str]
    ) -> None:
        """Repeat the first replica's turn, and compare.

        Args:
            replica: Its global index.
            again: Repeats it, and returns results and gradients.
            names: The names of the trained parameters.
        """
        try:
            found = _digests(*again(), names)
        except Exception as error:
            self._find(
                f"replica {replica} computed its part of the step twice, and the second time it has raised "
                f"{type(error).__name__}: {error}. Its loss depends on {REASONS}"
            )
            return
        for (name, then), (_, now) in zip(self._kept, found, strict=True):
            if then != now:
                self._find(
                    f"replica {replica} computed its part of the step twice, and {name} was another one the second "
                    f"time. It depends on {REASONS}"
                )
                return

    def _find(self, text: str) -> None:
        self.found = self.found or text


def is_due(number: int) -> bool:
    """Return whether costly comparisons are due in a step, given its number: in steps 1, 2, 4, 8 and so on."""
    return not number & (number - 1)


def repeats_bits(device: torch.device) -> bool:
    """Return whether a repeated computation has the same bits on a device."""
    return bool(device.type == "cpu" or torch.are_deterministic_algorithms_enabled())


def check_repetition(members: Members, found: str, step: int) -> None:
    """Raise on all instances if a repeated turn has differed on one of them. Collective.

    Raises:
        StrategyError: If one has found something.
    """
    communicator = members.communicator
    finders = communicator.all_gather(np.array(bool(found)), name="the comparison of a turn with its repetition")
    if finders.any():
        root = int(np.flatnonzero(finders)[0])
        text = broadcast_text(communicator, found, root, "what has differed in a repeated turn")
        raise StrategyError(f"in step {step} {text}")


_plainly = torch.autograd.backward
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by vmap or grad


@wraps(_plainly)
def _backward(tensors: Tree, *arguments: Tree, **named: Tree) -> None:
    """Run a backward pass. In a turn it may be nested, as that of a reentrant checkpoint."""
    if _guard.now is not None:
        _guard.now.search([tensors] if isinstance(tensors, torch.Tensor) else tensors)
    _plainly(tensors, *arguments, **named)


class _OutsideMarks:
    """The marks of a network's own tensors, without those of its submodules, that a write changes.

    Buffers are copied, because PyTorch does not count the writes of batch norm. Parts of scripted modules are called by
    no hook, so a scripted module has the marks of all of them. Tensors that `torch.func.functional_call` puts in place
    of the network's are left out.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        recurses = isinstance(network, torch.jit.ScriptModule)
        self.kind = type(network).__qualname__
        self._buffers: partial[Iterator[tuple[str, torch.Tensor]]] = partial(network.named_buffers, recurse=recurses)
        self._before = {name: None if _is_wrapped(one) else one.detach().clone() for name, one in self._buffers()}
        named = network.named_parameters(recurse=recurses)
        self._parameters = WriteMarks(
            [(name, one) for name, one in named if isinstance(one, torch.nn.Parameter) and not one.is_inference()]
        )

    def written(self) -> str:
        """Return the name of a tensor that was written since, or "" if none was."""
        for name, now in self._buffers():
            then = self._before.get(name, now[None])  # of another shape, if the buffer is new
            if then is not None and not have_same_bits(now, then):
                return name
        return min(self._parameters.counted(), default="")


def _digests(
    compared: Compared, gradients: Sequence[torch.Tensor | None], names: Sequence[str]
) -> list[tuple[str, Digest | None]]:
    named: list[tuple[str, torch.Tensor | None]] = [("the loss", one) for one in compared.losses]
    named += [(f"the gradient of {name}", one) for name, one in zip(names, gradients, strict=True)]
    named += [(slot.name, slot.tensor) for slot in compared.slots]
    digests = iter(digests_of([one for _, one in named if one is not None]))
    return [(name, None if one is None else next(digests)) for name, one in named]


def digests_of(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Return a digest of each tensor: two numbers that depend on all bits. Those of a device take one read."""
    dense = [one.detach() if one.layout is torch.strided else one.detach().to_dense() for one in tensors]
    if all(one.device.type == "cpu" for one in dense):
        return [digest_of([as_array(one)]) for one in dense]
    with torch.no_grad():
        found = torch.stack([_device_digest(one) for one in dense]).cpu()
    return [(total % _WORD, squares % _WORD) for total, squares in found.tolist()]


def _device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums over a tensor's elements as integers, modulo 2**64: x * weight and x * x * weight.

    The weight of element i is 2 * i + 1.
    """
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits_of(tensor).reshape(-1).split(_PIECE)):
        wide, first = piece.to(torch.int64), 2 * number * _PIECE + 1
        placed = wide * torch.arange(first, first + 2 * piece.numel(), 2, device=tensor.device)  # odd: no bit is lost
        found += torch.stack([placed.sum(), (placed * wide).sum()])
    return found


# ---- writes to parameters


class WriteMarks:
    """The marks of parameters before a step, to find those that replicas have written.

    PyTorch counts the writes to a tensor, except those through `parameter.data`. So in steps whose first turn is
    repeated, bits are compared, too.

    Args:
        named: The parameters that replicas must not write.
        compares_bits: Whether to compare bits.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], compares_bits: bool = False) -> None:
        self._named, self._compares_bits = named, compares_bits
        self._before = self._marks()
        self._bits = digests_of([one for _, one in named]) if compares_bits else []

    def _marks(self) -> list[tuple[int, int]]:
        return [(one.data_ptr(), one._version) for _, one in self._named]

    def counted(self) -> set[str]:
        """Return the names of the parameters that PyTorch knows to be written since, or that are in other memory."""
        if (now := self._marks()) == self._before:
            return set()
        return self._where(now, self._before)

    def by_bits(self) -> set[str]:
        """Return the names of the parameters with other bits, if bits are compared."""
        return self._where(digests_of([one for _, one in self._named]), self._bits) if self._compares_bits else set()

    def _where(self, now: Sequence[object], before: Sequence[object]) -> set[str]:
        return {name for (name, _), one, other in zip(self._named, now, before, strict=True) if one != other}

    def check(self) -> None:
        """Raise if a parameter was written since.

        Raises:
            StrategyError: If one was.
        """
        if written := self.counted() or self.by_bits():
            raise_written(*next(pair for pair in self._named if pair[0] in written))


def raise_written(name: str, parameter: torch.Tensor) -> NoReturn:
    """Raise because replicas have written a parameter that they share."""
    if parameter.requires_grad:
        raise StrategyError(
            f"{name} was written while a replica computed, as Embedding(max_norm=...) does in its forward pass. It is "
            "trained, and replicas share it, so their writes would be lost or mixed. Write it between steps, or "
            "compute another tensor from it in the forward pass; parameters frozen with requires_grad_(False) may be "
            "written"
        )
    raise StrategyError(
        f"{name} is frozen, and was written while a replica computed, but not in the first step, so replicas share it; "
        f"declare from the start how replicas agree on it: model_state_aggregation={ {name: 'mean'} }"
    )
