"""Differences between clocks: the truth always lies within the reported bounds."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from popdist.timeline import meeting
from popdist.timeline.clocks import DRIFT, Alignment, Exchange
from popdist.timeline.meeting import CARD_BYTES, Answering, Asking, Card, answers, asks, own_addresses, this_clock

SECOND = 10**9
LIMIT_S = 60.0


class SkewedClock:
    """A clock with an offset, a rate error and a periodic deviation."""

    def __init__(self, ahead_s, rate, waver=0.0):
        self._ahead_ns, self._rate, self._waver = ahead_s * SECOND, rate, waver

    def at(self, true_ns):
        wavering = self._waver * 20e9 * np.sin(np.asarray(true_ns) / 20e9)
        return np.rint(true_ns * (1 + self._rate) + self._ahead_ns + wavering).astype(np.int64)


def exchanges(random, here, there, there_ns, back_ns, times_ns, spread=2.0):
    """Return exchanges with minimal delays plus random ones that are mostly multiples of them, for each direction."""
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
def test_symmetric_delays_give_a_precise_difference(seed, delay_us, error_us):
    """Hosts exchange three messages four times a second."""
    random = np.random.default_rng(seed)
    here, there = SkewedClock(0, 0), SkewedClock(-42, 3e-5)
    times = np.repeat(np.arange(0, 20 * SECOND, SECOND // 4), 3) + np.tile([0, 10**6, 2 * 10**6], 80)
    alignment = Alignment.of(exchanges(random, here, there, 1e3 * delay_us, 1e3 * delay_us, times, 0.05))
    true_ns = random.integers(0, 19 * SECOND, 1000)
    found = alignment.at(here.at(true_ns))
    assert np.abs(found.middle_ns - (there.at(true_ns) - here.at(true_ns))).max() < 1e3 * error_us


def test_impossible_answers_are_ignored():
    good = [0, 1000, 1100, 2000]
    assert len(Alignment.of([good, [5000, 10, 5, 6000], [9000, 1, 2, 8000]]).when_ns) == 1


def test_no_difference_is_known_without_an_exchange():
    alignment = Alignment.of([])
    assert not alignment.is_known
    assert alignment.drift == (0.0, DRIFT)
    with pytest.raises(ValueError, match="the clocks is unknown"):
        alignment.at(np.zeros(1, np.int64))


class TestMessages:
    def test_messages_measure_the_offset_within_the_reported_uncertainty(self, monkeypatch):
        monkeypatch.setattr(meeting, "_ANSWER_LIMIT_S", LIMIT_S)
        ahead = 5 * SECOND
        answering = Answering(lambda: time.monotonic_ns() + ahead)
        answering.start()
        asking = Asking(Card("there", "host", answering.token, answering.port, ("127.0.0.1",)))
        asking.start()
        asking.close()
        asking._thread.join(LIMIT_S)  # `close` waits for 5 s
        answering.close()
        answering.close()
        alignment = Alignment.of(list(asking.exchanges))
        assert len(asking.exchanges) >= 16
        found = alignment.at(alignment.when_ns)
        assert np.all(np.abs(found.middle_ns - ahead) <= found.uncertainty_ns)

    def test_only_requests_with_the_token_are_answered(self):
        answering = Answering()
        answering.start()
        asking = Asking(Card("there", "host", bytes(16), answering.port, ("127.0.0.1",)))

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            mine.settimeout(0.01)
            assert not asking._exchange(mine, "127.0.0.1")
            known = Asking(Card("there", "host", answering.token, answering.port, ("127.0.0.1",)))
            mine.settimeout(LIMIT_S)
            assert known._exchange(mine, "127.0.0.1")
        answering.close()


class TestCards:
    def test_a_card_survives_packing(self):
        card = Card("a.b", "a host", bytes(range(16)), 4711, ("10.0.0.1", "127.0.0.1"))
        assert len(card.pack()) == CARD_BYTES
        assert Card.unpack(card.pack()) == card

    def test_the_cards_determine_who_asks_and_who_answers(self):
        cards = [Card(clock, "host", bytes(16)) for clock in "aabbac"]
        assert [asks(cards, index) for index in range(6)] == [False, False, True, False, False, True]
        assert answers(cards)
        assert not answers(cards[:2])

    def test_a_host_has_one_clock_name_and_its_addresses(self):
        assert this_clock() == this_clock()
        assert len(this_clock().name) <= 32
        assert "127.0.0.1" in own_addresses()


def test_an_exchange_bounds_the_difference_including_the_possible_drift():
    """The exchange took a second; the bounds hold in its middle."""
    second = 10**9
    known = Alignment.of([(0, 400, 500, second)])
    slack = DRIFT * (second / 2 + 1)
    assert known.when_ns.tolist() == [second // 2]
    assert (known.lowest_ns[0], known.highest_ns[0]) == pytest.approx((500 - second - slack, 400 + slack))


def test_a_good_exchange_improves_earlier_and_later_bounds():
    second, slow, quick = 10**9, 10**8, 1000

    def exchange(at_s: int, lasts_ns: int) -> Exchange:
        sent = at_s * second
        return sent, sent + lasts_ns // 2, sent + lasts_ns // 2, sent + lasts_ns

    good_in_the_middle = Alignment.of([exchange(at_s, quick if at_s == 2 else slow) for at_s in range(5)])
    uncertain = good_in_the_middle.at(np.array([second // 2, 7 * second // 2])).uncertainty_ns
    assert np.all(uncertain < quick + 1.6 * DRIFT * second)
