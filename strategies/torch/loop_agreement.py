"""Comparisons of a module in the program's own loop between instances: its parts, and the bits of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strategies.core.agreement import insist_on_agreement
from strategies.core.digest import insist_on_same_bits
from strategies.jax.comparing.digest import digest_of, host_arrays
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.agreement import settings_differ, word_of
from strategies.torch.options import TorchOptions
from strategies.torch.replicas.module_parts import ModuleWatch, Slot
from strategies.torch.tensors import host_array


class LoopAgreement:
    """The comparisons of one model.

    Args:
        module: The module.
        watch: The watch over it.
        replicas: The replicas of all instances.
        options: The options of the step.
    """

    def __init__(self, module: torch.nn.Module, watch: ModuleWatch, replicas: Replicas, options: TorchOptions) -> None:
        self._module, self._watch, self._replicas, self._options = module, watch, replicas, options
        self._writes_before = 0  # the count of writes when bits were last equal

    def insist_on_same_parts(self, slots: Sequence[Slot], new: Sequence[torch.Tensor]) -> None:
        """Compare parameters, buffers and options, and the values of new parameters. Collective.

        Raises:
            DisagreementError: On all instances, if they differ.
        """
        digests = {id(one): f", digest {digest_of(host_array(one))[0]:x}" for one in new}
        terms = {name: f"{_described(one)}{digests.get(id(one), '')}" for name, one in self._watch.named}
        buffers = {slot.name: f"buffer {slot.tensor.dtype}" for slot in slots}
        own = self._options
        options = {
            "seed": str(own.seed),
            "gradient_transfer_dtype": str(own.transfer.dtype),
            "missing_gradients": own.missing_gradients,
            "zero_weight": own.zero_weight,
        }
        insist_on_agreement(self._replicas, [options, terms, buffers])

    def have_same_bits(self) -> None:
        """Take it that all instances have the same bits now; unequal numbers of writes before do no harm."""
        self._writes_before = self._watch.writes

    def word(self, step: int) -> int:
        """Return the hash that travels with a step: it differs if instances have written parameters unequally often."""
        return word_of(step, self._watch.writes - self._writes_before)

    def compare_bits(self, step: int, words: tuple[float, float]) -> None:
        """Compare the bits of all parameters if the options or the words of all instances demand it. Collective if so.

        Args:
            step: The number of the step.
            words: The mean of the words and of their squares.

        Raises:
            DivergenceError: On all instances, if bits differ.
        """
        if settings_differ(*words) or (step and not step & (step - 1)):
            state = {name: host_array(one) for name, one in self._module.named_parameters()}
            insist_on_same_bits(self._replicas, host_arrays(state), step)
            self.have_same_bits()


def _described(parameter: torch.Tensor) -> str:
    where = "" if parameter.device.type == "cpu" else f" on {parameter.device.type}"
    return f"{parameter.dtype}{list(parameter.shape)} {'trained' if parameter.requires_grad else 'frozen'}{where}"
