"""Faults by which ranks get other results than their contributions, or wait for ever."""

from __future__ import annotations

from fault import Fault

IN_COLLECTIVES = (
    Fault(
        name="two replicas are swapped in a sum",
        path="collectives/reduction.py",
        old="for source in sources[2:]:",
        new="for source in reversed(sources[2:]):",
        caught_by=("tests/collectives/test_exact_sums.py::test_contributions_are_added_one_after_another",),
    ),
    Fault(
        name="16-bit floats are added in 16 bits",
        path="collectives/dtypes.py",
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
        name="the ring divides a mean by the number of ranks, not of contributions",
        path="collectives/ring/passes.py",
        old="self._replicas = parts.total",
        new="self._replicas = ring.size",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="the last chunk of a ring pass is dropped",
        path="collectives/ring/transport.py",
        old="for first in range(start, stop, step)]",
        new="for first in range(start, max(stop - step, start + 1), step)]",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="contributions of a rank lie over each other in the window",
        path="collectives/window/reduction.py",
        old="start += place * arrays * self._chunk * dtype.itemsize",
        new="start += place * self._chunk * dtype.itemsize",
        caught_by=("tests/collectives/test_long_arrays.py::test_every_rank_gets_the_ordered_mean",),
    ),
    Fault(
        name="what rank 0 has is broadcast, whoever the root is",
        path="collectives/finishing.py",
        old="np.copyto(flat, parts.arrays[root])",
        new="np.copyto(flat, parts.arrays[0])",
        caught_by=("tests/collectives/test_long_arrays.py::test_a_broadcast_gives_the_values_of_its_root",),
    ),
    Fault(
        name="layouts are not compared",
        path="collectives/ring/transport.py",
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
        name="the token of a job is not compared",
        path="collectives/network/security.py",
        old="return not self.token or is_same(self.prove(statement), proof)",
        new="return not self.token or bool(proof)",
        caught_by=("tests/collectives/test_proofs.py::test_only_who_knows_the_token_can_prove_a_statement",),
    ),
)
