"""A worker of `train_step.py`: trains the same models with torch, DistributedDataParallel over gloo.

usage: training_torch.py SOCKET MODEL BATCH_SIZE RANK RANKS RENDEZVOUS
"""

from __future__ import annotations

import os
import sys

import control
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch_training import Training, make_batches, make_model, make_optimizer


def main() -> None:
    path, model, batch_size, rank, ranks, rendezvous = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(ranks)
    )
    distributed = DistributedDataParallel(make_model(model), gradient_as_bucket_view=True)
    batches = make_batches(int(rank), int(batch_size), int(ranks))
    training = Training(distributed, make_optimizer(distributed), batches, torch.distributed.barrier)
    control.serve(path, "ddp", int(rank), {"ddp": training.run})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
