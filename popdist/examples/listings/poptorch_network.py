"""PopTorch's tutorial on pipelines: a network in four blocks, one on each of four simulated devices.

python -m popdist.examples.listings.poptorch_network
"""

import torch
from torch import nn

import strategies.torch.poptorch as poptorch


class Block(nn.Module):
    """A convolution, and the largest of each four pixels."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(inputs, outputs, 5), nn.MaxPool2d(2), nn.ReLU())

    def forward(self, images):
        """The smaller images."""
        return self.layers(images)


class Network(nn.Module):
    """Each layer is a block; what lies between two blocks belongs to the first."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = Block(1, 10), Block(10, 20)
        self.layer3, self.layer4 = nn.Linear(320, 256), nn.Linear(256, 10)

    def forward(self, images):
        """The logits."""
        with poptorch.Block("B1"):
            hidden = self.layer1(images)
        with poptorch.Block("B2"):
            hidden = self.layer2(hidden)
        with poptorch.Block("B3"):
            hidden = torch.relu(self.layer3(hidden.flatten(1)))
        with poptorch.Block("B4"):
            return self.layer4(hidden)


class TrainingNetwork(nn.Module):
    """Returns the loss as well, where there are labels; it is computed in the last block."""

    def __init__(self):
        super().__init__()
        self.network = Network()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        """The logits, or logits and loss."""
        output = self.network(images)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            return output, self.loss(output, labels)


def accuracy_of(outputs, labels):
    """The fraction that is right; outputs may be those of the last labels only."""
    return (outputs.argmax(1) == labels[-len(outputs) :]).float().mean().item()


def new_options(device_iterations=2, gradient_accumulation=10):
    """Four stages of one block each, and all outputs."""
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
    images = torch.randn(10, 1, 28, 28)[labels] + 0.5 * torch.randn(400, 1, 28, 28)  # ten patterns, and noise
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
