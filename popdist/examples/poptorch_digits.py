"""The program of PopTorch's tutorial on pipelines, on digits; under poprun on several instances.

python -m popdist.examples.poptorch_digits --data folder_of_mnist
poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.poptorch_digits
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import popdist
import popdist.poptorch
import strategies.torch.poptorch as poptorch
from popdist.examples.digits_data import load_digits
from popdist.examples.listings.poptorch_network import TrainingNetwork, accuracy_of

SIZE = 28  # pixels that the network needs; smaller images are enlarged
SMALL = 4000  # images in one call of the tutorial; smaller data sets use smaller calls


def parse_arguments():
    """Parse the tutorial's arguments; the defaults are smaller for small data sets."""
    parser = argparse.ArgumentParser(description="Train in a pipeline of four simulated devices.")
    parser.add_argument("--data", default="digits", help="digits, an npz file, or a directory of IDX files of MNIST")
    parser.add_argument("--batch-size", type=int, help="rows per micro-batch (40; 4 for small data)")
    parser.add_argument("--device-iterations", type=int, help="updates per call (10; 2 for small data)")
    parser.add_argument("--gradient-accumulation", type=int, default=10, help="micro-batches per update")
    parser.add_argument("--test-batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--profile", action="store_true", help="write the drawn work of the devices to a file")
    parser.add_argument("--profile-dir", type=Path, default=Path("profile"))
    parser.add_argument("--strategy", choices=["pipelined", "sharded"], default="pipelined")
    parser.add_argument("--debug", action="store_true", help="log in more detail")
    parser.add_argument("--offload-optimiser", action="store_true", help="shard the optimizer's state over replicas")
    return parser.parse_args()


def tensors_of(images, labels):
    """Return a data set of images [N, 1, 28, 28] with labels."""
    stretched = F.interpolate(torch.from_numpy(images).permute(0, 3, 1, 2), size=(SIZE, SIZE))
    return torch.utils.data.TensorDataset(stretched, torch.from_numpy(labels.astype(np.int64)))


def new_options(arguments, is_small):
    """Return the options of training."""
    options = popdist.poptorch.Options()
    options.deviceIterations(arguments.device_iterations or (2 if is_small else 10))
    options.Training.gradientAccumulation(arguments.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)
    kinds = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}
    stages = [poptorch.Stage(f"B{number + 1}").ipu(number) for number in range(4)]
    options.setExecutionStrategy(kinds[arguments.strategy](*stages))
    if arguments.offload_optimiser:
        location = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        options.TensorLocations.setOptimizerLocation(location)
    return options


def test_accuracy(model, options, dataset, batch_size):
    """Return the accuracy on the test images that this instance reads."""
    options = options.clone()
    options.Training.gradientAccumulation(1)
    options.deviceIterations(4)
    loader = poptorch.DataLoader(options, dataset, batch_size=batch_size)
    inference = poptorch.inferenceModel(model, options)
    return float(np.mean([accuracy_of(inference(images), labels) for images, labels in loader]))


def main():
    """Train, then test."""
    arguments = parse_arguments()
    if arguments.debug:
        poptorch.setLogLevel("DEBUG")
    popdist.init()
    digits = load_digits(arguments.data)
    training_set = tensors_of(digits.train_images, digits.train_labels)
    is_small = len(training_set) < SMALL
    options = new_options(arguments, is_small)
    torch.manual_seed(0)
    model = TrainingNetwork()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    training = poptorch.trainingModel(model, options, optimizer)
    size, mode = arguments.batch_size or (4 if is_small else 40), poptorch.DataLoaderMode.Async
    loader = poptorch.DataLoader(options, training_set, batch_size=size, shuffle=True, mode=mode)
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            outputs, losses = training(images, labels)
        accuracy = accuracy_of(outputs, labels)
        if popdist.getInstanceIndex() == 0:
            print(f"epoch {epoch}: loss {losses.mean():.4f}, {accuracy:.1%} of the last call", flush=True)
    if arguments.profile:
        arguments.profile_dir.mkdir(exist_ok=True)
        name = f"instance{popdist.getInstanceIndex()}.txt"
        (arguments.profile_dir / name).write_text(training.trace.text(), encoding="utf-8")
    test_set = tensors_of(digits.test_images, digits.test_labels)
    found = test_accuracy(model, options, test_set, arguments.test_batch_size)
    if popdist.getInstanceIndex() == 0:
        print(f"{found:.1%} of the test digits", flush=True)


if __name__ == "__main__":
    main()
