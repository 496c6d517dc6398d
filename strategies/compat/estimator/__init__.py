"""Estimators under the original's names: a `model_fn` of JAX or Keras trains, evaluates and predicts on all replicas.

Semantics: the original's `ipu_estimator`, `ipu_pipeline_estimator` and `ipu_run_config`, and `tf.estimator`.
"""

from strategies.compat.estimator.estimators import IPUEstimator, IPUPipelineEstimator, train_and_evaluate
from strategies.compat.estimator.model import NanLossDuringTrainingError
from strategies.compat.estimator.spec import (
    EvalSpec,
    IPUEstimatorSpec,
    IPUPipelineEstimatorSpec,
    IPURunConfig,
    ModeKeys,
    RunConfig,
    TrainSpec,
)
from strategies.compat.estimator.variables import (
    CrossReplicaOptimizer,
    EstimatorOptimizer,
    get_global_step,
    get_random_key,
    get_variable,
)

__all__ = [
    "CrossReplicaOptimizer",
    "EstimatorOptimizer",
    "EvalSpec",
    "IPUEstimator",
    "IPUEstimatorSpec",
    "IPUPipelineEstimator",
    "IPUPipelineEstimatorSpec",
    "IPURunConfig",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "RunConfig",
    "TrainSpec",
    "get_global_step",
    "get_random_key",
    "get_variable",
    "train_and_evaluate",
]
