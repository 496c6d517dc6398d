"""Timeline of module replicas and of their pipeline stages; recording changes no bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from connected import ConnectedStrategy
from torch import nn
from torch_modules import sgd_trainer

import collectives
import strategies.torch
import strategies.torch.poptorch as poptorch
from collectives import Settings
from collectives.instruments import Instruments
from popdist import Instance
from popdist.timeline.recorder import Recorder, RingBuffer
from poprun.trace.merging import put_together
from poprun.trace.recordings import InstanceRecording
from poprun.trace.spans import Sort
from strategies.compat.poptorch.options import Options

REPLICAS, STEPS, COUNT, CALLS = 2, 3, 4, 2


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, labels):
        with poptorch.Block("first", ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block("last", ipu_id=1):
            return F.cross_entropy(self.last(x), labels)


def data(rows):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def train_module(strategy, module, execution):
    options = {"stream_gradients": True}
    trainer = sgd_trainer(strategy, module, lambda own, batch: own(*batch), **options)
    dataset = strategies.torch.distribute_dataset(strategy, data(4 * REPLICAS * STEPS), batch_size=4, shuffle=False)
    for batch in dataset.epoch(0):
        trainer.step(batch)


def train_pipeline(strategy, module, execution):
    options = Options().deviceIterations(STEPS).replicationFactor(REPLICAS).setExecutionStrategy(execution)
    options.Training.gradientAccumulation(COUNT)
    options._strategy = strategy
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), 0.1))
    training(*data(2 * COUNT * REPLICAS * STEPS))
    training.destroy()


def record(train, execution=None, is_recorded=True):
    """Return the spans of one instance, and the bits of its module at the end."""
    ring = RingBuffer()
    recorder = Recorder(ring)
    settings = Settings(progress=Instruments(*([recorder] if is_recorded else [])))
    torch.manual_seed(0)
    module = TwoBlocks()
    with collectives.connect("single", settings) as communicator:
        train(ConnectedStrategy(Instance(0, 1, REPLICAS, 0, REPLICAS, 0), communicator), module, execution)
    bits = [each.detach().numpy().tobytes() for each in module.parameters()]
    if not is_recorded:
        return None, bits
    recording = InstanceRecording(names=recorder.take_new_names(), events=ring.take()[0], is_complete=True)
    return put_together([recording]).spans[0], bits


def test_each_replica_computes_in_every_step():
    spans, bits = record(train_module)
    replicas = spans.of(Sort.REPLICA)
    steps = spans.of(Sort.STEP)
    assert steps["step"].tolist() == list(range(STEPS))
    for replica in range(REPLICAS):
        own = replicas[replicas["name"] == replica]
        parts = own["value"][own["step"] == 0]
        assert parts.tolist() == list(range(len(parts)))
        assert own["step"].tolist() == [step for step in range(STEPS) for _ in parts]
        for step in steps:
            of_step = own[own["step"] == step["step"]]
            assert np.all(of_step["begin_ns"] >= step["begin_ns"])
            assert np.all(of_step["end_ns"] <= step["end_ns"])
    assert record(train_module, is_recorded=False) == (None, bits)


@pytest.mark.parametrize("execution", [poptorch.PipelinedExecution(), poptorch.ShardedExecution()], ids=str)
def test_each_stage_has_every_micro_batch_forward_and_back(execution):
    spans, bits = record(train_pipeline, execution)
    replicas = spans.of(Sort.REPLICA)
    for replica in range(REPLICAS):
        for track in (1, 2):
            own = replicas[(replicas["name"] == replica) & (replicas["track"] == track)]
            for step in range(STEPS):
                assert sorted(own["value"][own["step"] == step].tolist()) == sorted([*range(COUNT)] * 2)
            own = np.sort(own, order="begin_ns")
            assert np.all(own["end_ns"][:-1] <= own["begin_ns"][1:]), "a stage has one micro-batch at a time"
    assert record(train_pipeline, execution, is_recorded=False) == (None, bits)


def infer(strategy, module, execution):
    """Infer with stages; without an execution strategy, infer with a part of the module that has no stages."""
    options = Options().deviceIterations(COUNT).replicationFactor(REPLICAS)
    inputs = data(2 * COUNT * REPLICAS)
    if execution is None:
        module, inputs = module.first, inputs[:1]
    else:
        options.setExecutionStrategy(execution)
    options._strategy = strategy
    model = poptorch.inferenceModel(module, options)
    for _ in range(CALLS):
        model(*inputs)
    model.destroy()


@pytest.mark.parametrize(("execution", "tracks"), [(poptorch.PipelinedExecution(), {1, 2}), (None, {1})], ids=str)
def test_each_stage_of_an_inference_has_every_micro_batch_once_in_each_call(execution, tracks):
    replicas = record(infer, execution)[0].of(Sort.REPLICA)
    assert set(replicas["track"].tolist()) == tracks
    for replica in range(REPLICAS):
        for track in tracks:
            own = replicas[(replicas["name"] == replica) & (replicas["track"] == track)]
            assert sorted(own["value"].tolist()) == sorted([*range(COUNT)] * CALLS)
