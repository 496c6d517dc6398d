"""The original's estimator on several workers, which a network or Horovod connects: gradients are applied on the host.

In each of two terminals, with index 0 and index 1:

export TF_CONFIG='{"cluster":{"worker":["localhost:3737","localhost:3738"]},"task":{"type":"worker","index":0}}'
python -m popdist.examples.listings.estimator_workers

Without TF_CONFIG, as processes of mpirun:

mpirun -np 2 python -m popdist.examples.listings.estimator_workers
"""

import argparse
import logging
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import optax

import popdist
import strategies
from popdist.examples.digits_data import load_digits
from strategies import estimator

BATCH_SIZE = 32  # of each worker
WORKERS = 2


def input_fn(mode, input_context=None):
    """Return the batches of one worker."""
    digits = load_digits("digits")
    is_training = mode == estimator.ModeKeys.TRAIN
    images = digits.train_images if is_training else digits.test_images
    labels = digits.train_labels if is_training else digits.test_labels
    if input_context is not None:
        own = slice(input_context.input_pipeline_id, None, input_context.num_input_pipelines)
        images, labels = images[own], labels[own]
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(labels)) if is_training else np.arange(len(labels))
        for first in range(0, len(labels) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[first : first + BATCH_SIZE]
            yield images[rows], labels[rows]
        if not is_training:
            return


def model_fn(features, labels, mode):
    """Return the model of a mode: its loss and its gradients, its accuracy, or its predictions."""
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    logits = model(features, training=mode == estimator.ModeKeys.TRAIN)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.IPUEstimatorSpec(mode, predictions=logits.argmax(-1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    if mode == estimator.ModeKeys.EVAL:
        accuracy = (logits.argmax(-1) == labels).mean()
        return estimator.IPUEstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})

    optimizer = estimator.EstimatorOptimizer(optax.sgd(0.05, momentum=0.9))
    grads_and_vars = optimizer.compute_gradients(loss, var_list=model.trainable_variables)
    gradients, variables = zip(*grads_and_vars, strict=True)

    def host_model_fn(*host_gradients):
        """Average the gradients over all workers, and update the variables on the host."""
        return optimizer.apply_gradients(zip(host_gradients, variables, strict=True))

    host_call = (host_model_fn, gradients)
    return estimator.IPUEstimatorSpec(mode, loss=loss, train_op=loss, host_call=host_call)


def make_strategy():
    """Make a strategy with one replica for each worker of the original; a process may drive several of them."""
    if "TF_CONFIG" not in os.environ:
        popdist.init(WORKERS)
        return strategies.IPUHorovodStrategy(variables_on_host=True)  # initializes Horovod
    cluster = popdist.TFConfigClusterResolver()  # reads TF_CONFIG
    workers = len(cluster.cluster_spec().as_dict()["worker"])
    return strategies.IPUMultiWorkerStrategy(cluster, variables_on_host=True, num_local_replicas=WORKERS // workers)


def main():
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--model-dir")
    args = parser.parse_args()
    logging.getLogger("strategies.compat.estimator").setLevel(logging.INFO)
    logging.basicConfig()
    keras.utils.set_random_seed(1)

    config = estimator.RunConfig(
        ipu_run_config=estimator.IPURunConfig(),
        train_distribute=make_strategy(),
        save_checkpoints_steps=100,
    )
    classifier = estimator.IPUEstimator(model_fn, args.model_dir, config)
    metrics, _ = estimator.train_and_evaluate(
        classifier,
        estimator.TrainSpec(input_fn, max_steps=args.num_steps),
        estimator.EvalSpec(input_fn, steps=None),
    )
    variables = {name: classifier.get_variable_value(name) for name in classifier.get_variable_names()}
    print(f"accuracy {metrics['accuracy']:.3f}, loss {metrics['loss']:.3f}, {strategies.fingerprint(variables)}")


if __name__ == "__main__":
    main()
