"""The configuration of estimators and of their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from strategies.argument_checks import at_least, positive, wrong_type
from strategies.compat.config.configured import IPUConfig, ipus_of_group
from strategies.strategy import Strategy
from strategies.typing import Element

InputFunction = Callable[..., Iterable[Element]]


class ModeKeys:
    """The modes in which a `model_fn` is called, as in `tf.estimator`."""

    TRAIN, EVAL, PREDICT = "train", "eval", "infer"


@dataclass(frozen=True)
class IPURunConfig:
    """The devices of a worker: `num_replicas` replicas of `num_shards` devices. `prefetch_depth` has no effect.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, or `ipu_options` configures another number of devices at `ordinal`.
    """

    iterations_per_loop: int = 1
    ipu_options: IPUConfig | None = None
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("iterations_per_loop", "num_replicas", "num_shards"):
            positive(name, getattr(self, name))
        at_least(0, "ordinal", self.ordinal)
        positive("prefetch_depth", 3 if self.prefetch_depth is None else self.prefetch_depth)
        _require("ipu_options", self.ipu_options, IPUConfig)
        needed, found = self.num_replicas * self.num_shards, self._configured()
        if found != needed:
            asked = f"{needed} devices ({self.num_replicas} num_replicas times {self.num_shards} num_shards)"
            raise ValueError(f"IPURunConfig has {asked}, but ipu_options has {found}; give an IPUConfig with {needed}")

    def _configured(self) -> int:
        config = self.ipu_options or IPUConfig()
        counts = [*np.ravel(config.auto_select_ipus), *map(ipus_of_group, np.ravel(config.select_ipus))]
        return int(counts[self.ordinal]) if self.ordinal < len(counts) else int(not counts)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of an estimator, with arguments of `tf.estimator.RunConfig`; the last three have no effect.

    Without `train_distribute` and `eval_distribute`, each worker trains or evaluates alone. The first values of
    `get_variable` and the keys of replicas depend on `tf_random_seed`; None is 0.
    """

    ipu_run_config: IPURunConfig | None = None
    master: str | None = None
    _: KW_ONLY
    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    session_config: object = None
    save_summary_steps: int = 100
    keep_checkpoint_every_n_hours: float = 10000

    def __post_init__(self) -> None:
        _require("ipu_run_config", self.ipu_run_config, IPURunConfig)
        _require("train_distribute", self.train_distribute, Strategy)
        _require("eval_distribute", self.eval_distribute, Strategy)
        for name in ("save_checkpoints_steps", "save_checkpoints_secs", "log_step_count_steps"):
            check_steps(name, getattr(self, name))
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError("Can not provide both save_checkpoints_steps and save_checkpoints_secs; give one")

    @property
    def devices(self) -> IPURunConfig:
        """The devices of a worker."""
        return self.ipu_run_config or IPURunConfig()


@dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`; `max_steps` is the global step at which it ends, None for all data."""

    input_fn: InputFunction
    max_steps: int | None = None
    hooks: Sequence[object] | None = None
    saving_listeners: Sequence[object] | None = None

    def __post_init__(self) -> None:
        check_steps("max_steps", self.max_steps)


@dataclass(frozen=True)
class EvalSpec:
    """The evaluations of `train_and_evaluate`: at the first checkpoint, and `throttle_secs` after the last evaluation.

    After each, the chief calls `export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)` of
    the exporter, or of each of a list of them. `start_delay_secs` has no effect.
    """

    input_fn: InputFunction
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[object] | None = None
    exporters: Any = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_steps("steps", self.steps)


def check_steps(name: str, steps: float | None) -> None:
    """Raise ValueError unless a number is positive or None."""
    if steps is not None and steps <= 0:
        raise ValueError(f"Must specify {name} > 0, given: {steps}")


def _require(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind | None):
        raise wrong_type(name, value, f"use an object of {kind.__name__}")
