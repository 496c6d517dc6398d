"""The modes of modules, training or evaluation: an executor keeps those of its first call, as a compiled one does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)


class Modes:
    """The `training` of each submodule, as it was at the first call or was set by the executor.

    A program of PopTorch calls `model.eval()` before an inference, and its training model, which was compiled before,
    goes on with dropout.

    Args:
        module: whose modes they are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._taken: dict[torch.nn.Module, bool] = {}
        self._has_told = False

    def take(self) -> None:
        """Keep the modes as they are now."""
        self._taken = {each: each.training for each in self._module.modules()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the modules in the modes that were taken, and afterwards in those that the program has set."""
        if not self._taken:
            self.take()
            if not self._module.training:
                logger.warning(
                    "a training model is called for the first time with its module in evaluation mode, so dropout is "
                    "off and statistics stay; call model.train() before, unless that is meant"
                )
        others = {each: each.training for each in self._module.modules() if each.training is not self._of(each)}
        if others and not self._has_told and self._module not in others:
            self._has_told = True
            logger.warning(
                "the mode of %s has changed, and a training model keeps that of its first call; call train() or eval() "
                "of the training model to have it take the modes as they are then",
                type(next(iter(others))).__name__,
            )
        for each in others:
            each.training = self._of(each)
        try:
            yield
        finally:
            for each, mode in others.items():
                each.training = mode

    def _of(self, module: torch.nn.Module) -> bool:
        mode: bool = self._taken.get(module, module.training)
        return mode
