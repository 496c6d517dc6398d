"""Faults by which models of Keras and modules of PyTorch are trained or evaluated as nobody has said."""

from __future__ import annotations

from fault import Fault

IN_FRONT_ENDS = (
    Fault(
        name="means of metrics are means of the means of batches",
        path="strategies/keras/state.py",
        old="words.append(SUM)",
        new="words.append(MEAN)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_metrics.py::test_counts_curves_and_matrices_are_those_of_all_rows",
        ),
    ),
    Fault(
        name="rows that only fill a batch are evaluated by Keras",
        path="strategies/keras/batches.py",
        old="positions < given)",
        new="positions >= 0)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_where_nothing_is_trained_every_row_comes_once_with_its_number",
        ),
    ),
    Fault(
        name="all replicas of a model of Keras drop out alike",
        path="strategies/keras/state.py",
        old="own = jnp.where(replica == 0, state, derived)",
        new="own = jnp.where(replica >= 0, state, derived)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_state.py::test_each_replica_begins_with_a_state_of_its_own_and_the_first_with_that_of_the_model",
        ),
    ),
    Fault(
        name="a replica takes batches that lie apart for the micro-batches of a step",
        path="strategies/keras/batches.py",
        old="return range(local[0] * count, (local[-1] + 1) * count)",
        new="return range(local[0], self.per_step, self.layout.total_replicas)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_a_replica_takes_its_micro_batches_one_after_another",
        ),
    ),
    Fault(
        name="rows of a later step have the numbers of the first",
        path="strategies/keras/batches.py",
        old="self.first_row += self.layout.global_batch_size",
        new="self.first_row += 0",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_where_nothing_is_trained_every_row_comes_once_with_its_number",
        ),
    ),
    Fault(
        name="rows that are too few for all micro-batches of a model of Keras get past the check",
        path="strategies/keras/data.py",
        old="if rows < replicas * accumulated:",
        new="if rows < replicas:",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_rows_that_are_too_few_for_all_micro_batches_are_refused",
        ),
    ),
    Fault(
        name="running means of an evaluation by Keras count the last batch only",
        path="strategies/keras/evaluating.py",
        old="self._seen += len(counted)",
        new="self._seen = len(counted)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_metrics.py::test_a_running_mean_of_an_evaluation_counts_all_batches",
        ),
    ),
    Fault(
        name="a damaged backup of Keras is restored",
        path="strategies/keras/backups.py",
        old="            fault = fault_of(path)",
        new='            fault = ""',
        caught_by=(
            "tests/strategies/keras_models/test_keras_backups.py::test_where_the_newest_backup_is_damaged_the_one_before_is_used",
        ),
    ),
    Fault(
        name="a backup of Keras leaves out the states of seed generators",
        path="strategies/keras/backups.py",
        old='json.dumps(epoch | {"random_states": random_states(model)})',
        new='json.dumps(epoch | {"random_states": [[1, 2]] * len(random_states(model))})',
        caught_by=(
            "tests/strategies/keras_models/test_keras_backups.py::test_a_training_that_is_killed_in_an_epoch_ends_with_the_bits_of_one_that_was_not",
        ),
    ),
    Fault(
        name="only the newest backup of Keras is kept",
        path="strategies/keras/backups.py",
        old="KEPT = 2",
        new="KEPT = 1",
        caught_by=(
            "tests/strategies/keras_models/test_keras_backups.py::test_where_the_newest_backup_is_damaged_the_one_before_is_used",
        ),
    ),
    Fault(
        name="what a callback changes before a step of Keras is not compared",
        path="strategies/keras/watching.py",
        old="        self._note(_arrays(state))\n",
        new="        self._left = _arrays(state)\n",
        caught_by=(
            "tests/strategies/keras_models/test_keras_disagreements.py::test_what_one_instance_does_otherwise_is_refused_by_name",
        ),
    ),
    Fault(
        name="trainable flags that a callback of Keras changes are not compared",
        path="strategies/keras/watching.py",
        old="if with_flags:",
        new="if with_flags and not self._left:",
        caught_by=(
            "tests/strategies/keras_models/test_keras_disagreements.py::test_what_one_instance_does_otherwise_is_refused_by_name",
        ),
    ),
    Fault(
        name="files that Keras writes within an epoch have no optimizer state of other instances",
        path="strategies/keras/callbacks.py",
        old="_First(running, looks or writes)",
        new="_First(running, looks)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_disagreements.py::test_callbacks_that_only_write_may_be_on_the_chief_alone",
        ),
    ),
    Fault(
        name="an own train_step of Keras applies the gradients of its replica",
        path="strategies/keras/own_steps.py",
        old="apply(optimizer_variables, mean(grads), trainable_variables)",
        new="apply(optimizer_variables, (mean(grads), grads)[1], trainable_variables)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_own_steps.py::test_an_own_train_step_is_trained_with_the_mean_of_all_rows",
        ),
    ),
    Fault(
        name="an own train_step of Keras leaves seed generators as its replica has them",
        path="strategies/keras/own_steps.py",
        old="new[VARIABLES] = seeds.after(given, own, new[VARIABLES])",
        new="new[VARIABLES] = list(new[VARIABLES])",
        caught_by=(
            "tests/strategies/keras_models/test_keras_own_steps.py::test_an_own_train_step_has_the_same_bits_for_every_number_of_instances",
        ),
    ),
    Fault(
        name="a step of Keras's own may change variables by the rows of its replica",
        path="strategies/keras/own_steps.py",
        old="if is_own:",
        new="if is_own and part == OPTIMIZER:",
        caught_by=(
            "tests/strategies/keras_models/test_keras_own_steps.py::test_a_step_that_changes_variables_by_the_rows_of_a_replica_is_refused",
        ),
    ),
    Fault(
        name="weights that a callback of Keras restores on the chief stay there",
        path="strategies/keras/callbacks.py",
        old="self._watch.assign(broadcast(replicas, arrays))",
        new="broadcast(replicas, arrays)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_backups.py::test_callbacks_go_on_everywhere_from_what_the_chief_has_restored",
        ),
    ),
    Fault(
        name="only the first rows of arrays are compared between instances of Keras",
        path="strategies/keras/data.py",
        old="compared = _spread(source)",
        new="compared = example",
        caught_by=(
            "tests/strategies/keras_models/test_keras_disagreements.py::test_what_one_instance_does_otherwise_is_refused_by_name",
        ),
    ),
    Fault(
        name="modules of PyTorch draw from the generator of the process",
        path="strategies/torch/randomness.py",
        old="_generator.being(generator):\n        _include(_KEY, True)",
        new="_generator.being(generator):\n        _include(_KEY, False)",
        caught_by=(
            "tests/strategies/on_torch/test_randomness.py::test_a_thread_draws_what_plain_pytorch_draws_with_that_seed",
        ),
    ),
    Fault(
        name="all replicas of a module draw the same numbers",
        path="strategies/torch/randomness.py",
        old='struct.pack("<4q", seed, replica, step, micro_batch)',
        new='struct.pack("<4q", seed, 0, step, micro_batch)',
        caught_by=(
            "tests/strategies/on_torch/test_randomness.py::test_seeds_differ_for_each_replica_step_and_micro_batch",
        ),
    ),
    Fault(
        name="buffers of a module are those of replica 0 instead of the mean",
        path="strategies/torch/model_buffers.py",
        old="return word or (MEAN if is_float else FIRST)",
        new="return word or FIRST",
        caught_by=(
            "tests/strategies/on_torch/test_torch_trainer.py::TestBuffers::test_are_means_and_those_of_replica_0",
        ),
    ),
    Fault(
        name="buffers of replicas do not follow what the program changes in the module",
        path="strategies/torch/replica_modules.py",
        old="                    tensor.copy_(master)\n",
        new="                    pass\n",
        caught_by=(
            "tests/strategies/on_torch/test_torch_trainer.py::TestBuffers::test_that_the_program_changes_are_those_of_all_replicas",
        ),
    ),
    Fault(
        name="of buffers that each replica keeps the first one alone follows the program",
        path="strategies/torch/model_buffers.py",
        old="own.copy_(self.slots[number].tensor.detach().expand_as(own))",
        new="own[self._shown].copy_(self.slots[number].tensor.detach())",
        caught_by=(
            "tests/strategies/on_torch/test_torch_trainer.py::TestBuffers::test_that_the_program_changes_are_those_of_all_replicas",
        ),
    ),
    Fault(
        name="gradients of 16 bits are divided by the scale of the loss in 16 bits",
        path="strategies/torch/gradient_exchange.py",
        old="mean.copy_(received.to(wide) / scale)",
        new="mean.copy_(received / scale)",
        caught_by=(
            "tests/strategies/on_torch/test_torch_trainer.py::TestLossScaling::test_gradients_of_16_bits_are_divided_in_32",
        ),
    ),
    Fault(
        name="nobody looks whether the first step is that of plain PyTorch",
        path="strategies/torch/torch_step.py",
        old="            self._refuse_difference(watch)\n",
        new="            pass\n",
        caught_by=("tests/strategies/on_torch/test_first_steps.py::TestADifference::test_is_raised_on_all_instances",),
    ),
    Fault(
        name="a pass that compares leaves its statistics in the module",
        path="strategies/torch/undoing.py",
        old="                memory.copy_(saved)\n",
        new="                pass\n",
        caught_by=("tests/strategies/on_torch/test_first_steps.py::TestNothingIsChanged::test_in_what_is_trained",),
    ),
    Fault(
        name="lists in a module that the program changes are those from before in replicas",
        path="strategies/torch/replica_modules.py",
        old="            self._follow_contents()\n",
        new="            pass\n",
        caught_by=("tests/strategies/on_torch/test_idioms.py::test_one_replica_has_the_bits_of_plain_pytorch",),
    ),
    Fault(
        name="a bucket is sent before its last gradient has come",
        path="strategies/torch/replica_run.py",
        old="if not self._missing[bucket] and bucket",
        new="if self._missing[bucket] <= 1 and bucket",
        caught_by=(
            "tests/strategies/on_torch/test_replica_run.py::test_a_bucket_is_ready_when_its_last_gradient_has_come",
        ),
    ),
    Fault(
        name="micro-batches of a module are not divided by their number",
        path="strategies/torch/replica_run.py",
        old="elif divisor != 1:",
        new="elif divisor < 1:",
        caught_by=(
            "tests/strategies/on_torch/test_poptorch.py::TestTraining::test_gradients_are_reduced_over_micro_batches_and_replicas",
        ),
    ),
    Fault(
        name="of what flows into an operator only the last part counts where backward passes are taken apart",
        path="strategies/torch/split_backward.py",
        old="self._kept[edge] = gradient if before is None else before + gradient",
        new="self._kept[edge] = gradient",
        caught_by=(
            "tests/strategies/on_torch/test_split_backward.py::test_gradients_have_the_bits_of_a_whole_backward_pass",
        ),
    ),
    Fault(
        name="of a parameter that several operators use one alone counts where backward passes are taken apart",
        path="strategies/torch/split_backward.py",
        old="elif len(group.users) == 1:",
        new="elif group.users:",
        caught_by=(
            "tests/strategies/on_torch/test_split_backward.py::test_gradients_have_the_bits_of_a_whole_backward_pass",
        ),
    ),
    Fault(
        name="each step asks the kernel for its memory anew",
        path="strategies/torch/trainer.py",
        old="        keep_freed_memory()\n",
        new="",
        caught_by=(
            "tests/strategies/on_torch/test_torch_allocator.py::TestPages::test_of_one_step_are_those_of_the_next",
        ),
    ),
    Fault(
        name="a frozen layer whose optimizer state is sharded goes on moving by its last gradient",
        path="strategies/torch/updates.py",
        old="            part.grad = None\n",
        new="            pass\n",
        caught_by=(
            "tests/strategies/on_torch/test_torch_updates.py::test_what_the_program_changes_between_steps_is_followed_alike_everywhere",
        ),
    ),
    Fault(
        name="sharded state is applied to memory that a parameter has left",
        path="strategies/torch/updates.py",
        old="part.data = self._view(parameter)",
        new="pass",
        caught_by=(
            "tests/strategies/on_torch/test_torch_updates.py::test_what_the_program_changes_between_steps_is_followed_alike_everywhere",
        ),
    ),
    Fault(
        name="a parameter without a gradient keeps the one before",
        path="strategies/torch/updates.py",
        old="            parameter.grad = mean\n        self._optimizer.step()\n",
        new="            parameter.grad = parameter.grad if mean is None else mean\n        self._optimizer.step()\n",
        caught_by=(
            "tests/strategies/on_torch/test_torch_updates.py::test_a_whole_update_takes_no_gradient_of_the_step_before",
        ),
    ),
    Fault(
        name="gradients of PyTorch are divided before map_gradient gets them",
        path="strategies/torch/replica_run.py",
        old="elif divisor != 1:",
        new="if divisor != 1:",
        caught_by=(
            "tests/strategies/on_torch/test_torch_mapped_gradients.py::TestTheOption::test_maps_before_anything_is_divided_or_added",
        ),
    ),
    Fault(
        name="map_gradient of PyTorch sees the loss scale",
        path="strategies/torch/gradient_map.py",
        old="if self._scale != 1:",
        new="if self._scale < 0:",
        caught_by=(
            "tests/strategies/on_torch/test_torch_mapped_gradients.py::TestTheOption::test_has_the_same_bits_with_other_options",
        ),
    ),
    Fault(
        name="map_gradient of PyTorch hides gradients that are not finite",
        path="strategies/torch/options.py",
        old="keeps_bad = self.check_numerics or self.scaling is not None",
        new="keeps_bad = False",
        caught_by=(
            "tests/strategies/on_torch/test_torch_mapped_gradients.py::TestTheOption::test_does_not_hide_what_is_not_finite",
        ),
    ),
    Fault(
        name="with sums PopTorch's map_gradient sees gradients times the number of replicas",
        path="strategies/torch/poptorch/executor.py",
        old="loss_function(1 if mapping else factor, ",
        new="loss_function(factor, ",
        caught_by=(
            "tests/strategies/on_torch/test_torch_mapped_gradients.py::TestPopTorch::test_maps_gradients_as_the_loss_has_them",
        ),
    ),
    Fault(
        name="gradients that before_update puts in place are dropped",
        path="strategies/torch/torch_step.py",
        old="[(parameter, parameter.grad) for parameter in training.trained]",
        new="[(parameter, mean if has else None) for parameter, mean, has in pairs]",
        caught_by=(
            "tests/strategies/on_torch/test_torch_updates.py::test_gradients_that_before_update_puts_in_place_of_others_are_applied",
        ),
    ),
    Fault(
        name="a loss scale is taken off in 16 bits",
        path="strategies/torch/gradient_exchange.py",
        old="wide = torch.promote_types(received.dtype, torch.float32)",
        new="wide = received.dtype",
        caught_by=(
            "tests/strategies/on_torch/test_torch_updates.py::test_a_loss_scale_is_taken_off_in_32_bits_where_gradients_travel_in_16",
        ),
    ),
    Fault(
        name="a loss with an axis of one element is refused",
        path="strategies/torch/replica_run.py",
        old="loss.numel() != 1",
        new="loss.ndim",
        caught_by=("tests/strategies/on_torch/test_torch_updates.py::test_a_loss_may_have_axes_of_one_element",),
    ),
    Fault(
        name="rows of other replicas do not count in the backward pass of SyncBatchNorm",
        path="strategies/torch/normalisation.py",
        old="torch.cat([by_weight, by_bias]).double()) / ctx.count",
        new="torch.cat([by_weight, by_bias]).double()) / (x.numel() // channels)",
        caught_by=(
            "tests/strategies/on_torch/test_torch_sync_batch_norm.py::test_outputs_and_gradients_are_those_of_the_whole_batch",
        ),
    ),
    Fault(
        name="sums of SyncBatchNorm go where gradients leave meanwhile",
        path="strategies/torch/meetings.py",
        old="return add_by_name if is_busy else add",
        new="return add",
        caught_by=(
            "tests/strategies/on_torch/test_torch_sync_batch_norm.py::test_sums_do_not_disturb_gradients_that_leave_meanwhile",
        ),
    ),
    Fault(
        name="what a loop's backward pass computes again is ordinary batch normalisation",
        path="strategies/torch/sync_batch_norm.py",
        old="_kept[layer] = weakref.ref(self)",
        new="pass",
        caught_by=("tests/strategies/on_torch/test_torch_sync_batch_norm.py::test_loops_have_the_bits_of_a_trainer",),
    ),
    Fault(
        name="a layer that is thawed in a loop is never averaged",
        path="strategies/torch/gradient_averaging.py",
        old="one.requires_grad and id(one) not in numbers for",
        new="False for",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestWhatIsTrained::test_may_be_thawed_and_frozen",
        ),
    ),
    Fault(
        name="instances of a loop may train other layers",
        path="strategies/torch/gradient_averaging.py",
        old="insist_on_agreement(self._replicas, [options, terms, buffers])",
        new="insist_on_agreement(self._replicas, [options, buffers])",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestWhatIsTrained::test_has_to_be_the_same_on_all_instances",
        ),
    ),
    Fault(
        name="a new layer begins with other values on each instance",
        path="strategies/torch/gradient_averaging.py",
        old="for name, one in self._watch.named}\n        buffers",
        new="for name, one in self._watch.named if not digests}\n        buffers",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestWhatIsTrained::test_that_differs_between_instances_is_refused_by_name",
        ),
    ),
    Fault(
        name="gradients of micro-batches that are not synchronised are left to the instance",
        path="strategies/torch/gradient_averaging.py",
        old="if self.loop.carried:",
        new="if False:",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestBackwardPasses::test_that_are_not_synchronised_hand_all_their_gradients_on",
        ),
    ),
    Fault(
        name="a reentrant checkpoint ends a backward pass of a loop",
        path="strategies/torch/backward_passes.py",
        old="        if is_nested():",
        new="        if running is None and is_nested():",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestCheckpointing::test_counts_one_step_on_one_replica",
        ),
    ),
    Fault(
        name="two forward passes before one backward pass draw the same",
        path="strategies/torch/loop_state.py",
        old="        if self._generator is None:\n",
        new="        if self._generator is not None or True:\n",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestRandomNumbers::test_of_two_forward_passes_before_one_backward_are_those_of_trainer",
        ),
    ),
    Fault(
        name="gradients of two models have the same names",
        path="strategies/torch/gradient_averaging.py",
        old='self._title = "gradients" if self._passes.models == 1 else',
        new='self._title = "gradients" if self._passes.models else',
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestSeveralModels::test_that_take_part_in_another_order_are_an_error",
        ),
    ),
    Fault(
        name="gradients of a model leave before those of the model that came first",
        path="strategies/torch/backward_passes.py",
        old="            if not model_pass.has_left:\n                return\n",
        new="",
        caught_by=(
            "tests/strategies/on_torch/test_backward_passes.py::test_buckets_of_a_model_leave_behind_those_of_the_model_that_came_first",
        ),
    ),
    Fault(
        name="LBFGS decides by the loss of its own instance",
        path="strategies/torch/loop_state.py",
        old="return torch.tensor(float(mean),",
        new="return torch.tensor(float(loss),",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestBackwardPasses::test_of_optimizers_that_look_at_the_loss_are_equally_many",
        ),
    ),
    Fault(
        name="gradients of autograd.grad are local, and nothing says so",
        path="strategies/torch/gradient_averaging.py",
        old="        if names:\n            self._warn(",
        new="        if not names:\n            self._warn(",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestAutogradGrad::test_of_parameters_warns_once_by_name",
        ),
    ),
    Fault(
        name="parameters keep alive what averages them",
        path="strategies/torch/gradient_averaging.py",
        old="partial(_tell, weakref.ref(self))",
        new="partial(_tell, lambda: self)",
        caught_by=(
            "tests/strategies/on_torch/test_gradient_averaging.py::TestMemory::test_of_a_model_is_freed_with_it",
        ),
    ),
    Fault(
        name="a rate that one instance changes alone is not noticed",
        path="strategies/torch/torch_step.py",
        old="if differ(*tail.settings):",
        new="if False:",
        caught_by=(
            "tests/strategies/on_torch/test_torch_settings.py::test_what_one_instance_changes_alone_is_an_error_by_name",
        ),
    ),
    Fault(
        name="replicas evaluate with the buffers of the first one of their instance",
        path="strategies/torch/evaluation.py",
        old="buffers.masters_of(replica) for replica in local]",
        new="buffers.masters_of(local[0]) for replica in local]",
        caught_by=(
            "tests/strategies/on_torch/test_torch_replica_groups.py::TestBuffersOfEachReplica::test_are_those_with_which_each_replica_predicts",
        ),
    ),
    Fault(
        name="a replica without a gradient sends the one of the step before",
        path="strategies/torch/contribution.py",
        old="        if gradient is None:\n            view.zero_()",
        new="        if gradient is None:\n            pass",
        caught_by=(
            "tests/strategies/on_torch/test_replica_run.py::test_a_parameter_without_a_gradient_adds_nothing_of_the_step_before",
        ),
    ),
    Fault(
        name="LAMB has no limit for the norm of a parameter",
        path="strategies/torch/poptorch/optim.py",
        old='parameter.norm().clamp(max=group["max_weight_norm"])',
        new="parameter.norm()",
        caught_by=(
            "tests/strategies/on_torch/test_poptorch_optimizers.py::test_lamb_takes_no_more_than_its_limit_for_the_norm_of_a_parameter",
        ),
    ),
    Fault(
        name="rows behind a batch that is not filled have the numbers of others",
        path="strategies/keras/batches.py",
        old="self.first_row += given",
        new="self.first_row += len(positions)",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_rows_behind_a_step_that_is_not_filled_have_the_numbers_that_follow",
        ),
    ),
    Fault(
        name="rows of an epoch that is gone on with have the numbers of its first step",
        path="strategies/keras/batches.py",
        old="dealer.first_row = start * self._layout.global_batch_size",
        new="dealer.first_row = 0",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_rows_have_the_same_numbers_where_an_epoch_is_gone_on_with",
        ),
    ),
    Fault(
        name="what does not decay does where its optimizer state is sharded",
        path="strategies/keras/optimizer.py",
        old="if optimizer._var_key(old) in excluded",
        new="if False",
        caught_by=(
            "tests/strategies/keras_models/test_keras_training.py::test_what_keras_says_of_a_variable_holds_where_an_instance_has_a_part_of_it",
        ),
    ),
    Fault(
        name="steps_per_epoch of Keras leaves rows of arrays out",
        path="strategies/keras/data.py",
        old="-(-rows // (given.steps * per_step))",
        new="max(1, rows // (given.steps * per_step))",
        caught_by=(
            "tests/strategies/keras_models/test_keras_data.py::test_arrays_are_read_whole_in_the_steps_that_are_said",
        ),
    ),
    Fault(
        name="a constraint of Keras is forgotten where the optimizer state is sharded",
        path="strategies/keras/optimizer.py",
        old="own.path, own.constraint",
        new="own.path, None",
        caught_by=(
            "tests/strategies/keras_models/test_keras_training.py::test_what_keras_says_of_a_variable_holds_where_an_instance_has_a_part_of_it",
        ),
    ),
    Fault(
        name="a learning rate that is a tensor is not restored",
        path="strategies/torch/optimizer_arrays.py",
        old="group[name].copy_(as_tensor(np.asarray(value)))",
        new="pass",
        caught_by=(
            "tests/strategies/on_torch/test_torch_checkpoints.py::test_a_learning_rate_that_is_a_tensor_is_put_back_into_it",
        ),
    ),
)
