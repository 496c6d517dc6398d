"""Parameters, buffers and layers of a module, compared with what they were: by identity, nothing is read."""

from __future__ import annotations

import torch


class ModuleWatch:
    """Notices parameters, buffers and layers that are added, removed or replaced.

    Args:
        module: not changed.

    Attributes:
        named: its parameters, each once, when it was looked at last.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.look()

    def look(self) -> None:
        """Take what there is now for what should be there."""
        self._modules = list(self._module.modules())
        self._tables = [table for one in self._modules for table in (one._modules, one._parameters)]
        self._buffers = [one._buffers for one in self._modules]
        self.named = list(self._module.named_parameters())
        self._parameters = [one for _, one in self.named]
        self._structure, self._kinds = self._structure_now(), self._kinds_now()

    @property
    def has_other_parts(self) -> bool:
        """Whether there are other parameters, buffers or layers than those that were looked at."""
        return self._structure != self._structure_now()

    @property
    def is_swapped(self) -> bool:
        """Whether tensors stand in the place of parameters for a while, as in `torch.func.functional_call`."""
        parameters = [value for table in self._tables for value in table.values()]
        return not all(isinstance(one, torch.nn.Module | torch.nn.Parameter | None) for one in parameters)

    @property
    def has_other_kinds(self) -> bool:
        """Whether a parameter has another shape or dtype than it had."""
        return self._kinds != self._kinds_now()

    def _structure_now(self) -> list[object]:
        parts: list[object] = [id(value) for table in self._tables for value in table.values()]
        return parts + [value is None for table in self._buffers for value in table.values()]

    def _kinds_now(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(one.shape, one.dtype) for one in self._parameters]
