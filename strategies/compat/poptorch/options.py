"""PopTorch's options of a model, alone and under poprun."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import popdist
from strategies.argument_checks import at_least, positive
from strategies.compat.poptorch.blocks import ExecutionStrategy
from strategies.compat.poptorch.enums import CommGroupType, OutputMode
from strategies.compat.poptorch.errors import ConfigFileError
from strategies.compat.poptorch.option_groups import (
    JitOptions,
    OptionGroup,
    PopartOptions,
    PrecisionOptions,
    TensorLocationOptions,
    TrainingOptions,
)
from strategies.compat.poptorch.options_file import set_from_line, set_from_value
from strategies.compat.poptorch.outputs import Anchor
from strategies.compat.poptorch.profiling import folder_wanted, record_job, recording_into, tell_too_late
from strategies.compat.poptorch.without_effect import NO_COMPILER, NO_IPU, Accepted, Refused, methods_of
from strategies.errors import FailedPreconditionError, StrategyError
from strategies.job_strategies import PopDistStrategy
from strategies.local_strategy import LocalStrategy
from strategies.strategy import Strategy

COMPILED_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable for the folder of compiled programs."""

logger = logging.getLogger("strategies.torch.poptorch")


_BY_HAND = "processes cannot be numbered by hand; start them with poprun, and use popdist.poptorch.Options()"


def _decided(call: str, what: str) -> Refused:
    words = f"Cannot call `{call}` with popdist.poptorch.Options: poprun has decided {what}"
    return Refused(words, FailedPreconditionError)


class DistributedOptions(OptionGroup):
    """The processes of a job, `Options.Distributed`: poprun numbers them, and `popdist.poptorch.Options` reads that."""

    _title = "Options.Distributed"
    _methods = methods_of(
        _title,
        configureProcessId=Refused(_BY_HAND),
        disable=Accepted(lambda: True, "Options() has one process"),
        setEnvVarNames=Refused(_BY_HAND),
    )

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    @property
    def numProcesses(self) -> int:
        """The number of instances."""
        return self._options.strategy.replicas.num_instances

    @property
    def processId(self) -> int:
        """The index of this instance."""
        return self._options.strategy.replicas.instance_index


class DecidedDistributedOptions(DistributedOptions):
    """The processes of `popdist.poptorch.Options`, all decided by poprun.

    As in the original, every method raises FailedPreconditionError, which is a RuntimeError.
    """

    _methods = {
        "configureProcessId": _decided("Distributed.configureProcessId", "which process this is; leave it out"),
        "disable": _decided(
            "Distributed.disable", "the number of processes; use poptorch.Options() for a single process"
        ),
        "setEnvVarNames": _decided("Distributed.setEnvVarNames", "which process this is; leave it out"),
    }


class Options(OptionGroup):
    """The options of a model. Every setter returns the object, so calls can be chained; print it to see what is set.

    Semantics: PopTorch's options of the same names. Options without a meaning here are accepted, with one line in the
    log (INFO). `POPTORCH_DEFAULT_OPTIONS` in the environment is a JSON object of options for `from_json`.
    `POPTORCH_CACHE_DIR` is a folder for `enableExecutableCaching`.

    Example::

        options = poptorch.Options().deviceIterations(4).replicationFactor(2).randomSeed(42)
        options.Training.gradientAccumulation(8)
    """

    _methods = methods_of(
        "Options",
        appendToLocationExcludes=Accepted(lambda *excludes: excludes, NO_COMPILER),
        autoRoundNumIPUs=Accepted(lambda auto_round_num_ipus=True: auto_round_num_ipus, NO_IPU, True),
        broadcastBuffers=Accepted(
            lambda broadcast_buffers=True: broadcast_buffers,
            "buffers are equal on all instances after each update",
            True,
        ),
        connectionType=Accepted(lambda connection_type: connection_type, NO_IPU),
        disableModuleNamescope=Accepted(lambda: True, NO_COMPILER),
        enableStableNorm=Accepted(lambda enabled: enabled, "PyTorch computes normalisations in two passes", True),
        enableSyntheticData=Accepted(lambda enabled: enabled, "data are not copied to a device", True),
        logCycleCount=Accepted(lambda log_cycle_count: log_cycle_count, NO_IPU, True),
        logDir=Accepted(lambda log_dir: log_dir, NO_COMPILER),
        maxRepeatLogs=Accepted(lambda max_lines: max_lines, "the log does not repeat lines"),
        modelName=Accepted(lambda name: name, NO_COMPILER),
        relaxOptimizerAttributesChecks=Accepted(lambda relax=True: relax, "all hyperparameters may change", True),
        setAvailableMemoryProportion=Accepted(
            lambda available_memory_proportion: dict(available_memory_proportion), NO_IPU
        ),
        showCompilationProgressBar=Accepted(lambda show=True: show, NO_COMPILER, True),
        sourceLocationExcludes=Accepted(lambda excludes: list(excludes), NO_COMPILER),
        syncPattern=Accepted(lambda sync_pattern: sync_pattern, NO_IPU),
        updatableNamedBuffers=Accepted(lambda buffers: list(buffers), "buffers of the module are read at every call"),
        useIpuId=Accepted(lambda ipu_id: ipu_id, NO_IPU),
        useIpuModel=Accepted(lambda use_model: use_model, NO_IPU, True),
        useOfflineIpuTarget=Accepted(lambda ipu_version=2: ipu_version, NO_IPU),
    )

    device_iterations = 1
    replication_factor = 1
    output_mode = OutputMode.Default
    output_every = 1
    seed = 0
    execution_strategy: ExecutionStrategy | None = None
    anchors: Mapping[str, Anchor] = MappingProxyType({})

    Training: TrainingOptions
    Precision: PrecisionOptions
    Jit: JitOptions
    TensorLocations: TensorLocationOptions
    _Popart: PopartOptions
    _groups = {
        "Training": TrainingOptions,
        "Precision": PrecisionOptions,
        "Jit": JitOptions,
        "TensorLocations": TensorLocationOptions,
        "_Popart": PopartOptions,
    }
    _distributed_kind = DistributedOptions

    def __init__(self) -> None:
        super().__init__()
        self._strategy: Strategy | None = None
        if folder := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(folder)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS") or "{}")

    @cached_property
    def Distributed(self) -> DistributedOptions:
        """The processes of the job."""
        return self._distributed_kind(self)

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas run models with these options; clones share it."""
        if self._strategy is None:
            self._strategy = self._new_strategy()
        return self._strategy

    def _new_strategy(self) -> Strategy:
        folder = folder_wanted(os.environ, self._Popart.engine_options)
        attached = () if folder is None else recording_into(folder, self.replication_factor)
        return LocalStrategy(self.replication_factor, attached=attached)

    def deviceIterations(self, device_iterations: int) -> Options:
        """Set the number of updates, or of inference batches, of a call."""
        count = positive("deviceIterations", device_iterations)
        return self._set("deviceIterations", count, device_iterations=count)

    def replicationFactor(self, replication_factor: int) -> Options:
        """Set the number of replicas of this process."""
        count = positive("replicationFactor", replication_factor)
        return self._set("replicationFactor", count, replication_factor=count, _strategy=None)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Set which outputs a call returns.

        Args:
            output_mode: Mode. The default is the last micro-batch for training, and all micro-batches for inference.
            output_return_period: n of `OutputMode.EveryN`, a divisor of the number of micro-batches of a call.

        Raises:
            ValueError: If a period is given without `EveryN`, or `EveryN` without a period.
        """
        mode = OutputMode(output_mode)
        if (mode is OutputMode.EveryN) is (output_return_period is None):
            raise ValueError(
                f"outputMode is {mode.name} with the period {output_return_period}; give a period with EveryN only"
            )
        every = positive("output_return_period", output_return_period or 1)
        said = mode.name if mode is not OutputMode.EveryN else (mode.name, every)
        return self._set("outputMode", said, output_mode=mode, output_every=every)

    anchorMode = outputMode  # the name before PopTorch 2.3

    def defaultOutputMode(self) -> bool:
        """Return whether the output mode is the default."""
        return self.output_mode is OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = None,
    ) -> Options:
        """Record a tensor in every update, for `PoplarExecutor.getAnchoredTensor`.

        Args:
            short_name: Name for `getAnchoredTensor`.
            long_name: Name of a parameter, alone or after `Gradient___` or `UpdatedVar___`.
            output_mode: Updates of a call whose values are returned; None for the same as `outputMode`.
            output_return_period: n of `OutputMode.EveryN`, in updates.
        """
        mode = None if output_mode is None else OutputMode(output_mode)
        every = positive("output_return_period", output_return_period or 1)
        anchors = {**self.anchors, short_name: Anchor(long_name, mode, every)}
        return self._set(f"anchorTensor({short_name!r})", long_name, anchors=anchors)

    def randomSeed(self, random_seed: int) -> Options:
        """Set the seed of random numbers and of shuffling; 0 by default.

        As in PopTorch, this also seeds PyTorch itself, so modules made afterwards start with the same numbers.
        """
        seed = at_least(0, "randomSeed", random_seed)
        self._set("randomSeed", seed, seed=seed)
        torch.manual_seed(seed)
        return self

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Options:
        """Set the strategy that makes stages of blocks and orders their work."""
        if not isinstance(strategy, ExecutionStrategy):
            raise TypeError(f"{strategy!r} is not an execution strategy; use poptorch.PipelinedExecution(...)")
        return self._set("setExecutionStrategy", strategy, execution_strategy=strategy)

    def loadFromFile(self, filepath: str | Path) -> Options:
        """Set the options in the lines of a file, written as in a program without "options.": `deviceIterations(4)`.

        No code runs: values are literals, members of PopTorch's enumerations, dtypes, stages and strategies.

        Raises:
            ConfigFileError: If a line is not an option; the message names the line.
        """
        for number, line in enumerate(Path(filepath).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                set_from_line(self, line.strip())
            except (SyntaxError, NameError, AttributeError, TypeError, ValueError, RecursionError) as error:
                said = getattr(error, "msg", error)
                raise ConfigFileError(
                    f"line {number} of {filepath} is {line.strip()!r}: {said}; write it as in a program, without "
                    "'options.': deviceIterations(4)"
                ) from error
        return self

    def from_json(self, string: str) -> Options:
        """Set the options of a JSON object such as `{"Precision.enableFloatingPointExceptions": true}`.

        Raises:
            ConfigFileError: If the text is not a JSON object, or a name is not an option.
        """
        try:
            for name, value in json.loads(string).items():
                set_from_value(self, name, value)
        except (ValueError, AttributeError, NameError, TypeError, RecursionError) as error:
            raise ConfigFileError(
                f'{string[:200]!r} is not JSON of options: {error}; write {{"Training.gradientAccumulation": 4}}'
            ) from error
        return self

    def clone(self) -> Options:
        """Return a copy that can be changed. It shares the replicas until their number is set."""
        clone = self._copied()
        vars(clone).pop("Distributed", None)  # it refers to the original; the clone's replicas may change
        return clone

    __copy__ = clone

    def __deepcopy__(self, memory: object) -> Options:
        return self.clone()

    @classmethod
    def _options_known(cls) -> Iterator[str]:
        yield from super()._options_known()
        yield from (f"Distributed.{name}" for name in cls._distributed_kind._methods)

    def __repr__(self) -> str:
        return super().__repr__().replace(self._title, type(self).__name__, 1)

    def __getstate__(self) -> Mapping[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "Distributed"}  # it refers to the strategy
        return {**kept, "_strategy": None}

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Options:
        """Accept that each replica has its own rows; refuse groups of replicas with the same rows.

        Raises:
            StrategyError: For groups of several replicas.
            ValueError: For one group of all replicas, as in PopTorch.
        """
        if CommGroupType(input_group_type) is CommGroupType.All:
            raise ValueError("replicas with the same rows compute the same result; use CommGroupType.NoGrouping")
        if CommGroupType(input_group_type) is not CommGroupType.NoGrouping and input_group_size != 1:
            raise StrategyError(
                f"groups of {input_group_size} replicas should get the same rows, but every replica has its own rows "
                "here; repeat the rows in the data set, or use CommGroupType.NoGrouping"
            )
        return self._accept("inputReplicaGrouping", input_group_size, "every replica has its own rows")

    def enableExecutableCaching(self, path: str | Path) -> Options:
        """Keep the programs that `torch.compile` makes in a folder; nothing else is compiled."""
        folder = str(Path(path).absolute())
        os.environ[COMPILED_BY_TORCH] = folder
        logger.info("%s keeps programs compiled by torch.compile; nothing else is compiled", folder)
        return self._set("enableExecutableCaching", str(path))

    def enableProfiling(self, profile_dir: str | Path | None = None) -> Options:
        """Record each step into a folder; the log says how to open it. `POPLAR_ENGINE_OPTIONS` has precedence.

        Args:
            profile_dir: Folder; None for the current folder.
        """
        folder = str(profile_dir or ".")
        self._Popart.setEngineOptions({**self._Popart.engine_options, "autoReport.directory": folder})
        return self._set("enableProfiling", folder, _strategy=self._recorded())

    def _recorded(self) -> Strategy | None:
        """Return the strategy that profiling needs; None to make one on first use."""
        return None


class PopdistOptions(Options):
    """The options of an instance under poprun: its local replicas, and all instances of the job.

    Args:
        ipus_per_replica: Number of devices of each replica, or None. It is only checked, because simulated devices are
            made as they are needed.
    """

    _distributed_kind = DecidedDistributedOptions
    _methods = {
        **Options._methods,
        "useIpuId": _decided("useIpuId", "the devices of an instance; leave it out"),
    }

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            positive("ipus_per_replica", ipus_per_replica)
        self._strategy = self._new_strategy()

    def _new_strategy(self) -> Strategy:
        """Return a strategy of all replicas of this job, also for options that were saved in another job."""
        folder = folder_wanted(os.environ, self._Popart.engine_options)
        if folder is not None and not popdist.isBackendInitialized():
            record_job(folder)
        strategy = PopDistStrategy()
        vars(self)["replication_factor"] = len(strategy.replicas.local_replicas)
        return strategy

    def _recorded(self) -> Strategy:
        tell_too_late()
        return self.strategy

    def replicationFactor(self, replication_factor: int) -> Options:
        """Refuse to change the number of replicas.

        Raises:
            FailedPreconditionError: Always, because poprun decides it.
        """
        what = "the number of replicas of an instance; start it with another --num-replicas"
        _decided("replicationFactor", what).called("replicationFactor")
