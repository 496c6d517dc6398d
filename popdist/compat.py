"""The original's module `ipu`: a program changes one import, to `from popdist.compat import ipu`.

It replaces `from tensorflow.python import ipu`. Each name stands for its counterpart in this project. Most counterparts
are in `strategies`, which is loaded when such a name is used: this package depends on no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["ipu"]

_OURS = "strategies.compat.as_original"
_STRATEGIES = {
    "IPUStrategy": _OURS,
    "PopDistStrategy": _OURS,
    "IPUMultiWorkerStrategy": _OURS,
    "IPUHorovodStrategy": _OURS,
}
_POPDIST_STRATEGY = {"PopDistStrategy": _OURS}
_ESTIMATOR = "strategies.compat.estimator"
_OPTIMIZER_NAMES = (
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
)
_OPTIMIZERS = dict.fromkeys(_OPTIMIZER_NAMES, _OURS) | {"MapGradientOptimizer": "strategies"}
_COLLECTIVES = dict.fromkeys(("allgather", "allreduce", "broadcast"), "popdist")

_WHOLE = {
    "config": "strategies.config",
    "cross_replica_ops": "strategies.cross_replica_ops",
    "horovod": "popdist.horovod",
    "keras": "strategies.keras",
    "ops.cross_replica_ops": "strategies.cross_replica_ops",
    "ops.pipelining_ops": "strategies.compat.pipelining_ops",
    "ops.within_replica_ops": "strategies.within_replica_ops",
    "pipelining_ops": "strategies.compat.pipelining_ops",
    "within_replica_ops": "strategies.within_replica_ops",
}
"""Modules of the original outside `_NAMES`, each with the module here that has all of its names."""

_NAMES: Mapping[str, Mapping[str, str]] = {
    "": {},
    "dataset_benchmark": dict.fromkeys(("dataset_benchmark", "infeed_benchmark"), _OURS),
    "distributed": _COLLECTIVES | _STRATEGIES,
    "distributed.popdist_strategy": _POPDIST_STRATEGY,
    "gradient_accumulation": {"GradientAccumulationReductionMethod": "strategies"},
    "horovod.ipu_horovod_strategy": {
        "IPUHorovodStrategy": _OURS,
        "IPUHorovodStrategyV1": f"{_OURS}:IPUHorovodStrategy",
    },
    "horovod.popdist_strategy": _POPDIST_STRATEGY,
    "ipu_estimator": dict.fromkeys(("IPUEstimator", "IPUEstimatorSpec"), _ESTIMATOR),
    "ipu_infeed_queue": {"IPUInfeedQueue": _OURS},
    "ipu_multi_replica_strategy": {"IPUMultiReplicaStrategy": f"{_OURS}:PopDistStrategy"},
    "ipu_multi_worker_strategy": {
        "IPUMultiWorkerStrategy": _OURS,
        "IPUMultiWorkerStrategyV1": f"{_OURS}:IPUMultiWorkerStrategy",
    },
    "ipu_outfeed_queue": {
        "IPUOutfeedMode": "strategies:OutfeedMode",
        "IPUOutfeedQueue": _OURS,
        "ScopedIPUOutfeedQueue": _OURS,
    },
    "ipu_pipeline_estimator": dict.fromkeys(("IPUPipelineEstimator", "IPUPipelineEstimatorSpec"), _ESTIMATOR),
    "ipu_run_config": dict.fromkeys(("IPURunConfig", "RunConfig"), _ESTIMATOR),
    "ipu_strategy": {"IPUStrategy": _OURS, "IPUStrategyV1": f"{_OURS}:IPUStrategy"},
    "keras.layers": {"RecomputationCheckpoint": "strategies.keras"},
    "loops": {"repeat": _OURS, "while_loop": _OURS},
    "ops": {},
    "ops.replication_ops": {"replication_index": _OURS},
    "optimizers": _OPTIMIZERS,
    "optimizers.cross_replica_optimizer": _OPTIMIZERS,
    "optimizers.gradient_accumulation_optimizer": _OPTIMIZERS,
    "optimizers.map_gradient_optimizer": _OPTIMIZERS,
    "scopes": {"ipu_scope": _OURS, "ipu_shard": "strategies"},
    "utils": dict.fromkeys(("configure_ipu_system", "get_ipu_config", "reset_ipu_configuration"), "strategies.config"),
}

_INSTEAD = {
    "compile": "strategy.run(function), which compiles it",
    "create_ipu_config": "ipu.config.IPUConfig()",
    "ipu_compiler": "strategy.run(function), which compiles it",
    "reset_ipu_seed": "the seed of Trainer, or a key of jax.random among the arguments",
}
"""Suggested replacements for names without a counterpart."""


class _Module(ModuleType):
    """A module of the original whose names are looked up on access."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{__name__}.ipu.{place}".rstrip("."), f"The original's names in ipu.{place}.".replace("..", ".")
        )
        self.__path__: list[str] = []  # marks a package, so that its submodules can be imported
        self._place = place

    def __dir__(self) -> list[str]:
        names = {*_NAMES.get(self._place, ()), *_children(self._place)}
        if self._place in _WHOLE:
            names |= set(getattr(import_module(_WHOLE[self._place]), "__all__", ()))
        return sorted(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _children(self._place):
            return sys.modules[f"{self.__name__}.{name}"]
        if name in _NAMES.get(self._place, {}):
            module, _, other = _NAMES[self._place][name].partition(":")
            return getattr(import_module(module), other or name)
        whole = _WHOLE.get(self._place)
        if whole is not None and hasattr(import_module(whole), name):
            return getattr(import_module(whole), name)
        raise AttributeError(self._missing(name))

    def _missing(self, name: str) -> str:
        place = f"ipu.{self._place}".rstrip(".")
        if name in _INSTEAD:
            return f"{place} has no {name} here; use {_INSTEAD[name]}"
        return (
            f"{place} has no {name} here; it has {', '.join(dir(self))}; "
            "the documentation, page popdist_original, says what to use instead"
        )


def _places() -> list[str]:
    return sorted({*_NAMES, *_WHOLE})


def _children(place: str) -> list[str]:
    start = f"{place}." if place else ""
    below = (one[len(start) :] for one in _places() if one.startswith(start) and one != place)
    return [name for name in below if "." not in name]


def _modules() -> _Module:
    found = {place: _Module(place) for place in _places()}
    sys.modules.update({module.__name__: module for module in found.values()})
    return found[""]


__path__: list[str] = []  # so that popdist.compat.ipu.config can be imported
ipu = _modules()
