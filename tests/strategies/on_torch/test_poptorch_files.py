"""Files that PopTorch's interface reads: they set options and give models, and run no code."""

from __future__ import annotations

import pytest

import strategies.torch.poptorch as poptorch


@pytest.fixture
def was_run(tmp_path):
    return tmp_path / "was run"


def loaded(tmp_path, text):
    file = tmp_path / "options"
    file.write_text(text)
    return poptorch.Options().loadFromFile(file)


class TestOptionsInAFile:
    @pytest.mark.parametrize(
        "line",
        [
            "deviceIterations(__import__('pathlib').Path({path!r}).touch() or 1)",
            "deviceIterations(open({path!r}, 'w').write('1'))",
            "__init__.__globals__['__builtins__']['open']({path!r}, 'w')",
            "clone().__class__.__init__.__globals__['os'].system('touch {path}')",
            "modelName([open({path!r}, 'w') for _ in '1'][0].name)",
            "modelName((lambda: open({path!r}, 'w'))().name)",
            "modelName(f'{{open({path!r}, \"w\")}}')",
            "setExecutionStrategy(poptorch.load({path!r}))",
            "setExecutionStrategy(poptorch.Stage.__init__.__globals__)",
            "setExecutionStrategy(poptorch.enums.Enum('x', {path!r}))",
            "modelName(torch.hub.load({path!r}))",
            "_set('deviceIterations', 1)",
            "deviceIterations(*[1])",
            "deviceIterations(**{{'device_iterations': 1}})",
            "deviceIterations",
            "deviceIterations(1) or deviceIterations(2)",
            "loadFromFile({path!r})",
            "deviceIterations(" + "(" * 3000 + "1" + ")" * 3000 + ")",
        ],
    )
    def test_run_nothing(self, line, tmp_path, was_run):
        with pytest.raises(poptorch.ConfigFileError, match="line 1 of .*; write it as in a program"):
            loaded(tmp_path, line.format(path=str(was_run)) if "{" in line else line)
        assert not was_run.exists()

    def test_may_be_all_that_a_program_writes(self, tmp_path):
        options = loaded(
            tmp_path,
            "replicationFactor(2)\n"
            "outputMode(poptorch.OutputMode.EveryN, 2)\n"
            "setAvailableMemoryProportion({'IPU0': 0.5, 'IPU1': -0.25})\n"
            "Precision.setPartialsType(torch.float16)\n"
            "_Popart.set('defaultPrefetchBufferingDepth', 4)\n"
            "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings()"
            ".useOnChipStorage(False).useReplicatedTensorSharding(use=True))\n"
            "setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage('B1').ipu(0), ['B2', 'B3']))\n"
            "Training.gradientAccumulation(4).setAutomaticLossScaling(True)\n",
        )
        assert (options.replication_factor, options.output_every, options._Popart.buffers) == (2, 2, 4)
        assert options.TensorLocations.shards_optimizer
        assert repr(options.execution_strategy) == "PipelinedExecution(Stage('B1').ipu(0), Stage('B2', 'B3'))"
        assert (options.Training.gradient_accumulation, options.Training.automatic_loss_scaling) == (4, True)


class TestOptionsInJson:
    def test_are_set(self):
        options = poptorch.Options().from_json(
            '{"Training.gradientAccumulation": 4, "outputMode": "OutputMode.All", "_Popart.set": ["x", 1], '
            '"modelName": "resnet.50"}'
        )
        assert options.Training.gradient_accumulation == 4
        assert options.output_mode is poptorch.OutputMode.All
        assert options.toDict()["modelName"] == "resnet.50"

    @pytest.mark.parametrize(
        "string",
        [
            '{"__class__": 1}',
            '{"Training.__init__.__globals__.get": "x"}',
            "[1]",
            "{",
            '{"loadFromFile": "x"}',
            "[" * 5000,
        ],
    )
    def test_are_nothing_else(self, string):
        with pytest.raises(poptorch.ConfigFileError, match="is no JSON of options: "):
            poptorch.Options().from_json(string)
