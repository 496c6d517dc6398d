"""PopTorch's tutorial on pipelines: a network in four blocks, one on each of four simulated devices.

python -m popdist.examples.listings.poptorch_network
"""

import torch
from torch import nn

import strategies.torch.poptorch as poptorch


class Block(nn.Module):
    """A convolution with max-pooling over 2x2 pixels."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(inputs, outputs, 5), nn.MaxPool2d(2), nn.ReLU())

    def forward(self, images):
        """Return the smaller images."""
        return self.layers(images)


class Network(nn.Module):
    """A network with one block per layer; operations between two blocks belong to the first of them."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = Block(1, 10), Block(10, 20)
        self.layer3, self.layer4 = nn.Linear(320, 256), nn.Linear(256, 10)

    def forward(self, images):
        """Return the logits."""
        with poptorch.Block("B1"):
            hidden = self.layer1(images)
        with poptorch.Block("B2"):
            hidden = self.layer2(hidden)
        with poptorch.Block("B3"):
            hidden = torch.relu(self.layer3(hidden.flatten(1)))
        with poptorch.Block("B4"):
            return self.layer4(hidden)


class TrainingNetwork(nn.Module):
    """A network that also returns the loss, computed in the last block, if it gets labels."""

    def __init__(self):
        super().__init__()
        self.network = Network()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        """Return the logits, or logits and loss."""
        output = self.network(images)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            return output, self.loss(output, labels)


def accuracy_of(outputs, labels):
    """Return the fraction that is right; outputs may belong to the last labels only."""
    return (outputs.argmax(1) == labels[-len(outputs) :]).float().mean().item()


def new_options(device_iterations=2, gradient_accumulation=10):
    """Return options for four stages of one block each, with all outputs."""
    options = poptorch.Options()
    options.deviceIterations(device_iterations)
    options.Training.gradientAccumulation(gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(*(poptorch.Stage(f"B{number + 1}").ipu(number) for number in range(4)))
    )
    return options


if __name__ == "__main__":
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (400,))
    images = torch.randn(10, 1, 28, 28)[labels] + 0.5 * torch.randn(400, 1, 28, 28)  # ten patterns with noise
    model = TrainingNetwork()
    options = new_options()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.002)
    training = poptorch.trainingModel(model, options, optimizer)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(images, labels), batch_size=4, shuffle=True)
    for epoch in range(3):
        for batch in loader:
            outputs, losses = training(*batch)
        print(f"epoch {epoch}: loss {losses.mean():.3f}, {accuracy_of(outputs, batch[1]):.0%} of the last batch")
    print(training.trace.text())
