"""Faults by which ranks get other results than their contributions, or wait for ever."""

from __future__ import annotations

from fault import Fault

IN_COLLECTIVES = (
    Fault(
        name="two replicas are swapped in a sum",
        path="collectives/reduction.py",
        old="values = list(sources)",
        new="values = [sources[0], *reversed(sources[1:])]",
        caught_by=("tests/collectives/test_exact_sums.py::test_contributions_are_added_in_the_order_of_the_tree",),
    ),
    Fault(
        name="sums are split in the middle, not at a power of two",
        path="collectives/tree.py",
        old="middle = node.first + (1 << ((node.stop - node.first - 1).bit_length() - 1))",
        new="middle = (node.first + node.stop) // 2",
        caught_by=("tests/collectives/test_tree.py::test_sums_are_split_at_the_largest_power_of_two_below_the_whole",),
    ),
    Fault(
        name="a host finishes a slice without one of the sums that others send",
        path="collectives/plans/between_hosts.py",
        old="for to in others for node in sums[host]]",
        new="for to in others[1:] for node in sums[host]]",
        caught_by=(
            "tests/collectives/plans/test_reduction_plans.py"
            "::test_what_is_left_after_a_loss_adds_in_the_order_of_the_tree",
        ),
    ),
    Fault(
        name="a message of halving is lost on its way back",
        path="collectives/plans/between_hosts.py",
        old="back.append(Message(to, host, first, stop, root_of(replicas)))",
        new="back += [Message(to, host, first, stop, root_of(replicas))] if first else []",
        caught_by=(
            "tests/collectives/plans/test_reduction_plans.py::test_hosts_that_own_equal_powers_of_two_may_add_in_every_way",
        ),
    ),
    Fault(
        name="a slice is said to be finished by another rank than the one that does",
        path="collectives/plans/planning.py",
        old="workers[host] if host >= 0 else -1 for host in of_column",
        new="workers[-1 - host] if host >= 0 else -1 for host in of_column",
        caught_by=(
            "tests/collectives/plans/test_reduction_plans.py::test_drawn_spreads_of_up_to_64_replicas_add_in_the_order_of_the_tree",
        ),
    ),
    Fault(
        name="a rank behind the first one of its host does not get the result",
        path="collectives/plans/planning.py",
        old="within = [_gathering(spread, workers, first, stop), *moved, _spreading(spread, workers, first, stop)]",
        new="within = [_gathering(spread, workers, first, stop), *moved]",
        caught_by=(
            "tests/collectives/plans/test_reduction_plans.py::test_drawn_spreads_of_up_to_64_replicas_add_in_the_order_of_the_tree",
        ),
    ),
    Fault(
        name="16-bit floats are added in 16 bits",
        path="collectives/arrays.py",
        old="return np.dtype(np.float32)",
        new="return dtype",
        caught_by=("tests/collectives/test_exact_sums.py::test_16_bit_floats_are_rounded_once",),
    ),
    Fault(
        name="a mean of three is multiplied by a third",
        path="collectives/reduction.py",
        old="if count & (count - 1) == 0:",
        new="if count:",
        caught_by=("tests/collectives/test_exact_sums.py::test_a_mean_is_divided_once_by_the_count",),
    ),
    Fault(
        name="a mean over links is divided by the number of ranks, not of contributions",
        path="collectives/point_to_point/transport.py",
        old="Arrays(contributions, out, begins, reduction, planned.plan.spread.replicas)",
        new="Arrays(contributions, out, begins, reduction, self.size)",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="the last piece of a long array is dropped",
        path="collectives/plans/cutting.py",
        old="for offset in range(0, size, longest):",
        new="for offset in range(0, max(size - longest, 1), longest):",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="contributions of a rank lie over each other in the window",
        path="collectives/shared_memory/reduction.py",
        old="starts = accumulate(steps, initial=start)",
        new="starts = [start] * len(steps)",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="what rank 0 has is broadcast, whoever the root is",
        path="collectives/collective_ops.py",
        old="np.copyto(flat, parts.arrays[root])",
        new="np.copyto(flat, parts.arrays[0])",
        caught_by=("tests/collectives/test_long_arrays.py::test_a_broadcast_gives_the_values_of_its_root",),
    ),
    Fault(
        name="layouts are not compared",
        path="collectives/point_to_point/exchange.py",
        old="if theirs[_FINGERPRINT] != fingerprint:",
        new="if theirs[_FINGERPRINT] == 0:",
        caught_by=(
            "tests/collectives/test_call_fingerprints.py::test_ranks_that_call_different_things_learn_it_before_data_mixes",
        ),
    ),
    Fault(
        name="the name of a tensor is left out of the fingerprint",
        path="collectives/calls.py",
        old="blake2b(str(self).encode(), digest_size=8)",
        new='blake2b(str(self).replace(repr(self.name), "").encode(), digest_size=8)',
        caught_by=(
            "tests/collectives/test_call_fingerprints.py::test_calls_that_differ_in_one_thing_have_different_fingerprints",
        ),
    ),
    Fault(
        name="a message about a long wait forgets all but one of those waited for",
        path="collectives/waiting.py",
        old='", ".join(self.names[rank] for rank in missing)',
        new='", ".join(self.names[rank] for rank in missing[:1])',
        caught_by=("tests/collectives/test_waits.py::test_all_that_are_waited_for_are_named",),
    ),
    Fault(
        name="a barrier does not wait",
        path="collectives/communicator.py",
        old="self._run(self._preparations.barrier(name))",
        new="self._preparations.barrier(name)",
        caught_by=("tests/collectives/test_waits.py::test_a_barrier_waits_for_all",),
    ),
    Fault(
        name="a rank that closes just then does not tell the others",
        path="collectives/named.py",
        old="return not self._is_over()",
        new="return not self._closing",
        caught_by=(
            "tests/collectives/test_closing.py::test_the_others_are_told_of_closing_also_when_a_thread_has_just_found_nothing_to_do",
        ),
    ),
    Fault(
        name="the token of a job is not compared",
        path="collectives/network/security.py",
        old="return not self.token or is_same(self.prove(statement), proof)",
        new="return not self.token or bool(proof)",
        caught_by=("tests/collectives/test_proofs.py::test_only_who_knows_the_token_can_prove_a_statement",),
    ),
    Fault(
        name="gRPC repeats by itself what a closing connection has not sent",
        path="collectives/network/wire.py",
        old='("grpc.enable_retries", 0)',
        new='("grpc.enable_retries", 1)',
        caught_by=(
            "tests/collectives/test_workers_meeting.py::test_grpc_does_not_repeat_by_itself_what_nobody_has_looked_at",
        ),
    ),
    Fault(
        name="bytes inside of a host are counted at the rank that receives them",
        path="collectives/plans/choice.py",
        old="local[source] += share",
        new="local[to] += share",
        caught_by=(
            "tests/collectives/plans/test_plan_choice.py::test_bytes_inside_of_a_host_are_those_that_a_rank_sends",
        ),
    ),
    Fault(
        name="the cost of adding 16-bit floats is that of 16 bits",
        path="collectives/plans/choice.py",
        old="load.added * width.partial",
        new="load.added * width.leaf",
        caught_by=("tests/collectives/plans/test_plan_choice.py::test_sums_of_16_bit_floats_are_read_in_32",),
    ),
    Fault(
        name="the link of a host costs what it sends, however much it receives",
        path="collectives/plans/choice.py",
        old="max(*links[0], *links[1])",
        new="max(links[0])",
        caught_by=("tests/collectives/plans/test_plan_choice.py::test_a_link_is_as_busy_as_its_busier_direction",),
    ),
)
