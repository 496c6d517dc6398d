"""Faults in the weighted means of PyTorch: the Trainer, loops, evaluations, and weights of 0."""

from __future__ import annotations

from fault import Fault

_OF_TRAINER = "tests/strategies/on_torch/test_torch_weights.py::"
_OF_LOOPS = "tests/strategies/on_torch/test_torch_loop_weights.py::"
_ONE_PROCESS = f"{_OF_TRAINER}test_a_training_is_that_of_one_process_with_all_tokens_for_every_option"

IN_TORCH_WEIGHTS = (
    Fault(
        name="the loss of a micro-batch is not multiplied by its weight",
        path="strategies/torch/options.py",
        old="torch.promote_types(loss.dtype, torch.float32)) * weight",
        new="torch.promote_types(loss.dtype, torch.float32))",
        caught_by=f"{_ONE_PROCESS}[plain]",
    ),
    Fault(
        name="mean gradients on the host are not divided by the mean weight",
        path="strategies/torch/engine.py",
        old="pending.inputs.scale, weight or 1.0)",
        new="pending.inputs.scale)",
        caught_by=f"{_ONE_PROCESS}[plain]",
    ),
    Fault(
        name="the weights of an instance's replicas on a device are added without the last one",
        path="strategies/torch/exchange/gradients.py",
        old="for one in self._tail_values], operator.add)",
        new="for one in self._tail_values[:-1]], operator.add)",
        caught_by=f"{_ONE_PROCESS}[on a device]",
    ),
    Fault(
        name="gradients of the weight 0 stay NaN",
        path="strategies/torch/replicas/gradient_map.py",
        old="            return torch.zeros_like(gradient)",
        new="            return gradient",
        caught_by=f"{_ONE_PROCESS}[plain]",
    ),
    Fault(
        name="a micro-batch of a pipeline gets the weight of another one",
        path="strategies/torch/replicas/gradient_map.py",
        old="weight = self._weight if self._at_once == 1 else self._weights[threading.get_ident()]",
        new="weight = self._weight",
        caught_by=f"{_OF_TRAINER}test_a_pipeline_trains_with_all_tokens",
    ),
    Fault(
        name="instances may disagree on whether losses have weights",
        path="strategies/torch/engine.py",
        old='        insist_on_agreement(self._replicas, [{"metrics": ", ".join(names)}])',
        new="",
        caught_by=f"{_OF_TRAINER}test_instances_agree_on_weights_that_depend_on_their_data",
    ),
    Fault(
        name="SyncBatchNorm gets zeros in place of gradients of other replicas' losses",
        path="strategies/torch/replicas/passes.py",
        old="        if weight is not None and self._layers.meets:\n",
        new="        if False:\n",
        caught_by=f"{_OF_TRAINER}test_synchronised_batch_norm_has_the_gradients_of_all_tokens",
    ),
    Fault(
        name="a step of PyTorch without weight is applied",
        path="strategies/torch/engine.py",
        old="pending.is_applied = has_weight and is_finite",
        new="pending.is_applied = is_finite",
        caught_by=f"{_OF_TRAINER}test_a_step_without_weight_is_skipped_if_so_told",
    ),
    Fault(
        name="an evaluation of PyTorch counts rows, and not their weights",
        path="strategies/torch/replicas/evaluation.py",
        old="weight = float(computed.get(WEIGHT, count)) if count else 0.0",
        new="weight = float(count)",
        caught_by=f"{_OF_TRAINER}test_an_evaluation_is_the_mean_over_all_tokens",
    ),
    Fault(
        name="gradients of a loop are not divided by the mean weight",
        path="strategies/torch/distributed_model/averaging.py",
        old="        divide(wide, weight)\n",
        new="",
        caught_by=f"{_OF_LOOPS}test_a_plain_loop_has_the_bits_of_a_trainer",
    ),
    Fault(
        name="a micro-batch of a loop counts with the weight of the last one only",
        path="strategies/torch/distributed_model/passes.py",
        old="self._sum += given.value",
        new="self._sum = given.value",
        caught_by=f"{_OF_LOOPS}test_micro_batches_of_unequal_lengths_are_one_batch",
    ),
    Fault(
        name="a weighted mean is added to gradients of an earlier step",
        path="strategies/torch/distributed_model/passes.py",
        old="        elif not self._has_passes:",
        new="        elif False:",
        caught_by=f"{_OF_LOOPS}test_passes_without_a_weighted_mean_are_refused",
    ),
    Fault(
        name="replicas of a loop may have no weights while others have",
        path="strategies/torch/distributed_model/averaging.py",
        old="            if tail.metrics[4] != active:\n",
        new="            if False:\n",
        caught_by=f"{_OF_LOOPS}test_passes_without_a_weighted_mean_are_refused",
    ),
    Fault(
        name="the optimizer of a loop uses the gradients of a step that is skipped",
        path="strategies/torch/distributed_model/averaging.py",
        old="                one.grad = None\n",
        new="                pass\n",
        caught_by=f"{_OF_LOOPS}test_a_step_without_weight_is_skipped_if_so_told",
    ),
    Fault(
        name="an instance that is late does not hear that a step has no weight",
        path="strategies/torch/distributed_model/averaging.py",
        old="(means.loss, means.weight, [",
        new="(means.loss, None, [",
        caught_by=f"{_OF_LOOPS}test_a_late_instance_hears_the_mean_weight",
    ),
)
