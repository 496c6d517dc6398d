"""Train with torch.distributed itself over the backend popdist, and print what each rank has found as JSON.

usage: train_in_groups.py [ADDRESS]      ADDRESS: popdist:// (default) or env://
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import strategies
import strategies.torch
from collectives.tree import combined

EPOCHS, ROWS, BATCH_SIZE = 2, 48, 4


def new_module():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def loader_of(rank, size, epoch):
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 6, generator=drawn), torch.randint(0, 3, (ROWS,), generator=drawn))
    sampler = DistributedSampler(data, size, rank)
    sampler.set_epoch(epoch)
    return DataLoader(data, BATCH_SIZE, sampler=sampler)


def fit(module, parameters):
    """Train a module that takes care of the other ranks itself."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for epoch in range(EPOCHS):
        for inputs, targets in loader_of(dist.get_rank(), dist.get_world_size(), epoch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()


def by_hand(size):
    """Return the fingerprint of the same training in one process: DDP scales gradients, and the tree adds them."""
    module = new_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for batches in zip(*(loader_of(rank, size, epoch) for rank in range(size)), strict=True):
            gradients = []
            for inputs, targets in batches:
                loss = torch.nn.functional.cross_entropy(module(inputs), targets)
                gradients.append([each * (1.0 / size) for each in torch.autograd.grad(loss, list(module.parameters()))])
            for parameter, *of_ranks in zip(module.parameters(), *gradients, strict=True):
                parameter.grad = combined(of_ranks, torch.add)
            optimizer.step()
    return strategies.fingerprint(module.state_dict())


def with_ddp():
    module = new_module()
    fit(DistributedDataParallel(module), module.parameters())
    return module.state_dict()


def with_fsdp():
    module = new_module()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    fit(module, module.parameters())
    state = module.state_dict()
    return type(state)((name, each.full_tensor()) for name, each in state.items())


def with_groups():
    """Return sums in overlapping groups and along the axes of a mesh, which all ranks make."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = {}
    for name, members in {"ends": {0, size - 1}, "others": set(range(1, size)) or {0}, "again": {0, size - 1}}.items():
        group = dist.new_group(sorted(members))
        if rank in members:
            tensor = torch.tensor([float(rank + 1)])
            dist.all_reduce(tensor, group=group)
            sums[name] = tensor.item()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("outer", "inner"))
    sharded = distribute_tensor(torch.arange(4.0 * size), mesh["inner"], [Shard(0)])
    assert isinstance(sharded, DTensor)
    sums["mesh"] = sharded.sum().full_tensor().item()
    return sums


def main(address="popdist://"):
    torch.set_num_threads(1)
    dist.init_process_group("popdist", init_method=address)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    of_ddp, of_fsdp = with_ddp(), with_fsdp()
    torch.testing.assert_close(of_fsdp, of_ddp)  # FSDP divides the sum, DDP what it adds
    found = {
        "rank": dist.get_rank(),
        "backend": dist.get_backend(),
        "objects": objects,
        "ddp": strategies.fingerprint(of_ddp),
        "fsdp": strategies.fingerprint(of_fsdp),
        "groups": with_groups(),
    }
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
