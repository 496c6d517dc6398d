"""Faults in weighted means: the division, the tail, steps without weight, and Keras's masks."""

from __future__ import annotations

from fault import Fault

_OF_JAX = "tests/strategies/test_weighted_means.py::"
_OF_KERAS = "tests/strategies/keras_models/test_keras_weights.py::"
_ONE_PROCESS = f"{_OF_JAX}test_a_training_is_that_of_one_process_with_all_tokens_for_every_option[plain]"

IN_WEIGHTS = (
    Fault(
        name="mean gradients are not divided by the mean weight",
        path="strategies/jax/updates/update.py",
        old="            divisors.append(weight)",
        new="            pass",
        caught_by=_ONE_PROCESS,
    ),
    Fault(
        name="gradients of a part are divided otherwise than those of a whole array",
        path="strategies/jax/updates/update.py",
        old="quotient / jnp.where(quotient == quotient, divisor, 1)",
        new="quotient / divisor",
        caught_by=f"{_OF_JAX}test_the_bits_are_the_same_for_every_number_of_instances[ring-sharded]",
    ),
    Fault(
        name="gradients are not multiplied by the weight",
        path="strategies/jax/gradients/replica_program.py",
        old="return [weighted_terms(each, values[self.places.weight]) for each in apart]",
        new="return apart",
        caught_by=_ONE_PROCESS,
    ),
    Fault(
        name="metrics are not divided by the mean weight",
        path="strategies/core/options.py",
        old="np.divide(means, np.float32(weight), dtype=np.float32)",
        new="np.asarray(means, np.float32)",
        caught_by=_ONE_PROCESS,
    ),
    Fault(
        name="the weight is read as the notice",
        path="strategies/jax/gradients/model_state.py",
        old='''"""The place of the notice."""
        return self.num_values''',
        new='''"""The place of the notice."""
        return len(self.names)''',
        caught_by=f"{_OF_JAX}test_a_weight_is_no_notice",
    ),
    Fault(
        name="the flag of gradients that are not finite is read where the notice is",
        path="strategies/jax/gradients/model_state.py",
        old="return self.num_values + 1",
        new="return self.num_values",
        caught_by="tests/strategies/test_replica_program.py::TestTheTail::test_the_tail_has_the_declared_length",
    ),
    Fault(
        name="a loss of weight 0 that is NaN spoils the mean",
        path="strategies/jax/gradients/model_state.py",
        old="return jnp.where(weight > 0, widened(values) * weight, 0)",
        new="return widened(values) * weight",
        caught_by=_ONE_PROCESS,
    ),
    Fault(
        name="a negative weight is hidden in the sum",
        path="strategies/jax/gradients/model_state.py",
        old="jnp.where(((bits >= 0) | (size == 0)) & jnp.isfinite(number), number, jnp.nan)",
        new="number",
        caught_by=f"{_OF_JAX}test_a_bad_weight_on_one_replica_is_an_error_on_all_instances",
    ),
    Fault(
        name="a step without weight is applied",
        path="strategies/jax/engine.py",
        old="if not pending.is_weighted or (decides",
        new="if (decides",
        caught_by=f"{_OF_JAX}test_a_step_without_weight_is_skipped_if_so_told",
    ),
    Fault(
        name="a step without weight lowers the loss scale",
        path="strategies/core/step.py",
        old="if result.is_weighted else scale.kept()",
        new="if result.is_weighted else self.scaling.after(scale, False)",
        caught_by=f"{_OF_JAX}test_a_skipped_step_is_counted_with_loss_scaling_and_keeps_the_scale",
    ),
    Fault(
        name="gradients of other replicas' losses get the weight of this one",
        path="strategies/jax/gradients/replica_program.py",
        old="return self.places.is_weighted and self._has_collectives",
        new="return False",
        caught_by="tests/strategies/test_weights_with_collectives.py::test_gradients_through_collectives_are_those_of_the_weighted_mean",
    ),
    Fault(
        name="stages do not multiply the loss by its weight",
        path="strategies/jax/gradients/replica_program.py",
        old="loss, values = self._weighed(loss, values)",
        new="loss = loss",
        caught_by=f"{_OF_JAX}test_a_pipeline_trains_with_all_tokens_on_any_number_of_instances",
    ),
    Fault(
        name="an evaluation counts rows, and not their weights",
        path="strategies/jax/evaluation/tasks.py",
        old="        count = _sum(weights)",
        new="        count = np.float64(mask.sum())",
        caught_by=f"{_OF_JAX}test_an_evaluation_is_the_mean_over_all_tokens",
    ),
    Fault(
        name="replicas of Keras count the same whatever their masks are",
        path="strategies/keras/updates.py",
        old="return jnp.where(divisor == 0, NO_ROWS, divisor)",
        new="return jnp.ones(())",
        caught_by=f"{_OF_KERAS}test_training_is_that_of_stock_keras_with_the_rows_of_all_replicas",
    ),
    Fault(
        name="an added loss of Keras counts with the mask of another one",
        path="strategies/keras/updates.py",
        old="        return depends\n",
        new="        return False\n",
        caught_by=f"{_OF_KERAS}test_training_is_that_of_stock_keras_with_the_rows_of_all_replicas",
    ),
    Fault(
        name="Keras's mean loss of an epoch is that of the replicas' losses",
        path="strategies/keras/training.py",
        old="if not self._division.is_weighted:",
        new="if True:",
        caught_by=f"{_OF_KERAS}test_training_is_that_of_stock_keras_with_the_rows_of_all_replicas",
    ),
)
