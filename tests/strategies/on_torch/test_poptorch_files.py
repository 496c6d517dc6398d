"""Files that PopTorch's interface reads: they set options and give models, and run no code."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    def test_a_file_runs_no_code(self, line, tmp_path, was_run):
        with pytest.raises(poptorch.ConfigFileError, match="line 1 of .*; write it as in a program"):
            loaded(tmp_path, line.format(path=str(was_run)) if "{" in line else line)
        assert not was_run.exists()

    def test_a_file_sets_every_kind_of_option(self, tmp_path):
        options = loaded(
            tmp_path,
            "# of a training\n\nreplicationFactor(2)\n"
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

    def test_an_unknown_option_is_refused_with_its_line(self, tmp_path):
        with pytest.raises(
            poptorch.ConfigFileError, match=r"line 2 of .* is 'deviceIteration\(4\)': .* without 'options"
        ):
            loaded(tmp_path, "deviceIterations(4)\ndeviceIteration(4)\n")


class TestOptionsInJson:
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
        [
            '{"__class__": 1}',
            '{"Training.__init__.__globals__.get": "x"}',
            "[1]",
            "{",
            '{"loadFromFile": "x"}',
            "[" * 5000,
        ],
    )
    def test_other_json_is_refused(self, string):
        with pytest.raises(poptorch.ConfigFileError, match="is not JSON of options: "):
            poptorch.Options().from_json(string)


class Activated(nn.Module):
    """A module that has a PyTorch function, blocks, a group of replicas, and an own object as attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([poptorch.BeginBlock(nn.Linear(3, 3), "B1", ipu_id=0), nn.Linear(3, 1)])
        self.activation, self.shape, self.kinds = F.gelu, torch.Size([3]), {"norm": nn.LayerNorm}
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.layers[1](self.activation(self.layers[0](x))).square().mean()


class Opens:
    """Code that a stranger's file would run if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def saved(folder, **others):
    torch.manual_seed(0)
    module = Activated()
    options = poptorch.Options().deviceIterations(2).anchorTensor("w", "layers.1.weight")
    options.Precision.setPartialsType(torch.float16)
    options.own_name = "mine"
    optimizer = poptorch.optim.AdamW(
        module.parameters(), lr=0.1, bias_correction=False, loss_scaling=8.0, max_grad_norm=0.5
    )
    training = poptorch.trainingModel(module, options, optimizer)
    training(torch.ones(4, 3))
    training.save(folder / "model", **others)
    return training


class TestModelsInAFile:
    def test_loading_gives_the_saved_model(self, tmp_path):
        training = saved(tmp_path)
        again = poptorch.load(tmp_path / "model")
        assert repr(again) == repr(training)
        assert again.options.own_name == "mine"
        for each in (training, again):
            each(torch.ones(4, 3))
        assert torch.equal(again.model.layers[0].weight, training.model.layers[0].weight)
        optimizer = again.trainer.optimizer
        assert (optimizer.loss_scaling, optimizer.max_grad_norm) == (8.0, 0.5)

    @pytest.mark.parametrize("place", ["model", "options", "optimizer", "state", "other"])
    def test_a_file_runs_no_code(self, place, tmp_path, was_run):
        saved(tmp_path)
        content = torch.load(tmp_path / "model", weights_only=False)
        if place == "model":
            content["model"].attribute = Opens(was_run)
        else:
            content[place] = Opens(was_run)
        torch.save(content, tmp_path / "model")
        with pytest.raises(
            poptorch.Error, match=r"names (io|_io|builtins)\.open, and reading it could run code .* load its"
        ):
            poptorch.load(tmp_path / "model")
        assert not was_run.exists()

    def test_functions_of_the_program_are_refused_unless_trusted(self, tmp_path):
        module = Activated()
        module.activation = saved
        poptorch.inferenceModel(module).save(tmp_path / "model")
        with pytest.raises(poptorch.Error, match=r"names test_poptorch_files\.saved, .* is_trusted=True"):
            poptorch.load(tmp_path / "model")
        assert poptorch.load(tmp_path / "model", is_trusted=True).model.activation is saved

    def test_a_file_imports_no_module(self, tmp_path):
        (tmp_path / "stranger.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
        program = (
            "import sys, torch; sys.path.insert(0, sys.argv[1]); import stranger; "
            "torch.save({'state': {}, 'options': None, 'training': False, 'model': stranger.Net()}, sys.argv[2])"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path), str(tmp_path / "model")], check=True)
        with pytest.raises(poptorch.Error, match=r"names stranger\.Net"):
            poptorch.load(tmp_path / "model")
        assert "stranger" not in sys.modules

    def test_a_sharded_optimizer_state_is_not_saved(self, tmp_path):
        module = Activated()
        options = poptorch.Options().replicationFactor(2)
        location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        options.TensorLocations.setOptimizerLocation(location)
        training = poptorch.trainingModel(module, options)
        with pytest.raises(poptorch.Error, match=r"is sharded, .* use strategies\.Checkpoints"):
            training.save(tmp_path / "model")
        training.save(tmp_path / "model", export_model=False)

    @pytest.mark.parametrize("cut", [0, 1, 100, 3000, -10])
    def test_damaged_files_are_an_error_of_one_line(self, cut, tmp_path):
        saved(tmp_path)
        content = (tmp_path / "model").read_bytes()
        (tmp_path / "model").write_bytes(content[:cut])
        with pytest.raises(poptorch.Error, match=r"is not a file of PoplarExecutor\.save, or it is damaged"):
            poptorch.load(tmp_path / "model")

    def test_files_of_other_writers_are_refused(self, tmp_path):
        torch.save({"weights": torch.ones(2)}, tmp_path / "model")
        with pytest.raises(poptorch.Error, match=r"is not a file of PoplarExecutor\.save; load it with torch\.load"):
            poptorch.load(tmp_path / "model")
