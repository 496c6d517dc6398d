"""Sources of batches: all sources of Keras are dealt out to replicas by one rule."""

import itertools

import keras
import numpy as np
import pytest
from small_models import ROWS, TARGETS, WEIGHTS, Batches, Reordered, X, bits_of, regression
from tiers import first_of, only

from strategies.data.layout import Layout
from strategies.data.randomness import kept_generators, seed_for
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.keras.data import DataArguments, NumberedBatches, StreamOfBatches, open_feed

BATCH = 4
COUNT = ROWS // BATCH


class Numbered(Batches):
    def __init__(self, **named):
        super().__init__(**named)
        self.read, self.begun, self.ended = [], 0, 0

    def __getitem__(self, number):
        self.read.append(number)
        return super().__getitem__(number)

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def as_torch():
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(TARGETS))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def as_grain():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.range(ROWS).map(lambda i: (X[i], TARGETS[i])).batch(BATCH)


def as_tensorflow():
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices((X, TARGETS)).batch(BATCH)


def as_generator():
    yield from map(Batches().__getitem__, itertools.cycle(range(COUNT)))


SOURCES = {
    "arrays": lambda: ({"x": X, "y": TARGETS, "batch_size": BATCH}, {}),
    "PyDataset": lambda: ({"x": Numbered()}, {}),
    "PyDataset with workers": lambda: ({"x": Numbered(workers=2)}, {}),
    "torch": lambda: ({"x": as_torch()}, {}),
    "grain": lambda: ({"x": as_grain()}, {}),
    "tf.data": lambda: ({"x": as_tensorflow()}, {}),
    "generator": lambda: ({"x": as_generator()}, {"steps_per_epoch": 3}),
}


@pytest.fixture(scope="module")
def trained():
    """Return the bits trained with each source."""
    return {}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("instances", first_of([2, 1]))
def test_all_sources_of_the_same_batches_train_the_same(in_scopes, source, instances, trained):
    """A generator is the exception: it makes the requested steps, and the next epoch continues with it."""

    def program(strategy):
        model = regression()
        given, steps = SOURCES[source]()
        model.fit(**given, **steps, epochs=2, shuffle=False, verbose=0)
        return bits_of(model)

    for bits in in_scopes(instances, program):
        expected = trained.setdefault("generator" if source == "generator" else "others", bits)
        assert bits == expected


@pytest.mark.parametrize("source", only(["PyDataset"], [name for name in SOURCES if name != "generator"]))
def test_all_sources_are_evaluated_and_predicted_once(in_scopes, source):
    stock = regression()
    expected = stock.evaluate(X, TARGETS, verbose=0)

    def program(strategy):
        model = regression()
        given, _ = SOURCES[source]()
        evaluated = model.evaluate(**given, verbose=0)
        given, _ = SOURCES[source]()
        given.pop("y", None)
        return evaluated, model.predict(**given, verbose=0)

    for evaluated, predicted in in_scopes(2, program):
        assert evaluated == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(predicted, stock.predict(X, verbose=0), atol=1e-6)


def test_a_model_that_is_not_compiled_predicts_on_several_instances(in_scopes):
    def program(strategy):
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        return keras.Sequential([keras.Input((6,)), layer]).predict(X[:7], verbose=0)

    [whole], parts = in_scopes(1, program), in_scopes(2, program)
    assert all(np.array_equal(part, whole) for part in parts)


def test_an_instance_reads_only_its_own_batches_of_an_indexed_source(in_scopes):
    def program(strategy):
        data = Numbered()
        regression().fit(data, shuffle=False, verbose=0)
        return sorted(data.read), data.begun, data.ended

    results = in_scopes(2, program)
    own = [[0, 0, 1, 1, 4, 5, 8, 9], [2, 2, 3, 3, 6, 7, 10, 11]]  # those of the first step twice, to compare them
    peeked = [0, COUNT - 1]  # one as an example, and the last one since it may have fewer rows
    for (read, begun, ended), mine in zip(results, own, strict=True):
        assert read == sorted([*mine, *peeked, COUNT - 1])  # the last step has one batch, which replicas share
        assert (begun, ended) == (1, 1)


class WithGenerator(Batches):
    """A source that adds noise from its own generator."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, number):
        rows, targets = super().__getitem__(number)
        return rows + self.generator.normal(size=rows.shape).astype(np.float32), targets


class MixedUp(Batches):
    """A source that mixes the rows of a batch with those that were read before."""

    before = 0

    def __getitem__(self, number):
        rows, targets = super().__getitem__(number)
        before, self.before = self.before, rows
        return (rows + before) / 2, targets


@pytest.mark.parametrize("kind", [WithGenerator, MixedUp])
@pytest.mark.parametrize("instances", [1, 2])
def test_batches_that_depend_on_earlier_reads_are_refused(in_scopes, kind, instances):
    with pytest.raises(StrategyError, match=r"element \d+ of the data set is different when it is read again"):
        in_scopes(instances, lambda strategy: regression().fit(kind(), verbose=0))


def test_batches_of_a_single_replica_may_depend_on_earlier_reads(alone):
    def trained():
        model = regression()
        model.fit(WithGenerator(), verbose=0, shuffle=False)
        return bits_of(model)

    assert alone(lambda strategy: trained(), replicas=1) == alone(lambda strategy: trained(), replicas=1)


def test_all_instances_shuffle_data_in_the_same_way(in_scopes):
    """Instance 0 draws the seed. Threads share NumPy's state, so two runs differ here."""

    def program(strategy):
        found = []
        for given in ({"x": X, "y": TARGETS, "batch_size": 4}, {"x": Numbered()}):
            for shuffle in (True, False):
                model = regression()
                model.fit(**given, shuffle=shuffle, verbose=0)
                found.append(bits_of(model))
        return found

    one, other = in_scopes(2, program)
    assert one == other
    assert one[1] == one[3]
    assert len(set(one)) == 3


class Noisy(Batches):
    """A source that draws when it is read."""

    def __getitem__(self, number):
        rows, targets = super().__getitem__(number)
        return rows + np.random.standard_normal(rows.shape).astype(np.float32), targets


class NoisyByLayer(Batches):
    """A source that draws by a layer of Keras with a seed, and by Keras's own generator."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.GaussianNoise(1.0, seed=1)

    def __getitem__(self, number):
        rows, targets = super().__getitem__(number)
        return np.asarray(self.layer(rows, training=True) + keras.random.normal(rows.shape)), targets


class ReorderedByKeras(Reordered):
    """A source that draws another order by a generator of Keras, which each instance seeds otherwise."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator()

    def on_epoch_end(self):
        self.order = np.asarray(keras.random.shuffle(self.order, seed=self.generator))


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("kind", [Noisy, NoisyByLayer, Reordered, ReorderedByKeras])
def test_random_numbers_of_a_source_do_not_depend_on_the_spread(in_scopes, monkeypatch, kind, steps):
    """Each instance reads its own batches only. With two steps an epoch, hooks come while a pass is read."""
    monkeypatch.setattr(np.random, "randint", lambda most: 7)  # the seed of a training: threads share NumPy's state

    def program(strategy):
        model = regression()
        evaluated = model.evaluate(kind(), verbose=0)
        model.fit(kind(), shuffle=False, epochs=3, steps_per_epoch=steps, verbose=0)
        return bits_of(model), evaluated

    [one] = in_scopes(1, program)
    assert in_scopes(2, program) == [one] * 2


@pytest.mark.parametrize("kind", [Noisy, NoisyByLayer])
def test_another_training_draws_other_numbers(alone, kind):
    def program(strategy):
        np.random.seed(3)
        models = [regression() for _ in range(2)]
        for model in models:
            model.fit(kind(), shuffle=False, verbose=0)
        return [bits_of(model) for model in models]

    one, other = alone(program)
    assert one != other


def test_seeds_of_layers_make_different_numbers_and_keep_their_states(alone):
    def program(strategy):
        generators, found = [keras.random.SeedGenerator(seed) for seed in (1, 2)], []
        for generator in generators:
            with kept_generators():
                seed_for(7, 0, 0)
                found.append(np.asarray(generator.next()).tolist())
        return found, [np.asarray(generator.state.value).tolist() for generator in generators]

    (one, other), states = alone(program)
    assert one != other
    assert states == [[1, 0], [2, 0]]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_generator_gives_each_pass_exactly_its_batches(in_scopes, steps):
    """A pass that reads ahead would take batches from the next one, maybe other ones on each instance."""

    def program(strategy):
        taken = []

        def generator():
            for number in itertools.cycle(range(COUNT)):
                taken.append(number)
                yield Batches()[number]

        model, data, counts = regression(), generator(), []
        for _ in range(2):
            model.evaluate(data, steps=steps, verbose=0)
            counts.append(len(taken))
        model.fit(data, steps_per_epoch=steps, epochs=2, validation_data=data, validation_steps=steps, verbose=0)
        return [*counts, len(taken)]

    batches = 4 * steps
    assert in_scopes(2, program) == [[batches, 2 * batches, 6 * batches]] * 2


def test_endless_batches_with_numbers_begin_again_in_each_evaluation(in_scopes):
    class Endless(Batches):
        @property
        def num_batches(self):
            return None

        def __getitem__(self, number):
            return super().__getitem__(number % COUNT)

    def program(strategy):
        model, data = regression(), Endless()
        again = [model.evaluate(data, steps=2, verbose=0) for _ in range(2)]
        model.optimizer.learning_rate = 0.0
        told = model.fit(
            data, steps_per_epoch=1, epochs=3, validation_data=data, validation_steps=2, shuffle=False, verbose=0
        )
        return [*again, *told.history["val_loss"]], told.history["loss"]

    for evaluated, trained in in_scopes(2, program):
        assert len(set(evaluated)) == 1
        assert len(set(trained)) == 3  # training goes on in the next epoch


def test_batches_with_numbers_have_the_weights_of_their_classes(alone):
    class Kinds(Numbered):
        def __getitem__(self, number):
            return X[:3], np.array([0, 1, 0])

    def program(strategy):
        feed = open_feed(DataArguments(Kinds(), class_weight={0: 1.0, 1: 2.5}), strategy, trains=True)
        return feed.example[2].tolist()

    assert alone(program) == [1.0, 2.5, 1.0]


def test_rows_are_shuffled_whenever_stock_keras_shuffles_them(alone):
    """Keras takes 1 for true. Unknown words are true too in Keras; they are refused here."""

    def program(strategy):
        def is_shuffled(shuffle):
            return open_feed(DataArguments(X, TARGETS), strategy, trains=True, shuffle=shuffle).dataset.is_shuffled

        with pytest.raises(ValueError, match=r"shuffle is 'no'; it must be True, False or 'batch'"):
            regression().fit(X, TARGETS, shuffle="no", verbose=0)
        return [is_shuffled(shuffle) for shuffle in (1, np.True_, 0, None, "batch")]

    assert alone(program) == [True, True, False, False, False]


@pytest.mark.parametrize(("steps", "batch_size"), [(3, 4), (5, 3), (12, 1)])
def test_arrays_are_read_whole_in_the_given_number_of_steps(alone, steps, batch_size):
    """The steps take 48 rows on 4 replicas."""

    def program(strategy):
        feed = open_feed(DataArguments(X[:48], TARGETS[:48], steps=steps), strategy, trains=True)
        return feed.batch_size // strategy.num_replicas_in_sync

    assert alone(program) == batch_size


def test_another_global_batch_size_than_that_of_the_source_is_refused(alone):
    """Keras ignores `batch_size` then, and so does this; a global batch size would claim something untrue."""

    def program(strategy):
        with pytest.raises(ValueError, match="global_batch_size is 32, but the data come in batches that make 16 rows"):
            regression().fit(Numbered(), global_batch_size=32, verbose=0)
        regression().fit(Numbered(), global_batch_size=16, verbose=0)

    alone(program)


def test_the_shuffle_of_an_epoch_does_not_depend_on_the_first_epoch(alone):
    """A training that restarts with `initial_epoch` continues with the bits of an unbroken one."""

    def program(strategy):
        found = []
        for parts in ([(0, 2)], [(0, 1), (1, 2)]):
            model = regression()
            for begin, end in parts:
                np.random.seed(8)
                model.fit(X, TARGETS, batch_size=4, initial_epoch=begin, epochs=end, verbose=0)
            found.append(bits_of(model))
        return found

    one, other = alone(program)
    assert one == other


# ---- distribution of elements


def rows(source, local, batch_size=2, replicas=4, remainder="short", accumulated=1, start=0):
    layout = Layout(batch_size, replicas, local, remainder, accumulated)
    return list(source.open(layout, seed=0, shuffle=False).batches(0, start))


def batches(sizes):
    ends = list(itertools.accumulate(sizes))
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def numbered(sizes):
    given = batches(sizes)
    return NumberedBatches(given.__getitem__, len(given))


def stream(sizes):
    return StreamOfBatches(lambda: batches(sizes))


@pytest.mark.parametrize("make", [numbered, stream])
@pytest.mark.parametrize(
    ("sizes", "dealt"),
    [
        ([2] * 8, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
        ([2] * 6, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]),
        ([2] * 7 + [1], [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]),
        ([2] * 5 + [1], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_rows_that_do_not_fill_a_step_are_dealt_out_evenly(make, sizes, dealt, instances):
    local = 4 // instances
    parts = [rows(make(sizes), range(i * local, (i + 1) * local)) for i in range(instances)]
    steps = [np.concatenate(step).tolist() for step in zip(*parts, strict=True)]
    assert steps == dealt


@pytest.mark.parametrize("make", [numbered, stream])
@pytest.mark.parametrize("sizes", [[2] * 8, [2] * 5, [2] * 7 + [1], [2], [1]])
def test_evaluation_reads_every_row_once_with_its_number(make, sizes):
    size = sizes[0]
    seen = []
    for first in (0, 2):
        for batch in rows(make(sizes), range(first, first + 2), size, remainder="pad"):
            assert isinstance(batch, Masked)
            numbers, values = batch.values
            assert len(numbers) == 2 * size
            np.testing.assert_array_equal(numbers, values)
            seen += values[batch.mask].tolist()
    assert sorted(seen) == list(range(sum(sizes)))


def test_row_numbers_continue_after_a_step_that_is_not_filled():
    steps = rows(stream([2, 2, 2, 1, 2, 2, 2, 2]), range(2), remainder="pad")
    assert [step.values[0].tolist() for step in steps] == [[0, 1, 2, 3], [7, 8, 9, 10]]


@pytest.mark.parametrize(("make", "sizes"), [(numbered, [2] * 8), (stream, [2] * 8), (stream, [2, 2, 2, 1] + [2] * 4)])
def test_row_numbers_are_the_same_if_an_epoch_is_continued(make, sizes):
    whole, rest = (rows(make(sizes), range(2), remainder="pad", start=start) for start in (0, 1))
    assert [step.values[0].tolist() for step in rest] == [step.values[0].tolist() for step in whole[1:]]


def test_a_replica_takes_its_micro_batches_one_after_another():
    [first, last] = [rows(numbered([2] * 8), local, accumulated=2) for local in (range(2), range(2, 4))]
    assert [step.tolist() for step in first] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert [step.tolist() for step in last] == [[8, 9, 10, 11, 12, 13, 14, 15]]


def test_batches_with_unlike_rows_are_left_for_the_user_to_pad():
    given = StreamOfBatches(lambda: [np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises(ValueError, match=r"rows of the shapes \(3,\) and \(4,\), .* pad them to the same length"):
        rows(given, range(2), replicas=2)


def test_arguments_that_the_source_already_contains_are_refused(alone):
    """Stock Keras refuses these arguments too."""

    def program(strategy):
        for beside in ({"y": TARGETS}, {"sample_weight": WEIGHTS}):
            with pytest.raises(ValueError, match="should not be passed"):
                regression().fit(Numbered(), **beside, verbose=0)
        grain = pytest.importorskip("grain")
        batches = grain.MapDataset.source(list(zip(X, TARGETS, strict=True))).batch(4)
        with pytest.raises(ValueError, match="class_weight"):
            regression().fit(batches, class_weight={0: 1.0}, verbose=0)

    alone(program)


def test_an_empty_source_is_an_error(alone):
    with pytest.raises(ValueError, match="must yield at least one batch|no batch"):
        alone(lambda strategy: regression().fit((batch for batch in ()), verbose=0))


@pytest.mark.parametrize("rows", [4, 7])
def test_too_few_rows_for_all_micro_batches_are_refused(alone, rows):
    """Arrays, and batches of one row, are enough for four replicas, but not for two micro-batches of each."""

    def program(strategy):
        model = regression()
        model.set_gradient_accumulation_options(2)
        for data in ((X[:rows], TARGETS[:rows]), (Batches(1, rows),)):
            with pytest.raises(
                ValueError, match=f"the data have {rows} rows for 4 replicas x 2 micro-batches; give at"
            ):
                model.fit(*data, verbose=0)

    alone(program)
