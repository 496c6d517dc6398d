"""A program that trains a PyTorch module on handwritten digits, with the same bits on any number of instances.

python -m popdist.examples.torch_digits
poprun --num-instances 2 --num-replicas 4 python -m popdist.examples.torch_digits
poprun verify --num-replicas 4 python -m popdist.examples.torch_digits --epochs 1
"""

import torch
import torch.nn.functional as F

import popdist
import strategies
import strategies.torch
from popdist.examples.command_line import parser_of
from popdist.examples.digits_data import load_digits

REPLICAS = 4


def new_module(pixels):
    """Make a network with batch norm and dropout, with the same initial parameters in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(pixels, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 10),
    )


def loss_fn(module, batch):
    """Return the loss of one replica's micro-batch, and the accuracy."""
    logits = module(batch["image"])
    accuracy = (logits.argmax(1) == batch["label"]).float().mean()
    return F.cross_entropy(logits, batch["label"]), {"accuracy": accuracy}


def accuracy_of(module, images, labels):
    """Return the fraction of images that the module gets right."""
    module.eval()
    with torch.no_grad():
        found = (module(images).argmax(1) == labels).float().mean().item()
    module.train()
    return found


def main():
    """Train for some epochs; the first instance prints the progress."""
    parser = parser_of("Train a module of PyTorch on handwritten digits.")
    parser.set_defaults(epochs=5)
    parser.add_argument("--checkpoints", help="folder of checkpoints; training continues from the newest one")
    arguments = parser.parse_args()

    popdist.init(REPLICAS)
    strategy = strategies.PopDistStrategy()
    digits = load_digits(arguments.data)
    rows = {"image": digits.train_images, "label": digits.train_labels.astype("int64")}
    test = torch.from_numpy(digits.test_images), torch.from_numpy(digits.test_labels.astype("int64"))
    dataset = strategies.torch.distribute_dataset(strategy, rows, batch_size=arguments.batch_size)
    module = new_module(rows["image"][0].size)
    trainer = strategies.torch.Trainer(strategy, module, loss_fn, torch.optim.AdamW(module.parameters(), 0.01))

    def train(after_step=lambda: None):
        for epoch in range(dataset.position().epoch, arguments.epochs):
            for batch in dataset.epoch(epoch):
                metrics = trainer.step(batch)
                after_step()
            found = accuracy_of(module, *test)
            if strategy.is_chief:
                print(f"epoch {epoch}: loss {metrics['loss']:.4f}, {found:.1%} of the test digits", flush=True)

    if arguments.checkpoints:
        with strategies.Checkpoints(arguments.checkpoints, trainer, dataset, every=20) as checkpoints:
            trainer.restore(checkpoints)
            train(lambda: checkpoints.after_step(trainer.state))
    else:
        train()
    if strategy.is_chief:
        print(f"variables {strategies.fingerprint(trainer.state.variables)}", flush=True)


if __name__ == "__main__":
    main()
