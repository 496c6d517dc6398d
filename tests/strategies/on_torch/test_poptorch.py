"""PopTorch's interface: programs of PopTorch give what plain PyTorch gives, on any number of replicas and instances."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from poptorch_modules import new_options
from torch import nn
from torch_modules import data

import strategies.torch.poptorch as poptorch
from strategies import NonFiniteGradientError, StrategyError
from strategies.compat.poptorch.options import Options

ROWS = 48

SAVED_OPTIONS = """
import pickle, popdist.poptorch
options = pickle.loads(pickle.dumps(popdist.poptorch.Options()))
print(type(options.strategy).__name__, options.replication_factor, options.strategy.num_replicas_in_sync)
"""

DISTRIBUTED = ("disable", "setEnvVarNames", "configureProcessId")

REFUSED_BY_A_JOB = """
import popdist.poptorch
for options in (popdist.poptorch.Options(), popdist.poptorch.Options().clone()):
    own = options.Distributed
    assert (own.processId, own.numProcesses) == (0, 1)
    calls = [(options.useIpuId, 1), (options.replicationFactor, 2)]
    calls += [(own.disable,), (own.setEnvVarNames, "SIZE", "RANK"), (own.configureProcessId, 0, 1)]
    for call, *arguments in calls:
        try:
            call(*arguments)
        except RuntimeError as error:
            print(error)
"""


class Classifier(nn.Module):
    """The tutorial's classifier: outputs without labels, outputs and loss with them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(64, 9), nn.Linear(9, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        with poptorch.Block("B1", ipu_id=0):
            hidden = torch.tanh(self.first(x.flatten(1)))
        with poptorch.Block("B2", ipu_id=1):
            output = self.last(self.dropout(hidden))
            if labels is None:
                return output
            return output, F.cross_entropy(output, labels)


class Noise(nn.Module):
    """A module that draws random numbers in evaluation mode too."""

    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Classifier()


def dataset():
    rows = data()
    return torch.utils.data.TensorDataset(rows["x"], rows["y"])


def plainly(model, optimizer, batch, iterations, accumulation, replicas=1):
    """Return outputs and losses of every micro-batch by plain PyTorch, with replicas side by side."""
    x, y = batch
    outputs, losses = [], []
    count = iterations * accumulation * replicas
    parts = iter(zip(x.chunk(count), y.chunk(count), strict=True))
    for _ in range(iterations):
        optimizer.zero_grad()
        for _ in range(accumulation * replicas):
            output, loss = model(*next(parts))
            (loss / (accumulation * replicas)).backward()
            outputs.append(output.detach())
            losses.append(loss.detach())
        optimizer.step()
    return torch.cat(outputs), torch.stack(losses)


class TestTraining:
    def test_one_replica_has_the_bits_of_plain_pytorch(self, model):
        own, plain = copy.deepcopy(model), copy.deepcopy(model)
        options = new_options(iterations=3, accumulation=4, mode=poptorch.OutputMode.All)
        optimizer = poptorch.optim.AdamW(own.parameters(), lr=0.01)
        training = poptorch.trainingModel(own, options, optimizer)
        loader = poptorch.DataLoader(options, dataset(), batch_size=2)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for _ in range(2):
            for batch in loader:
                outputs, losses = training(*batch)
                expected = plainly(plain, reference, batch, 3, 4)
                assert torch.equal(outputs, expected[0])
                assert torch.equal(losses, expected[1])
        assert all(map(torch.equal, own.state_dict().values(), plain.state_dict().values()))

    def test_four_replicas_match_one_with_the_global_batch_up_to_rounding(self, model):
        losses = []
        for replicas, rows in ((4, 2), (1, 8)):
            own = copy.deepcopy(model)
            options = new_options(replicas=replicas, iterations=2, accumulation=3, mode=poptorch.OutputMode.All)
            training = poptorch.trainingModel(own, options, torch.optim.SGD(own.parameters(), 0.1))
            loader = poptorch.DataLoader(options, dataset(), batch_size=rows, shuffle=True)
            [batch] = loader
            losses.append(training(*batch)[1].reshape(-1, replicas).mean(1))
        torch.testing.assert_close(*losses, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("kind", [poptorch.ReductionType.Mean, poptorch.ReductionType.Sum])
    def test_gradients_are_reduced_over_micro_batches_and_replicas(self, kind, model):
        own, plain = copy.deepcopy(model), copy.deepcopy(model)
        options = new_options(replicas=2, accumulation=2)
        options.Training.accumulationAndReplicationReductionType(kind)
        training = poptorch.trainingModel(own, options, torch.optim.SGD(own.parameters(), 0.5))
        batch = data()["x"][:8], data()["y"][:8]
        training(*batch)
        is_sum = kind is poptorch.ReductionType.Sum
        plainly(plain, torch.optim.SGD(plain.parameters(), 0.5 * (4 if is_sum else 1)), batch, 1, 2, 2)
        torch.testing.assert_close(own.first.weight, plain.first.weight)

    def test_training_does_not_depend_on_the_instances(self, model, on_instances):
        noisy = Classifier(dropout=0.3)
        noisy.load_state_dict(model.state_dict())

        def train(strategy):
            own = copy.deepcopy(noisy)
            options = new_options(strategy, 4, 2, 3)
            training = poptorch.trainingModel(own, options, poptorch.optim.Adam(own.parameters(), lr=0.01))
            loader = poptorch.DataLoader(options, dataset(), batch_size=2, shuffle=True)
            rows = [training(*batch) and batch[1] for _ in range(2) for batch in loader]
            training.destroy()
            return own.first.weight.detach().numpy().tobytes(), torch.cat(rows)

        alone = on_instances(1, 4, train)[0]
        for count in (2, 4):
            found = on_instances(count, 4, train)
            assert [each[0] for each in found] == [alone[0]] * count
            assert sorted(torch.cat([each[1] for each in found]).tolist()) == sorted(alone[1].tolist())

    def test_the_default_optimizer_is_plain_descent(self, model):
        own = copy.deepcopy(model)
        training = poptorch.trainingModel(own)
        assert isinstance(training.trainer.optimizer, torch.optim.SGD)
        assert training.trainer.optimizer.param_groups[0]["lr"] == 0.01
        output, loss = training(data()["x"], labels=data()["y"])
        assert output.shape == (ROWS, 5)
        assert loss.shape == ()

    def test_outputs_without_a_loss_are_refused(self, model):
        with pytest.raises(StrategyError, match="returns no scalar that depends on its parameters"):
            poptorch.trainingModel(copy.deepcopy(model))(data()["x"])

    def test_rows_that_cannot_be_divided_are_refused(self, model):
        training = poptorch.trainingModel(copy.deepcopy(model), new_options(iterations=5, accumulation=2))
        with pytest.raises(
            ValueError, match=r"deviceIterations 5 x gradientAccumulation 2 x 1 local replicas.*DataLoader"
        ):
            training(data()["x"], data()["y"])

    def test_set_optimizer_refuses_another_kind(self, model):
        training = poptorch.trainingModel(model, optimizer=poptorch.optim.Adam(model.parameters(), lr=0.1))
        with pytest.raises(StrategyError, match="made with Adam of 1 groups, but this is SGD"):
            training.setOptimizer(poptorch.optim.SGD(model.parameters(), lr=0.0))


class TestOutputs:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize(
        ("mode", "period", "rows"),
        [
            (poptorch.OutputMode.All, None, list(range(24))),
            (poptorch.OutputMode.Final, None, [20, 21, 22, 23]),
            (poptorch.OutputMode.EveryN, 3, [8, 9, 10, 11, 20, 21, 22, 23]),
        ],
    )
    def test_outputs_are_rows_of_the_batch(self, training, mode, period, rows, model):
        """The last rows of two replicas come from the last micro-batch as well."""
        options = new_options(replicas=2, iterations=3, accumulation=2)
        options.outputMode(mode, period)
        if training:
            own = copy.deepcopy(model)
            executor = poptorch.trainingModel(own, options, torch.optim.SGD(own.parameters(), 0.0))
            outputs, losses = executor(data()["x"][:24], data()["y"][:24])
            assert losses.shape == (len(rows) // 2,)
        else:
            options = options.clone()
            options.Training.gradientAccumulation(1)
            options.deviceIterations(6)
            outputs = poptorch.inferenceModel(copy.deepcopy(model), options)(data()["x"][:24])
        torch.testing.assert_close(outputs, model(data()["x"][:24])[rows].detach())

    def test_output_mode_sum_adds_up_outputs(self, model):
        options = new_options(replicas=2, iterations=3, mode=poptorch.OutputMode.Sum)
        outputs = poptorch.inferenceModel(copy.deepcopy(model), options)(data()["x"][:12])
        expected = model(data()["x"][:12]).detach().reshape(3, 4, 5).sum(0)
        torch.testing.assert_close(outputs, expected)

    def test_a_period_goes_with_every_n_and_divides_the_micro_batches(self, model):
        with pytest.raises(ValueError, match="give a period with EveryN only"):
            Options().outputMode(poptorch.OutputMode.All, 2)
        options = new_options(iterations=3)
        options.outputMode(poptorch.OutputMode.EveryN, 2)
        with pytest.raises(ValueError, match="use a period that divides"):
            poptorch.inferenceModel(copy.deepcopy(model), options)(data()["x"][:6])


class TestInference:
    def test_inference_follows_the_weights_of_its_training(self, model):
        own = copy.deepcopy(model)
        training = poptorch.trainingModel(own, optimizer=torch.optim.SGD(own.parameters(), 0.5))
        inference = poptorch.inferenceModel(training)
        before = inference(data()["x"])
        training(data()["x"], data()["y"])
        after = inference(data()["x"])
        assert not torch.equal(before, after)
        assert torch.equal(after, own(data()["x"]).detach())
        assert not after.requires_grad

    def test_inference_is_in_evaluation_mode_and_leaves_the_module_in_training_mode(self):
        module = Classifier(dropout=0.9)
        inference = poptorch.inferenceModel(module)
        assert torch.equal(inference(data()["x"]), inference(data()["x"]))
        assert module.training

    @pytest.mark.parametrize("kind", ["in place", "replaced"])
    def test_inference_continues_with_the_buffers_that_it_writes(self, kind, on_instances):
        """Buffers of a single replica belong to the module, as in PyTorch; several replicas have one copy each."""

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, x):
                if kind == "in place":
                    self.seen += x.sum()
                else:
                    self.seen = self.seen + x.sum()
                return self.seen.clone()

        alone = Counting()
        inference = poptorch.inferenceModel(alone)
        assert [inference(torch.ones(2)).item() for _ in range(3)] == [2, 4, 6]
        assert alone.seen == 6
        inference.destroy()

        def infer(strategy):
            own = Counting()
            inference = poptorch.inferenceModel(own, new_options(strategy, 2))
            x = torch.tensor([1.0, 5.0])[list(strategy.local_replicas)]
            found = [inference(x).tolist() for _ in range(2)]
            assert own.seen == 0
            inference.destroy()
            return found

        assert on_instances(1, 2, infer) == [[[1, 5], [2, 10]]]
        assert on_instances(2, 2, infer) == [[[1], [2]], [[5], [10]]]

    def test_inference_between_updates_reads_the_attributes_of_each_replica(self, on_instances):
        class Largest(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(1, 1)
                self.part.largest = 0.0

            def forward(self, x, y=None):
                if y is not None:
                    self.part.largest = max(self.part.largest, float(x.max()))
                found = self.part(x) * self.part.largest
                return found if y is None else F.mse_loss(found, y)

        first = Largest()

        def infer(strategy):
            own = copy.deepcopy(first)
            options = new_options(strategy, 2)
            training, inference = poptorch.trainingModel(own, options), poptorch.inferenceModel(own, options)
            x = torch.tensor([[1.0], [5.0]])[list(strategy.local_replicas)]
            found = []
            for number in range(2):
                training(x * (number + 1), x)
                found.append(inference(x))
            return torch.stack(found, 1)

        expected = on_instances(1, 2, infer)[0]
        assert torch.equal(torch.cat(on_instances(2, 2, infer)), expected)

    def test_one_micro_batch_takes_tensors_without_axes(self):
        assert poptorch.inferenceModel(Noise())(torch.tensor(3.0)) > 3

    def test_inference_refuses_gradient_accumulation(self, model):
        with pytest.raises(StrategyError, match=r"give it options.clone\(\)"):
            poptorch.inferenceModel(model, new_options(accumulation=2))

    def test_inference_off_the_cpu_is_refused(self, model):
        with pytest.raises(StrategyError, match=r"first\.weight is on meta, .* module.cpu\(\)"):
            poptorch.inferenceModel(copy.deepcopy(model).to("meta"))


@pytest.mark.parametrize("mode", list(poptorch.DataLoaderMode))
def test_a_resumed_program_reads_the_order_of_its_epoch(on_instances, mode):
    """An instance that has looked at a batch reads the same order as the others then."""

    def program(strategy):
        def new():
            return poptorch.DataLoader(new_options(strategy), torch.arange(12), batch_size=2, shuffle=True, mode=mode)

        whole, resumed = new(), new()
        epochs = [torch.cat(list(whole)).tolist() for _ in range(3)]
        for _ in range(strategy.instance_index):
            next(iter(resumed))
        resumed.set_epoch(1)
        return epochs, [torch.cat(list(resumed)).tolist() for _ in range(2)]

    for epochs, rest in on_instances(2, 2, program):
        assert rest == epochs[1:] != epochs[:2]


class TestDataLoader:
    def test_a_loader_gives_each_element_once(self, on_instances):
        def read(strategy):
            options = new_options(strategy, 4, 2, 1)
            loader = poptorch.DataLoader(options, torch.arange(43), batch_size=2, shuffle=True)
            assert len(loader) == 2
            return [batch.tolist() for batch in loader], loader.combinedBatchSize

        for count in (1, 2, 4):
            found = on_instances(count, 4, read)
            assert {size for _, size in found} == {16 // count}
            seen = [number for batches, _ in found for batch in batches for number in batch]
            assert len(set(seen)) == len(seen) == 32

    def test_shuffles_every_epoch_in_another_way_and_the_same_for_the_same_seed(self):
        def read(seed):
            options = new_options().randomSeed(seed)
            loader = poptorch.DataLoader(options, torch.arange(9), batch_size=9, shuffle=True)
            return [batch.tolist() for _ in range(2) for batch in loader]

        assert read(1) == read(1) != read(2)
        assert read(1)[0] != read(1)[1]

    @pytest.mark.parametrize("mode", poptorch.DataLoaderMode)
    def test_every_mode_gives_the_same_batches(self, mode):
        loader = poptorch.DataLoader(new_options(), torch.arange(7), batch_size=2, mode=mode)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]

    def test_an_accessor_reads_ahead(self):
        loader = poptorch.DataLoader(new_options(), torch.arange(7), batch_size=2)
        accessor = poptorch.AsynchronousDataAccessor(loader, buffer_size=2, load_indefinitely=True)
        assert len(accessor) == 3
        for _ in range(2):
            assert [batch.tolist() for batch in accessor] == [[0, 1], [2, 3], [4, 5]]
        accessor.terminate()

    def test_one_instance_keeps_the_remainder_and_several_refuse_it(self, on_instances):
        loader = poptorch.DataLoader(new_options(), torch.arange(5), batch_size=2, drop_last=False)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
        assert len(loader) == 3

        def make(strategy):
            with pytest.raises(StrategyError, match="use drop_last=True"):
                poptorch.DataLoader(new_options(strategy, 2), torch.arange(5), batch_size=2, drop_last=False)

        on_instances(2, 2, make)

    def test_streams_are_dealt_out_to_instances(self, on_instances):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(11))

        def read(strategy):
            loader = poptorch.DataLoader(new_options(strategy, 2, 2), Stream(), batch_size=2)
            return [batch.tolist() for batch in loader]

        assert on_instances(1, 2, read) == [[[0, 1, 2, 3, 4, 5, 6, 7]]]
        assert on_instances(2, 2, read) == [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]


class TestOptions:
    def test_repr_shows_the_options_that_are_set(self):
        options = new_options(iterations=10, accumulation=4)
        options.randomSeed(3)
        assert "deviceIterations=10" in repr(options)
        assert "Training={'gradientAccumulation': 4}" in repr(options)

    def test_options_freeze_once_a_model_is_made_and_clones_stay_mutable(self, model):
        options = new_options(accumulation=2)
        poptorch.trainingModel(copy.deepcopy(model), options)
        with pytest.raises(StrategyError, match=r"Options\.deviceIterations is set after a model"):
            options.deviceIterations(2)
        with pytest.raises(StrategyError, match=r"Options\.Training\.gradientAccumulation is set after a model"):
            options.Training.gradientAccumulation(1)
        clone = options.clone()
        clone.Training.gradientAccumulation(1)
        assert options.Training.gradient_accumulation == 2
        assert clone.strategy is options.strategy

    def test_copies_are_mutable_and_have_the_same_replicas(self):
        """With other replicas, the copy of an instance's options would train on that instance alone."""
        options = new_options(iterations=3)
        strategy = options.strategy
        options._freeze()
        for copied in (copy.copy(options), copy.deepcopy(options)):
            assert copied.strategy is strategy
            assert copied.deviceIterations(4).device_iterations == 4
        assert options.device_iterations == 3

    @pytest.mark.complete
    def test_options_saved_in_a_job_take_the_strategy_of_the_reading_job(self, in_new_process):
        assert in_new_process(SAVED_OPTIONS) == "PopDistStrategy 1 1\n"

    def test_assigning_to_a_method_of_options_is_refused(self):
        with pytest.raises(
            AttributeError, match=r"deviceIterations is a method, .* write .deviceIterations\(3\) instead"
        ):
            Options().deviceIterations = 3
        with pytest.raises(TypeError, match="the options are a str"):
            poptorch.inferenceModel(Classifier(), "options")

    def test_options_that_poprun_decides_are_refused_in_a_job(self, in_new_process):
        said = in_new_process(REFUSED_BY_A_JOB).splitlines()
        assert len(said) == 2 * 5
        assert all(
            re.match(r"Cannot call `(\S+)` with popdist.poptorch.Options: poprun has decided", one) for one in said
        )
        calls = [one.split("`")[1] for one in said[:5]]
        assert calls == ["useIpuId", "replicationFactor", *(f"Distributed.{name}" for name in DISTRIBUTED)]

    def test_floating_point_exceptions_find_gradients_that_are_not_finite(self, model):
        options = Options()
        options.Precision.enableFloatingPointExceptions(True)
        own = copy.deepcopy(model)
        with pytest.raises(NonFiniteGradientError):
            poptorch.trainingModel(own, options)(data()["x"] * torch.nan, data()["y"])


class TestAnchors:
    def training(self, model, mode=None, period=None):
        options = new_options(iterations=4, accumulation=2)
        options.anchorTensor("gradient", "Gradient___last.bias", mode, period)
        options.anchorTensor("bias", "UpdatedVar___last.bias")
        own = copy.deepcopy(model)
        return poptorch.trainingModel(own, options, poptorch.optim.SGD(own.parameters(), lr=0.1))

    def expected(self, model):
        """Return the gradients of all updates."""
        own = copy.deepcopy(model)
        optimizer, found = torch.optim.SGD(own.parameters(), 0.1), []
        for x, y in zip(data()["x"][:16].split(4), data()["y"][:16].split(4), strict=True):
            plainly(own, optimizer, (x, y), 1, 2)
            found.append(own.last.bias.grad.clone())
        return torch.stack(found), own.last.bias.detach()

    @pytest.mark.parametrize(
        ("mode", "period", "pick"),
        [
            (None, None, lambda seen: seen[-1]),
            (poptorch.OutputMode.All, None, lambda seen: seen),
            (poptorch.OutputMode.EveryN, 2, lambda seen: seen[1::2]),
            (poptorch.OutputMode.Sum, None, lambda seen: seen.sum(0)),
        ],
    )
    def test_anchors_show_values_after_updates(self, mode, period, pick, model):
        training = self.training(model, mode, period)
        training(data()["x"][:16], data()["y"][:16])
        gradients, bias = self.expected(model)
        assert torch.equal(training.getAnchoredTensor("gradient"), pick(gradients))
        assert torch.equal(training.getAnchoredTensor("bias"), bias)
        assert "Gradient___last.bias" in training.getTensorNames()

    def test_unknown_or_unseen_anchors_are_refused(self, model):
        training = self.training(model)
        with pytest.raises(StrategyError, match="no value of 'gradient' was recorded"):
            training.getAnchoredTensor("gradient")
        with pytest.raises(StrategyError, match=r"no tensor 'bias' to anchor; .*Gradient___first\.weight"):
            poptorch.trainingModel(copy.deepcopy(model), new_options().anchorTensor("b", "bias"))
        options = new_options().anchorTensor("b", "Gradient___last.bias")
        options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useReplicatedTensorSharding())
        with pytest.raises(StrategyError, match="anchor UpdatedVar___last.bias, or do not shard"):
            poptorch.trainingModel(copy.deepcopy(model), options)


class TestRandomState:
    def test_random_state_of_an_inference_can_be_restored(self):
        inference = poptorch.inferenceModel(Noise(), new_options().randomSeed(5))
        ones = torch.ones(4, 8)
        inference(ones)
        state = inference.rng_state
        assert state == [5, 1]
        second, third = inference(ones), inference(ones)
        assert not torch.equal(second, third)
        inference.rng_state = state
        assert torch.equal(inference(ones), second)
        inference.destroy()

    def test_random_state_of_a_training_is_the_seed_and_the_number_of_updates(self, model):
        training = poptorch.trainingModel(copy.deepcopy(model), new_options(iterations=2).randomSeed(5))
        training(data()["x"][:8], data()["y"][:8])
        assert training.rng_state == [5, 2]
        training.rng_state = [5, 2]
        with pytest.raises(StrategyError, match=r"has made 2 updates, but the state is from after 3; .*Checkpoints"):
            training.rng_state = [5, 3]
        with pytest.raises(StrategyError, match=r"the model has the seed 5, .* options.randomSeed\(6\)"):
            training.rng_state = [6, 2]


def test_operators_without_an_effect_return_their_arguments(capsys):
    x = torch.arange(3.0)
    assert poptorch.nop(x) is x
    assert poptorch.set_available_memory(x, 0.1) is x
    assert poptorch.recomputationCheckpoint(x) is x
    assert poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop) is x
    assert poptorch.set_overlap_for_output(x, poptorch.OverlapMode.NoOverlap) is x
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert capsys.readouterr().out == "x: tensor([0., 1., 2.])\n"
    assert poptorch.for_loop(3, lambda y: y * 2, [x])[0].tolist() == [0, 8, 16]
    assert poptorch.for_loop(2, lambda y: y + 1, [np.arange(2)])[0].tolist() == [2, 3]  # one value: no sequence
    assert poptorch.cond(torch.tensor(False), lambda y: y, [x], lambda y: y + 1, [x])[0] == 1
    with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Serial).cycleBackOff(0.1):
        assert poptorch.CPU(lambda y: y + 1, "one more")(x)[0] == 1
    assert not poptorch.isRunningOnIpu()
    assert not poptorch.ipuHardwareIsAvailable()


def test_public_names_are_described():
    assert list(poptorch.__all__) == sorted(poptorch.__all__)
    for name in poptorch.__all__:
        assert getattr(poptorch, name).__doc__, name
