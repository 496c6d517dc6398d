"""The estimator whose `model_fn` is a function of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from typing_extensions import override

from strategies.compat.estimator.base import Estimator, arguments_of
from strategies.compat.estimator.run_config import ModeKeys
from strategies.compat.estimator.spec import IPUEstimatorSpec
from strategies.typing import Tree


@final
class IPUEstimator(Estimator):
    """An estimator whose `model_fn` gets a batch and returns an `IPUEstimatorSpec`; see `Estimator`.

    Semantics: the original's class of that name.
    """

    _takes, _adds_losses = frozenset({"features", "labels"}), False

    @override
    def _model(self, mode: str) -> Callable[..., IPUEstimatorSpec]:
        def called(features: Tree, labels: Tree = None) -> IPUEstimatorSpec:
            labels = None if mode == ModeKeys.PREDICT else labels
            if labels is not None and "labels" not in arguments_of(self.model_fn):
                raise ValueError("model_fn does not take labels, but input_fn returns labels")
            return self._spec(IPUEstimatorSpec, mode, features=features, labels=labels)

        return called
