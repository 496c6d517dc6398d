"""Faults by which a training computes something else than it says."""

from __future__ import annotations

from fault import Fault

IN_STRATEGIES = (
    Fault(
        name="two replicas get the same random key",
        path="strategies/gradients/replica_program.py",
        old="jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), control[STEP]), index)",
        new="jax.random.fold_in(jax.random.key(self._seed), control[STEP])",
        caught_by=("tests/strategies/test_trainer.py::TestKeys::test_differ_for_each_replica_and_step",),
    ),
    Fault(
        name="a replica gets the same random key in two steps",
        path="strategies/gradients/replica_program.py",
        old="jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), control[STEP]), index)",
        new="jax.random.fold_in(jax.random.key(self._seed), index)",
        caught_by=("tests/strategies/test_trainer.py::TestKeys::test_differ_for_each_replica_and_step",),
    ),
    Fault(
        name="a row of every global batch is skipped",
        path="strategies/data/layout.py",
        old="first = step * self.global_batch_size",
        new="first = step * (self.global_batch_size + 1)",
        caught_by=("tests/strategies/test_datasets.py::test_without_shuffling_elements_come_in_order",),
    ),
    Fault(
        name="a replica reads what another one reads too",
        path="strategies/data/layout.py",
        old="starts = first + count * np.asarray(self.local_replicas, np.int64)",
        new="starts = first + count * np.arange(len(self.local_replicas))",
        caught_by=("tests/strategies/test_datasets.py::test_numbers_that_are_no_powers_of_two",),
    ),
    Fault(
        name="all epochs are shuffled alike",
        path="strategies/data/layout.py",
        old="np.random.SeedSequence([seed, epoch])",
        new="np.random.SeedSequence([seed, 0])",
        caught_by=("tests/strategies/test_datasets.py::test_epochs_and_seeds_give_different_orders",),
    ),
    Fault(
        name="one micro-batch too few is accumulated",
        path="strategies/gradients/accumulation.py",
        old="start, (jnp.arange(count), parts)",
        new="start, (jnp.arange(count - 1), jax.tree.map(lambda part: part[1:], parts))",
        caught_by=("tests/strategies/test_accumulation.py::test_is_what_a_loop_on_the_host_computes",),
    ),
    Fault(
        name="gradients are not divided by the scale of the loss",
        path="strategies/updates/update.py",
        old="leaves = [leaf.astype(jnp.float32) / scale for leaf in leaves]",
        new="leaves = [leaf.astype(jnp.float32) for leaf in leaves]",
        caught_by=("tests/strategies/test_updates.py::test_means_are_divided_by_the_loss_scale",),
    ),
    Fault(
        name="a step that overflowed is applied",
        path="strategies/step/single_step.py",
        old="is_finite = bool(tail[step.program.finite_place] == 0)",
        new="is_finite = True",
        caught_by=(
            "tests/strategies/test_precision.py::TestLossScaling::test_one_replica_that_overflows_keeps_all_from_the_step",
        ),
    ),
    Fault(
        name="products of an update are contracted with the sums that they go into",
        path="strategies/programs/xla_pitfalls.py",
        old="results = [_rounded(results[0], zero)]",
        new="results = [results[0]]",
        caught_by=("tests/strategies/test_xla_pitfalls.py::test_no_product_is_contracted_with_a_sum",),
    ),
    Fault(
        name="the last elements that do not fill a part are dropped from a sharded update",
        path="strategies/replicas/shards.py",
        old="return -(-size // self.replicas)",
        new="return size // self.replicas",
        caught_by=("tests/strategies/test_sharded_update.py::test_the_parts_of_all_instances_make_the_array",),
    ),
    Fault(
        name="the files of a checkpoint are not compared with their digests",
        path="strategies/checkpoints/sealed_folders.py",
        old="if _sha256(checkpoint / name) != sha256:",
        new="if not (checkpoint / name).stat().st_size:",
        caught_by=("tests/strategies/test_damaged_files.py::test_a_file_of_which_one_bit_has_changed_is_named",),
    ),
    Fault(
        name="a data set goes on one step behind the one at which it was saved",
        path="strategies/data/datasets.py",
        old="self._consumed = self._resume = (position.epoch, position.step)",
        new="self._consumed = self._resume = (position.epoch, position.step + 1)",
        caught_by=("tests/strategies/test_datasets.py::test_a_restored_position_continues_exactly",),
    ),
    Fault(
        name="a digest leaves out the last array",
        path="strategies/comparing/digest.py",
        old="for leaf in jax.tree.leaves(tree):",
        new="for leaf in jax.tree.leaves(tree)[:-1]:",
        caught_by=("tests/strategies/test_digest.py::test_every_flipped_bit_shows",),
    ),
    Fault(
        name="those that are left go on with the batch behind the one of the step",
        path="strategies/data/datasets.py",
        old="batches = self._source.batches(epoch, step - 1)",
        new="batches = self._source.batches(epoch, step)",
        caught_by=(
            "tests/strategies/test_redistribution.py::test_the_batch_of_the_last_step_is_read_again_for_other_replicas",
        ),
    ),
    Fault(
        name="the first element of an infeed is lost where it is looked at",
        path="strategies/feeds/infeed.py",
        old="self._opened = itertools.chain([first], self._opened)",
        new="self._opened = itertools.chain([], self._opened)",
        caught_by=("tests/strategies/test_infeed.py::TestElements::test_q_03_of_a_finite_data_set",),
    ),
    Fault(
        name="the gradient of a mean over replicas is a sum",
        path="strategies/replicas/collective_equations.py",
        old="return collective(index, cotangent)",
        new='return replace(collective, kind=Reduce("sum"))(index, cotangent)',
        caught_by=(
            "tests/strategies/test_cross_replica_ops.py::test_gradients_are_those_of_the_sum_of_all_replicas_losses",
        ),
    ),
    Fault(
        name="a row that only fills a batch is evaluated",
        path="strategies/evaluation/evaluation_program.py",
        old="Mean(_sum(values[mask]), np.float64(mask.sum()))",
        new="Mean(_sum(values), np.float64(mask.size))",
        caught_by=(
            "tests/strategies/test_evaluation.py::TestEveryRowCountsOnce::test_of_batches_of_which_the_last_is_short",
        ),
    ),
    Fault(
        name="losses of rows are added in float32",
        path="strategies/evaluation/evaluation_program.py",
        old="np.add.accumulate(values, dtype=np.float64)[-1]",
        new="np.add.accumulate(values, dtype=np.float32)[-1]",
        caught_by=("tests/strategies/test_evaluation.py::TestEveryRowCountsOnce::test_sums_are_as_good_as_float64",),
    ),
    Fault(
        name="rows of a stream are predicted replica by replica",
        path="strategies/data/every_row.py",
        old="self.is_interleaved = not dataset.is_random_access",
        new="self.is_interleaved = False",
        caught_by=("tests/strategies/test_evaluation.py::TestPredictions::test_come_in_the_order_of_the_data",),
    ),
    Fault(
        name="batches of an evaluation that an instance has not got are skipped after a loss",
        path="strategies/evaluation/data_pass.py",
        old="int(np.where(meeting.passes == own, meeting.batches, 0).min())",
        new="int(np.where(meeting.passes == own, meeting.batches, 0).max())",
        caught_by=(
            "tests/strategies/test_surviving_evaluation.py::test_the_others_find_the_same_though_some_are_a_batch_ahead",
        ),
    ),
    Fault(
        name="what is padded ends with the first instance that has nothing left",
        path="strategies/data/datasets.py",
        old="fill = self._padding_after if self.pads else None",
        new="fill = None",
        caught_by=(
            "tests/strategies/test_lockstep.py::TestPadding::"
            "test_every_element_of_shards_of_unknown_lengths_counts_once",
        ),
    ),
    Fault(
        name="steps are made on the replicas that an instance had before others were lost in something else",
        path="strategies/step/jax_engine.py",
        old="if self._devices is not self._replicas.devices:",
        new="if False:",
        caught_by=(
            "tests/strategies/test_surviving.py::"
            "test_steps_after_a_duty_are_made_on_the_replicas_of_those_who_are_left",
        ),
    ),
    Fault(
        name="what a segment hands on is kept after it was taken for the last time",
        path="strategies/programs/segments.py",
        old="intermediates.pop(taken) if last[taken] == number else intermediates[taken]",
        new="intermediates[taken]",
        caught_by=(
            "tests/strategies/test_segments.py::test_residuals_are_let_go_when_they_were_taken_for_the_last_time",
        ),
    ),
    Fault(
        name="what segments hand on is in the order of addresses",
        path="strategies/programs/jaxpr.py",
        old="enumerate(_in_order(graph, every))",
        new="enumerate(every)",
        caught_by=("tests/strategies/test_jaxpr.py::test_the_same_function_is_always_cut_into_the_same_segments",),
    ),
    Fault(
        name="a function with a derivative of its own is taken for a call",
        path="strategies/programs/jaxpr.py",
        old="    if is_derived:\n",
        new="    if True:\n",
        caught_by=("tests/strategies/test_jaxpr.py::test_calls_are_dissolved_and_what_has_a_rule_is_not",),
    ),
    Fault(
        name="the second device of a configuration gives the number of replicas",
        path="strategies/config/selection.py",
        old="return Selection(auto_select_ipus[0],",
        new="return Selection(auto_select_ipus[-1],",
        caught_by=("tests/strategies/test_config_replicas.py::TestArithmetic::test_the_first_device_counts",),
    ),
    Fault(
        name="a configuration decides also what a trainer says itself",
        path="strategies/step/options.py",
        old="if check_numerics is None and effects.checks_numerics",
        new="if effects.checks_numerics",
        caught_by=("tests/strategies/test_ipu_config.py::TestEffects::test_unless_they_say_so_or_scale_losses",),
    ),
    Fault(
        name="the loss may have other bits where gradients are streamed",
        path="strategies/gradients/gradient_programs.py",
        old="parts[Part(TAIL)] = bucket.layout.tail_view(buffers)",
        new="pass",
        caught_by=("tests/strategies/test_gradients.py::test_streamed_gradients_have_the_same_bits",),
    ),
)
