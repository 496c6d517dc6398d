"""Detection of writes to parameters while a module computes, which would make replicas or instances differ.

PyTorch counts the writes to a tensor, so counters and addresses are compared in every pass. It does not count a write
through `parameter.data`, so in passes 1, 2, 4, 8 and so on bits are compared, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from strategies.core.digest import Digest
from strategies.errors import StrategyError
from strategies.jax.comparing.digest import digest_of
from strategies.torch.replicas.module_parts import ModuleParts
from strategies.torch.tensors import as_array, bits_of

_WORD = 1 << 64
_PIECE = 1 << 22  # elements


class WriteCounters:
    """A comparison of the counters and addresses of tensors before and after a computation."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._before: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Record the tensors' counters before a computation."""
        self._before = self._marks()

    def written(self) -> list[int]:
        """Return the numbers of the tensors that were written since `begin`, or moved to other memory."""
        now = self._marks()
        if now == self._before:
            return []
        return [number for number, (one, before) in enumerate(zip(now, self._before, strict=True)) if one != before]

    def _marks(self) -> list[tuple[int, int]]:
        return [(one.data_ptr(), one._version) for one in self._tensors]


class WrittenBits:
    """A comparison of the bits of tensors before and after a computation, in passes 1, 2, 4, 8 and so on.

    Args:
        tensors: The tensors.
        is_always: Whether the bits are compared in every pass.

    Attributes:
        passes: The number of computations that have begun.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], is_always: bool = False) -> None:
        self._tensors = tensors
        self._is_always = is_always
        self.passes = 0
        self._before: list[Digest] | None = None

    def begin(self) -> None:
        """Record the tensors' bits before a computation, if this pass compares them."""
        self.passes += 1
        is_power_of_two = not self.passes & (self.passes - 1)
        self._before = self._digests() if is_power_of_two or self._is_always else None

    def written(self) -> list[int]:
        """Return the numbers of the tensors whose bits have changed since `begin`, if this pass compares them."""
        if self._before is None:
            return []
        pairs = enumerate(zip(self._digests(), self._before, strict=True))
        return [number for number, (one, before) in pairs if one != before]

    def _digests(self) -> list[Digest]:
        if self._tensors and self._tensors[0].device.type != "cpu":
            return device_digests(self._tensors)
        return [digest_of([as_array(one.detach())]) for one in self._tensors]


def device_digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Return a digest of each tensor on a device: two numbers that depend on all bits. All digests take one read."""
    if not tensors:
        return []
    with torch.no_grad():
        found = torch.stack([_device_digest(one.detach()) for one in tensors]).cpu()
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


class ForwardWatch:
    """A watcher of the forward passes of a module that is a replica itself and may write frozen parameters.

    Args:
        module: The module.
        declared: The names of frozen parameters that the program has declared to be written.

    Attributes:
        frozen: The names of frozen parameters that forward passes have written. The reader clears the set.
    """

    def __init__(self, module: torch.nn.Module, declared: Container[str] = ()) -> None:
        self._module = module
        self._declared = declared
        self.frozen: set[str] = set()
        self._known: set[str] = set()
        self._look()

    def _look(self) -> None:
        self._parts = ModuleParts(self._module)
        self._named = list(self._module.named_parameters())
        self._counters = WriteCounters(one for _, one in self._named)
        self._bits = WrittenBits([one for _, one in self._named])
        self._declared_bits = {
            name: WrittenBits([one], is_always=True) for name, one in self._named if name in self._declared
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a forward pass.

        Raises:
            StrategyError: If the pass has written a trained parameter. Also if it has written an undeclared frozen
                parameter through `data`, and this was seen only after the first pass.
        """
        if self._parts.changed():
            self._look()
        watches: list[WriteCounters | WrittenBits] = [self._counters, self._bits, *self._declared_bits.values()]
        for watch in watches:
            watch.begin()
        yield
        self._take(set(self._counters.written()), set(self._bits.written()))

    def _take(self, counted: set[int], by_bits: set[int]) -> None:
        found = [self._named[number] for number in sorted(counted | by_bits)]
        trained = [name for name, one in found if one.requires_grad]
        refuse_writes(trained, trained)
        late = [self._named[number][0] for number in sorted(by_bits - counted) if self._bits.passes > 1]
        refuse_writes([name for name in late if name not in self._known and name not in self._declared], ())
        declared = {name for name, bits in self._declared_bits.items() if bits.written()}
        self.frozen |= declared | self._known | {name for name, _ in found}
        self._known |= {self._named[number][0] for number in by_bits - counted}


def refuse_writes(written: Sequence[str], trained: Container[str]) -> None:
    """Raise if a forward or backward pass has written parameters.

    Args:
        written: The names of these parameters.
        trained: The names of all trained parameters.

    Raises:
        StrategyError: If `written` is not empty.
    """
    if wrong := [name for name in written if name in trained]:
        raise StrategyError(
            f"{', '.join(wrong)} was written while a replica computed, as Embedding(max_norm=...) does in its forward "
            "pass. It is trained, and replicas share it, so their writes would be lost or mixed. "
            "Write it between steps, into the module that was given to strategies.torch, or compute another tensor "
            "from it in the forward pass; parameters frozen with requires_grad_(False) may be written"
        )
    if written:
        raise StrategyError(
            f"{', '.join(written)} is frozen, and was written while a replica computed, but not in the first step, so "
            "replicas share it; declare from the start how replicas agree on it: "
            f"model_state_aggregation={ {written[0]: 'mean'} }"
        )
