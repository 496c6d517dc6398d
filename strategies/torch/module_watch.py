"""The parts of a module, compared with those of the last look; no values are read."""

from __future__ import annotations

import torch

from strategies.torch.module_parts import Parts


class ModuleWatch:
    """A watcher of parts of a module that are added, removed or replaced, and of parameters of another kind.

    Args:
        module: not changed.

    Attributes:
        named: its parameters, each once, when it was looked at last.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.look()

    def look(self) -> None:
        """Take the parts that the module has now as the known ones."""
        self._parts = Parts(self._module)
        self.named = list(self._module.named_parameters())
        self._parameters = [one for _, one in self.named]
        self._kinds = self._kinds_now()

    @property
    def has_other_parts(self) -> bool:
        """Whether there are other parameters, buffers or layers than those that were looked at."""
        return self._parts.changed() is not None

    @property
    def is_swapped(self) -> bool:
        """Whether tensors stand in the place of parameters for a while, as in `torch.func.functional_call`."""
        return any(not isinstance(one, torch.nn.Parameter) for one in self._module.parameters())

    @property
    def writes(self) -> int:
        """The number of writes to parameters that PyTorch has counted."""
        return sum(one._version for one in self._parameters)

    @property
    def has_other_kinds(self) -> bool:
        """Whether a parameter has another shape or dtype than it had."""
        return self._kinds != self._kinds_now()

    def _kinds_now(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(one.shape, one.dtype) for one in self._parameters]
