"""How far clocks are apart: the truth always lies within what is reported."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from popdist.timeline.clocks import DRIFT, Alignment, Exchange
from popdist.timeline.meeting import CARD_BYTES, Answering, Asking, Card, answers, asks, own_addresses, this_clock

SECOND = 10**9


class SkewedClock:
    """A clock that is off, runs faster by a rate, and that wavers."""

    def __init__(self, ahead_s, rate, waver=0.0):
        self._ahead_ns, self._rate, self._waver = ahead_s * SECOND, rate, waver

    def at(self, true_ns):
        wavering = self._waver * 20e9 * np.sin(np.asarray(true_ns) / 20e9)
        return np.rint(true_ns * (1 + self._rate) + self._ahead_ns + wavering).astype(np.int64)


def exchanges(random, here, there, there_ns, back_ns, times_ns, spread=2.0):
    """Messages there and back, which take so long and mostly a multiple of it longer, each way by itself."""
    found = []
    for sent in times_ns:
        received = sent + there_ns * (1 + random.exponential(spread))
        answered = received + random.integers(100, 50_000)
        returned = answered + back_ns * (1 + random.exponential(spread))
        found.append([here.at(sent), there.at(received), there.at(answered), here.at(returned)])
    return np.array(found)


CLOCKS = [(0, 0, 0), (3.5, 0, 0), (-7000, 2e-4, 0), (1e5, -4e-4, 0), (12, 1e-4, 3e-4)]


@pytest.mark.parametrize(("ahead_s", "rate", "waver"), CLOCKS)
@pytest.mark.parametrize(("there_us", "back_us"), [(20, 20), (5000, 5000), (10, 4000)])
@pytest.mark.parametrize("every_s", [0.25, 5])
def test_the_true_difference_is_within_the_uncertainty(seed, ahead_s, rate, waver, there_us, back_us, every_s):
    random = np.random.default_rng(seed)
    here, there = SkewedClock(5, 1e-5), SkewedClock(ahead_s, rate, waver)
    times = np.arange(3 * SECOND, 60 * SECOND, every_s * SECOND) + random.integers(0, SECOND // 10)
    alignment = Alignment.of(exchanges(random, here, there, 1e3 * there_us, 1e3 * back_us, times))
    true_ns = np.sort(random.integers(0, 80 * SECOND, 2000))
    found = alignment.at(here.at(true_ns))
    error = np.abs(found.middle_ns - (there.at(true_ns) - here.at(true_ns)))
    assert np.all(error <= found.uncertainty_ns + 2)
    within = (true_ns > times[0]) & (true_ns < times[-1])
    most_ns = 500 * (there_us + back_us) * 12 + DRIFT * every_s * SECOND
    assert found.uncertainty_ns[within].max() < most_ns
    drift, uncertainty = alignment.drift
    if not waver:
        assert abs(drift - (rate - 1e-5)) <= uncertainty + 1e-9


@pytest.mark.parametrize(("delay_us", "error_us"), [(20, 50), (5000, 1000)])
def test_it_is_known_well_where_messages_take_about_as_long_there_as_back(seed, delay_us, error_us):
    """Hosts ask four times a second, three times each."""
    random = np.random.default_rng(seed)
    here, there = SkewedClock(0, 0), SkewedClock(-42, 3e-5)
    times = np.repeat(np.arange(0, 20 * SECOND, SECOND // 4), 3) + np.tile([0, 10**6, 2 * 10**6], 80)
    alignment = Alignment.of(exchanges(random, here, there, 1e3 * delay_us, 1e3 * delay_us, times, 0.05))
    true_ns = random.integers(0, 19 * SECOND, 1000)
    found = alignment.at(here.at(true_ns))
    assert np.abs(found.middle_ns - (there.at(true_ns) - here.at(true_ns))).max() < 1e3 * error_us


def test_answers_that_no_clock_can_give_are_left_out():
    good = [0, 1000, 1100, 2000]
    assert len(Alignment.of([good, [5000, 10, 5, 6000], [9000, 1, 2, 8000]]).when_ns) == 1


def test_nothing_is_known_without_an_exchange():
    alignment = Alignment.of([])
    assert not alignment.is_known
    assert alignment.drift == (0.0, DRIFT)
    with pytest.raises(ValueError, match="the clocks is unknown"):
        alignment.at(np.zeros(1, np.int64))


class TestMessages:
    def test_find_out_how_far_a_clock_is_ahead_within_what_they_report(self):
        ahead = 5 * SECOND
        answering = Answering(lambda: time.monotonic_ns() + ahead)
        answering.start()
        asking = Asking(Card("there", "host", answering.token, answering.port, ("127.0.0.1",)))
        asking.start()
        asking.close()
        answering.close()
        answering.close()
        alignment = Alignment.of(list(asking.exchanges))
        assert len(asking.exchanges) >= 16
        found = alignment.at(alignment.when_ns)
        assert np.all(np.abs(found.middle_ns - ahead) <= found.uncertainty_ns)

    def test_are_answered_to_those_only_who_know_the_token(self):
        answering = Answering()
        answering.start()
        asking = Asking(Card("there", "host", bytes(16), answering.port, ("127.0.0.1",)))

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            mine.settimeout(0.01)
            assert not asking._exchange(mine, "127.0.0.1")
            known = Asking(Card("there", "host", answering.token, answering.port, ("127.0.0.1",)))
            mine.settimeout(5)
            assert known._exchange(mine, "127.0.0.1")
        answering.close()


class TestCards:
    def test_survive_being_packed(self):
        card = Card("a.b", "a host", bytes(range(16)), 4711, ("10.0.0.1", "127.0.0.1"))
        assert len(card.pack()) == CARD_BYTES
        assert Card.unpack(card.pack()) == card

    def test_say_who_asks_and_whether_anybody_does(self):
        cards = [Card(clock, "host", bytes(16)) for clock in "aabbac"]
        assert [asks(cards, index) for index in range(6)] == [False, False, True, False, False, True]
        assert answers(cards)
        assert not answers(cards[:2])

    def test_of_one_host_name_one_clock_and_its_addresses(self):
        assert this_clock() == this_clock()
        assert len(this_clock().name) <= 32
        assert "127.0.0.1" in own_addresses()


def test_an_exchange_bounds_the_difference_with_what_clocks_may_drift_meanwhile():
    """It took a second; the bounds hold in its middle."""
    second = 10**9
    known = Alignment.of([(0, 400, 500, second)])
    slack = DRIFT * (second / 2 + 1)
    assert known.when_ns.tolist() == [second // 2]
    assert (known.lowest_ns[0], known.highest_ns[0]) == pytest.approx((500 - second - slack, 400 + slack))


def test_a_good_exchange_helps_all_before_it_and_all_after_it():
    second, slow, quick = 10**9, 10**8, 1000

    def exchange(at_s: int, lasts_ns: int) -> Exchange:
        sent = at_s * second
        return sent, sent + lasts_ns // 2, sent + lasts_ns // 2, sent + lasts_ns

    good_in_the_middle = Alignment.of([exchange(at_s, quick if at_s == 2 else slow) for at_s in range(5)])
    uncertain = good_in_the_middle.at(np.array([second // 2, 7 * second // 2])).uncertainty_ns
    assert np.all(uncertain < quick + 1.6 * DRIFT * second)
