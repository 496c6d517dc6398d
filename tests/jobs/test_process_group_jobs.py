"""Real jobs whose programs use torch.distributed, DDP and FSDP over the backend popdist."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import sys

import pytest
from pages import page_programs
from poprun_jobs import ROOT, run, start, start_command, start_mpirun

pytestmark = [
    pytest.mark.job,
    pytest.mark.cores(2),
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

FILE = str(ROOT / "tests" / "jobs" / "programs" / "train_in_groups.py")
PROGRAM = (sys.executable, FILE)
BY_MESSAGES = {"POPDIST_MECHANISM": "ring"}
HEAD = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import strategies.torch
"""
MEET = """
dist.init_process_group("popdist", init_method="popdist://")
rank, size = dist.get_rank(), dist.get_world_size()
"""


def by_poprun(size, *words, environ=None):
    finished = run("-n", str(size), *words, environ=environ)
    assert finished.status == 0, finished.stderr
    return [finished.lines_of(rank) for rank in range(size)]


def by_mpirun(size, *words, environ=None):
    finished = start_mpirun(size, *words, environ=environ).finish()
    assert finished.status == 0, finished.stderr
    return [finished.lines_of(rank) for rank in range(size)]


def start_workers(size, folder, *words):
    """Start workers that know each other by TF_CONFIG, and are connected by gRPC."""
    cluster = {"worker": [f"unix:{folder}/{rank}" for rank in range(size)]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(size)]
    return [start_command(*words, environ={"TF_CONFIG": json.dumps(task)}) for task in tasks]


def by_workers(size, folder, *words):
    found = [worker.finish() for worker in start_workers(size, folder, *words)]
    assert [one.status for one in found] == [0] * size, found[0].stderr
    return [one.stdout.splitlines() for one in found]


@functools.cache
def by_hand(size):
    import torch

    sys.path.insert(0, os.path.dirname(FILE))
    import train_in_groups

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            return train_in_groups.by_hand(size)
    finally:
        torch.set_num_threads(threads)


def expected_of(rank, size):
    sums = {"mesh": 4.0 * size * (4 * size - 1) / 2}
    if rank in (0, size - 1):
        sums |= dict.fromkeys(("ends", "again"), 1.0 if size == 1 else size + 1.0)
    if rank or size == 1:
        sums["others"] = 1.0 if size == 1 else size * (size + 1) / 2 - 1
    objects = [{"rank": each} for each in range(size)]
    return {"rank": rank, "backend": "popdist", "objects": objects, "ddp": by_hand(size), "groups": sums}


def check(lines, size):
    """Check what all ranks printed, and return the fingerprint that FSDP has on all of them."""
    found = [json.loads(of_rank[-1]) for of_rank in lines]
    of_fsdp = {each.pop("fsdp") for each in found}
    assert found == [expected_of(rank, size) for rank in range(size)]
    [only] = of_fsdp
    if size in (1, 2):  # a division by a power of two rounds nothing, so FSDP's mean is DDP's
        assert only == by_hand(size)
    return only


def test_ddp_under_poprun_has_the_bits_of_the_tree():
    check(by_poprun(2, *PROGRAM), 2)


@pytest.mark.complete
def test_the_bits_are_the_same_over_every_transport_and_launcher(tmp_path):
    jobs = [
        by_poprun(3, *PROGRAM),
        by_poprun(3, *PROGRAM, "env://"),
        by_poprun(3, *PROGRAM, environ=BY_MESSAGES),
        by_mpirun(3, *PROGRAM),
        by_workers(3, tmp_path, *PROGRAM),
    ]
    assert len({check(lines, 3) for lines in jobs}) == 1


@pytest.mark.complete
def test_one_process_needs_no_launcher():
    finished = start_command(*PROGRAM).finish()
    assert finished.status == 0, finished.stderr
    check([finished.stdout.splitlines()], 1)


@pytest.mark.complete
def test_the_program_of_the_page_prints_one_fingerprint_under_each_launcher(tmp_path):
    [program] = page_programs("torch_distributed.md")
    path = tmp_path / "train.py"
    path.write_text(program, encoding="utf-8")
    jobs = [by_poprun(2, sys.executable, str(path)), by_mpirun(2, sys.executable, str(path))]
    assert jobs[0][0] == jobs[1][0]
    assert [len(of_rank) for of_rank in jobs[0]] == [1, 0]


OF_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
parts = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
wrapped, optimizer, loader = parts
assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(wrapped(inputs), targets))
    optimizer.step()
assert accelerator.gather(torch.ones(2)).tolist() == [1.0] * 2 * size
assert accelerator.reduce(torch.ones(2)).tolist() == [float(size)] * 2
"""
OF_TRANSFORMERS = """
import tempfile
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": each, "labels": each} for each in torch.randint(0, 32, (48, 8))]
with tempfile.TemporaryDirectory() as folder:
    options = {"report_to": [], "save_strategy": "epoch", "eval_strategy": "epoch", "disable_tqdm": True}
    arguments = TrainingArguments(folder, num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True, **options)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:20])
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert trainer.state.global_step == 48 // 4 // size
    dist.barrier()
"""


@pytest.mark.complete
@pytest.mark.parametrize(("library", "training"), [("accelerate", OF_ACCELERATE), ("transformers", OF_TRANSFORMERS)])
def test_libraries_train_over_the_group_that_exists(library, training):
    pytest.importorskip(library)
    end = """
import strategies
print("bits", dist.get_backend(), strategies.fingerprint(model.state_dict()), flush=True)
dist.destroy_process_group()
"""
    meeting = MEET.replace(', init_method="popdist://"', "")
    threads = {"OMP_NUM_THREADS": "1"}
    program = (sys.executable, "-c")
    jobs = [
        by_poprun(2, *program, HEAD + meeting + training + end, environ=threads),
        by_mpirun(2, *program, HEAD + MEET + training + end, environ=threads),
    ]
    [line] = {line for job in jobs for of_rank in job for line in of_rank if line.startswith("bits")}
    assert line.startswith("bits popdist ")


OVERLAPPING = f"""{HEAD}{MEET}
class Meeting(torch.autograd.Function):
    '''In the backward pass of the first layer, wait until the gradients of the last layer have been exchanged.'''

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        work = works.pop()
        assert work.wait(timedelta(seconds=60))
        return gradient

def begin_early(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    works.append(work)
    return work.get_future().then(lambda future: future.value()[0])

works = []
first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, value):
        return self.last(Meeting.apply(self.first(value)))

model = torch.nn.parallel.DistributedDataParallel(Both(), bucket_cap_mb=1e-6)
model.register_comm_hook(None, begin_early)
for step in range(3):  # after the first step, buckets have the order in which gradients come
    works.append(dist.barrier(async_op=True)) if not step else None
    model(torch.ones(2, 4)).sum().backward()
    works.clear()
print("overlaps", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.complete
def test_gradients_are_exchanged_while_the_backward_pass_goes_on():
    assert by_poprun(2, sys.executable, "-c", OVERLAPPING) == [["overlaps"]] * 2


CHECKPOINTED = f"""{HEAD}
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("popdist", init_method="popdist://")

def sharded():
    return fully_shard(torch.nn.Linear(5, 3), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

def whole(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"]

model, loaded, told = sharded(), sharded(), sharded()
dcp.async_save(get_model_state_dict(model), checkpoint_id=sys.argv[1]).result()
state = get_model_state_dict(loaded)
dcp.load(state, checkpoint_id=sys.argv[1])
set_model_state_dict(loaded, state)
assert torch.equal(whole(loaded), whole(model))
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
set_model_state_dict(told, full, options=options)
assert torch.equal(whole(told), whole(model))
print("equal", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.complete
def test_checkpoints_of_torch_are_written_aside_read_and_told_by_rank_0(tmp_path):
    assert by_poprun(2, sys.executable, "-c", CHECKPOINTED, str(tmp_path)) == [["equal"]] * 2


LOSING = f"""{HEAD}
dist.init_process_group("popdist", init_method="popdist://", timeout=timedelta(seconds=int(sys.argv[2])))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        os.setpgid(0, 0)  # without a terminal the kernel may send SIGHUP to a group with a stopped process: the tests'
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        assert step >= 1, error  # messages of the step before, which the lost rank had completed, may be lost with it
        print(str(error).split(": ")[1], flush=True)
        os._exit(3)
"""


@pytest.mark.complete
@pytest.mark.parametrize(("how", "limit_s", "error"), [("SIGKILL", 300, "PeerLostError"), ("SIGSTOP", 5, "")])
def test_a_lost_rank_raises_on_the_others(tmp_path, how, limit_s, error):
    """A killed worker is seen at once, and a stopped one after the timeout of the group."""
    workers = start_workers(3, tmp_path, sys.executable, "-c", LOSING, how, str(limit_s))
    found = [workers[rank].finish() for rank in (0, 2)]
    workers[1].process.send_signal(signal.SIGKILL)
    workers[1].finish()
    assert [one.status for one in found] == [3, 3], [one.stderr for one in found]
    names = {one.stdout.split()[-1] for one in found}
    assert names <= {error} if error else names <= {"CollectiveTimeoutError", "PeerLostError"}


@pytest.mark.complete
def test_a_program_that_fails_on_one_rank_ends_the_job():
    program = f"{HEAD}{MEET}\nassert rank != 1, 'mine'\ndist.all_reduce(torch.ones(2))"
    finished = run("-n", "2", sys.executable, "-c", program)
    assert finished.status == 1
    assert "first cause: instance 1" in finished.own_text
    assert "AssertionError: mine" in finished.own_text


@pytest.mark.complete
def test_a_group_may_be_made_again_and_works_may_be_left_pending_at_the_end():
    program = f"""{HEAD}{MEET}
dist.destroy_process_group()
dist.init_process_group("popdist", init_method="popdist://")
total = torch.ones(100_000)
for _ in range(20):
    dist.all_reduce(total, dist.ReduceOp.MAX, async_op=True)
never = dist.irecv(torch.ones(2), 1 - rank)
print("made again", flush=True)
"""
    assert by_poprun(2, sys.executable, "-c", program) == [["made again"]] * 2


@pytest.mark.complete
def test_other_ranks_in_the_environment_are_refused():
    changed = "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_PORT=str(20000 + os.getpid() % 10000))"
    program = f"{HEAD}{changed}\ndist.init_process_group('popdist')"
    finished = start("-n", "2", sys.executable, "-c", program).finish()
    assert finished.status == 1
    assert "torch.distributed says rank 0 of 1, the launcher says" in finished.stderr


def test_other_ranks_in_the_program_are_refused():
    program = f"{HEAD}dist.init_process_group('popdist', init_method='popdist://', rank=0, world_size=4)"
    finished = start("-n", "1", sys.executable, "-c", program).finish()
    assert finished.status == 1
    assert "torch.distributed says rank 0 of 4, the launcher says instance 0 of 1" in finished.stderr


@pytest.mark.complete
def test_spares_are_refused():
    program = f"{HEAD}{MEET}"
    finished = start("-n", "2:3", "--on-failure", "shrink", sys.executable, "-c", program).finish()
    assert finished.status == 1
    assert "start the job without --spares" in finished.stderr
