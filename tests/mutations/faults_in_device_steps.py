"""Faults in steps that stay on devices, and in the exchanges of gradients on devices."""

from __future__ import annotations

from fault import Fault

_STEPS = "tests/strategies/on_device/test_step_on_device.py"
_ENGINES = "tests/strategies/engines/test_engines.py"
_NOTICE = "test_all_instances_agree_on_a_notice_to_one_at_the_end_of_the_step"
_WINDOWS = "tests/strategies/test_window_path.py"
_COPIES = "tests/strategies/test_host_copies.py"

IN_DEVICE_STEPS = (
    Fault(
        name="sums on JAX's devices are added in another order than the tree's",
        path="strategies/jax/on_device/paths.py",
        old="values.append(values[left] + values[right])\n    return values[-1]",
        new="pass\n    return sum(values[1:], values[0])",
        caught_by=f"{_WINDOWS}::test_means_and_rows_have_the_bits_of_the_host",
    ),
    Fault(
        name="a mean on JAX's devices is divided twice",
        path="strategies/jax/on_device/paths.py",
        old="(total * np.float32(1 / replicas))",
        new="(total * np.float32(1 / replicas**2))",
        caught_by=f"{_STEPS}::test_a_step_has_the_bits_of_the_host_for_every_number_of_replicas",
    ),
    Fault(
        name="a mean on JAX's devices is multiplied by a rounded reciprocal",
        path="strategies/jax/on_device/paths.py",
        old="if replicas & (replicas - 1) == 0:  # for powers of two, a multiplication has the bits of a division",
        new="if True:",
        caught_by=f"{_STEPS}::test_a_step_has_the_bits_of_the_host_with_each_option",
    ),
    Fault(
        name="the loss scale grows after each finite step",
        path="strategies/jax/on_device/step.py",
        old="jnp.where(is_finite, jnp.where(is_due, higher, same), lower)",
        new="jnp.where(is_finite, higher, lower)",
        caught_by=f"{_STEPS}::test_the_loss_scale_moves_as_on_the_host",
    ),
    Fault(
        name="a failure on the device is reported with the number of the latest step",
        path="strategies/jax/on_device/step.py",
        old='f"step {number} has failed on the device',
        new='f"step {step} has failed on the device',
        caught_by=f"{_STEPS}::test_a_failure_on_the_device_names_its_step",
    ),
    Fault(
        name="gradients of pipelines stay on the device",
        path="strategies/jax/preparation.py",
        old='plan, reason = None, None if self._options.pipeline is None else "replicas are pipelines"',
        new="plan, reason = None, None",
        caught_by=f"{_STEPS}::test_a_forced_device_refuses_options_that_need_the_host",
    ),
    Fault(
        name="the model state on the device changes despite a non-finite gradient",
        path="strategies/jax/on_device/step.py",
        old="return chosen(is_finite, after, before.model_state)",
        new="return after",
        caught_by=f"{_STEPS}::test_a_model_state_stays_if_a_gradient_is_not_finite",
    ),
    Fault(
        name="a notice to one instance with a device does not reach the others",
        path="strategies/jax/on_device/step.py",
        old="            notice = float(given[0])\n",
        new="",
        caught_by=f"{_ENGINES}::{_NOTICE}[jax on devices]",
    ),
    Fault(
        name="the padding of slices in a compiled exchange comes first",
        path="strategies/jax/on_device/paths.py",
        old="jnp.pad(own, ((0, 0), (0, instances * share - size)))",
        new="jnp.pad(own, ((0, 0), (instances * share - size, 0)))",
        caught_by="tests/strategies/on_device/test_compiled_path.py::test_compiled_means_have_the_bits_of_the_host",
    ),
    Fault(
        name="an instance omits the last element of its slice of a window",
        path="strategies/exchange/window_path.py",
        old="return bounds[rank], bounds[rank + 1]",
        new="return bounds[rank], bounds[rank + 1] - 1",
        caught_by=f"{_WINDOWS}::test_slices_of_instances_are_all_of_a_group",
    ),
    Fault(
        name="a window lost with an instance is mistaken for memory that cannot be shared",
        path="strategies/exchange/window_path.py",
        old="            communicator.barrier(name=_REFUSED)\n",
        new="",
        caught_by=f"{_WINDOWS}::test_a_window_that_is_missing_after_a_loss_is_a_loss_and_no_refusal",
    ),
    Fault(
        name="gradients copied to the host overlap",
        path="strategies/exchange/host_copies.py",
        old="self._memory[start : start + source.nbytes]",
        new="self._memory[: source.nbytes]",
        caught_by=f"{_COPIES}::test_arrays_arrive_in_page_locked_memory_that_is_used_again",
    ),
    Fault(
        name="gradients are added before their copy to the host is complete",
        path="strategies/exchange/host_copies.py",
        old="        self.await_buffer(number)\n",
        new="",
        caught_by=f"{_COPIES}::test_arrays_arrive_in_page_locked_memory_that_is_used_again",
    ),
    Fault(
        name="parts of a mean are copied to the start of the whole mean on the device",
        path="strategies/exchange/host_copies.py",
        old="return self._starts[number] + address - self._first[number]",
        new="return self._starts[number]",
        caught_by=f"{_COPIES}::test_means_are_copied_to_their_places_on_the_host",
    ),
    Fault(
        name="compiled collectives are chosen for instances that share a GPU",
        path="strategies/exchange/choice.py",
        old="    if sharing := _sharing(facts):\n",
        new="    if False and (sharing := _sharing(facts)):\n",
        caught_by="tests/strategies/test_exchange_choice.py::test_the_automatic_choice_follows_from_the_facts",
    ),
    Fault(
        name="operations on GPUs need not be deterministic",
        path="strategies/jax/replicas/replicas.py",
        old="            use_deterministic_operations(os.environ)\n",
        new="            pass\n",
        caught_by="tests/strategies/test_determinism.py::test_a_strategy_on_gpus_sets_the_flag_unless_the_program_declines",
    ),
    Fault(
        name="PyTorch multiplies sums on a device by a rounded reciprocal",
        path="strategies/torch/tensors.py",
        old="math.frexp(divisor)[0] == 0.5 and 2.0**-126 <= divisor <= 2.0**126",
        new="True",
        caught_by="tests/strategies/on_torch/test_device_arithmetic.py::test_a_mean_on_a_device_has_the_bits_of_the_host",
    ),
)
