"""PopTorch's options."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import popdist
from strategies.errors import FailedPreconditionError, StrategyError
from strategies.ipu import IPUStrategy
from strategies.job_strategies import PopDistStrategy
from strategies.numbers import at_least, positive
from strategies.strategy import Strategy
from strategies.torch.poptorch.anchors import Anchor
from strategies.torch.poptorch.blocks import ExecutionStrategy
from strategies.torch.poptorch.enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from strategies.torch.poptorch.errors import ConfigFileError
from strategies.torch.poptorch.option_groups import (
    NO_COMPILER,
    NO_IPU,
    JitOptions,
    OptionGroup,
    PopartOptions,
    PrecisionOptions,
    TensorLocationOptions,
    TrainingOptions,
)
from strategies.torch.poptorch.options_file import set_from_line, set_from_value
from strategies.torch.poptorch.recording import folder_wanted, record_job, recording_into, tell_too_late

COMPILED_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable for the folder of what it compiles."""

logger = logging.getLogger(__name__)


class DistributedOptions(OptionGroup):
    """Several processes, `Options.Distributed`: poprun knows them, and `popdist.poptorch.Options` asks it."""

    _title = "Options.Distributed"

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    @property
    def numProcesses(self) -> int:
        """How many instances there are."""
        return self._options.strategy.replicas.num_instances

    @property
    def processId(self) -> int:
        """Which of them this is."""
        return self._options.strategy.replicas.instance_index

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Refused.

        Raises:
            StrategyError: always; the way out is poprun.
        """
        raise StrategyError(
            "processes are not numbered by hand; start them with poprun, and use popdist.poptorch.Options()"
        )

    def disable(self) -> DistributedOptions:
        """Changes nothing: `Options()` has one process."""
        return self._set("disable", True)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """See `configureProcessId`."""
        return self.configureProcessId(0, 1)


class DecidedDistributedOptions(DistributedOptions):
    """Those of `popdist.poptorch.Options`, where poprun has decided all of it: nothing can be set.

    Every method raises FailedPreconditionError, which is a RuntimeError, as the original's.
    """

    def configureProcessId(self, process_id: int, num_processes: int) -> DistributedOptions:
        """Refused."""
        raise _decided("Distributed.configureProcessId", "which process this is; leave it out")

    def disable(self) -> DistributedOptions:
        """Refused."""
        raise _decided("Distributed.disable", "how many processes there are; use poptorch.Options() for one alone")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> DistributedOptions:
        """Refused."""
        raise _decided("Distributed.setEnvVarNames", "which process this is; leave it out")


_GROUPS = ("_training", "_precision", "_jit", "_locations", "_popart")


def _decided(call: str, what: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"Cannot call `{call}` with popdist.poptorch.Options: poprun has decided {what}")


class Options(OptionGroup):
    """How a model runs. Every setter returns the options, so that they can be chained; print them to see what is set.

    Semantics: PopTorch's options of the same names. What has no meaning without an IPU is taken, and one line of the
    log (INFO) says so once. `POPTORCH_DEFAULT_OPTIONS` in the environment is JSON of options, see `from_json`;
    `POPTORCH_CACHE_DIR` is the folder of `enableExecutableCaching`.
    """

    device_iterations = 1
    replication_factor = 1
    output_mode = OutputMode.Default
    output_every = 1
    seed = 0
    execution_strategy: ExecutionStrategy | None = None
    anchors: Mapping[str, Anchor] = MappingProxyType({})
    _distributed_kind = DistributedOptions

    def __init__(self) -> None:
        super().__init__()
        self._strategy: Strategy | None = None
        self._training = TrainingOptions()
        self._precision = PrecisionOptions()
        self._jit = JitOptions()
        self._locations = TensorLocationOptions()
        self._popart = PopartOptions()
        self._distributed = self._distributed_kind(self)
        if folder := os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(folder)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS") or "{}")

    # ---- what is heeded

    @property
    def Training(self) -> TrainingOptions:
        """Those of training."""
        return self._training

    @property
    def Precision(self) -> PrecisionOptions:
        """Those of precision."""
        return self._precision

    @property
    def Jit(self) -> JitOptions:
        """How a model is read."""
        return self._jit

    @property
    def TensorLocations(self) -> TensorLocationOptions:
        """Where tensors lie."""
        return self._locations

    @property
    def Distributed(self) -> DistributedOptions:
        """The processes."""
        return self._distributed

    @property
    def strategy(self) -> Strategy:
        """The replicas on which models with these options run; clones have the same."""
        if self._strategy is None:
            self._strategy = self._new_strategy()
        return self._strategy

    def _new_strategy(self) -> Strategy:
        folder = folder_wanted(os.environ, self._popart.engine_options)
        attached = () if folder is None else recording_into(folder, self.replication_factor)
        return IPUStrategy(self.replication_factor, attached=attached)

    def deviceIterations(self, device_iterations: int) -> Options:
        """How many updates, or batches of an inference, a call makes."""
        count = positive("deviceIterations", device_iterations)
        return self._set("deviceIterations", count, device_iterations=count)

    def replicationFactor(self, replication_factor: int) -> Options:
        """The number of replicas in this process."""
        count = positive("replicationFactor", replication_factor)
        return self._set("replicationFactor", count, replication_factor=count, _strategy=None)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Which outputs a call returns.

        Args:
            output_mode: see there; the default is the last one for training, and all for inference.
            output_return_period: n of `OutputMode.EveryN`, a divisor of the micro-batches of a call.

        Raises:
            ValueError: if there is a period without `EveryN`, or none with it.
        """
        mode = OutputMode(output_mode)
        if (mode is OutputMode.EveryN) is (output_return_period is None):
            raise ValueError(
                f"outputMode is {mode.name} with the period {output_return_period}; EveryN, and it alone, has one"
            )
        every = positive("output_return_period", output_return_period or 1)
        said = mode.name if mode is not OutputMode.EveryN else (mode.name, every)
        return self._set("outputMode", said, output_mode=mode, output_every=every)

    anchorMode = outputMode  # its name before PopTorch 2.3

    def defaultOutputMode(self) -> bool:
        """Whether it is the default one."""
        return self.output_mode is OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = None,
    ) -> Options:
        """Look at a tensor in every update; see `PoplarExecutor.getAnchoredTensor`.

        Args:
            short_name: by which it is asked for.
            long_name: a parameter's name, `Gradient___` and one, or `UpdatedVar___` and one.
            output_mode: of which updates of a call it is returned; None: of those whose outputs are, see `outputMode`.
            output_return_period: n of `OutputMode.EveryN`, in updates.
        """
        mode = None if output_mode is None else OutputMode(output_mode)
        every = positive("output_return_period", output_return_period or 1)
        anchors = {**self.anchors, short_name: Anchor(long_name, mode, every)}
        return self._set(f"anchorTensor({short_name!r})", long_name, anchors=anchors)

    def randomSeed(self, random_seed: int) -> Options:
        """Of random numbers and of shuffling; 0 unless it is set.

        It is PyTorch's from here on, too, as in PopTorch: modules that are made afterwards begin with the same numbers.
        """
        seed = at_least(0, "randomSeed", random_seed)
        self._set("randomSeed", seed, seed=seed)
        torch.manual_seed(seed)
        return self

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Options:
        """How blocks become stages, and stages run."""
        if not isinstance(strategy, ExecutionStrategy):
            raise TypeError(f"{strategy!r} is no strategy of execution; use poptorch.PipelinedExecution(...)")
        return self._set("setExecutionStrategy", strategy, execution_strategy=strategy)

    def loadFromFile(self, filepath: str | Path) -> Options:
        """Set what the lines of a file say, each as in a program, without "options.": `deviceIterations(4)`.

        Nothing is executed: values are literals, members of PopTorch's enumerations, dtypes, stages and strategies.

        Raises:
            ConfigFileError: if a line is none; it is named.
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
        """Set what an object of JSON says: `{"Precision.enableFloatingPointExceptions": true}`.

        Raises:
            ConfigFileError: if it is no object, or a name no option.
        """
        try:
            for name, value in json.loads(string).items():
                set_from_value(self, name, value)
        except (ValueError, AttributeError, NameError, TypeError, RecursionError) as error:
            raise ConfigFileError(
                f'{string[:200]!r} is no JSON of options: {error}; write {{"Training.gradientAccumulation": 4}}'
            ) from error
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        """Changes nothing: all instances begin with the buffers of instance 0, and agree on them after each step."""
        return self._accept_switch(
            "broadcastBuffers", broadcast_buffers, "all instances agree on buffers after each update"
        )

    def clone(self) -> Options:
        """A copy that can be changed, on the same replicas unless it is given others."""
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone._values, clone._is_frozen = dict(self._values), False
        for name in _GROUPS:
            group = copy.copy(getattr(self, name))
            group._values, group._is_frozen = dict(group._values), False
            setattr(clone, name, group)
        clone._distributed = self._distributed_kind(clone)
        return clone

    def __copy__(self) -> Options:
        return self.clone()

    def __deepcopy__(self, memory: object) -> Options:
        return self.clone()

    @classmethod
    def _options_known(cls) -> Iterator[str]:
        yield from super()._options_known()
        for name, group in _CLASSES.items():
            yield from (f"{name}.{option}" for option in group._options_known() if option != "toDict")

    def _freeze(self) -> None:
        for name in _GROUPS:
            getattr(self, name)._freeze()
        super()._freeze()

    def toDict(self) -> Mapping[str, object]:
        """What has been set, by name, groups as dictionaries of their own."""
        groups = {
            "Training": self._training,
            "Precision": self._precision,
            "Jit": self._jit,
            "TensorLocations": self._locations,
            "_Popart": self._popart,
        }
        return {**self._values, **{name: group.toDict() for name, group in groups.items() if group.toDict()}}

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.toDict().items())
        return f"{type(self).__name__}({inner})"

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_strategy": None, "_distributed": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._distributed = self._distributed_kind(self)

    # ---- what has no meaning here

    def useIpuModel(self, use_model: bool) -> Options:
        """Changes nothing."""
        return self._accept_switch("useIpuModel", use_model, NO_IPU)

    @property
    def _Popart(self) -> PopartOptions:
        """Those of the compiler, which programs reach by this name."""
        return self._popart

    def sourceLocationExcludes(self, excludes: Sequence[str]) -> Options:
        """Changes nothing."""
        return self._accept("sourceLocationExcludes", list(excludes), NO_COMPILER)

    def disableModuleNamescope(self) -> Options:
        """Changes nothing."""
        return self._accept("disableModuleNamescope", True, NO_COMPILER)

    def maxRepeatLogs(self, max_lines: int | None) -> Options:
        """Changes nothing."""
        return self._accept("maxRepeatLogs", max_lines, "the log repeats no line")

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Options:
        """Changes nothing where each replica has rows of its own; refused where several are to get the same.

        Raises:
            StrategyError: for groups of several replicas.
            ValueError: for one group of all replicas, as in PopTorch.
        """
        if CommGroupType(input_group_type) is CommGroupType.All:
            raise ValueError("replicas that all get the same rows compute the same; use CommGroupType.NoGrouping")
        if CommGroupType(input_group_type) is not CommGroupType.NoGrouping and input_group_size != 1:
            raise StrategyError(
                f"groups of {input_group_size} replicas are to get the same rows, and every replica has rows of its "
                "own here; repeat the rows in the data set, or use CommGroupType.NoGrouping"
            )
        return self._accept("inputReplicaGrouping", input_group_size, "every replica has rows of its own")

    def updatableNamedBuffers(self, buffers: Sequence[str]) -> Options:
        """Changes nothing."""
        return self._accept("updatableNamedBuffers", list(buffers), "buffers of the module are read at every call")

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Changes nothing."""
        return self._accept("appendToLocationExcludes", excludes, NO_COMPILER)

    def useIpuId(self, ipu_id: int) -> Options:
        """Changes nothing."""
        return self._accept("useIpuId", ipu_id, NO_IPU)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Changes nothing."""
        return self._accept("useOfflineIpuTarget", ipu_version, NO_IPU)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        """Changes nothing."""
        return self._accept_switch("autoRoundNumIPUs", auto_round_num_ipus, NO_IPU)

    def connectionType(self, connection_type: ConnectionType) -> Options:
        """Changes nothing."""
        return self._accept("connectionType", connection_type, NO_IPU)

    def syncPattern(self, sync_pattern: SyncPattern) -> Options:
        """Changes nothing."""
        return self._accept("syncPattern", sync_pattern, NO_IPU)

    def setAvailableMemoryProportion(self, available_memory_proportion: Mapping[str, float]) -> Options:
        """Changes nothing."""
        return self._accept("setAvailableMemoryProportion", dict(available_memory_proportion), NO_IPU)

    def enableExecutableCaching(self, path: str | Path) -> Options:
        """Keep what `torch.compile` makes there; nothing else is compiled."""
        folder = str(Path(path).absolute())
        os.environ[COMPILED_BY_TORCH] = folder
        logger.info("%s has what torch.compile makes; nothing else is compiled", folder)
        return self._set("enableExecutableCaching", str(path))

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        """Changes nothing."""
        return self._accept_switch("showCompilationProgressBar", show, NO_COMPILER)

    def enableProfiling(self, profile_dir: str | Path | None = None) -> Options:
        """Record each step into a folder, and say how that is opened; `POPLAR_ENGINE_OPTIONS` has precedence.

        Args:
            profile_dir: the folder; None: this one.
        """
        folder = str(profile_dir or ".")
        self._popart.setEngineOptions({**self._popart.engine_options, "autoReport.directory": folder})
        return self._set("enableProfiling", folder, _strategy=self._recorded())

    def _recorded(self) -> Strategy | None:
        """Return the strategy that profiling needs; None: it is made when it is asked for."""
        return None

    def enableStableNorm(self, enabled: bool) -> Options:
        """Changes nothing."""
        return self._accept_switch("enableStableNorm", enabled, "PyTorch's normalisations are computed in two passes")

    def enableSyntheticData(self, enabled: bool) -> Options:
        """Changes nothing."""
        return self._accept_switch("enableSyntheticData", enabled, "data are not copied to a device")

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """Changes nothing."""
        return self._accept_switch("relaxOptimizerAttributesChecks", relax, "all numbers of optimizers may change")

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        """Changes nothing."""
        return self._accept_switch("logCycleCount", log_cycle_count, NO_IPU)

    def logDir(self, log_dir: str) -> Options:
        """Changes nothing."""
        return self._accept("logDir", log_dir, NO_COMPILER)

    def modelName(self, name: str) -> Options:
        """Changes nothing."""
        return self._accept("modelName", name, NO_COMPILER)


_CLASSES: Mapping[str, type[OptionGroup]] = {
    "Distributed": DistributedOptions,
    "Jit": JitOptions,
    "Precision": PrecisionOptions,
    "TensorLocations": TensorLocationOptions,
    "Training": TrainingOptions,
}


class PopdistOptions(Options):
    """The options of an instance under poprun: its replicas, and all instances of the job.

    Args:
        ipus_per_replica: devices that each replica spans; None: what poprun was told. More than poprun was told need
            not be said: simulated devices are there as they are needed.
    """

    _distributed_kind = DecidedDistributedOptions

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            positive("ipus_per_replica", ipus_per_replica)
        self._strategy = self._new_strategy()

    def _new_strategy(self) -> Strategy:
        """All replicas of the job, also for options that were saved in another one."""
        folder = folder_wanted(os.environ, self._popart.engine_options)
        if folder is not None and not popdist.isBackendInitialized():
            record_job(folder)
        strategy = PopDistStrategy()
        vars(self)["replication_factor"] = len(strategy.replicas.local_replicas)
        return strategy

    def _recorded(self) -> Strategy:
        """See `Options`: the instances are connected already."""
        tell_too_late()
        return self.strategy

    def replicationFactor(self, replication_factor: int) -> Options:
        """Refused.

        Raises:
            FailedPreconditionError: always: poprun decides.
        """
        raise _decided("replicationFactor", "how many replicas an instance has; start it with another --num-replicas")

    def useIpuId(self, ipu_id: int) -> Options:
        """Refused; see `replicationFactor`."""
        raise _decided("useIpuId", "on which devices an instance runs; leave it out")
