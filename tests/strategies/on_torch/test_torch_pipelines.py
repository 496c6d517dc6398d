"""Pipelines of a module: stages run concurrently in the order of a timetable, with the bits of plain PyTorch."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node
from torch_modules import sgd_trainer

import strategies
import strategies.torch
import strategies.torch.poptorch as poptorch
from strategies import StrategyError
from strategies.compat.poptorch.options import Options
from strategies.pipelines.timetable import ActionKind, placed, schedule_named


class Block(nn.Module):
    """The tutorial's block: convolution, pooling, activation."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 5)

    def forward(self, x):
        return F.relu(F.max_pool2d(self.conv(x), 2))


class Network(nn.Module):
    """The tutorial's network, with its blocks."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = Block(1, 10), Block(10, 20)
        self.layer3, self.layer4 = nn.Linear(320, 256), nn.Linear(256, 10)

    def forward(self, x):
        with poptorch.Block("B1"):
            x = self.layer1(x)
        with poptorch.Block("B2"):
            x = self.layer2(x)
        with poptorch.Block("B3"):
            x = F.relu(self.layer3(x.flatten(1)))
        with poptorch.Block("B4"):
            return self.layer4(x)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            loss = F.cross_entropy(output, labels)
        return output, loss


class Noisy(nn.Module):
    """Dropout and batch norm in separate stages, a skip connection, and blocks marked in other ways."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last = poptorch.BeginBlock(nn.Linear(8, 3), ipu_id=2)

    @poptorch.BlockFunction("middle", ipu_id=1)
    def middle(self, x):
        return F.dropout(torch.tanh(self.second(x)), 0.3, self.training)

    def forward(self, x, labels):
        with poptorch.Block("front", ipu_id=0):
            front = self.norm(self.first(x))
        output = self.last(self.middle(front) + front)
        return output, F.cross_entropy(output, labels)


COUNT, ITERATIONS, ROWS = 8, 2, 2
PIPELINED = [
    poptorch.PipelinedExecution("B1", "B2", "B3", "B4"),
    poptorch.PipelinedExecution(*(poptorch.Stage(f"B{n + 1}").ipu(n) for n in range(4)), schedule="grouped"),
    poptorch.PipelinedExecution(["B1", "B2"], ["B3", "B4"], schedule="interleaved"),
    poptorch.PipelinedExecution(
        poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1), poptorch.Stage("B3", "B4").ipu(0)
    ),
    poptorch.PipelinedExecution(*(poptorch.Stage(f"B{n + 1}").ipu(n % 2) for n in range(4))),
    poptorch.ShardedExecution("B1", "B2", "B3", "B4"),
    poptorch.SerialPhasedExecution(["B1"], ["B2"], ["B3"], ["B4"]),
    poptorch.ParallelPhasedExecution(poptorch.Phase("B1", "B2").ipus(0), poptorch.Phase("B3", "B4").ipus(1)),
]


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ITERATIONS * COUNT * ROWS, 1, 28, 28, generator=generator)
    return x, torch.randint(0, 10, (len(x),), generator=generator)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return WithLoss(Network())


def new_options(strategy, replicas=1, count=COUNT, iterations=ITERATIONS):
    options = Options().deviceIterations(iterations).outputMode(poptorch.OutputMode.All)
    options.replicationFactor(replicas).Training.gradientAccumulation(count)
    return options if strategy is None else options.setExecutionStrategy(strategy)


@pytest.fixture(scope="module")
def plain(network):
    """Return losses and parameters of plain PyTorch after two calls."""
    own = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.001)
    losses = []
    for _ in range(2):
        for x, y in zip(*(each.split(COUNT * ROWS) for each in batch()), strict=True):
            optimizer.zero_grad()
            for rows in zip(x.split(ROWS), y.split(ROWS), strict=True):
                _, loss = own(*rows)
                (loss / COUNT).backward()
                losses.append(loss.item())
            optimizer.step()
    return losses, own.state_dict()


@pytest.mark.parametrize("strategy", PIPELINED, ids=str)
def test_every_strategy_has_the_bits_of_plain_pytorch(strategy, network, plain):
    own = copy.deepcopy(network)
    training = poptorch.trainingModel(own, new_options(strategy), poptorch.optim.AdamW(own.parameters(), lr=0.001))
    losses = [loss for _ in range(2) for loss in training(*batch())[1].tolist()]
    assert losses == plain[0]
    assert all(map(torch.equal, own.state_dict().values(), plain[1].values()))
    training.destroy()


def test_four_replicas_match_one_with_the_global_batch_up_to_rounding(network):
    strategy, found = poptorch.PipelinedExecution("B1", "B2", "B3", "B4"), []
    for replicas, count in ((4, 4), (1, 16)):
        own = copy.deepcopy(network)
        options = new_options(strategy, replicas, count, 1)
        training = poptorch.trainingModel(own, options, torch.optim.SGD(own.parameters(), 0.1))
        losses = [training(*batch())[1].mean().item() for _ in range(3)]
        found.append(losses)
        training.destroy()
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def noisy_batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * COUNT * ROWS, 6, generator=generator)
    return x, torch.randint(0, 3, (len(x),), generator=generator)


def test_random_numbers_and_moving_means_match_a_model_without_a_pipeline(on_instances):
    torch.manual_seed(2)
    module = Noisy()

    def train(strategy, execution):
        own = copy.deepcopy(module)
        options = new_options(execution, iterations=2)
        options._strategy = strategy
        training = poptorch.trainingModel(own, options, torch.optim.Adam(own.parameters()))
        rows = 2 * COUNT * 3 * len(strategy.local_replicas)
        for _ in range(2):
            training(*(each[:rows] for each in noisy_batch()))
        training.destroy()
        return [each.detach().numpy().tobytes() for each in own.state_dict().values()]

    executions = [None, poptorch.PipelinedExecution(), poptorch.ShardedExecution()]
    executions.append(poptorch.PipelinedExecution(schedule="grouped"))
    found = on_instances(1, 2, lambda strategy: [train(strategy, execution) for execution in executions])[0]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("schedule", ["one_forward_one_backward"])
def test_a_step_leaves_no_objects_behind(schedule, network):
    """Hooks of autograd's nodes are hidden from the garbage collector: a cycle through one would never be freed."""
    strategy = poptorch.PipelinedExecution("B1", "B2", "B3", "B4", schedule=schedule)
    training = poptorch.trainingModel(copy.deepcopy(network), new_options(strategy))
    counts = []
    for _ in range(3):
        training(*batch())
        gc.collect()
        counts.append(sum(isinstance(each, Node) for each in gc.get_objects()))
    training.destroy()
    assert counts[2] == counts[1], "nodes of autograd after the second and the third call"


class Branching(nn.Module):
    """Three stages whose layers depend on the rows, and swap their places."""

    def __init__(self):
        super().__init__()
        self.layers, self.extra = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 6)

    def forward(self, x):
        is_positive = bool(x.sum() > 0)
        for number, layer in enumerate(self.layers):
            with poptorch.Block(str(number), ipu_id=number):
                x = torch.tanh(layer(x))
                if number == 1:
                    x = F.gelu(self.extra(x)) if is_positive else F.gelu(x) * self.extra(x)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["one_forward_one_backward"])
def test_micro_batches_may_take_different_paths(schedule):
    x = torch.randn(2 * COUNT, 6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    module = Branching()
    found = []
    for execution in (None, poptorch.PipelinedExecution(schedule=schedule)):
        own = copy.deepcopy(module)
        training = poptorch.trainingModel(own, new_options(execution), torch.optim.SGD(own.parameters(), 0.1))
        for _ in range(2):
            training(x)
        training.destroy()
        found.append([each.detach() for each in own.parameters()])
    assert all(map(torch.equal, *found))


class Grouped(nn.Module):
    """Stages with a parameter each, of which every replica has its own row."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.full((2, 6, 6), 0.1 * (stage + 1))) for stage in range(4))

    def forward(self, x):
        for stage, row in enumerate(self.rows):
            with poptorch.Block(str(stage), ipu_id=stage):
                x = torch.tanh(x @ row)
        return x.square().mean()


def test_stages_have_parameters_with_a_row_for_each_replica():
    """The rows of a step are new tensors, which may lie where those of another stage were."""
    found = []
    for execution in (poptorch.PipelinedExecution(), None):
        module = Grouped()
        options = new_options(execution, replicas=2, iterations=16)
        training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), 0.1))
        for parameter in module.parameters():
            parameter.replicaGrouping(poptorch.CommGroupType.NoGrouping)
        training(torch.randn(2 * COUNT * 16, 6, generator=torch.Generator().manual_seed(4)))
        training.destroy()
        found.append([one.detach() for one in module.parameters()])
    assert all(map(torch.equal, *found))


def test_stages_run_concurrently_in_the_order_of_the_timetable(network):
    """A stage waits in the forward pass of the second micro-batch until the next stage has the first one."""
    met, barrier = [], threading.Barrier(2, timeout=100)

    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            number = (self.calls - 1) % 2
            is_first_step = self.calls <= 2
            with poptorch.Block("one", ipu_id=0):
                hidden = self.first(x)
                if number == 1 and not is_first_step:
                    met.append(barrier.wait())
            with poptorch.Block("two", ipu_id=1):
                if number == 0 and not is_first_step:
                    met.append(barrier.wait())
                return self.second(hidden).mean()

    module = Meeting()
    execution = poptorch.PipelinedExecution(schedule="grouped")
    training = poptorch.trainingModel(module, new_options(execution, count=2, iterations=1))
    for _ in range(2):
        training(torch.ones(4, 4))
    assert sorted(met) == [0, 1]
    training.destroy()


def test_the_trace_lists_all_actions_and_the_stash_matches_the_schedule(network):
    own = copy.deepcopy(network)
    strategy = poptorch.PipelinedExecution("B1", "B2", "B3", "B4")
    training = poptorch.trainingModel(own, new_options(strategy, iterations=1))
    with pytest.raises(ValueError, match="a trace needs actions"):
        _ = training.trace
    for _ in range(2):
        training(*(each[: COUNT * ROWS] for each in batch()))
    spans = training.trace.replicas[0]
    assert len([span for span in spans if span.action.kind is not ActionKind.UPDATE]) == 2 * 4 * COUNT
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        for stage in range(4):
            own_spans = [span for span in spans if span.action.kind is kind and span.action.stage == stage]
            assert [span.action.micro_batch for span in own_spans] == list(range(COUNT))
            assert all(one.end_s <= other.begin_s for one, other in zip(own_spans, own_spans[1:], strict=False))
    kept = most = 0
    for span in [span for span in spans if span.action.stage == 0 and span.action.kind is not ActionKind.UPDATE]:
        kept += 1 if span.action.kind is ActionKind.FORWARD else -1
        most = max(most, kept)
    assert most == 4, "one forward pass, one backward pass: as many as there are stages behind"
    assert "stage" in str(training.trace)
    training.destroy()


@pytest.mark.parametrize("schedule", ["grouped", "one_forward_one_backward"])
def test_devices_execute_the_timetable_one_action_at_a_time(schedule, network):
    strategy = poptorch.PipelinedExecution("B1", "B2", "B3", "B4", schedule=schedule)
    training = poptorch.trainingModel(copy.deepcopy(network), new_options(strategy, iterations=1))
    for _ in range(2):
        training(*(each[: COUNT * ROWS] for each in batch()))
    timetable = schedule_named(schedule).timetable(placed(range(4)), COUNT, True)
    for device, actions in enumerate(timetable.devices):
        spans = [span for span in training.trace.replicas[0] if span.device == device]
        assert [span.action for span in spans] == list(actions)
        assert all(one.end_s <= other.begin_s for one, other in zip(spans, spans[1:], strict=False))
    training.destroy()


@pytest.mark.parametrize("schedule", ["one_forward_one_backward"])
def test_gradients_leave_while_stages_still_compute(schedule, on_instances):
    """Streamed gradients of the last micro-batch, from any thread, have the bits of a step without pipeline."""
    torch.manual_seed(2)
    module = Noisy()
    x, y = (each[: 4 * COUNT] for each in noisy_batch())

    def train(strategy, **options):
        own = copy.deepcopy(module)
        trainer = sgd_trainer(
            strategy,
            own,
            lambda module, rows: module(*rows)[1],
            gradient_accumulation_count=4,
            loss_scaling="dynamic",
            **options,
        )
        for _ in range(3):
            local = strategy.local_replicas
            trainer.step(tuple(each.chunk(2)[local.start] if len(local) == 1 else each for each in (x, y)))
        return strategies.fingerprint(trainer.state.variables)

    pipeline = poptorch.PipelinedExecution(schedule=schedule).pipeline
    streamed = on_instances(2, 2, lambda strategy: train(strategy, pipeline=pipeline, stream_gradients=True))
    assert streamed == on_instances(1, 2, train) * 2


@pytest.mark.parametrize("schedule", ["grouped", "one_forward_one_backward"])
def test_inference_runs_in_the_stages(schedule, network):
    """The first call learns the stages; outputs equal those without a pipeline."""
    execution = poptorch.PipelinedExecution("B1", "B2", "B3", "B4", schedule=schedule)
    inference = poptorch.inferenceModel(network, new_options(execution, 2, 1, 5))
    rows = batch()[0][:20]
    plainly = [network(each).detach() for each in rows.split(2)]
    with pytest.raises(ValueError, match="a trace needs actions"):
        _ = inference.trace
    for _ in range(2):
        assert torch.equal(inference(rows), torch.cat(plainly))
    spans = inference.trace.replicas
    assert sorted(spans) == [0, 1]
    assert all(len(each) == 4 * 5 for each in spans.values())
    assert {span.action.kind for span in spans[0]} == {ActionKind.FORWARD}
    inference.destroy()


@pytest.mark.complete
@pytest.mark.timeout(600)
class TestTheTutorialAtItsFullSize:
    """The tutorial at its full size: 40 rows x 10 micro-batches x 10 updates in a call, on four stages.

    Four replicas have 10 of the 40 rows each. Rounding then differs from that of 40 rows, and AdamW amplifies it to
    9e-4 within a call; plain PyTorch with micro-batches of 1, 4 or 5 rows does the same. Therefore float64 shows that
    four replicas compute the same as one.
    """

    CALLS = 2

    def losses(self, network, replicas, dtype, by_hand):
        """Return the losses of two calls, and those of plain PyTorch with the same number of replicas."""
        generator = torch.Generator().manual_seed(4)
        y = torch.randint(0, 10, (4000,), generator=generator)
        x = torch.randn(10, 1, 28, 28, generator=generator)[y] + torch.randn(4000, 1, 28, 28, generator=generator)
        x, own = x.to(dtype), copy.deepcopy(network).to(dtype)
        options = new_options(poptorch.PipelinedExecution("B1", "B2", "B3", "B4"), replicas, 10, 10)
        training = poptorch.trainingModel(own, options, poptorch.optim.AdamW(own.parameters(), lr=0.001))
        found = [training(x, y)[1].reshape(100, replicas) for _ in range(self.CALLS)]
        training.destroy()
        return torch.cat(found), losses_of_plain(copy.deepcopy(network).to(dtype), x, y, by_hand, self.CALLS)

    def test_losses_have_the_bits_of_plain_pytorch(self, network):
        found, by_hand = self.losses(network, 4, torch.float32, 4)
        assert torch.equal(found, by_hand)

    def test_four_replicas_match_one_with_the_global_batch(self, network):
        found, alone = self.losses(network, 4, torch.float64, 1)
        torch.testing.assert_close(found.mean(1), alone[:, 0], rtol=0, atol=1e-6)


def losses_of_plain(module, x, y, replicas, calls):
    """Return the losses of plain PyTorch; gradients of the replicas are added up in the order of the tree."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.001)
    found = []
    for _ in range(calls):
        for rows in zip(x.split(400), y.split(400), strict=True):
            gradients, losses = [], []
            for replica in range(replicas):
                optimizer.zero_grad()
                for part in zip(*(each.split(40) for each in rows), strict=True):
                    _, loss = module(*(each.chunk(replicas)[replica] for each in part))
                    (loss / 10).backward()
                    losses.append(loss.detach())
                gradients.append([parameter.grad for parameter in module.parameters()])
            for parameter, *own in zip(module.parameters(), *gradients, strict=True):
                parameter.grad = own[0] if replicas == 1 else ((own[0] + own[1]) + (own[2] + own[3])) / 4
            optimizer.step()
            found.append(torch.stack(losses).reshape(replicas, 10).T)
    return torch.cat(found)


class Two(nn.Module):
    """Two stages with a selectable fault."""

    def __init__(self, names=("A", "B"), wrong=None):
        super().__init__()
        self.names, self.wrong = names, wrong
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        with poptorch.Block(self.names[0]):
            x = self.first(x) * (self.scale if self.wrong != "changed" else self.scale.clone())
            if self.wrong == "changed":
                self.scale *= 1.1
            if self.wrong == "buffer":
                x = self.norm(x)
        with poptorch.Block(self.names[1]):
            x = (self.first if self.wrong == "parameter" else self.second)(x)
            if self.wrong == "buffer":
                x = self.norm(x)
            if self.wrong in ("changed", "used"):
                x = x + self.scale
            if self.wrong == "error" and x.abs().sum() > 1e6:
                raise ZeroDivisionError
        return x.mean()


def call_two(module, *, execution=None, count=4, times=1, scale=1.0):
    execution = execution or poptorch.PipelinedExecution("A", "B")
    training = poptorch.trainingModel(module, new_options(execution, count=count, iterations=1))
    try:
        for number in range(times):
            training(torch.ones(2 * count, 3) * (scale if number else 1.0))
    finally:
        training.destroy()


class TestRefusals:
    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (lambda: Two(("A", "C")), r"no stage has the block 'C'; the strategy lists the blocks 'A', 'B'"),
            (lambda: Two(("B", "A")), r"block 'A' of stage 0 begins after stage 1; the order of stages"),
            (lambda: Two(wrong="parameter"), r"a parameter of shape .* is used on the devices 1 and 0"),
            (lambda: Two(wrong="buffer"), r"buffer norm.* changes, and is used in the stages 0, 1"),
            (lambda: Two(wrong="changed"), r"buffer scale changes, and is used in the stages 0, 1"),
        ],
    )
    def test_modules_with_parts_that_stages_cannot_share(self, module, message):
        with pytest.raises(StrategyError, match=message):
            call_two(module())

    def test_unchanged_buffers_are_allowed_in_all_stages(self):
        call_two(Two(wrong="used"), times=2)

    def test_too_few_micro_batches(self):
        with pytest.raises(StrategyError, match=r"has 2 stages, but a step has 1 micro-batches, .* of 2 or more"):
            call_two(Two(), count=1)
        call_two(Two(), count=1, execution=poptorch.ShardedExecution("A", "B"))

    def test_too_few_micro_batches_of_an_inference(self):
        few = poptorch.inferenceModel(Two(), new_options(poptorch.PipelinedExecution("A", "B"), 1, 1, 1))
        with pytest.raises(StrategyError, match=r"a call has 1 micro-batches, .* use deviceIterations of 2 or more"):
            few(torch.ones(2, 3))
        few.destroy()
        sharded = poptorch.inferenceModel(Two(), new_options(poptorch.ShardedExecution("A", "B"), 1, 1, 1))
        sharded(torch.ones(2, 3))
        sharded.destroy()

    def test_blocks_without_a_device_if_no_stages_are_listed(self):
        with pytest.raises(StrategyError, match="block 'A' has no ipu_id, and the strategy lists no stages"):
            call_two(Two(), execution=poptorch.PipelinedExecution())

    def test_a_block_in_two_stages(self):
        with pytest.raises(StrategyError, match="block 'A' is in two stages"):
            poptorch.PipelinedExecution("A", ["A", "B"])

    @pytest.mark.parametrize("kind", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
    def test_unknown_schedules(self, kind):
        with pytest.raises(ValueError, match="there is no pipeline schedule '1f1b'; use one of grouped, "):
            kind("A", "B", schedule="1f1b")

    def test_blocks_missing_from_the_model(self):
        """Without the check the model would silently run without a pipeline."""
        with pytest.raises(StrategyError, match=r"a stage has the block 'C', which no micro-batch .*Block\('C'\)"):
            call_two(Two(), execution=poptorch.ShardedExecution("A", "B", "C"))

    def test_phases_that_are_not_given(self):
        with pytest.raises(ValueError, match="needs phases"):
            poptorch.SerialPhasedExecution()

    def test_running_means(self):
        options = new_options(poptorch.PipelinedExecution("A", "B"), count=4, iterations=1)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
        with pytest.raises(StrategyError, match=r"use MeanReductionStrategy\.Post, or no execution strategy"):
            poptorch.trainingModel(Two(), options)

    def test_a_module_that_begins_two_blocks(self):
        layer = poptorch.BeginBlock(nn.Linear(1, 1), "A")
        with pytest.raises(StrategyError, match="remove the mark with poptorch.removeBlocks"):
            poptorch.BeginBlock(layer, "B")
        poptorch.removeBlocks(layer)
        poptorch.BeginBlock(layer, "B")


def test_an_error_in_one_stage_ends_all_stages_and_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_two(Two(wrong="error"), times=2, scale=1e9)


def test_stages_of_blocks_follow_devices_or_are_numbered():
    of = poptorch.PipelinedExecution().placing.of
    assert [of("a", 0), of("b", 2), of("c", 0)] == [(0, 0), (2, 2), (0, 0)]
    of = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement).placing.of
    assert [of("a", 0), of("b", 1), of("c", 0), of("b", 1)] == [(0, 0), (1, 1), (2, 0), (1, 1)]
    strategy = poptorch.PipelinedExecution("a", poptorch.Stage("b", "c").ipu(3))
    assert strategy.stage("c").blocks == ["b", "c"]
    assert repr(strategy) == "PipelinedExecution(Stage('a'), Stage('b', 'c').ipu(3))"
