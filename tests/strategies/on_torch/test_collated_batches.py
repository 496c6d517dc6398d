"""Batches of a `collate_fn`: ragged rows, lists and names, with the same bits for every number of instances."""

from collections import UserDict

import numpy as np
import pytest
import torch

import strategies
import strategies.torch
from strategies.torch import CollatedBatch

REPLICAS, BATCH_SIZE = 4, 2
ROWS = [torch.randn(3 + k % 5, generator=torch.Generator().manual_seed(k)) for k in range(23)]


class Sentences(torch.utils.data.Dataset):
    """Elements of unequal lengths, with a name."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return {"x": ROWS[index], "name": f"row {index}"}


def as_lists(elements):
    return {"x": [one["x"] for one in elements], "names": tuple(one["name"] for one in elements), "none": None}


def padded(elements):
    xs = [one["x"] for one in elements]
    return torch.nn.utils.rnn.pad_sequence(xs, batch_first=True), np.array([len(x) for x in xs], np.float32)


def loss_of_lists(module, batch):
    assert batch["names"] == tuple(f"row {number}" for number in map(of_row, batch["x"]))
    return sum(module(x[:, None]).square().mean() for x in batch["x"]) / len(batch["x"])


def of_row(x):
    return next(number for number, row in enumerate(ROWS) if torch.equal(row, x))


def loss_of_padded(module, batch):
    x, lengths = batch
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return ((module(x[..., None])[..., 0].square() * mask).sum(1) / lengths).mean()


COLLATED = {"lists": (as_lists, loss_of_lists), "padded": (padded, loss_of_padded)}


def begun(strategy, loss, accumulation=1):
    module = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.zeros_(module.bias)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return module, strategies.torch.Trainer(strategy, module, loss, optimizer, gradient_accumulation_count=accumulation)


def trained(strategy, what, accumulation=1):
    collate, loss = COLLATED[what]
    module, trainer = begun(strategy, loss, accumulation)
    dataset = strategies.torch.distribute_dataset(
        strategy,
        Sentences(),
        BATCH_SIZE // accumulation,
        gradient_accumulation_count=accumulation,
        collate_fn=collate,
    )
    seen = [float(trainer.step(batch)["loss"]) for epoch in range(2) for batch in dataset.epoch(epoch)]
    rest = strategies.torch.distribute_dataset(
        strategy, Sentences(), BATCH_SIZE, shuffle=False, remainder="pad", collate_fn=collate
    )
    seen.append(trainer.evaluate(rest)["loss"])
    trainer.close()
    return [one.hex() for one in (*seen, module.weight.item(), module.bias.item())]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("what", COLLATED)
def test_ragged_rows_train_alike_on_any_number_of_instances(everywhere, what, accumulation):
    first, *others = everywhere(REPLICAS, lambda strategy: trained(strategy, what, accumulation))
    assert all(other == first for other in others)


def test_an_evaluation_leaves_padding_out(strategy):
    module, trainer = begun(strategy, loss_of_lists)
    dataset = strategies.torch.distribute_dataset(
        strategy, Sentences(), BATCH_SIZE, shuffle=False, remainder="pad", collate_fn=as_lists
    )
    with torch.no_grad():
        wanted = np.mean([module(x[:, None]).square().mean().item() for x in ROWS])
    assert trainer.evaluate(dataset)["loss"] == pytest.approx(wanted, rel=1e-6)
    trainer.close()


def test_rows_of_arrays_are_elements(strategy):
    rows = {"x": torch.arange(8.0), "y": np.arange(8)}
    dataset = strategies.torch.distribute_dataset(strategy, rows, 2, shuffle=False, collate_fn=list)
    [batch] = dataset.epoch(0)
    assert [[(float(one["x"]), int(one["y"])) for one in part] for part in batch.parts] == [
        [(0, 0), (1, 1)],
        [(2, 2), (3, 3)],
        [(4, 4), (5, 5)],
        [(6, 6), (7, 7)],
    ]
    assert batch.shape == (8,)


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4], [6, 6, 6, 6]], ids=["ragged", "equal"])
def test_a_list_is_a_data_set_of_its_elements(strategy, lengths):
    """Lists are read as by DataLoader, whatever the lengths of their tensors are."""
    rows = [torch.full((length,), number) for number, length in enumerate(lengths)]
    dataset = strategies.torch.distribute_dataset(strategy, rows, 1, shuffle=False, collate_fn=list)
    [batch] = dataset.epoch(0)
    assert [part[0].tolist() for part in batch.parts] == [row.tolist() for row in rows]


def test_arrays_of_unequal_lengths_are_refused(strategy):
    with pytest.raises(ValueError, match=r"data set\['x'\] has 8, data set\['y'\] has 7; all must have the same"):
        strategies.torch.distribute_dataset(strategy, {"x": np.ones(8), "y": np.ones(7)}, 2, collate_fn=list)


def test_a_loader_of_the_program_gives_parts_of_unequal_shapes(on_instances):
    def run(strategy, parts):
        module, trainer = begun(strategy, lambda module, x: module(x[:, None]).square().mean())
        for step in range(2):
            own = [ROWS[replica + 4 * step] for replica in strategy.local_replicas]
            trainer.step(CollatedBatch(own, rows=len(own)))
        with pytest.raises(
            ValueError, match=f"has 3 collated parts, but the local replicas have {parts} micro-batches"
        ):
            trainer.step(CollatedBatch(ROWS[:3]))
        trainer.close()
        return module.weight.item().hex()

    [one] = on_instances(1, 2, lambda strategy: run(strategy, 2))
    assert on_instances(2, 2, lambda strategy: run(strategy, 1)) == [one] * 2


def popped(module, batch):
    return module(batch.pop("x")).square().mean()


def doubled(module, batch):
    return module(batch.mul_(2)).square().mean()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("part", "loss"), [(lambda x: UserDict(x=x), popped), (lambda x: x, doubled)])
def test_a_loss_may_take_values_out_of_a_part_or_write_it(part, loss, accumulation):
    """A batch of the tokenizers of Hugging Face is a `UserDict`."""
    parts = [part(torch.full((2, 1), 0.5 + number)) for number in range(REPLICAS * accumulation)]
    module, trainer = begun(strategies.IPUStrategy(REPLICAS), loss, accumulation)
    trainer.step(CollatedBatch(parts))
    assert module.weight.item() != 1
    trainer.close()


def test_a_loop_gets_the_parts(everywhere):
    def run(strategy):
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        model = strategies.torch.DistributedModel(module, strategy)
        dataset = strategies.torch.distribute_dataset(
            strategy, Sentences(), 1, gradient_accumulation_count=2, collate_fn=as_lists
        )
        for batch in dataset.epoch(0):
            model.backward(lambda part: loss_of_lists(model, part) / 2, batch, 2)
        return module.weight.grad.numpy().tobytes()

    assert len(set(everywhere(2, run))) == 1


@pytest.mark.parametrize(
    ("source", "collate", "text"),
    [
        (iter([1, 2]), list, r"collate_fn needs a data set with a length and \[i\], but the source is a list_iterator"),
        (Sentences(), "list", "collate_fn is a str; give a function of a list of elements"),
    ],
)
def test_a_source_that_cannot_be_collated_is_refused(strategy, source, collate, text):
    with pytest.raises(TypeError, match=text):
        strategies.torch.distribute_dataset(strategy, source, 2, collate_fn=collate)
