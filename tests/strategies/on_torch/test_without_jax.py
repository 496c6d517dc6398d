"""Programs of PyTorch that run without JAX, and begin to use JAX later."""

from __future__ import annotations

TRAINING = """
import sys
import torch
import strategies, strategies.torch

strategy = strategies.IPUStrategy(num_replicas=2)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
data = {"x": torch.randn(24, 3), "y": torch.randint(0, 2, (24,))}

def loss_fn(module, batch):
    scores = module(batch["x"])
    return torch.nn.functional.cross_entropy(scores, batch["y"]), {"largest": scores.max()}

trainer = strategies.torch.Trainer(strategy, module, loss_fn, torch.optim.Adam(module.parameters()))
batches = strategies.torch.distribute_dataset(strategy, data, batch_size=4)
rows = strategies.torch.distribute_dataset(strategy, data, batch_size=5, shuffle=False, remainder="pad")

def train(epoch):
    trainer.run(batches.epoch(epoch))
    means = trainer.evaluate(rows)
    trainer.predict(rows, lambda module, batch: module(batch["x"]))
    numbers = [*means.values(), *(parameter.sum().item() for parameter in module.parameters())]
    return [number.hex() for number in numbers]
"""

ALONE = """
found = train(0)
trainer.plan(next(iter(batches.epoch(1))))
one = torch.nn.Linear(3, 2)
model = strategies.torch.DistributedModel(one, strategies.PopDistStrategy())
model(data["x"]).sum().backward()
import strategies.torch.poptorch
of_jax = {"jax", "jaxlib", "keras", "optax", "orbax", "grain"} & set(sys.modules)
assert not of_jax, of_jax
print(found, train(1))
"""

LATER = """
found = train(0)
assert "jax" not in sys.modules
import jax

print(found, train(1))
leaves = jax.tree.leaves(trainer.state)
assert len(leaves) > 4 and all(hasattr(leaf, "shape") for leaf in leaves), leaves
assert jax.local_device_count() == 2
ones = strategy.run(lambda: strategies.get_replica_context().all_reduce("sum", 1.0))
assert [float(one) for one in ones] == [2.0, 2.0]
"""


def test_programs_of_pytorch_never_import_jax_and_may_begin_to_use_it_later(in_new_process):
    """Later JAX knows the classes of the strategies and the number of devices, and the bits stay."""
    assert in_new_process(TRAINING + ALONE) == in_new_process(TRAINING + LATER)
