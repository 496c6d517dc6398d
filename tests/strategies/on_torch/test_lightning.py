"""The strategy "popdist" of Lightning's Trainer: the same bits for every number of instances."""

# ruff: noqa: E402 - nothing may be imported before the skip
from __future__ import annotations

import copy
import logging
import pickle
import random
import warnings

import pytest

pl = pytest.importorskip("pytorch_lightning", reason="PyTorch Lightning is not installed")

import numpy as np
import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only as of_fabric
from lightning_modules import ROWS, Noisy, Regression, bits, fitted, loader, rows_of, trainer_of
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelSummary
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, MinMaxMetric, SpearmanCorrCoef

import strategies
import strategies.torch
from collectives import CollectiveError
from strategies import DisagreementError, StrategyError
from strategies.torch.lightning import PopDistLightningStrategy
from strategies.torch.lightning.loader import ShardingRule
from strategies.torch.replicas.attributes import Attributes

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::RuntimeWarning"
)
REPLICAS = 4


@pytest.fixture(autouse=True)
def process_of_lightning():
    """Restore what Lightning keeps for the whole process after each test: the rank, and the level of its logger."""
    logger = logging.getLogger("pytorch_lightning")
    ranks, level = (rank_zero_only.rank, of_fabric.rank), logger.level
    logger.setLevel(logging.ERROR)
    yield
    rank_zero_only.rank, of_fabric.rank = ranks
    logger.setLevel(level)


def same(found):
    """Return the result of all instances, if it is the same for every number of them."""
    assert all(one == found[0] for one in found), found
    return found[0]


def metrics(trainer):
    return {name: one.item() for name, one in trainer.callback_metrics.items()}


def test_a_training_has_the_same_bits_for_every_number_of_instances(everywhere):
    def train(strategy):
        module, trainer = fitted(strategy, validation=loader(), gradient_clip_val=0.5)
        return bits(module), trainer.global_step, metrics(trainer)

    found, steps, values = same(everywhere(REPLICAS, train))
    assert found != bits(Regression())
    assert steps == 6
    assert values.keys() == {"train_loss", "train_loss_step", "train_loss_epoch", "val_loss", "rows", "largest"}


def test_a_training_has_the_bits_of_this_project_s_trainer():
    def loss_fn(module, batch):
        return module.loss(batch)

    strategy = strategies.IPUStrategy(REPLICAS)
    module, _ = fitted(strategy, training=loader(drop_last=True), max_epochs=1)
    other = Regression()
    [optimizer], _ = other.configure_optimizers()
    trainer = strategies.torch.Trainer(strategy, other, loss_fn, optimizer, seed=3)
    dataset = strategies.torch.distribute_dataset(strategy, rows_of(), batch_size=3, shuffle=False)
    trainer.run(dataset.epoch(0))
    trainer.close()
    assert bits(module) == bits(other)


def test_data_sets_that_draw_random_numbers_give_the_same_bits():
    """Thread instances share the generators of NumPy and Python, so one instance after another runs here."""
    module, _ = fitted(strategies.IPUStrategy(2), training=loader(Noisy(), shuffle=True), max_epochs=1)
    again, _ = fitted(strategies.IPUStrategy(2), training=loader(Noisy(), shuffle=True), max_epochs=1)
    plain, _ = fitted(strategies.IPUStrategy(2), training=loader(shuffle=True), max_epochs=1)
    assert bits(module) == bits(again) != bits(plain)


def test_accumulated_batches_make_one_step(everywhere):
    def train(strategy):
        module, trainer = fitted(strategy, accumulate_grad_batches=2, max_epochs=1)
        return bits(module), trainer.global_step

    assert same(everywhere(2, train))[1] == 3  # of five batches


class Line(Regression):
    """A module whose steps of several replicas are those of one process with all of their rows."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        with torch.no_grad():
            [one.fill_(0.1) for one in self.parameters()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_accumulation_is_the_mean_over_the_batches():
    """Three batches of one replica have the gradient of one batch three times as large."""
    strategy = strategies.IPUStrategy(1)
    parts, _ = fitted(strategy, Line(), loader(batch_size=2), max_steps=1, accumulate_grad_batches=15)
    whole, _ = fitted(strategy, Line(), loader(batch_size=30), max_steps=1)
    for one, other in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4)


def test_mixed_precision_gives_the_same_bits(everywhere):
    """True precisions set PyTorch's default dtype, which threads share: tests/jobs has them."""

    def train(strategy):
        return bits(fitted(strategy, precision="bf16-mixed", max_epochs=1)[0])

    same(everywhere(2, train))


@pytest.mark.complete
def test_scaled_losses_give_the_same_bits(everywhere):
    def train(strategy):
        from pytorch_lightning.plugins import MixedPrecision

        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
        ours = PopDistLightningStrategy(strategy, seed=3, precision_plugin=plugin)
        module, trainer = fitted(ours, max_epochs=1)
        return bits(module), metrics(trainer)["train_loss_epoch"]

    _, loss = same(everywhere(2, train))
    plain = metrics(fitted(strategies.IPUStrategy(2), max_epochs=1)[1])["train_loss_epoch"]
    assert loss == pytest.approx(plain, rel=0.05)


# ---- attributes, weights of losses, manual optimization


def fitted_plainly(module, training):
    """Return a module and its trainer after a training without a strategy."""
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, training)
    return module, trainer


def assert_close(module, other):
    for one, same_one in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, same_one, rtol=1e-5)


def test_attributes_that_steps_assign_belong_to_their_replica(everywhere):
    class Counts(Line):
        count = 0
        past = torch.zeros(())

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.past = 0.5 * self.past + self.loss(batch).detach()
            return self.loss(batch) * self.count * self.past

        def on_train_epoch_start(self):
            self.count = 10

    def train(strategy):
        module, _ = fitted(strategy, Counts(), loader())
        return bits(module), module.count

    assert same(everywhere(REPLICAS, train))[1] == 13


def test_numbers_that_differ_between_replicas_have_no_value_in_hooks(on_instances):
    """The hook of an instance would see one replica's rows only. An instance with one replica is a process of DDP."""

    class Accumulates(Line):
        def on_validation_epoch_start(self):
            self.total, self.batches = 0.0, 0

        def validation_step(self, batch, batch_idx):
            self.total += self.loss(batch)
            self.batches += 1

        def on_validation_epoch_end(self):
            self.log("mean", self.total / self.batches, sync_dist=True)

    def validate(strategy):
        [found] = trainer_of(strategy).validate(Accumulates(), loader(rows_of(24)), verbose=False)
        return found["mean"]

    match = r"Accumulates.total was assigned in a step and is .* in replica 0, .* in replica 1, so outside of steps it"
    with pytest.raises(StrategyError, match=match):
        on_instances(1, 2, validate)
    module = Line()
    expected = module.loss(rows_of(24).tensors).item()
    assert same(on_instances(2, 2, validate)) == pytest.approx(expected, rel=1e-5)


def after_steps(kind):
    """Return a module after steps of two replicas, which have assigned an attribute of a kind."""
    module = Line()
    attributes = Attributes(module)
    attributes.begin(range(2))
    for replica in range(2):
        with attributes.of(replica):
            module.seen = kind(replica)
    attributes.end()
    return module


def loss_of(number):
    return torch.tensor(float(number), requires_grad=True) * 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [float, str, loss_of, np.float32, np.int64, np.bool_, lambda n: np.array([n])])
@pytest.mark.parametrize("use", [float, format, pickle.dumps])
def test_numbers_of_every_kind_are_refused_if_they_differ(kind, use):
    """A checkpoint with them could not be loaded. Copies of a module, which callbacks make, have them, too."""
    module = copy.deepcopy(after_steps(kind))
    with pytest.raises(StrategyError, match=r"seen was assigned in a step and is \S+ in replica 0, \S+ in replica 1"):
        use(module.seen)


@pytest.mark.parametrize("kind", [lambda number: np.array(str(number)), lambda number: torch.tensor([number, number])])
def test_other_attributes_have_the_values_of_the_last_replica_in_hooks(kind):
    assert str(after_steps(kind).seen) == str(kind(1))


class Masked(Line):
    """A module whose loss is a mean over some of the rows."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        counts = x[:, 0] > -1
        strategies.torch.loss_weight(counts.sum())
        loss = ((self.net(x) - y) ** 2)[counts].mean()
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss


def test_losses_and_their_logs_count_with_their_weights(everywhere):
    """Some replicas have no row that counts, so that their loss is NaN."""

    def train(strategy):
        module, trainer = fitted(strategy, Masked(), loader(rows_of(32), batch_size=1), max_epochs=1)
        return module, bits(module), metrics(trainer)

    found = everywhere(REPLICAS, train)
    same([one[1:] for one in found])
    plain, trainer = fitted_plainly(Masked(), loader(rows_of(32), batch_size=REPLICAS))
    assert_close(found[0][0], plain)
    assert found[0][2] == pytest.approx(metrics(trainer), rel=1e-5)


def test_weights_with_accumulated_batches_are_refused():
    with pytest.raises(StrategyError, match="the loss has a weight, but accumulate_grad_batches=2"):
        fitted(strategies.IPUStrategy(2), Masked(), accumulate_grad_batches=2)


def test_manual_optimization_of_one_replica_is_that_of_plain_lightning():
    class Two(Line):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(4, 1)
            with torch.no_grad():
                [one.fill_(0.2) for one in self.parameters()]

        def training_step(self, batch, batch_idx):
            x, y = batch
            for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(net(x), y))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.net, self.other)]

    module, trainer = fitted(strategies.IPUStrategy(1), Two(), loader(), max_epochs=1)
    plain, other = fitted_plainly(Two(), loader())
    assert_close(module, plain)
    assert trainer.global_step == other.global_step == 20


# ---- evaluations


def test_every_row_counts_once_in_an_evaluation(everywhere):
    """30 rows do not fill the last step of four replicas, so that some have no rows."""

    def validate(strategy):
        trainer = trainer_of(strategy)
        [found] = trainer.validate(Regression(), loader(batch_size=4), verbose=False)
        return found

    found = same(everywhere(REPLICAS, validate))
    module = Regression().eval()
    x, y = rows_of().tensors
    assert found["rows"] == ROWS
    assert found["largest"] == x.max()
    assert found["val_loss"] == pytest.approx(torch.nn.functional.mse_loss(module.net(x), y).item(), rel=1e-5)


def test_predictions_are_the_batches_of_one_process(everywhere):
    def predict(strategy):
        found = trainer_of(strategy).predict(Regression(), loader(batch_size=4))
        return [one.tolist() for one in found]

    found = same(everywhere(REPLICAS, predict))
    module = Regression().eval()
    with torch.no_grad():
        expected = [module.net(x).tolist() for x, _ in loader(batch_size=4)]
    assert found == expected


@pytest.mark.complete
def test_a_test_of_several_loaders_logs_each(on_instances):
    def run(strategy):
        trainer = trainer_of(strategy)

        class Several(Regression):
            def test_step(self, batch, batch_idx, dataloader_idx):
                self.log("test_loss", self.loss(batch))

        return trainer.test(Several(), [loader(), loader(batch_size=5)], verbose=False)

    found = same(on_instances(2, 4, run))
    assert [list(one) for one in found] == [["test_loss/dataloader_idx_0"], ["test_loss/dataloader_idx_1"]]


# ---- checkpoints


def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(on_instances, tmp_path):
    """Two instances write the checkpoint in the middle of an epoch, and one goes on."""

    def begin(strategy):
        saves = ModelCheckpoint(tmp_path, "four", every_n_train_steps=4)
        fitted(strategy, max_steps=5, max_epochs=-1, enable_checkpointing=True, callbacks=[saves])

    on_instances(2, REPLICAS, begin)
    strategy = strategies.IPUStrategy(REPLICAS)
    module, trainer = Regression(), trainer_of(strategy, max_epochs=3)
    trainer.fit(module, loader(shuffle=True), ckpt_path=tmp_path / "four.ckpt")
    assert trainer.global_step == 9
    assert bits(module) == bits(fitted(strategy, max_epochs=3)[0])


def test_a_checkpoint_from_the_end_of_a_stopped_epoch_begins_the_next_one(tmp_path):
    """Lightning counts an epoch that max_steps ends as a whole one."""
    strategy = strategies.IPUStrategy(REPLICAS)
    fitted(strategy, max_steps=2, max_epochs=-1)[1].save_checkpoint(tmp_path / "two.ckpt")
    trainer = trainer_of(strategy, max_epochs=2)
    trainer.fit(Regression(), loader(shuffle=True), ckpt_path=tmp_path / "two.ckpt")
    assert trainer.global_step == 2 + 3


def test_a_checkpoint_of_other_replicas_is_refused(tmp_path):
    _, trainer = fitted(strategies.IPUStrategy(2), max_steps=1)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(StrategyError, match="of a training with 2 replicas, and this job has 4; give poprun"):
        trainer_of(strategies.IPUStrategy(4)).fit(Regression(), loader(), ckpt_path=tmp_path / "two.ckpt")
    assert trainer_of(strategies.IPUStrategy(4)).validate(
        Regression(), loader(), ckpt_path=tmp_path / "two.ckpt", verbose=False
    )


class Saves(pl.Callback):
    """A callback that saves a checkpoint in chosen hooks, each in a file `HOOK-STEP.ckpt`."""

    def __init__(self, folder, *places):
        self.folder, self.places = folder, places

    def save(self, hook, trainer, *arguments):
        if f"{hook}-{trainer.global_step}" in self.places and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{hook}-{trainer.global_step}.ckpt")

    def on_train_batch_start(self, *arguments):
        self.save("on_train_batch_start", *arguments)

    def on_train_batch_end(self, *arguments):
        self.save("on_train_batch_end", *arguments)

    def on_validation_batch_end(self, *arguments):
        self.save("on_validation_batch_end", *arguments)

    def on_validation_end(self, *arguments):
        self.save("on_validation_end", *arguments)

    def on_train_epoch_end(self, *arguments):
        self.save("on_train_epoch_end", *arguments)


class Shuffles(Sampler):
    """A sampler whose order depends on the passes before, in one of several ways."""

    def __init__(self, kind, rows=ROWS):
        self.rows = rows
        generator = np.random.RandomState(7) if kind == "legacy" else np.random.default_rng(7)
        self.draw = lambda: generator.permutation(rows)
        if kind != "hidden":
            self.generators = {"of_order": [generator]}

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(self.draw().tolist())


class Buckets(BatchSampler):
    """A batch sampler that shuffles its batches; its sampler has a generator, too."""

    def __init__(self):
        super().__init__(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(4)), 3, drop_last=False)
        self.random = random.Random(5)

    def __iter__(self):
        batches = list(super().__iter__())
        self.random.shuffle(batches)
        return iter(batches)


class Counts(Shuffles):
    """A sampler that offers its state, as those of torchdata do."""

    def __init__(self):
        self.rows, self.passes = ROWS, 0

    def draw(self):
        self.passes += 1
        return np.random.default_rng(self.passes).permutation(ROWS)

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


class TwoLoaders(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["long"]) + self.loss(batch["short"])


ORDERS = {
    "a generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(9)),
    "a sampler with a generator of NumPy": lambda: loader(sampler=Shuffles("numpy")),
    "a sampler with an old generator of NumPy": lambda: loader(sampler=Shuffles("legacy")),
    "a batch sampler": lambda: DataLoader(rows_of(), batch_sampler=Buckets()),
    "a sampler with a state": lambda: loader(sampler=Counts()),
    "a second pass of a shorter loader": lambda: {"long": loader(shuffle=True), "short": loader(Noisy(15))},
}


LONG = ("a sampler with a generator of NumPy", "a second pass of a shorter loader")


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.complete if one in LONG else ()) for one in ORDERS]
)
def test_a_resume_reads_the_rows_of_a_training_without_a_stop(kind, tmp_path):
    """From the middle of the second epoch, and from its end; a second resume begins with a checkpoint of the first."""

    def train(*saves, **options):
        module = TwoLoaders() if "short" in kind else Line()
        callbacks = [Saves(tmp_path, *saves)]
        trainer = trainer_of(strategies.IPUStrategy(2), max_epochs=3, callbacks=callbacks)
        trainer.fit(module, ORDERS[kind](), **options)
        return bits(module)

    places = ["on_train_batch_end-7", "on_train_epoch_end-10"]
    whole = train(*places)
    for place, later in zip(places, [["on_train_batch_end-9"], []], strict=True):
        assert train(*later, ckpt_path=tmp_path / f"{place}.ckpt") == whole
    assert train(ckpt_path=tmp_path / "on_train_batch_end-9.ckpt") == whole


def test_a_resume_on_other_instances_reads_the_same_rows(on_instances, tmp_path):
    """While it loads a checkpoint, Lightning changes `sys.modules`, so thread instances cannot resume at once."""

    def train(strategy, *saves, **options):
        module = Line()
        trainer = trainer_of(strategy, max_epochs=3, callbacks=[Saves(tmp_path, *saves)])
        trainer.fit(module, ORDERS["a generator"](), **options)
        return bits(module)

    whole = same(on_instances(2, 2, lambda strategy: train(strategy, "on_train_batch_end-7")))
    assert train(strategies.IPUStrategy(2), ckpt_path=tmp_path / "on_train_batch_end-7.ckpt") == whole


def test_a_sampler_whose_state_cannot_be_saved_is_named_at_a_resume(tmp_path):
    def train(*saves, **options):
        module = Line()
        trainer = trainer_of(strategies.IPUStrategy(2), max_epochs=3, callbacks=[Saves(tmp_path, *saves)])
        trainer.fit(module, loader(sampler=Shuffles("hidden")), **options)
        return bits(module)

    places = ["on_train_batch_end-2", "on_train_batch_end-7", "on_train_epoch_end-10"]
    whole = train(*places)
    assert train(ckpt_path=tmp_path / "on_train_batch_end-2.ckpt") == whole
    match = "because of Shuffles: it draws another order for epoch 1 .*give it state_dict and load_state_dict"
    for place in places[1:]:
        with pytest.warns(UserWarning, match=match):
            train(ckpt_path=tmp_path / f"{place}.ckpt")


@pytest.mark.parametrize(
    ("made", "warns"), [(lambda: loader(shuffle=True), False), (ORDERS["a generator"], True)], ids=["known", "own"]
)
def test_checkpoints_of_version_0_1_go_on(made, warns, tmp_path):
    """They have no states of samplers."""

    def train(*saves, **options):
        module = Line()
        trainer = trainer_of(strategies.IPUStrategy(2), callbacks=[Saves(tmp_path, *saves)])
        trainer.fit(module, made(), **options)
        return bits(module)

    whole, path = train("on_train_batch_end-7"), tmp_path / "on_train_batch_end-7.ckpt"
    old = torch.load(path, weights_only=True)
    del old["popdist"]["place"]
    old["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [{"epoch": 1, "given": 2}]
    torch.save(old, path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert (train(ckpt_path=path) == whole) != warns
    assert any("RandomSampler: the checkpoint was written by an earlier" in str(one.message) for one in seen) == warns


class Plateau(Line):
    """A module whose learning rate depends on the loss of the validation, and whose hook draws random numbers."""

    def __init__(self, interval, monitor="val_loss"):
        super().__init__()
        self.interval, self.monitor = interval, monitor

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.net.bias.add_(0.01 * torch.rand(1))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
        options = {"monitor": self.monitor, "interval": self.interval, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}


def rates(folder, saves, module, validation=None, ckpt_path=None, **options):
    """Return the bits and the learning rate after a training of three epochs of five batches."""
    torch.manual_seed(3)
    trainer = trainer_of(strategies.IPUStrategy(2), max_epochs=3, callbacks=[Saves(folder, *saves)], **options)
    trainer.fit(module, loader(shuffle=True), validation, ckpt_path=ckpt_path)
    return bits(module), trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.complete)])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_validations_after_a_resume_draw_and_count_as_without_a_stop(interval, workers, tmp_path):
    """Lightning itself skips a validation that is due at a checkpoint, and updates of ReduceLROnPlateau."""

    def train(*saves, **resume):
        own = torch.Generator().manual_seed(6)
        validation = loader(Noisy(10), shuffle=True, generator=own, num_workers=workers)
        options = {"val_check_interval": 2, "limit_val_batches": 1}
        return rates(tmp_path, saves, Plateau(interval), validation, **options, **resume)

    places = [
        *("on_train_batch_end-6", "on_train_batch_end-7", "on_validation_batch_end-7", "on_validation_end-7"),
        *("on_train_batch_end-10", "on_train_epoch_end-10"),
    ]
    whole = train(*places)
    assert whole[1] < 0.1
    assert {place: train(ckpt_path=tmp_path / f"{place}.ckpt") for place in places} == dict.fromkeys(places, whole)


@pytest.mark.parametrize(
    ("epochs", "options"),
    [
        (3, {"reload_dataloaders_every_n_epochs": 1}),
        (5, {"reload_dataloaders_every_n_epochs": 2, "val_check_interval": 2}),
        (4, {"check_val_every_n_epoch": 2}),
    ],
    ids=["made anew", "made anew every second epoch", "validated every second epoch"],
)
@pytest.mark.parametrize("is_hook", [True, False], ids=["hooks", "arguments"])
def test_loaders_of_a_later_epoch_go_on_or_begin_anew_as_without_a_stop(epochs, options, is_hook, tmp_path):
    """Hooks make loaders with new generators; a loader that is an argument keeps its generator."""

    def train(*saves, ckpt_path=None):
        module = Plateau("epoch")
        make = {
            "train_dataloader": lambda: loader(sampler=Shuffles("numpy")),
            "val_dataloader": lambda: loader(Noisy(10), sampler=Shuffles("numpy", 10)),
        }
        if is_hook:
            vars(module).update(make)
        given = [] if is_hook else [one() for one in make.values()]
        torch.manual_seed(3)
        trainer = trainer_of(
            strategies.LocalStrategy(2), max_epochs=epochs, callbacks=[Saves(tmp_path, *saves)], **options
        )
        trainer.fit(module, *given, ckpt_path=ckpt_path)
        return bits(module), trainer.optimizers[0].param_groups[0]["lr"], float(trainer.callback_metrics["val_loss"])

    places = ["on_train_epoch_end-5", "on_train_batch_end-7", "on_train_epoch_end-10", "on_train_batch_end-12"]
    whole = train(*places)
    assert {place: train(ckpt_path=tmp_path / f"{place}.ckpt") for place in places} == dict.fromkeys(places, whole)


def test_gradients_that_wait_for_further_batches_are_saved(tmp_path):
    def train(*saves, **resume):
        return rates(tmp_path, saves, Plateau("step", "train_loss_step"), accumulate_grad_batches=2, **resume)

    place = "on_train_batch_end-3"  # after the first step of the second epoch, and once more after its next batch
    assert train(ckpt_path=None) == (whole := train(place))
    assert train(ckpt_path=tmp_path / f"{place}.ckpt") == whole
    assert "gradients" in torch.load(tmp_path / f"{place}.ckpt", weights_only=True)["popdist"]["place"]


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("on_train_batch_start-7", "written in batch 2 of epoch 1, which begins again"),
        ("on_train_batch_end-7", "ReduceLROnPlateau depends on train_loss_epoch, a value over a whole epoch"),
    ],
)
def test_a_resume_names_what_cannot_be_restored(place, match, tmp_path):
    rates(tmp_path, [place], Plateau("epoch", "train_loss_epoch"))
    with pytest.warns(UserWarning, match=match):
        rates(tmp_path, [], Plateau("epoch", "train_loss_epoch"), ckpt_path=tmp_path / f"{place}.ckpt")


# ---- data


@pytest.mark.complete
def test_replicas_read_the_order_of_a_sampler(on_instances):
    weights = [1.0] * ROWS

    def train(strategy):
        sampler = WeightedRandomSampler(weights, ROWS)
        batches = BatchSampler(SequentialSampler(range(ROWS)), 2, drop_last=True)
        one = bits(fitted(strategy, training=loader(sampler=sampler), max_epochs=1)[0])
        other = bits(fitted(strategy, training=DataLoader(rows_of(), batch_sampler=Batches(batches)), max_epochs=1)[0])
        return one, other

    found = [same(on_instances(instances, REPLICAS, train)) for instances in (1, 2)]
    assert found[0] == found[1]


class Batches(BatchSampler):
    """A batch sampler of a program."""

    def __init__(self, batches):
        self.batches = list(batches)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_instances_that_draw_other_orders_are_refused(on_instances):
    def train(strategy):
        own = torch.Generator().manual_seed(strategy.instance_index)
        with pytest.raises(DisagreementError, match="instances 1 draw another order of rows than instance 0"):
            fitted(strategy, training=loader(shuffle=True, generator=own))

    on_instances(2, 2, train)


@pytest.mark.complete
def test_a_data_set_of_this_project_trains(everywhere):
    def train(strategy):
        dataset = strategies.torch.distribute_dataset(strategy, rows_of(), batch_size=3, seed=3)
        sampler = strategies.torch.DistributedSampler(rows_of(), strategy, batch_size=3, seed=3)
        with_sampler = loader(batch_size=sampler.instance_batch_size, sampler=sampler)
        return bits(fitted(strategy, training=dataset)[0]), bits(fitted(strategy, training=with_sampler)[0])

    one, other = same(everywhere(2, train))
    assert one == other


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows_of())


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: loader(Endless()), "an IterableDataset gives its rows in order"),
        (lambda: [rows_of()[:2]], "a (list|tuple) cannot be dealt|a Tensor cannot be dealt"),
        (lambda: loader(batch_size=None), "batch_size=None cannot be dealt"),
        (lambda: loader(rows_of(7), drop_last=True), "takes 12 rows, but the loader has 7, .* drop_last=False"),
        (
            lambda: loader(sampler=torch.utils.data.DistributedSampler(rows_of(), 2, 0)),
            "has torch's DistributedSampler, but",
        ),
    ],
)
def test_data_that_cannot_be_dealt_is_refused(made, match):
    with pytest.raises(StrategyError, match=match):
        fitted(strategies.IPUStrategy(REPLICAS), training=made())


def test_replicas_share_every_row_of_an_evaluation_once():
    for length in (1, 5, 12, 26, 48):
        rule = ShardingRule(length, 3, 4, is_training=False, drops=False)
        read = [place for step in range(rule.steps) for one in range(4) for place in rule.positions(step, one)]
        assert read == list(range(length))
        assert [rule.is_whole(step) for step in range(rule.steps)] == [
            all(rule.positions(step, one) for one in range(4)) for step in range(rule.steps)
        ]


def test_replicas_get_equally_many_rows_in_training():
    for length in (1, 5, 12, 26, 48):
        rule = ShardingRule(length, 3, 4, is_training=True, drops=False)
        for step in range(rule.steps):
            parts = [rule.positions(step, one) for one in range(4)]
            assert len({len(one) for one in parts}) == 1
        read = [place for step in range(rule.steps) for one in range(4) for place in rule.positions(step, one)]
        assert set(read) == set(range(length))
        assert len(read) < length + 4
        assert ShardingRule(length, 3, 4, is_training=True, drops=True).steps == length // 12


# ---- what is refused


class Skipping(Regression):
    def training_step(self, batch, batch_idx):
        return None


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Backward(Regression):
    def backward(self, loss):
        loss.backward()


class WritesInPlace(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        self.seen += len(batch[0])


class AssignsABuffer(WritesInPlace):
    def validation_step(self, batch, batch_idx):
        self.seen = self.seen + len(batch[0])


@pytest.mark.parametrize("module", [WritesInPlace, AssignsABuffer])
def test_evaluations_that_write_buffers_are_refused(module):
    """Instances would go on with buffers of their own rows, and checkpoints would have those of instance 0."""
    with pytest.raises(StrategyError, match="validation_step has written the buffer seen, which would have the rows"):
        trainer_of(strategies.IPUStrategy(2)).validate(module(), loader(), verbose=False)
    assert trainer_of(strategies.IPUStrategy(1)).validate(module(), loader(), verbose=False) == [{}]


class LogsVectors(Regression):
    def training_step(self, batch, batch_idx):
        self.log("x", batch[0][0])
        return self.loss(batch)


class Gathers(Regression):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.all_gather(batch[1]).mean()


class TakesTheIterator(Regression):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Skipping, "training_step has returned no loss"),
        (Manual, "automatic_optimization=False lets training_step call the optimizer"),
        (Backward, "Backward.backward would run once for each replica"),
        (LogsVectors, r"log\('x'\) got a Tensor of shape \[4\]"),
        (Gathers, "all_gather in a step would join processes, but this one drives 4 replicas"),
        (TakesTheIterator, "let training_step take the batch, not the iterator"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module, match):
    with pytest.raises(StrategyError, match=match):
        fitted(strategies.IPUStrategy(REPLICAS), module())


def test_replicas_that_log_different_names_are_refused():
    class Different(Regression):
        count = 0

        def training_step(self, batch, batch_idx):
            Different.count += 1
            self.log(f"loss_{Different.count}", 1.0)
            return self.loss(batch)

    with pytest.raises(StrategyError, match="replica 1 has logged loss_2, but another one loss_1; log the same names"):
        fitted(strategies.IPUStrategy(2), Different())


@pytest.mark.parametrize("instances", [1, 2])
def test_a_step_that_depends_on_the_steps_of_other_replicas_is_refused(instances, on_instances):
    def train(strategy):
        class Counting(Regression):
            calls = []

            def training_step(self, batch, batch_idx):
                Counting.calls.append(batch_idx)
                return self.loss(batch) / len(Counting.calls)

        with pytest.raises(StrategyError, match="replica . computed its part of the step twice, and the loss was"):
            fitted(strategy, Counting())

    on_instances(instances, 4, train)


def test_instances_that_log_different_names_are_refused(on_instances):
    def train(strategy):
        class Different(Regression):
            def training_step(self, batch, batch_idx):
                self.log(f"loss_{strategy.instance_index}", 1.0)
                return self.loss(batch)

        with pytest.raises(CollectiveError, match="loss_0"):
            fitted(strategy, Different())

    on_instances(2, 2, train)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"devices": 3}, "asks Lightning for devices=3, but the launcher has started 1 instances"),
        ({"num_nodes": 2}, "asks Lightning for num_nodes=2"),
        ({"use_distributed_sampler": False}, "use_distributed_sampler=False lets every process read"),
    ],
)
def test_options_that_contradict_the_job_are_refused(options, match):
    with pytest.raises(StrategyError, match=match):
        fitted(strategies.IPUStrategy(2), **options)


def test_a_trainer_takes_the_strategy_by_name():
    with strategies.IPUStrategy(2).scope():
        trainer = trainer_of("popdist")
    assert isinstance(trainer.strategy, PopDistLightningStrategy)
    assert (trainer.world_size, trainer.global_rank, trainer.num_nodes) == (1, 0, 1)


# ---- collective calls of hooks


def test_hooks_reduce_over_instances(on_instances):
    class Hooks(Regression):
        found = None

        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_epoch_end(self):
            mine = torch.tensor([1.0 + self.trainer.global_rank])
            self.log("own", mine, sync_dist=True)
            strategy = self.trainer.strategy
            self.found = (
                self.all_gather(mine).tolist(),
                strategy.reduce(mine, reduce_op="sum").item(),
                strategy.broadcast({"rank": self.trainer.global_rank}, 1),
                strategy.reduce_boolean_decision(self.trainer.is_global_zero, all=False),
                strategy.reduce_boolean_decision(self.trainer.is_global_zero, all=True),
            )

    def validate(strategy):
        module = Hooks()
        [logged] = trainer_of(strategy).validate(module, loader(), verbose=False)
        return module.found, logged

    found, logged = same(on_instances(2, 4, validate))
    assert found == ([[1.0], [2.0]], 3.0, {"rank": 1}, True, False)
    assert logged == {"own": 1.5}


def test_hooks_of_batches_see_each_replica_s_batch():
    class Shifts(Regression):
        seen = ()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.seen = (*self.seen, len(batch[0]))
            return batch

        def on_train_batch_start(self, batch, batch_idx):
            assert [replica for replica, _ in batch.items()] == [0, 1]
            assert len(batch[1][0]) == 3

    module, _ = fitted(strategies.IPUStrategy(2), Shifts(), loader(), max_steps=1)
    assert module.seen[:2] == (3, 3)


def test_a_summary_runs_the_example_of_a_module_s_input():
    class Example(Regression):
        example_input_array = torch.zeros(2, 4)

        def forward(self, x):
            return self.net(x)

    module, trainer = fitted(strategies.IPUStrategy(2), Example(), max_epochs=1, callbacks=[ModelSummary()])
    other, _ = fitted(strategies.IPUStrategy(2), max_epochs=1)
    assert bits(module) == bits(other)


def test_outputs_of_training_steps_list_the_replicas():
    class Outputs(Regression):
        outputs = None

        def training_step(self, batch, batch_idx):
            return {"loss": self.loss(batch), "rows": len(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.outputs = outputs

    module, _ = fitted(strategies.IPUStrategy(2), Outputs(), loader(), max_steps=1)
    assert module.outputs["rows"] == [3, 3]
    assert module.outputs["loss"].ndim == 0


@pytest.mark.complete
def test_several_loaders_give_each_replica_a_batch_of_each(everywhere):
    class Pairs(Regression):
        def training_step(self, batch, batch_idx):
            assert batch.keys() == {"a", "b"}
            return self.loss(batch["a"]) + self.loss(batch["b"])

    def train(strategy):
        loaders = {"a": loader(shuffle=True), "b": loader(TensorDataset(*rows_of(20).tensors), batch_size=2)}
        return bits(fitted(strategy, Pairs(), loaders, max_epochs=1)[0])

    same(everywhere(2, train))


# ---- metrics of torchmetrics


class Measured(Regression):
    """A module with metrics of torchmetrics: sums of floats, lists, and a collection."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()
        self.correlation = SpearmanCorrCoef()
        self.both = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="of_", compute_groups=False)

    def training_step(self, batch, batch_idx):
        self.error(self.net(batch[0]), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        found = self.net(batch[0])
        self.correlation.update(found[:, 0], batch[1][:, 0])
        self.both.update(found, batch[1])
        self.log_dict(self.both)

    def on_validation_epoch_end(self):
        self.log("correlation", self.correlation.compute())
        self.correlation.reset()


def test_metrics_have_the_same_bits_for_every_number_of_instances(everywhere):
    def train(strategy):
        module, trainer = fitted(strategy, Measured(), validation=loader(batch_size=4))
        return bits(module), metrics(trainer)

    _, found = same(everywhere(2, train))
    assert found.keys() == {
        *("error", "error_step", "error_epoch", "correlation"),
        *("of_MeanSquaredError", "of_MeanAbsoluteError"),
    }


def test_metrics_of_replicas_are_those_of_one_process(everywhere):
    def validate(strategy):
        return trainer_of(strategy).validate(Measured(), loader(batch_size=4), verbose=False)

    [found] = same(everywhere(REPLICAS, validate))
    [alone] = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    ).validate(Measured(), loader(batch_size=4), verbose=False)
    assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "match"),
    [
        (lambda: MetricCollection([MeanSquaredError(), MeanAbsoluteError()]), "write MetricCollection.*compute_groups"),
        (lambda: MinMaxMetric(MeanSquaredError()), "MinMaxMetric of torchmetrics keeps values that are no states"),
    ],
)
def test_metrics_whose_states_cannot_be_merged_are_refused(metric, match):
    module = Regression()
    module.metric = metric()
    with pytest.raises(StrategyError, match=match):
        fitted(strategies.IPUStrategy(2), module)


@pytest.mark.complete
def test_averaged_weights_have_the_same_bits(everywhere):
    """The callback copies the module."""

    def train(strategy):
        return bits(fitted(strategy, callbacks=[EMAWeightAveraging(decay=0.5)])[0])

    assert same(everywhere(2, train)) != bits(fitted(strategies.IPUStrategy(2))[0])
