"""The process group of torch.distributed: every operation, on ranks that are threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from collectives import (
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    LayoutMismatchError,
    Limits,
    PeerLostError,
    Settings,
    UnsupportedBufferError,
    run_on_threads,
)
from collectives.tree import combined
from strategies.torch.process_group.group import PopDistProcessGroup

SIZES = (1, 2, 3, 5)
LIMIT = timedelta(seconds=60)
SPREADS = [
    pytest.param((), "ring", id="one_host_by_messages"),
    pytest.param((), "window", id="one_host_by_memory"),
    pytest.param((0, 0, 1, 1), "window", id="two_hosts"),
    pytest.param((0, 1, 1, 1), "window", id="uneven_hosts"),
    pytest.param((0, 1, 2, 3), "ring", id="four_hosts"),
]


def on_ranks(size, function, mechanism="ring", hosts=(), limits=None):
    """Run `function(group)` once per rank, each in its own thread; return the results in rank order."""
    settings = Settings(mechanism=mechanism, limits=limits or Limits())

    def of_rank(communicator):
        group = PopDistProcessGroup(communicator)
        found = function(group)
        group.shutdown()
        return found

    return run_on_threads(size, of_rank, settings, hosts)


def values_of(rank, shape=(7, 3), dtype=torch.float32):
    """Return values whose sum depends on the order of additions."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 4)
    return drawn.to(dtype)


def in_tree_order(tensors, function=torch.add):
    """Combine one tensor per rank in the order of the tree; 16-bit floats in float32, as the group promises."""
    if tensors[0].dtype in (torch.bfloat16, torch.float16):
        return combined([each.float() for each in tensors], function).to(tensors[0].dtype)
    return combined(tensors, function)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_have_the_order_of_the_tree(size, dtype):
    def program(group):
        tensor = values_of(group.rank(), dtype=dtype)
        dist.all_reduce(tensor, group=group)
        return tensor

    expected = in_tree_order([values_of(rank, dtype=dtype) for rank in range(size)])
    assert all(torch.equal(found, expected) for found in on_ranks(size, program))


@pytest.mark.parametrize(("hosts", "mechanism"), SPREADS)
def test_sums_have_the_same_bits_over_every_spread(hosts, mechanism):
    """A long tensor moves in pieces, and a short one with the comparison of the calls."""
    lengths = (5, 300_001)

    def program(group):
        tensors = [values_of(group.rank(), length) for length in lengths]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
        return tensors

    expected = [in_tree_order([values_of(rank, length) for rank in range(4)]) for length in lengths]
    for found in on_ranks(4, program, mechanism, hosts):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


OPERATIONS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_reductions_and_their_blocks_are_those_of_torch(op, dtype):
    size = 3
    chosen = getattr(dist.ReduceOp, op)

    def tensor_of(rank):
        drawn = torch.randint(0, 2 if dtype is torch.bool else 5, (6,), generator=torch.Generator().manual_seed(rank))
        return drawn.to(dtype)

    def program(group):
        whole, kept = tensor_of(group.rank()), tensor_of(group.rank())
        part = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_single(part, whole, chosen, group=group)
        listed = torch.empty(2, dtype=dtype)
        dist.reduce_scatter(listed, list(whole.split(2)), chosen, group=group)
        assert torch.equal(part, listed)
        assert torch.equal(whole, kept)
        dist.reduce(kept, group_dst=1, op=chosen, group=group)
        assert group.rank() == 1 or torch.equal(kept, whole)
        dist.all_reduce(whole, chosen, group=group)
        assert group.rank() != 1 or torch.equal(kept, whole)
        return whole, part

    is_refused = (op.startswith("B") and dtype.is_floating_point) or (op.startswith("B") and dtype is torch.bool)
    if is_refused:
        with pytest.raises(UnsupportedBufferError, match=f"cannot reduce {dtype} by {op}; use one of SUM"):
            on_ranks(size, program)
        return
    function = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and}.get(op) if dtype is torch.bool else None
    expected = in_tree_order([tensor_of(rank) for rank in range(size)], function or OPERATIONS[op])
    for rank, (whole, part) in enumerate(on_ranks(size, program)):
        assert torch.equal(whole, expected)
        assert torch.equal(part, expected[2 * rank : 2 * rank + 2])


def test_means_are_divided_once():
    def program(group):
        tensor = values_of(group.rank())
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        return tensor

    expected = in_tree_order([values_of(rank) for rank in range(3)]) / 3
    assert all(torch.equal(found, expected) for found in on_ranks(3, program))


def test_tensors_with_gaps_and_without_elements_are_reduced_and_moved():
    def program(group):
        wide = values_of(group.rank(), (4, 6))
        dist.all_reduce(wide[:, ::2], group=group)
        dist.broadcast(wide.t(), group_src=1, group=group)
        scalar = torch.tensor(float(group.rank()), requires_grad=True)
        dist.all_reduce(scalar, group=group)
        empty = torch.empty(0, 3)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            dist.all_reduce(empty, op, group=group)
        gathered = torch.empty(0)
        dist.all_gather_single(gathered, empty.view(-1), group=group)
        return wide, scalar.item()

    total = values_of(0, (4, 6)) + values_of(1, (4, 6))
    expected = values_of(1, (4, 6))
    expected[:, ::2] = total[:, ::2]
    for wide, scalar in on_ranks(2, program):
        assert torch.equal(wide, expected)
        assert scalar == 1.0


def test_tensors_may_be_resized_afterwards():
    """PyTorch refuses it for good if NumPy has seen the storage; FSDP and the hooks of PowerSGD resize."""

    def program(group):
        reduced, moved, sent = torch.ones(3), torch.ones(3), torch.full((3,), 2.0)
        dist.all_reduce(reduced, group=group)
        dist.broadcast(moved, group_src=0, group=group)
        call = group.recv if group.rank() else group.send
        assert call([sent], 1 - group.rank(), 0).wait(LIMIT)
        return [tensor.resize_(5)[:3].tolist() for tensor in (reduced, moved, sent)]

    assert on_ranks(2, program) == [[[2.0] * 3, [1.0] * 3, [2.0] * 3]] * 2


def test_lazy_negatives_are_reduced_and_moved_by_their_values():
    """The memory of such a tensor has the other sign."""

    def program(group):
        reduced, moved = (torch.tensor([complex(0, group.rank() + 1)]).conj().imag for _ in range(2))
        assert reduced.is_neg()
        assert reduced.is_contiguous()
        dist.all_reduce(reduced, group=group)
        dist.broadcast(moved, group_src=1, group=group)
        with pytest.raises(ValueError, match="or a lazy negative; give tensor.clone"):
            group.send([moved], 1 - group.rank())
        return reduced.item(), moved.item()

    assert on_ranks(2, program) == [(-3.0, -2.0)] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.int16])
def test_tensors_of_every_dtype_are_moved(size, dtype):
    def tensor_of(rank):
        return (torch.arange(4) + rank).to(dtype)

    def program(group):
        rank, last = group.rank(), size - 1
        mine = tensor_of(rank)
        listed = [torch.empty(4, dtype=dtype) for _ in range(size)]
        dist.all_gather(listed, mine, group=group)
        whole = torch.empty(size * 4, dtype=dtype)
        whole[rank * 4 : rank * 4 + 4] = mine
        dist.all_gather_single(whole, whole[rank * 4 : rank * 4 + 4], group=group)  # as FSDP does
        sent = tensor_of(rank)
        dist.broadcast(sent, group_src=last, group=group)
        gathered = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == last else None
        dist.gather(mine, gathered, group=group, group_dst=last)
        dealt = torch.empty(4, dtype=dtype)
        to_deal = [tensor_of(10 + each) for each in range(size)] if rank == last else None
        dist.scatter(dealt, to_deal, group=group, group_src=last)
        crossed = [torch.empty(4, dtype=dtype) for _ in range(size)]
        dist.all_to_all(crossed, [tensor_of(rank * size + each) for each in range(size)], group=group)
        return listed, whole, sent, gathered, dealt, crossed

    def same(found, expected):
        return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

    of_all = [tensor_of(rank) for rank in range(size)]
    for rank, (listed, whole, sent, gathered, dealt, crossed) in enumerate(on_ranks(size, program)):
        assert all(map(same, listed, of_all))
        assert same(whole, torch.cat([each.view(torch.uint8) for each in of_all]).view(dtype))
        assert same(sent, tensor_of(size - 1))
        assert gathered is None or all(map(same, gathered, of_all))
        assert same(dealt, tensor_of(10 + rank))
        assert all(map(same, crossed, [tensor_of(source * size + rank) for source in range(size)]))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_takes_parts_of_different_sizes(size):
    def program(group):
        rank = group.rank()
        splits = [(rank + to) % 3 for to in range(size)]
        tensor = torch.arange(2 * sum(splits)).view(-1, 2) + 100 * rank
        output = torch.empty(sum((source + rank) % 3 for source in range(size)), 2, dtype=torch.int64)
        dist.all_to_all_single(output, tensor, [(source + rank) % 3 for source in range(size)], splits, group=group)
        return list(tensor.split(splits)), output

    found = on_ranks(size, program)
    for rank, (_, output) in enumerate(found):
        assert torch.equal(output, torch.cat([parts[rank] for parts, _ in found]))


def test_parts_that_do_not_fit_are_refused_on_all_ranks():
    def program(group):
        splits = [2, 2] if group.rank() else [1, 3]
        with pytest.raises(LayoutMismatchError, match="rank 0 sends 4 bytes to rank 0, which expects 8") as caught:
            dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], splits, group=group)
        dist.barrier(group=group)
        return str(caught.value)

    assert len(set(on_ranks(2, program))) == 1


def test_objects_are_gathered_and_broadcast():
    def program(group):
        found = [None] * group.size()
        dist.all_gather_object(found, {"rank": group.rank(), "text": "x" * group.rank()}, group=group)
        chosen = [found] if group.rank() == 2 else [None]
        dist.broadcast_object_list(chosen, group_src=2, group=group)
        return chosen[0]

    expected = [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    assert on_ranks(3, program) == [expected] * 3


DIFFERENT = {
    "shapes": lambda group, rank: dist.all_reduce(torch.ones(3 + rank), group=group),
    "shapes of one size": lambda group, rank: dist.all_reduce(torch.ones((2, 3) if rank else (3, 2)), group=group),
    "dtypes": lambda group, rank: dist.all_reduce(
        torch.ones(3, dtype=torch.int32 if rank else torch.float32), group=group
    ),
    "dtypes of one size": lambda group, rank: dist.broadcast(
        torch.ones(3, dtype=torch.int32 if rank else torch.float32), group_src=0, group=group
    ),
    "operations": lambda group, rank: dist.all_reduce(
        torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group
    ),
    "products": lambda group, rank: dist.all_reduce(
        torch.ones(3), dist.ReduceOp.PRODUCT if rank else dist.ReduceOp.SUM, group=group
    ),
    "roots": lambda group, rank: dist.broadcast(torch.ones(3), group_src=rank, group=group),
    "roots of reduce": lambda group, rank: dist.reduce(torch.ones(3), group_dst=rank, group=group),
    "calls": lambda group, rank: dist.barrier(group) if rank else dist.all_reduce(torch.ones(3), group=group),
    "shapes of products": lambda group, rank: dist.all_reduce(
        torch.ones((2, 3) if rank else (3, 2)), dist.ReduceOp.PRODUCT, group=group
    ),
    "shapes of reduce": lambda group, rank: dist.reduce(
        torch.ones((2, 3) if rank else (3, 2)), group_dst=0, group=group
    ),
    "shapes of reduce_scatter": lambda group, rank: dist.reduce_scatter_single(
        torch.ones(3), torch.ones((2, 3) if rank else 6), group=group
    ),
    "booleans of reduce": lambda group, rank: dist.reduce(
        torch.ones(3, dtype=torch.bool if rank else torch.uint8), op=dist.ReduceOp.MAX, group_dst=0, group=group
    ),
    "operations on booleans": lambda group, rank: dist.all_reduce(
        torch.ones(3, dtype=torch.bool), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group
    ),
    "dtypes of all_to_all": lambda group, rank: dist.all_to_all(
        *([torch.ones(3, dtype=torch.int32 if rank else torch.float32) for _ in range(2)] for _ in range(2)),
        group=group,
    ),
    "rows of all_to_all": lambda group, rank: dist.all_to_all_single(
        *(torch.ones((2, 2) if rank else 4) for _ in range(2)), group=group
    ),
    "numbers of tensors": lambda group, rank: group.allreduce_coalesced([torch.ones(3)] * (1 + rank)).wait(),
    "reduce and all_reduce": lambda group, rank: (
        dist.reduce(torch.ones(3), group_dst=0, group=group) if rank else dist.all_reduce(torch.ones(3), group=group)
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_are_refused_on_all_ranks(what):
    def program(group):
        with pytest.raises(LayoutMismatchError, match="rank 0 called .*; rank 1 called ") as caught:
            DIFFERENT[what](group, group.rank())
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3
        return str(caught.value)

    assert len(set(on_ranks(2, program))) == 1


def test_a_work_goes_on_while_its_caller_does_something_else():
    """Rank 1 begins only after rank 0 has begun and has gone on."""
    has_gone_on = threading.Event()

    def program(group):
        tensors = [torch.ones(4), torch.full((4,), 2.0)]
        if group.rank():
            assert has_gone_on.wait(60)
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        if not group.rank():
            assert [work.is_completed() for work in works] == [False, False]
            has_gone_on.set()
        futures = [work.get_future() for work in works]
        assert works[1].wait()
        assert works[0].is_success()
        assert works[0].exception() is None
        assert works[1].result()[0] is tensors[1]
        assert futures[0].wait()[0].tolist() == [2.0] * 4
        dist.barrier(group=group)  # after the works, although its caller waits at once
        return tensors[1].tolist()

    assert on_ranks(2, program) == [[4.0] * 4] * 2


def test_a_callback_may_wait_for_collectives_of_its_own():
    """Comm hooks of DDP such as PowerSGD do; on all ranks these collectives come before the program's next one.

    On rank 0 the callback runs in the group's thread. On rank 1 the work may end before it has a callback.
    """
    has_gone_on = threading.Event()

    def program(group):
        def go_on(future):
            inner = future.value()[0] * 10
            dist.all_reduce(inner, group=group)
            return dist.all_reduce(inner, group=group, async_op=True).get_future().wait()

        if group.rank():
            assert has_gone_on.wait(60)
        tensor, later = torch.ones(3), torch.ones(3)
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future().then(go_on)
        work = dist.all_reduce(later, group=group, async_op=True)
        has_gone_on.set()
        assert work.wait(LIMIT)
        return future.wait()[0].tolist(), later.tolist()

    assert on_ranks(2, program) == [([80.0] * 3, [2.0] * 3)] * 2


def test_a_work_that_fails_raises_where_it_is_awaited():
    def program(group):
        works = [dist.all_reduce(torch.ones(2 + bad * group.rank()), group=group, async_op=True) for bad in (0, 1, 0)]
        assert works[0].wait()
        with pytest.raises(LayoutMismatchError):
            works[1].wait()
        assert isinstance(works[1].exception(), LayoutMismatchError)
        assert not works[1].is_success()
        with pytest.raises(RuntimeError, match="LayoutMismatchError: Tensor layouts did not match"):
            works[1].get_future().wait()
        assert works[2].wait()

    on_ranks(2, program)


def test_a_wait_may_have_a_limit_of_its_own():
    may_begin = threading.Event()

    def program(group):
        if group.rank():
            assert may_begin.wait(60)
        work = dist.barrier(group=group, async_op=True)
        if not group.rank():
            with pytest.raises(CollectiveTimeoutError, match=r"barrier has not ended after the timeout of 0\.01 s"):
                work.wait(timedelta(milliseconds=10))
            may_begin.set()
        assert work.wait(LIMIT)

    on_ranks(2, program)


def test_the_timeout_of_the_group_limits_all_waits():
    may_end = threading.Event()

    def program(group):
        if group.rank():
            assert may_end.wait(60)
            return
        group.set_timeout(timedelta(milliseconds=20))
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 in all_reduce .*timeout_s = 0\.02"):
            dist.all_reduce(torch.ones(2), group=group)
        with pytest.raises(BrokenError):
            dist.all_reduce(torch.ones(2), group=group)
        may_end.set()
        raise ZeroDivisionError  # so that the others do not wait for this rank

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, program)


def test_the_timeout_of_a_barrier_limits_its_wait_alone():
    may_end = threading.Event()

    def program(group):
        dist.barrier(group, timeout=LIMIT)
        assert group._communicator.limits.timeout_s == 600.0
        if group.rank():
            assert may_end.wait(60)
            return
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 in barrier .*timeout_s = 0\.02"):
            dist.barrier(group, timeout=timedelta(milliseconds=20))
        may_end.set()
        raise ZeroDivisionError  # so that the others do not wait for this rank

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, program)


def test_a_lost_rank_ends_the_waits_of_the_others():
    errors = []

    def program(group):
        if group.rank() == 1:
            raise ZeroDivisionError
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        try:
            work.wait()
        except PeerLostError as error:
            errors.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError):
        on_ranks(3, program)
    assert len(errors) == 2
    assert all("rank 1 has failed: ZeroDivisionError" in error for error in errors)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(2, device="meta"), "takes dense tensors on the CPU, not a tensor on meta; move it with tensor.cpu"),
        (torch.ones(2).to_sparse(), r"not a sparse tensor on cpu; give tensor.to_dense\(\)"),
        (AsyncCollectiveTensor(torch.ones(2)), "plain tensors, not AsyncCollectiveTensor, which wraps another one"),
        (torch.ones(2).to(torch.float8_e4m3fn), "cannot reduce torch.float8_e4m3fn; convert it"),
    ],
    ids=["device", "sparse", "wrapper", "float8"],
)
def test_tensors_that_cannot_be_reduced_are_refused_before_others_are_involved(tensor, words):
    def program(group):
        if group.rank():
            with pytest.raises(UnsupportedBufferError, match=words):
                dist.all_reduce(tensor, group=group)
        dist.barrier(group=group)

    on_ranks(2, program)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantized_tensors_are_refused_because_their_scales_would_not_move():
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)

    def program(group):
        with pytest.raises(UnsupportedBufferError, match=r"not a quantized tensor on cpu; give tensor.dequantize\(\)"):
            dist.broadcast(tensor, group_src=0, group=group)

    on_ranks(2, program)


def test_lists_of_a_wrong_length_or_size_are_refused():
    def program(group):
        with pytest.raises(ValueError, match="list of 1 tensors in a group of 2 ranks"):
            dist.all_gather([torch.ones(2)], torch.ones(2), group=group)
        with pytest.raises(ValueError, match=r"float32\[2\] and, in the list, float32\[3\]"):
            dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2), group=group)
        with pytest.raises(ValueError, match="has to have 2 times the elements"):
            dist.all_gather_single(torch.ones(5), torch.ones(2), group=group)
        with pytest.raises(ValueError, match=r"3 rows and the splits \[1, 1\]"):
            dist.all_to_all_single(torch.ones(4), torch.ones(3), [2, 2], [1, 1], group=group)

    on_ranks(2, program)


# ---- messages


def test_messages_are_matched_by_source_and_tag():
    """Rank 0 receives in another order than messages come; large messages move in pieces."""
    lengths = {7: 3, 8: 700_001, 9: 0}

    def message(rank, tag):
        return torch.arange(lengths[tag]) + 1000 * rank + tag

    def program(group):
        if group.rank():
            works = [
                dist.isend(message(group.rank(), tag), group_dst=0, group=group, tag=tag)
                for tag in lengths
                for _ in range(2)
            ]
            for work in works:
                assert work.wait(LIMIT)
            return []
        found = []
        for tag in (9, 8, 7):
            for source in (2, 1):
                into = torch.empty(lengths[tag], dtype=torch.int64)
                work = group.recv([into], source, tag)
                assert work.wait(LIMIT)
                assert work.source_rank() == source
                found.append(torch.equal(into, message(source, tag)))
        for tag in (7, 8):
            sources = set()
            for _ in range(2):
                into = torch.empty(lengths[tag], dtype=torch.int64)
                work = group.recv_anysource([into], tag)
                assert work.wait(LIMIT)
                found.append(torch.equal(into, message(work.source_rank(), tag)))
                sources.add(work.source_rank())
            assert sources == {1, 2}
        for source in (1, 2):
            group.recv([torch.empty(0, dtype=torch.int64)], source, 9).wait(LIMIT)
        return found

    assert on_ranks(3, program)[0] == [True] * 10


def test_ranks_may_all_send_before_they_receive():
    def program(group):
        rank, size = group.rank(), group.size()
        sent, received = torch.full((400_000,), float(rank)), torch.empty(400_000)
        for _ in range(3):
            works = [group.send([sent], (rank + 1) % size, 0), group.recv([received], (rank - 1) % size, 0)]
            for work in works:
                assert work.wait(LIMIT)
        return received.unique().tolist()

    assert on_ranks(3, program) == [[2.0], [0.0], [1.0]]


def test_a_message_of_another_size_or_dtype_is_refused_and_the_next_one_is_received():
    def program(group):
        if group.rank():
            for tensor in (torch.ones(3), torch.ones(2, dtype=torch.int32), torch.full((2,), 5.0)):
                dist.send(tensor, group_dst=0, group=group)
            return None
        with pytest.raises(LayoutMismatchError, match=r"sent 12 bytes of torch\.float32 with tag 0, but .* has 8"):
            group.recv([torch.ones(2)], 1).wait(LIMIT)
        with pytest.raises(LayoutMismatchError, match=r"8 bytes of torch\.int32 .* has 8 bytes of torch\.float32"):
            group.recv([torch.ones(2)], 1).wait(LIMIT)
        into = torch.ones(2)
        group.recv([into], 1).wait(LIMIT)
        return into.tolist()

    assert on_ranks(2, program)[0] == [5.0, 5.0]


def test_a_rank_cannot_send_to_itself():
    def program(group):
        with pytest.raises(ValueError, match="rank 0 cannot send to or from itself"):
            group.send([torch.ones(1)], 0)

    on_ranks(1, program)


def test_a_receive_is_ended_by_the_loss_of_its_sender():
    errors = []

    def program(group):
        if group.rank():
            raise ZeroDivisionError
        try:
            group.recv([torch.ones(2)], 1).wait(LIMIT)
        except PeerLostError as error:
            errors.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, program)
    assert len(errors) == 1
    assert "rank 1" in errors[0]


# ---- the end


def test_a_destroyed_group_refuses_calls_and_fails_receives():
    def program(group):
        pending = None
        if not group.rank():
            pending = group.recv([torch.ones(2)], 1, 0)
        group.shutdown()
        with pytest.raises(ClosedError):
            dist.all_reduce(torch.ones(2), group=group)
        if pending is not None:
            with pytest.raises(ClosedError, match="the process group was destroyed"):
                pending.wait(LIMIT)

    on_ranks(2, program)


def test_a_rank_that_ends_early_is_named_on_the_others():
    """The others then destroy the group without waiting for it."""

    def program(group):
        if group.rank():
            with pytest.raises(LayoutMismatchError, match="see why rank 0 came to the end"):
                dist.all_reduce(torch.ones(2), group=group)
        else:
            with pytest.raises(LayoutMismatchError):
                group.shutdown()

    on_ranks(3, program)


def test_a_group_that_is_destroyed_after_an_error_waits_for_nobody():
    may_end = threading.Event()

    def program(group):
        if group.rank():
            assert may_end.wait(60)
            return
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            group.shutdown()
            may_end.set()
            raise

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, program)


def test_tensors_are_released_when_their_works_have_ended():
    import gc
    import weakref

    def program(group):
        tensor = torch.ones(10)
        seen = weakref.ref(tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        dist.barrier(group=group)
        del tensor, work
        gc.collect()
        return seen() is None

    assert on_ranks(2, program) == [True, True]


def test_sums_may_overflow_without_a_warning():
    def program(group):
        tensor = torch.tensor([-torch.inf if group.rank() else torch.inf, 3e38])
        dist.all_reduce(tensor, group=group)
        return tensor

    for found in on_ranks(2, program):
        assert found.isnan().tolist() == [True, False]
        assert found.isinf().tolist() == [False, True]
