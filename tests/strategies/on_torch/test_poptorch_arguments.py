"""Arguments of PopTorch programs: taken in PopTorch's order and by its names; misspelt ones are refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from poptorch_modules import Line, new_options, rows
from torch import nn

import strategies.torch.poptorch as poptorch
from strategies import StrategyError

Running, Post = poptorch.MeanReductionStrategy.Running, poptorch.MeanReductionStrategy.Post


@pytest.fixture
def model():
    torch.manual_seed(4)
    return Line()


@dataclass
class Packed:
    inside: torch.Tensor


def trained(model, options, optimizer=None):
    """Return the module after a call with four rows for each of its micro-batches."""
    own = copy.deepcopy(model)
    training = poptorch.trainingModel(own, options, (optimizer or descent)(own.parameters()))
    training(*rows(4 * options.device_iterations * options.Training.gradient_accumulation))
    training.destroy()
    return own


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class TestMeans:
    def test_running_means_are_updated_by_each_micro_batch(self, model):
        """Each micro-batch divides by the number so far, which rounds differently from a single division."""
        options = new_options(accumulation=3)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(Running)
        plain, (x, y) = copy.deepcopy(model), rows(12)
        for number, (part, expected) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
            for parameter in plain.parameters():
                if number:
                    parameter.grad *= number / (number + 1)
            (plain(part, expected) / (number + 1)).backward()
        descent(plain.parameters()).step()
        own = trained(model, options)
        assert torch.equal(own.layer.weight, plain.layer.weight)
        torch.testing.assert_close(own.layer.weight, trained(model, new_options(accumulation=3)).layer.weight)

    def test_the_loss_is_reported_as_a_mean_even_if_gradients_are_summed(self, model):
        found = []
        for kind in (poptorch.ReductionType.Sum, poptorch.ReductionType.Mean):
            options = new_options(replicas=2, accumulation=3)
            options.Training.accumulationAndReplicationReductionType(kind)
            own = copy.deepcopy(model)
            training = poptorch.trainingModel(own, options, descent(own.parameters()))
            training(*rows(12))
            found.append((training.trainer._loop.metrics.means.tolist(), own.layer.bias.grad.item()))
        (loss_of_sum, of_sum), (loss_of_mean, of_mean) = found
        assert loss_of_sum == loss_of_mean
        assert of_sum == pytest.approx(6 * of_mean)

    def test_sums_ignore_the_strategy_of_means(self, model):
        options = new_options(accumulation=3).setExecutionStrategy(poptorch.ShardedExecution("B1"))
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
        found = []
        for kind in (Running, Post):
            options = options.clone()
            options.Training.setMeanAccumulationAndReplicationReductionStrategy(kind)
            found.append(trained(model, options).layer.weight)
        assert torch.equal(*found)


class TestOptimizers:
    def test_lamb_takes_arguments_in_the_order_of_poptorch(self, model):
        numbers = (0.01, (0.8, 0.9), 1e-6, 0.1, False, 4.0, 2.0)
        optimizer = poptorch.optim.LAMB(model.parameters(), *numbers)
        names = ("lr", "betas", "eps", "weight_decay", "bias_correction", "loss_scaling", "max_weight_norm")
        group = {**optimizer.param_groups[0], "loss_scaling": optimizer.loss_scaling}
        assert tuple(group[name] for name in names) == numbers

    @pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "LAMB"])
    def test_none_means_the_default(self, kind, model):
        said, unsaid = (
            getattr(poptorch.optim, kind)(model.parameters(), **arguments)
            for arguments in ({}, {"lr": None, "weight_decay": None, "loss_scaling": None, "eps": None})
        )
        assert said.param_groups[0].keys() == unsaid.param_groups[0].keys()
        assert [said.param_groups[0][name] for name in ("lr", "weight_decay", "eps")] == [
            unsaid.param_groups[0][name] for name in ("lr", "weight_decay", "eps")
        ]

    def test_defaults_are_the_numbers_of_poptorch(self, model):
        group = poptorch.optim.LAMB(model.parameters()).param_groups[0]
        assert (group["lr"], group["weight_decay"], group["max_weight_norm"]) == (1e-3, 1e-2, 65500.0)
        assert poptorch.optim.AdamW(model.parameters(), bias_correction=None).param_groups[0]["weight_decay"] == 1e-2

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_rmsprop_has_the_variant_of_tensorflow(self, momentum, centered, weight_decay):
        value, gradients = np.array([3.0, -1.0]), np.random.default_rng(3).standard_normal((4, 2))
        parameter = torch.nn.Parameter(torch.tensor(value))
        numbers = {"lr": 0.1, "alpha": 0.9, "eps": 0.01, "momentum": momentum, "centered": centered}
        own = poptorch.optim.RMSprop([parameter], **numbers, weight_decay=weight_decay, use_tf_variant=True)
        squares, means, moved = np.ones(2), np.zeros(2), np.zeros(2)
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient)
            own.step()
            gradient = gradient + weight_decay * value
            squares = 0.9 * squares + 0.1 * gradient**2
            means = 0.9 * means + 0.1 * gradient
            moved = momentum * moved + 0.1 * gradient / np.sqrt(squares + 0.01 - centered * means**2)
            value = value - moved
            np.testing.assert_allclose(parameter.detach(), value, rtol=1e-12)

    def test_unknown_arguments_are_refused(self, model):
        with pytest.raises(TypeError, match="LAMB has no argument lrr; it has lr, betas"):
            poptorch.optim.LAMB(model.parameters(), lrr=0.1)

    def test_optimizers_know_their_variable_attributes(self, model):
        attributes = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).variable_attrs
        assert [attributes.isConstant(name) for name in ("lr", "momentum", "loss_scaling")] == [False, False, True]
        attributes.markAsConstant("momentum")
        attributes.markAsVariable("loss_scaling")
        assert [attributes.isConstant(name) for name in ("momentum", "loss_scaling")] == [True, False]
        with pytest.raises(ValueError, match=r"no attribute 'beta'; it has lr, momentum, .*loss_scaling"):
            attributes.markAsConstant("beta")

    def test_automatic_loss_scaling_takes_its_initial_scale(self, model):
        options = new_options()
        options.Training.setAutomaticLossScaling(True)
        training = poptorch.trainingModel(
            model, options, poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=64.0)
        )
        assert str(training.trainer.state.loss_scale) == "64"

    def test_excluded_options_are_named_as_in_programs(self, model):
        checked = new_options()
        checked.Precision.enableFloatingPointExceptions(True)
        scaled = poptorch.optim.SGD(model.parameters(), 0.1, loss_scaling=8.0)
        with pytest.raises(StrategyError, match=r"enableFloatingPointExceptions .* loss_scaling=1\.0"):
            poptorch.trainingModel(model, checked, scaled)
        training = poptorch.trainingModel(model, checked, poptorch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(StrategyError, match=r"enableFloatingPointExceptions .* loss_scaling=1\.0"):
            training.setOptimizer(scaled)


class TestOptions:
    @pytest.mark.parametrize("options", [poptorch.Options(), poptorch.Options().Training])
    def test_misspelt_options_are_refused(self, options):
        with pytest.raises(AttributeError, match="gradient_acumulation is not an option; .* Set options by methods"):
            options.gradient_acumulation = 4

    def test_derived_options_cannot_be_assigned_once_a_model_is_made(self, model):
        options = new_options()
        poptorch.trainingModel(model, options)
        with pytest.raises(AttributeError, match="device_iterations follows from the options"):
            options.device_iterations = 4
        assert options.device_iterations == 1

    def test_random_seed_applies_to_modules_made_afterwards(self):
        made = []
        for _ in range(2):
            torch.rand(1)
            poptorch.Options().randomSeed(7)
            made.append(nn.Linear(3, 1).weight)
        assert torch.equal(*made)

    def test_about_how_a_graph_is_compiled_are_taken(self):
        options = poptorch.Options().sourceLocationExcludes(["a"]).disableModuleNamescope().maxRepeatLogs(None)
        options.updatableNamedBuffers(["mean"]).appendToLocationExcludes("models")._Popart.setEngineOptions({})
        options.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
        options.inputReplicaGrouping(1, poptorch.CommGroupType.Consecutive)
        assert "disableModuleNamescope" in repr(options)

    def test_older_names_of_options_work(self):
        reduction = new_options().Training.accumulationReductionType(poptorch.ReductionType.Sum).reduction
        assert reduction is poptorch.ReductionType.Sum

    def test_options_that_would_change_the_result_are_refused(self):
        with pytest.raises(StrategyError, match="FloatDowncastToHalf would do the opposite"):
            poptorch.Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.FloatDowncastToHalf)
        with pytest.raises(StrategyError, match="groups of 2 replicas should get the same rows"):
            new_options(replicas=2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
        with pytest.raises(ValueError, match="with the same rows"):
            new_options(replicas=2).inputReplicaGrouping(1, poptorch.CommGroupType.All)

    def test_a_truth_value_as_location_is_refused(self):
        """A truth value would shard nothing without a message."""
        with pytest.raises(TypeError, match="the location is True; give poptorch.TensorLocationSettings"):
            poptorch.Options().TensorLocations.setOptimizerLocation(True)

    def test_options_come_first(self):
        with pytest.raises(
            TypeError, match=r"the options are a list; use poptorch\.DataLoader\(poptorch\.Options\(\), dataset"
        ):
            poptorch.DataLoader([1], poptorch.Options())


class TestAnchors:
    def anchored(self, model, options, *anchor):
        options.anchorTensor("bias", "layer.bias", *anchor)
        training = poptorch.trainingModel(model, options)
        training(*rows(4 * options.device_iterations * options.Training.gradient_accumulation))
        return training.getAnchoredTensor("bias")

    @pytest.mark.parametrize(
        ("mode", "period", "updates"),
        [
            (poptorch.OutputMode.Final, None, None),
            (poptorch.OutputMode.All, None, 4),
            (poptorch.OutputMode.EveryN, 4, 2),
            (poptorch.OutputMode.EveryN, 1, 4),
        ],
    )
    def test_anchors_follow_the_output_mode_by_default(self, mode, period, updates, model):
        """The period of outputs counts micro-batches, and there are two of them for each update."""
        options = new_options(iterations=4, accumulation=2).outputMode(mode, period)
        found = self.anchored(model, options)
        assert found.shape == ((1,) if updates is None else (updates, 1))
        last = found if updates is None else found[-1]
        assert torch.equal(last, model.layer.bias)

    def test_anchors_with_a_period_longer_than_the_call_are_refused(self, model):
        with pytest.raises(
            ValueError, match=r"layer\.bias is anchored with EveryN and n 3, which does not divide 2 updates"
        ):
            self.anchored(model, new_options(iterations=2), poptorch.OutputMode.EveryN, 3)


class TestPhases:
    @pytest.mark.parametrize("kind", [poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution])
    def test_phases_are_given_as_one_list_as_in_the_documentation(self, kind):
        strategy = kind([poptorch.Phase(poptorch.Stage("A"), poptorch.Stage("A2")), poptorch.Phase("B", "B2")])
        strategy.phase(0).ipus(0, 2)
        assert repr(strategy) == f"{kind.__name__}(Stage('A').ipu(0), Stage('A2').ipu(2), Stage('B', 'B2'))"

    def test_phases_are_given_as_names_and_stages(self):
        strategy = poptorch.SerialPhasedExecution("first", poptorch.Stage("second"), ["third", "fourth"])
        assert [stage.blocks for stage in strategy.stages] == [["first"], ["second"], ["third", "fourth"]]

    @pytest.mark.parametrize("stages", [(), (3,), ("A", poptorch.Stage("B")), (poptorch.Phase("A"),)])
    def test_phases_of_other_types_are_refused(self, stages):
        with pytest.raises(TypeError, match="a phase needs stages, or names of blocks"):
            poptorch.Phase(*stages)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(11))


class TestDataLoader:
    def test_the_remainder_of_a_stream_is_refused_without_drop_last(self, on_instances):
        def read(strategy):
            loader = poptorch.DataLoader(new_options(strategy, 2), Stream(), batch_size=2, drop_last=False)
            with pytest.raises(
                StrategyError, match="ends with 3 elements, which do not fill a batch of 4 .* use drop_last=True"
            ):
                list(loader)

        on_instances(2, 2, read)
        loader = poptorch.DataLoader(new_options(), Stream(), batch_size=4, drop_last=False)
        assert [len(batch) for batch in loader] == [4, 4, 3]

    def test_warns_of_workers_that_read_the_same_stream(self, caplog):
        poptorch.DataLoader(new_options(), Stream(), num_workers=2)
        assert "each of 2 workers reads the whole IterableDataset" in caplog.text
        caplog.clear()
        poptorch.DataLoader(new_options(), Stream(), num_workers=2, worker_init_fn=print)
        assert not caplog.text

    @pytest.mark.parametrize("mode", poptorch.DataLoaderMode)
    def test_a_new_epoch_begins_after_one_that_was_left_early(self, mode):
        loader = poptorch.DataLoader(new_options(), torch.arange(64), batch_size=8, shuffle=True, mode=mode)
        first = next(iter(loader))
        assert not torch.equal(next(iter(loader)), first)

    def test_accessor_arguments_are_taken_and_others_refused(self):
        known = {"early_preload": True, "sharing_strategy": poptorch.SharingStrategy.SharedMemory, "buffer_size": 2}
        mode = poptorch.DataLoaderMode.Async
        loader = poptorch.DataLoader(new_options(), torch.arange(4), 2, mode=mode, async_options=known)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        with pytest.raises(TypeError, match="does not take bufer_size; it takes buffer_size, "):
            poptorch.DataLoader(new_options(), torch.arange(4), mode=mode, async_options={"bufer_size": 2})
        with pytest.raises(TypeError, match="does not take load; it takes buffer_size, "):
            poptorch.AsynchronousDataAccessor([1], load=True)
        with pytest.raises(StrategyError, match="rebatched_size is 4, .* let the DataLoader do it"):
            poptorch.AsynchronousDataAccessor([1], rebatched_size=4)


class TestModels:
    def test_a_model_that_is_no_module_is_refused(self):
        with pytest.raises(TypeError, match="the model is a builtin_function_or_method; give a torch.nn.Module"):
            poptorch.inferenceModel(abs)

    @pytest.mark.parametrize("pack", [Packed, lambda tensor: tensor.numpy()])
    def test_outputs_that_cannot_be_concatenated_are_refused(self, pack):
        """Concatenation would lose the rows of all replicas but one."""

        class Packing(nn.Module):
            def forward(self, x):
                return {"found": pack(x)}

        inference = poptorch.inferenceModel(Packing(), new_options(replicas=2))
        with pytest.raises(TypeError, match=r"returns a (Packed|ndarray), .* in tuples, lists or dictionaries"):
            inference(torch.ones(4, 2))
        inference.destroy()


class TestOperators:
    def test_dynamic_slices_and_updates_take_positions_from_tensors(self):
        x, start = torch.arange(8.0, requires_grad=True), torch.tensor([2])
        found = poptorch.dynamic_slice(x, 0, start, 4, 2)
        found.sum().backward()
        assert found.tolist() == [2, 4]
        assert x.grad.tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
        whole = torch.zeros(2, 4)
        assert poptorch.dynamic_update(whole, torch.ones(2, 2), 1, start, 2).tolist() == [[0, 0, 1, 1]] * 2
        assert not whole.any()

    def test_operators_take_their_arguments_by_name(self, capsys):
        x = torch.arange(2.0)
        assert poptorch.cond(torch.tensor(True), then_body=abs, then_inps=[x], else_body=abs, else_inps=[x]) is not x
        poptorch.ipu_print_tensor(x, title="x", digits=3, print_gradient=False)
        assert capsys.readouterr().out.startswith("x: ")
        mode = poptorch.MatMulSerializationMode.ReducingDim
        assert poptorch.serializedMatMul(x, x, mode, factor=2, keep_precision=True) == 1


def test_error_classes_of_devices_can_be_named_in_except():
    """An unknown name in `except` would raise another error that hides the first one."""
    assert issubclass(poptorch.RecoverableError, poptorch.Error)
    assert issubclass(poptorch.UnrecoverableError, poptorch.Error)
