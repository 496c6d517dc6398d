"""Variables without a trainer: mirrored variables, and variables reduced on reading."""

import jax
import numpy as np
import pytest

import strategies
from strategies import loops


@pytest.mark.parametrize("on_host", [False, True])
def test_a_mirrored_variable_begins_with_instance_0s_value_and_reduces_what_replicas_write(on_instances, on_host):
    def program(strategy):
        variable = strategy.variable(lambda: np.float32(strategy.instance_index + 1), aggregation="sum")
        before = float(variable.read_value())
        variable.assign(strategy.per_replica(lambda r: np.float32(r)))
        return before, float(variable.read_value()), isinstance(variable.value, np.ndarray)

    assert on_instances(2, 4, program, variables_on_host=on_host) == [(1.0, 6.0, on_host)] * 2


def test_a_variable_takes_only_values_like_itself(strategy):
    variable = strategy.variable({"w": np.ones((2, 3), np.float32)})
    variable.assign({"w": np.full((2, 3), 2)})
    assert variable.value["w"].dtype == np.float32
    with pytest.raises(ValueError, match=r"a value of shape \[3\] for a variable of \[2, 3\]"):
        variable.assign({"w": np.ones(3)})
    with pytest.raises(ValueError, match="structure"):
        variable.assign(np.ones((2, 3)))


@pytest.mark.parametrize(("aggregation", "wanted"), [("mean", 2.5), ("sum", 10.0), ("only_first_replica", 1.0)])
def test_a_variable_that_is_synchronised_on_reading_is_reduced_over_all_replicas(on_instances, aggregation, wanted):
    def program(strategy):
        variable = strategy.variable(0.0, "on_read", aggregation)
        variable.assign(strategy.per_replica(lambda r: np.float32(r + 1)))
        return float(variable.read_value())

    assert on_instances(2, 4, program) == [wanted] * 2


def test_a_sum_that_is_assigned_is_read_back(on_instances):
    def program(strategy):
        variable = strategy.variable(0.0, "on_read", "sum")
        variable.assign(np.float32(12))
        return [float(jax.numpy.asarray(value)) for value in variable.values], float(variable.read_value())

    assert on_instances(2, 4, program) == [([3.0, 3.0], 12.0)] * 2


def test_a_variable_that_is_synchronised_on_reading_keeps_its_dtype_and_shape(strategy):
    variable = strategy.variable(np.int32(0), "on_read", "sum")
    variable.assign(np.int32(-8))
    assert [value.item() for value in variable.values] == [-2] * 4
    variable.assign(strategy.per_replica(float))
    assert (variable.read_value(), variable.read_value().dtype) == (6, np.int32)
    for wrong in (np.zeros(3, np.int32), strategy.per_replica(lambda r: np.zeros(3, np.int32))):
        with pytest.raises(ValueError, match=r"a value of shape \[3\] for a variable of \[\]"):
            variable.assign(wrong)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_a_sum_of_integers_that_cannot_be_divided_among_the_replicas_is_refused(strategy, dtype):
    variable = strategy.variable(np.zeros(2, dtype), "on_read", "sum")
    variable.assign(np.array([8, 100], dtype))
    with pytest.raises(ValueError, match=r"^5 was assigned to a sum of u?int\d+ over 4 replicas, .* a multiple of 4"):
        variable.assign(np.array([8, 5], dtype))
    assert variable.read_value().tolist() == [8, 100]
    variable.assign(strategy.per_replica(lambda r: np.array([2, 2 if r == 0 else 1], dtype)))
    assert variable.read_value().tolist() == [8, 5]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.uint8, 255), (np.int8, 127), (np.int32, 2**31 - 1), (np.uint32, 2**32 - 1)]
)
def test_the_mean_of_an_integer_variable_is_the_assigned_value(strategy, dtype, largest):
    for synchronization in ("on_read", "on_write"):
        variable = strategy.variable(dtype(0), synchronization, "mean")
        for value in (5, largest):
            variable.assign(dtype(value))
            assert (int(variable.read_value()), variable.read_value().dtype) == (value, dtype)
            variable.assign(strategy.per_replica(lambda r, value=value: dtype(value - r)))
            assert int(variable.read_value()) == value - 2  # 1.5 is cut off


@pytest.mark.parametrize("synchronization", ["on_read", "on_write"])
def test_an_integer_variable_takes_no_numbers_that_it_cannot_hold(strategy, synchronization):
    variable = strategy.variable(np.zeros(2, np.uint8), synchronization, "mean")
    variable.assign(np.array([255.0, 3.0]))
    for wrong in ([300, 1], [1, -1], [2.5, 1], [np.nan, 1], [1, np.inf]):
        with pytest.raises(ValueError, match="was assigned to a variable of uint8, which cannot hold it; round it, or"):
            variable.assign(np.array(wrong))
        with pytest.raises(ValueError, match="was assigned to a variable of uint8"):
            variable.assign(strategy.per_replica(lambda r, wrong=wrong: np.array(wrong)))
    assert variable.read_value().tolist() == [255, 3]


def test_unknown_words_are_refused_with_the_known_ones():
    strategy = strategies.IPUStrategy()
    with pytest.raises(ValueError, match="on_write, on_read"):
        strategy.variable(0.0, "on_sunday")
    with pytest.raises(ValueError, match="sum, mean, only_first_replica"):
        strategy.variable(0.0, "on_read", "median")


def test_only_instance_0_writes_checkpoints(on_instances):
    """The instances run on threads."""

    def program(strategy):
        extended = strategy.extended
        assert extended.experimental_between_graph
        assert extended.experimental_should_init
        return extended.should_checkpoint, extended.should_save_summary

    assert on_instances(2, 2, program) == [(True, True), (False, False)]


def test_a_replica_reads_the_current_value(strategy):
    variable = strategy.variable(np.float32(1))

    def double():
        return 2 * variable.value

    traced = []

    def listed():
        traced.append(variable.read_value())
        return 0

    for value in (1, 5):
        variable.assign(np.float32(value))
        for _ in range(2):
            assert [float(x) for x in strategy.run(double)] == [2 * value] * 4
            strategy.run(listed)
    assert len(traced) == 2  # compiled again only after a change


def test_a_cached_loop_reads_the_current_value(strategy):
    variable = strategy.variable(np.float32(1))

    def body(x):
        return x + variable.value

    for value in (1, 5):
        variable.assign(np.float32(value))
        assert float(loops.repeat(3, body, [0.0])) == 3 * value


@pytest.mark.parametrize("synchronization", ["on_read", "on_write"])
def test_assigning_inside_a_replica_is_refused(strategy, synchronization):
    """Assigned values would be leftovers of a compilation."""
    variable = strategy.variable(np.float32(1), synchronization, "mean")
    for place in (lambda body: strategy.run(body, args=(2.0,)), lambda body: loops.repeat(1, body, [2.0])):
        with pytest.raises(RuntimeError, match="assign of a variable was called while a program is compiled.*return"):
            place(lambda x: variable.assign(x))
    assert float(variable.read_value()) == 1


def test_reading_a_reduced_value_inside_a_replica_is_refused(strategy):
    variable = strategy.variable(np.float32(1), "on_read")
    with pytest.raises(RuntimeError, match="read_value of a variable was called while a program is compiled"):
        strategy.run(variable.read_value)


def test_a_variable_can_be_an_argument(on_instances):
    """Each replica gets its own value of a variable that is synchronised on reading."""

    def program(strategy):
        mirrored = strategy.variable({"w": np.float32(10)})
        own = strategy.variable(np.float32(0), "on_read", "sum")
        own.assign(strategy.per_replica(lambda r: np.float32(r)))
        results = strategy.run(lambda tree, own: tree["both"][0]["w"] + own, args=({"both": [mirrored]}, own))
        return (
            [float(x) for x in results],
            float(strategy.reduce("sum", own)),
            float(strategy.reduce("mean", mirrored)["w"]),
        )

    assert on_instances(2, 4, program) == [([10.0, 11.0], 6.0, 10.0), ([12.0, 13.0], 6.0, 10.0)]
