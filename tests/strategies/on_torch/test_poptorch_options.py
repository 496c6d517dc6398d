"""Options and names of PopTorch: each takes effect, or logs the reason why not."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest
import torch
from torch import nn

import strategies.torch.poptorch as poptorch
from strategies import StrategyError
from strategies.compat.poptorch import names
from strategies.compat.poptorch.options import TABLE
from strategies.data.randomness import kept_generators, seed_for


class Line(nn.Module):
    """A linear layer that returns its mean squared error; half of it is computed in 16 bits."""

    def __init__(self, **blocks):
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(3, 4), nn.Linear(4, 1), []

    def forward(self, x):
        with poptorch.Block(), poptorch.autocast():
            hidden = self.first(x)
        self.seen.append(hidden.dtype)
        with poptorch.Block():
            return self.last(hidden.float()).square().mean()


@pytest.fixture
def model():
    torch.manual_seed(4)
    return Line()


class TestOwnAttributes:
    def test_own_attributes_of_options_are_kept_and_copied(self):
        options = poptorch.Options()
        options.use_popdist = True
        assert options.use_popdist
        assert options.clone().use_popdist
        assert pickle.loads(pickle.dumps(options)).use_popdist

    def test_attributes_of_distributed_belong_to_each_options_object(self):
        options = poptorch.Options()
        options.Distributed.use_popdist = True
        assert options.Distributed.use_popdist
        assert options.Distributed is options.Distributed
        for other in (options.clone(), pickle.loads(pickle.dumps(options))):
            assert other.Distributed is other.Distributed
            assert other.Distributed._options is other

    def test_own_attributes_can_be_set_on_frozen_options(self, model):
        options = poptorch.Options()
        poptorch.inferenceModel(model, options)
        options.batches_seen = 3
        assert options.batches_seen == 3

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("deviceIteration", "deviceIterations"),
            ("gradient_accumulation", "Training.gradientAccumulation"),
            ("useIpuMode", "useIpuModel"),
            ("enableStochasticRoundin", "Precision.enableStochasticRounding"),
        ],
    )
    def test_attributes_close_to_an_option_are_refused_with_a_suggestion(self, name, meant):
        with pytest.raises(
            AttributeError, match=rf"Options\.{name} is not an option; did you mean {meant}\(\.\.\.\)\?"
        ):
            setattr(poptorch.Options(), name, 4)

    def test_reading_an_unknown_option_suggests_a_known_one(self):
        with pytest.raises(AttributeError, match="Options.Trainings is not an option; did you mean Training"):
            _ = poptorch.Options().Trainings
        with pytest.raises(
            AttributeError, match="gradientAcumulation is not an option; did you mean gradientAccumulation"
        ):
            poptorch.Options().Training.gradientAcumulation(3)
        with pytest.raises(AttributeError, match=r"Options.zebra is not an option; the documentation \(docs: torch\)"):
            _ = poptorch.Options().zebra


class TestEnvironment:
    def test_environment_variables_set_options(self, tmp_path, monkeypatch):
        monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"Training.gradientAccumulation": 3}')
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
        monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
        options = poptorch.Options()
        assert options.Training.gradient_accumulation == 3
        assert options.toDict()["enableExecutableCaching"] == str(tmp_path)


class TestModes:
    def test_evaluation_mode_in_the_first_call_is_logged(self, model, caplog):
        poptorch.trainingModel(model.eval(), poptorch.Options())(torch.ones(4, 3))
        assert "in evaluation mode at the first call" in caplog.text

    def test_a_changed_mode_of_a_part_is_logged(self, model, caplog):
        training = poptorch.trainingModel(model, poptorch.Options())
        training(torch.ones(4, 3))
        model.first.eval()
        training(torch.ones(4, 3))
        assert "the mode of Linear has changed, but a training model keeps" in caplog.text

    def test_modes_that_the_program_sets_stay(self, model):
        training = poptorch.trainingModel(model, poptorch.Options())
        training(torch.ones(4, 3))
        model.eval()
        training(torch.ones(4, 3))
        assert not model.training
        assert not model.first.training


class TestAutocast:
    @pytest.mark.parametrize(("enabled", "dtype"), [(True, torch.float16), (False, torch.float32)])
    def test_autocast_applies_unless_options_disable_it(self, enabled, dtype, model):
        options = poptorch.Options()
        options.Precision.autocastEnabled(enabled).autocastPolicy(poptorch.autocasting.Policy())
        training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), 0.1))
        training(torch.ones(4, 3))
        of_training = [*model.seen]
        model.seen.clear()
        seen = []
        model.first.register_forward_hook(lambda layer, given, hidden: seen.append(hidden.dtype))
        inference = poptorch.inferenceModel(model, options)
        inference(torch.ones(4, 3))
        assert (of_training, seen) == ([dtype], [dtype])

    def test_autocast_decorates_functions_and_can_be_disabled(self):
        @poptorch.autocast(dtype=torch.bfloat16)
        def product(x):
            with poptorch.autocast(enabled=False):
                inner = x @ x
            return x @ x, inner

        for _ in range(2):
            assert [each.dtype for each in product(torch.ones(2, 2))] == [torch.bfloat16, torch.float32]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

    def test_operator_lists_of_a_policy_are_refused(self):
        precision = poptorch.Options().Precision
        with pytest.raises(StrategyError, match=r"the policy lists operators \(fp16, demote\), .* its own list"):
            precision.autocastPolicy(poptorch.autocasting.Policy(fp16=["matmul"], demote=["add"]))
        with pytest.raises(TypeError, match=r"give poptorch\.autocasting\.Policy\(\), or None"):
            precision.autocastPolicy("fp16")


class TestStages:
    def test_each_block_without_a_device_becomes_a_stage(self, model):
        options = poptorch.Options()
        options.Training.gradientAccumulation(2)
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
        training = poptorch.trainingModel(model, options)
        for _ in range(2):
            training(torch.ones(4, 3))
        assert {span.device for span in training.trace.replicas[0]} == {0, 1}
        training.destroy()

    def test_blocks_without_devices_are_refused_with_the_way_out(self, model):
        options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution())
        options.Training.gradientAccumulation(2)
        with pytest.raises(StrategyError, match=r"PipelinedExecution\(poptorch\.AutoStage\.AutoIncrement\)"):
            poptorch.trainingModel(model, options)(torch.ones(4, 3))


class TestNamesThatWereLeftOut:
    """Names of PopVision, of files of options and of whole models: the error or the log says what to use."""

    @pytest.mark.parametrize(
        ("ask", "way_out"),
        [
            (lambda model: model.save("model"), r"torch\.save, or the training with strategies\.Checkpoints"),
            (lambda model: model.compileAndExport("model", torch.ones(1, 3)), r"save model\.state_dict\(\)"),
            (lambda model: model.getLatency(), r"time\.perf_counter, or start the program with poprun --timeline"),
            (lambda model: model.getPerfCounters(), r"poprun --timeline FILE"),
            (lambda model: poptorch.load("model", edit_opts_fn=print), "load its state_dict"),
            (lambda model: model.options.loadFromFile("options"), "call the options of its lines in the program"),
        ],
    )
    def test_calls_are_refused_with_the_way_out(self, ask, way_out, model):
        with pytest.raises(poptorch.Error, match=way_out):
            ask(poptorch.inferenceModel(model))

    def test_the_log_says_how_to_record_steps(self, monkeypatch, caplog):
        names.log_once.cache_clear()
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true"}')
        poptorch.Options().enableProfiling("reports")
        for what in ("POPLAR_ENGINE_OPTIONS", "Options.enableProfiling"):
            assert f"{what} has no effect here: start the program with poprun --timeline FILE" in caplog.text


class TestJson:
    def test_json_sets_options(self):
        options = poptorch.Options().from_json(
            '{"Training.gradientAccumulation": 4, "outputMode": "OutputMode.All", "_Popart.set": ["x", 1], '
            '"modelName": "resnet.50"}'
        )
        assert options.Training.gradient_accumulation == 4
        assert options.output_mode is poptorch.OutputMode.All
        assert options.toDict()["modelName"] == "resnet.50"

    @pytest.mark.parametrize(
        "string",
        ['{"__class__": 1}', '{"Training.__init__.__globals__.get": "x"}', '{"clone": 1}', "[1]", "{", "[" * 5000],
    )
    def test_other_json_is_refused(self, string):
        with pytest.raises(poptorch.ConfigFileError, match="is not JSON of options: "):
            poptorch.Options().from_json(string)


class TestPrint:
    def test_every_option_is_printed_with_its_value_and_effect(self):
        options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.EveryN, 2).useIpuModel(True)
        options.Training.gradientAccumulation(8)
        options._Popart.set("autoRecomputation", 3)
        printed = str(options).splitlines()
        for group, rows in TABLE.items():
            if not group.startswith(("Popdist", "TensorLocationSettings")):
                assert f"{group}:" in printed
                for name in rows:
                    assert any(line.strip().startswith(f"{name} ") for line in printed), name
        assert "  deviceIterations = 4  # number of updates in a call" in printed
        assert "  outputMode = ('EveryN', 2)  # micro-batches whose outputs a call returns" in printed
        assert "  randomSeed = 0  # seed of random numbers and of shuffling" in printed
        assert "  useIpuModel = True  # no effect: replicas run on the cores of this machine" in printed
        assert "  gradientAccumulation = 8  # number of micro-batches in an update" in printed
        assert "  autoRecomputation = 3" in printed
        assert any(line.startswith("  loadFromFile is refused: ") for line in printed)


class TestCompilers:
    def test_caching_uses_the_cache_of_torch(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
        caplog.set_level(logging.INFO, "strategies.torch.poptorch")
        poptorch.Options().enableExecutableCaching(tmp_path)
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        assert cache_dir() == str(tmp_path)
        assert f"{tmp_path} keeps programs compiled by torch.compile; nothing else is compiled" in caplog.text

    def test_the_buffering_depth_is_the_number_of_batches_made_ahead(self):
        options = poptorch.Options()
        options._Popart.set("defaultPrefetchBufferingDepth", 5)
        loader = poptorch.DataLoader(options, torch.arange(8), mode=poptorch.DataLoaderMode.Async)
        assert loader._buffers == 5
        own = poptorch.DataLoader(options, torch.arange(8), async_options={"buffer_size": 2})
        assert own._buffers == 2
        with pytest.raises(ValueError, match="defaultPrefetchBufferingDepth"):
            poptorch.Options()._Popart.set("defaultPrefetchBufferingDepth", 0)

    def test_popart_options_that_would_change_training_are_refused(self):
        with pytest.raises(StrategyError, match=r"'accumulationFactor', .* use Options.Training"):
            poptorch.Options()._Popart.set("accumulationFactor", 4)

    def test_the_compilation_time_is_zero(self, model):
        assert poptorch.inferenceModel(model).compilationTime().total_seconds() == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: poptorch.Options().enableStableNorm(True),
            r"Options.enableStableNorm has no effect here: PyTorch computes",
        ),
        (
            lambda: poptorch.TensorLocationSettings().useOnChipStorage(True),
            "all tensors are in host memory, as useOnChipStorage(False) asks",
        ),
        (
            lambda: poptorch.Options().Precision.enableStochasticRounding(True),
            "enableStochasticRounding has no effect here: PyTorch rounds to nearest",
        ),
        (
            lambda: poptorch.Options()._Popart.set("autoRecomputation", 3).setPatterns({"TiedGather": True}),
            "Options._Popart.autoRecomputation has no effect here: nothing is compiled",
        ),
        (
            lambda: poptorch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1, velocity_scaling=4.0),
            "velocity_scaling of an optimizer has no effect here: velocities are not scaled",
        ),
    ],
)
def test_options_without_an_effect_are_logged_once(call, said, caplog):
    names.log_once.cache_clear()
    caplog.set_level(logging.INFO, "strategies.torch.poptorch")
    call()
    call()
    assert caplog.text.count(said) == 1


class TestHardware:
    def test_hardware_can_be_claimed_by_the_environment(self, monkeypatch):
        assert (poptorch.ipuHardwareVersion(), poptorch.ipuHardwareIsAvailable()) == (0, False)
        monkeypatch.setenv("POPTORCH_IPU_HARDWARE_VERSION", "21")
        assert (poptorch.ipuHardwareVersion(), poptorch.ipuHardwareIsAvailable(4)) == (21, True)
        monkeypatch.setenv("POPTORCH_IPU_HARDWARE_VERSION", "mk2")
        with pytest.raises(ValueError, match="is 'mk2'; set it to a version of IPUs"):
            poptorch.ipuHardwareVersion()


class TestNames:
    @pytest.mark.parametrize(
        ("name", "way_out"),
        [
            ("trainingmodel", "did you mean trainingModel?"),
            ("experimental", "inferenceModel"),
            ("profiling", "torch.profiler.record_function"),
            ("zebra", "docs: torch"),
        ],
    )
    def test_unknown_names_are_refused_with_the_way_out(self, name, way_out):
        with pytest.raises(AttributeError, match=f"poptorch has no {name}: .*{way_out}"):
            getattr(poptorch, name)

    @pytest.mark.parametrize(
        ("name", "library"),
        [
            ("custom_op", "torch.autograd.Function"),
            ("ctc_beam_search_decoder", "torchaudio.models.decoder.ctc_decoder"),
            ("fps", "torch_cluster.fps"),
            ("nearest", "torch_cluster.nearest"),
        ],
    )
    def test_unsupported_functions_name_a_library_that_has_them(self, name, library):
        function = getattr(poptorch, name)
        assert (function.__name__, function.__qualname__) == (name, name)
        with pytest.raises(StrategyError, match=library):
            function(torch.ones(1), 2, named=3)

    def test_phased_strategies_have_separate_methods(self):
        parallel, serial = poptorch.ParallelPhasedExecution("B1"), poptorch.SerialPhasedExecution("B1")
        assert parallel.useSeparateBackwardPhase().sendTensorsOffChipAfterFwd(False) is parallel
        assert serial.useSeparateBackwardPhase().setTensorsLiveness(poptorch.Liveness.AlwaysLive) is serial
        with pytest.raises(AttributeError, match="ParallelPhasedExecution has no setTensorsLiveness"):
            parallel.setTensorsLiveness(poptorch.Liveness.AlwaysLive)
        with pytest.raises(AttributeError, match="SerialPhasedExecution has no sendTensorsOffChipAfterFwd"):
            serial.sendTensorsOffChipAfterFwd()

    def test_blocks_without_a_stage_are_refused(self):
        with pytest.raises(StrategyError, match=r"no stage has the block \[1, 2\]; the strategy lists the blocks 'B1'"):
            poptorch.PipelinedExecution("B1").stage([1, 2])

    def test_older_names_take_the_same_arguments(self):
        options = poptorch.Options().anchorMode(poptorch.AnchorMode.EveryN, 2)
        assert (options.output_mode, options.output_every) == (poptorch.OutputMode.EveryN, 2)

    def test_dir_lists_names_without_an_effect(self):
        options, model = poptorch.Options(), poptorch.inferenceModel(nn.Linear(1, 1))
        assert {"useIpuModel", "deviceIterations"} <= set(dir(options))
        assert {"copyWeightsToHost", "setOptimizer"} <= set(dir(model))

    def test_functions_without_an_effect_take_the_arguments_of_poptorch(self):
        options = poptorch.Options()
        assert options.useOfflineIpuTarget(ipu_version=21).useIpuModel(True) is options
        with pytest.raises(TypeError, match=r"Options\.useIpuModel\(\) takes one argument, 'use_model'"):
            options.useIpuModel()
        with pytest.raises(AttributeError, match="MultiConv has no planTypes; it has availableMemoryProp"):
            poptorch.MultiConv().planTypes(1)

    def test_the_version_is_that_of_the_described_poptorch(self):
        assert poptorch.__version__.split(".")[0] == "3"


class TestSeeds:
    def test_a_seed_for_pytorch_waits_until_a_thread_has_read_its_element(self):
        with kept_generators():  # as a thread that reads ahead
            seed_for(7, 0, 0)
            seeding = threading.Thread(target=poptorch.Options().randomSeed, args=(3,))
            seeding.start()
            seeding.join(0.2)
            drawn = torch.rand(2)
        seeding.join()
        assert torch.initial_seed() == 3
        seed_for(7, 0, 0)
        assert torch.equal(torch.rand(2), drawn)


class TestSamplers:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.utils.data.WeightedRandomSampler([1.0, 3.0] * 8, 24),
            lambda: torch.utils.data.SubsetRandomSampler(range(0, 32, 2)),
            lambda: torch.utils.data.RandomSampler(range(16)),
        ],
    )
    def test_samplers_give_the_same_order_on_all_instances(self, make, on_instances):
        def read(strategy):
            options = poptorch.Options().replicationFactor(2).randomSeed(3)
            options._strategy = strategy
            loader = poptorch.DataLoader(options, torch.arange(32), batch_size=2, sampler=make())
            return [batch.tolist() for _ in range(2) for batch in loader], len(loader)

        [(alone, length)] = on_instances(1, 2, read)
        pair = on_instances(2, 2, read)
        assert [first + second for first, second in zip(pair[0][0], pair[1][0], strict=True)] == alone
        assert len(alone) == 2 * length
        assert alone[:length] != alone[length:]

    def test_samplers_of_the_program_need_one_instance_or_own_partitioning(self, on_instances):
        class Backwards(torch.utils.data.Sampler):
            def __len__(self):
                return 8

            def __iter__(self):
                return iter(range(7, -1, -1))

        loader = poptorch.DataLoader(poptorch.Options(), torch.arange(8), batch_size=4, sampler=Backwards())
        assert [batch.tolist() for batch in loader] == [[7, 6, 5, 4], [3, 2, 1, 0]]

        def make(strategy):
            options = poptorch.Options().replicationFactor(2)
            options._strategy = strategy
            with pytest.raises(
                StrategyError, match="the sampler is a Backwards, .* auto_distributed_partitioning=False"
            ):
                poptorch.DataLoader(options, torch.arange(8), sampler=Backwards())
            part = {"sampler": Backwards(), "auto_distributed_partitioning": False}
            return [batch.tolist() for batch in poptorch.DataLoader(options, torch.arange(8), 4, **part)]

        assert on_instances(2, 2, make) == [[[7, 6, 5, 4], [3, 2, 1, 0]]] * 2

    def test_samplers_are_refused_with_another_source_of_order(self):
        sampler = torch.utils.data.SequentialSampler(range(8))
        with pytest.raises(StrategyError, match="shuffle=True asks for another"):
            poptorch.DataLoader(poptorch.Options(), torch.arange(8), shuffle=True, sampler=sampler)
        with pytest.raises(TypeError, match="has no length"):
            poptorch.DataLoader(poptorch.Options(), torch.arange(8), sampler=iter([1]))


class TestData:
    def test_data_that_fill_no_batch_are_an_error_of_poptorch(self):
        for kind in (poptorch.Error, ValueError):
            with pytest.raises(kind, match="has 3 elements, but a batch of all replicas takes 4"):
                poptorch.DataLoader(poptorch.Options(), torch.arange(3), batch_size=4)

    def test_a_generator_for_shuffling_is_ignored_and_logged(self, caplog):
        generator = torch.Generator()
        poptorch.DataLoader(poptorch.Options(), torch.arange(8), 4, shuffle=True, generator=generator)
        assert "follows options.randomSeed and ignores the generator" in caplog.text

    def test_the_collate_function_gets_whole_batches_of_a_stream(self):
        """The function gets the elements of a batch, not each element alone."""

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(8))

        loader = poptorch.DataLoader(poptorch.Options(), Stream(), batch_size=4, collate_fn=sum)
        assert list(loader) == [6, 22]
