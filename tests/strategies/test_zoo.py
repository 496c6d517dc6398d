"""Models of the zoo: the same bits for every spread of replicas and with every optimizer."""

import functools

import pytest
from tiers import only
from zoo import ELEMENTWISE, FOR_OPTIMIZERS, MODELS, OPTIMIZERS, fingerprints

import strategies

pytestmark = pytest.mark.long
REPLICAS = 4
TRAININGS = {  # each has bits of its own
    "plain": {},
    "recompute": {"recompute": "blocks"},
    "accumulation": {"gradient_accumulation_count": 2},
}
STATES = {"whole": {}, "sharded": {"replicated_optimizer_state_sharding": True}}
SPREADS = [  # instances, training and state: all pairs
    (2, "plain", "sharded"),
    (4, "recompute", "whole"),
    (2, "accumulation", "whole"),
    (4, "plain", "whole"),
    (2, "recompute", "sharded"),
    (4, "accumulation", "sharded"),
]
FEW = ("loops", "attention", "cnn")
"""Models of the default tier, each with another training: data-dependent layers, softmax, windows. `batch_norm` is
trained on a single core, and `test_precision.py` has 16-bit floats."""
ON_ONE_CORE = ["batch_norm"]
OTHERS = [name for name in MODELS if name not in ON_ONE_CORE]
"""Models of the complete tier."""
ON_CORES = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import train_zoo
train_zoo.main(sys.argv[1:])
"""


@functools.cache
def alone(name, training="plain", optimizer="momentum"):
    """Return the result of one instance that drives all replicas."""
    return fingerprints(strategies.IPUStrategy(REPLICAS), MODELS[name], optimizer, **TRAININGS[training])


def spreads():
    """Yield the spreads of a model; models take turns on two and four instances, a few in the default tier."""
    for number, name in enumerate(MODELS):
        spread = SPREADS[number % len(SPREADS)]
        yield pytest.param(name, *spread, marks=() if name in FEW else pytest.mark.complete)


def test_a_few_models_have_each_training_each_state_and_all_numbers_of_instances():
    spreads = [SPREADS[list(MODELS).index(name) % len(SPREADS)] for name in FEW]
    assert [set(one) for one in zip(*spreads, strict=True)] == [{2, 4}, set(TRAININGS), set(STATES)]


@pytest.mark.parametrize(("name", "instances", "training", "state"), list(spreads()))
def test_a_model_has_the_same_bits_for_every_spread_of_replicas(on_instances, name, instances, training, state):
    def on_one(strategy):
        return fingerprints(strategy, MODELS[name], **TRAININGS[training], **STATES[state])

    wanted = alone(name, training)
    assert len(set(wanted)) == 5
    assert on_instances(instances, REPLICAS, on_one) == [wanted] * instances


@pytest.mark.parametrize(
    "optimizer",
    only(["adafactor"], OPTIMIZERS),
)
def test_an_optimizer_has_the_same_bits_with_whole_and_sharded_state(on_instances, optimizer):
    def train(strategy, **state):
        return fingerprints(strategy, FOR_OPTIMIZERS, optimizer, **state)

    wanted = train(strategies.IPUStrategy(REPLICAS))
    assert len(set(wanted)) == 5
    state = STATES["sharded" if optimizer in ELEMENTWISE else "whole"]
    assert on_instances(2, REPLICAS, lambda strategy: train(strategy, **state)) == [wanted] * 2


@pytest.mark.complete
@pytest.mark.parametrize("optimizer", ["clipped_adamw", "adafactor"])  # both use more than one element
def test_an_optimizer_of_several_layers_has_the_same_bits(on_instances, optimizer):
    def on_one(strategy):
        is_sharded = optimizer in ELEMENTWISE
        return fingerprints(strategy, MODELS["mlp"], optimizer, replicated_optimizer_state_sharding=is_sharded)

    assert on_instances(4, REPLICAS, on_one) == [alone("mlp", optimizer=optimizer)] * 4


@pytest.mark.cores(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("momentum", ON_ONE_CORE),
        *(pytest.param("momentum", OTHERS[half::2], marks=pytest.mark.complete) for half in (0, 1)),
        pytest.param("adafactor", ["mlp"], marks=pytest.mark.complete),  # its update adds up elements
    ],
)
def test_a_single_core_gives_the_same_bits(subtests, in_new_process, pytestconfig, optimizer, names):
    """Another process compiles for itself, with one of the cores that this one may use."""
    words = [pytestconfig.rootpath / "tests/jobs/programs", "--cores=1", f"--replicas={REPLICAS}"]
    printed = in_new_process(ON_CORES, *words, f"--optimizer={optimizer}", *names).splitlines()
    for name in names:
        with subtests.test(name):
            found = [line.split() for line in printed if line.startswith(f"{name} ")]
            assert [last for *_, last in found] == alone(name, optimizer=optimizer)
