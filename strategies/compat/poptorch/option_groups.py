"""Groups of PopTorch's options: of training, of precision, of where tensors lie, of the compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.compat.poptorch.autocasting import Policy
from strategies.compat.poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from strategies.compat.poptorch.without_effect import (
    NO_COMPILER,
    NO_IPU,
    ONE_MEMORY,
    Accepted,
    Accepting,
    methods_of,
    tell_once,
)
from strategies.errors import StrategyError

Self = TypeVar("Self", bound="OptionGroup")

_CLOSE = 0.8
"""Similarity, from 0 to 1, from which one name may be meant by another."""


class OptionGroup(Accepting):
    """Options that can be set until a model, or a data loader, has been made with them."""

    _title = "Options"
    _groups: ClassVar[Mapping[str, type[OptionGroup]]] = {}
    """Groups of options inside of this one, which are attributes of these names."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._is_frozen = False
        vars(self).update({name: group() for name, group in self._groups.items()})

    def _copied(self: Self) -> Self:
        """Return the same options, not frozen."""
        copied = type(self).__new__(type(self))
        groups = {name: getattr(self, name)._copied() for name in self._groups}
        vars(copied).update(vars(self), _values=dict(self._values), _is_frozen=False, **groups)
        return copied

    def _set(self: Self, name: str, value: object, **attributes: object) -> Self:
        """Take the value that a method was given, and keep attributes that follow from it."""
        if self._is_frozen:
            raise StrategyError(
                f"{self._title}.{name} is set after a model or a data loader was made with these options; set it "
                "before, or change a clone: options.clone()"
            )
        self._values[name] = value
        vars(self).update(attributes)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to replace options: nothing would check the value. Names of the program's own are its own."""
        if name in self._methods or callable(getattr(type(self), name, None)):
            raise AttributeError(
                f"{self._title}.{name} is a method, which would be overwritten; write .{name}({value!r}) instead"
            )
        if name in self._groups or (hasattr(type(self), name) and not name.startswith("_")):
            raise AttributeError(
                f"{self._title}.{name} follows from what its methods were given; options are set by methods, as in "
                "options.deviceIterations(4)"
            )
        if meant := self._meant(name):
            raise AttributeError(
                f"{self._title}.{name} is no option; did you mean {meant}(...)? Options are set by methods, as in "
                "options.deviceIterations(4)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the table, or refuse a name that is not there with the one that was meant."""
        if name in self._methods:
            return super().__getattr__(name)
        known = [each for each in (*dir(type(self)), *self._methods, *self._groups) if not each.startswith("_")]
        meant = next(iter(get_close_matches(name, known, 1, _CLOSE)), None) or self._meant(name)
        way_out = f"did you mean {meant}?" if meant else "the documentation, page torch, has those that are there"
        raise AttributeError(f"{self._title}.{name} is no option; {way_out}")

    def _meant(self, name: str) -> str | None:
        """Return the option that has nearly this name, here or in a group beside; None if there is none."""
        if name.startswith("_"):
            return None
        known = {option.split(".")[-1].lower(): option for option in self._options_known()}
        close = get_close_matches(name.lower().replace("_", ""), known, 1, _CLOSE)
        return known[close[0]] if close else None

    @classmethod
    def _options_known(cls) -> Iterator[str]:
        """Yield the names of all options, of groups with a dot."""
        for name in dir(cls):
            if not name.startswith("_") and callable(getattr(cls, name)):
                yield name
        yield from cls._methods
        for name, group in cls._groups.items():
            if not name.startswith("_"):
                yield from (f"{name}.{option}" for option in group._options_known() if option != "toDict")

    def _accept(self: Self, name: str, value: object, why: str) -> Self:
        tell_once(f"{self._title}.{name}", why)
        return self._set(name, value)

    def _set_switch(self: Self, name: str, value: bool, **attributes: object) -> Self:
        require_switches(**{name: value})
        return self._set(name, value, **attributes)

    def _freeze(self) -> None:
        for name in self._groups:
            getattr(self, name)._freeze()
        self._is_frozen = True

    def toDict(self) -> Mapping[str, object]:
        """Return what has been set, by name; groups as dictionaries of their own."""
        groups = {name: getattr(self, name).toDict() for name in self._groups}
        return {**self._values, **{name: inner for name, inner in groups.items() if inner}}

    def __repr__(self) -> str:
        return f"{self._title}({', '.join(f'{name}={value!r}' for name, value in self.toDict().items())})"


_OF_NUMBERS = {
    "accumulationAndReplicationReductionType": "Options.Training.accumulationAndReplicationReductionType",
    "accumulationFactor": "Options.Training.gradientAccumulation",
    "automaticLossScalingSettings.enabled": "Options.Training.setAutomaticLossScaling",
    "enableFloatingPointChecks": "Options.Precision.enableFloatingPointExceptions",
    "enableGradientAccumulation": "Options.Training.gradientAccumulation",
    "enableReplicatedGraphs": "Options.replicationFactor",
    "globalReplicationFactor": "popdist.poptorch.Options() under poprun",
    "groupNormStridedChannelGrouping": "torch.nn.GroupNorm as it is, which has neighbouring channels in a group",
    "meanAccumulationAndReplicationReductionStrategy": (
        "Options.Training.setMeanAccumulationAndReplicationReductionStrategy"
    ),
    "replicatedGraphCount": "Options.replicationFactor",
}
"""Options of the compiler that change what is trained, and what to use."""
BUFFERING = ("defaultPrefetchBufferingDepth", "defaultBufferingDepth")


class TrainingOptions(OptionGroup):
    """Options of training, `Options.Training`."""

    _title = "Options.Training"
    _methods = methods_of(
        _title,
        setConvolutionDithering=Accepted(lambda enabled: enabled, "convolutions are not spread over tiles", True),
    )

    gradient_accumulation = 1
    reduction = ReductionType.Mean
    mean_strategy = MeanReductionStrategy.Post
    automatic_loss_scaling = False

    def gradientAccumulation(self, gradient_accumulation: int) -> TrainingOptions:
        """Set the micro-batches of each replica for one update."""
        count = positive("gradientAccumulation", gradient_accumulation)
        return self._set("gradientAccumulation", count, gradient_accumulation=count)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> TrainingOptions:
        """Reduce gradients over micro-batches and replicas to their mean or sum.

        Raises:
            ValueError: for another type.
        """
        if reduction_type not in (ReductionType.Sum, ReductionType.Mean):
            raise ValueError(f"gradients are reduced by ReductionType.Sum or .Mean, and this is {reduction_type!r}")
        kind = ReductionType(reduction_type)
        return self._set("accumulationAndReplicationReductionType", kind, reduction=kind)

    accumulationReductionType = accumulationAndReplicationReductionType  # its name before PopTorch 2.3

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> TrainingOptions:
        """Set how a mean over micro-batches is computed: Running, or Post, where each loss is divided by their number.

        A running mean is changed before each micro-batch, so blocks run one after another then, and not in a pipeline.
        """
        kind = MeanReductionStrategy(mean_reduction_strategy)
        return self._set("setMeanAccumulationAndReplicationReductionStrategy", kind, mean_strategy=kind)

    def setAutomaticLossScaling(self, enabled: bool) -> TrainingOptions:
        """Scale losses dynamically, see `LossScaling`; an optimizer's own `loss_scaling` is the first scale."""
        return self._set_switch("setAutomaticLossScaling", enabled, automatic_loss_scaling=enabled)


class PrecisionOptions(OptionGroup):
    """Options of precision, `Options.Precision`."""

    _title = "Options.Precision"
    _methods = methods_of(
        _title,
        enableStochasticRounding=Accepted(lambda enabled: enabled, "PyTorch rounds to nearest, in float32", True),
        runningStatisticsAlwaysFloat=Accepted(lambda value: value, "buffers keep their dtypes", True),
        setPartialsType=Accepted(lambda dtype: dtype, "PyTorch chooses in what it adds up"),
    )

    autocasts = True
    checks_numerics = False

    def autocastEnabled(self, autocast_enabled: bool) -> PrecisionOptions:
        """Heed `poptorch.autocast` in models, or not."""
        return self._set_switch("autocastEnabled", autocast_enabled, autocasts=autocast_enabled)

    def autocastPolicy(self, autocast_policy: Policy | None) -> PrecisionOptions:
        """Say which operators `poptorch.autocast` casts: those of PyTorch's own list.

        Raises:
            StrategyError: if the policy has lists of its own.
        """
        if autocast_policy is not None and not isinstance(autocast_policy, Policy):
            raise TypeError(f"the policy is {autocast_policy!r}; give poptorch.autocasting.Policy(), or None")
        if autocast_policy is not None and autocast_policy.lists:
            raise StrategyError(
                f"the policy lists operators ({', '.join(autocast_policy.lists)}), and torch.autocast has its own list "
                "for CPUs; leave the policy out, and cast in the model what is to have another dtype"
            )
        return self._set("autocastPolicy", autocast_policy)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> PrecisionOptions:
        """Accept dtypes that are promoted as PyTorch promotes them, that is `HalfUpcastToFloat`.

        Raises:
            StrategyError: if parameters are to be cast to half precision.
        """
        if half_float_casting is HalfFloatCastingBehavior.FloatDowncastToHalf:
            raise StrategyError(
                "PyTorch promotes float16 to float32 where both meet, and FloatDowncastToHalf would do the opposite; "
                "cast in the model, or use HalfUpcastToFloat"
            )
        return self._accept("halfFloatCasting", half_float_casting, "PyTorch promotes float16 to float32")

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Raise `NonFiniteGradientError` for the first gradient that is not finite."""
        return self._set_switch("enableFloatingPointExceptions", enabled, checks_numerics=enabled)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether an IPU would round at random."""
        return bool(self._values.get("enableStochasticRounding"))


class TensorLocationSettings(OptionGroup):
    """Where tensors lie."""

    _title = "TensorLocationSettings"
    _methods = methods_of(
        _title,
        minElementsForOffChip=Accepted(lambda min_elements: min_elements, ONE_MEMORY),
        useIOTilesToLoad=Accepted(lambda use=True: use, NO_IPU, True),
        useIOTilesToStore=Accepted(lambda use=True: use, NO_IPU, True),
        useOnChipStorage=Accepted(lambda use=True: use, f"{ONE_MEMORY}, where useOnChipStorage(False) puts them", True),
    )

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Have every replica keep a part of the optimizer state."""
        return self._set_switch("useReplicatedTensorSharding", use)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Set the size below which tensors are not sharded."""
        return self._set("minElementsForReplicatedTensorSharding", positive("min_elements", min_elements))


def settings_of(location: object) -> TensorLocationSettings:
    """Return a location, if it is of settings.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(location, TensorLocationSettings):
        raise TypeError(
            f"the location is {location!r}; give poptorch.TensorLocationSettings().useReplicatedTensorSharding(), say"
        )
    return location


class TensorLocationOptions(OptionGroup):
    """Where tensors lie, `Options.TensorLocations`."""

    _title = "Options.TensorLocations"
    _methods = methods_of(
        _title,
        numIOTiles=Accepted(lambda num_tiles: num_tiles, NO_IPU),
        setAccumulatorLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
        setActivationLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
        setWeightLocation=Accepted(lambda location: settings_of(location), ONE_MEMORY),
    )

    def setOptimizerLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Set whether optimizer state is sharded, by `useReplicatedTensorSharding`; results do not change."""
        return self._set("setOptimizerLocation", settings_of(location))

    @property
    def of_optimizer(self) -> Mapping[str, object]:
        """The settings of optimizer state."""
        location = self._values.get("setOptimizerLocation")
        return location.toDict() if isinstance(location, TensorLocationSettings) else {}

    @property
    def shards_optimizer(self) -> bool:
        """Whether every replica keeps a part of the optimizer state."""
        return bool(self.of_optimizer.get("useReplicatedTensorSharding"))


class JitOptions(OptionGroup):
    """Options of how PopTorch reads a model, `Options.Jit`."""

    _title = "Options.Jit"
    _methods = methods_of(
        _title,
        traceModel=Accepted(
            lambda trace_model: trace_model, "no model is traced: its forward runs as it is written", True
        ),
    )


class PopartOptions(OptionGroup):
    """Options of PopTorch's compiler, `Options._Popart`: all are taken, and most change nothing."""

    _title = "Options._Popart"
    _methods = methods_of(_title, setPatterns=Accepted(lambda patterns, level=2: dict(patterns), NO_COMPILER))

    buffers: int | None = None
    engine_options: Mapping[str, str] = MappingProxyType({})

    def set(self, key: str, value: object) -> PopartOptions:
        """Take an option; those of `BUFFERING` say how many batches a `DataLoader` makes ahead.

        Raises:
            StrategyError: if the option says what is trained, for which there is another option.
        """
        if key in _OF_NUMBERS:
            raise StrategyError(
                f"{self._title}.set({key!r}, ...) changes what is trained, and is not heeded; use {_OF_NUMBERS[key]}"
            )
        if key in BUFFERING:
            return self._set(key, value, buffers=positive(key, value))
        return self._accept(key, value, NO_COMPILER)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> PopartOptions:
        """Take options of the engine; `autoReport.directory` is heeded, see `Options.enableProfiling`."""
        given = dict(engine_options)
        if any(name.startswith("autoReport.") for name in given):
            return self._set("setEngineOptions", given, engine_options=MappingProxyType(given))
        return self._accept("setEngineOptions", given, NO_COMPILER)
