"""A worker of `train_step.py`: trains the same models with torch and Horovod, as Horovod's documentation shows it.

usage: training_horovod.py SOCKET MODEL BATCH_SIZE     (under mpirun)
"""

from __future__ import annotations

import sys

import control
import torch
from horovod import torch as hvd
from torch_training import Training, make_batches, make_model, make_optimizer


def main() -> None:
    path, name, batch_size = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    model = make_model(name)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=model.named_parameters())
    # Not broadcast_optimizer_state: Adam has no state yet, and to make one Horovod would take a step, after which
    # the losses are no longer those of the other ways.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = make_batches(hvd.rank(), int(batch_size), hvd.size())
    training = Training(model, optimizer, batches, hvd.barrier)
    control.serve(path, "hvd", hvd.rank(), {"hvd": training.run})
    hvd.shutdown()


if __name__ == "__main__":
    main()
