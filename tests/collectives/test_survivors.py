"""The agreement of workers on who is left, with every order of messages, losses and cuts: never two groups go on."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import combinations, pairwise

import pytest

from collectives.network.survivors import Agreement, View, may_go_on

SCHEDULES = 300
FAULTS_AT_MOST = 4


class Network:
    """Workers without threads: a test delivers each of their messages when it wants.

    Args:
        size: The number of workers.
        choose: The source of all choices.

    Attributes:
        workers: The agreement of each running worker, by rank.
        entered: For each epoch and membership the workers that have entered it.
    """

    def __init__(self, size: int, choose: random.Random) -> None:
        self.choose = choose
        self._size = size
        self.workers = {rank: Agreement(rank, range(size)) for rank in range(size)}
        self.entered: dict[tuple[int, frozenset[int]], set[int]] = defaultdict(set)
        self._links: dict[tuple[int, int], deque[bytes]] = {
            (source, to): deque() for source in range(size) for to in range(size) if source != to
        }
        self._told: dict[int, View] = {}
        self._notices: list[tuple[int, int, str]] = []  # (who, whom, why): losses that a worker will notice

    # ---- faults

    def kill(self, rank: int) -> None:
        """End a worker; each of the others will notice it, some only after its last messages."""
        del self.workers[rank]
        for other in self.workers:
            self._notices.append((other, rank, "its connection broke"))

    def cut(self, one: int, other: int) -> None:
        """Cut the link of two workers; each of them will notice it. What was under way may still arrive."""
        self._notices += [(one, other, "silent"), (other, one, "silent")]
        for way in ((one, other), (other, one)):
            if self.choose.random() < 0.5:
                self._links[way].clear()

    def restart(self, rank: int) -> bool:
        """Start a worker again if all others have gone on without it; return whether it may ask to join."""
        members = [each for each in self.workers.values() if each.is_member and not each.excluded]
        is_free = all(rank not in each.view.next_members and each.view.epoch for each in members)
        if rank in self.workers or not members or not is_free or any(rank in notice[:2] for notice in self._notices):
            return False
        for way, waiting in self._links.items():
            if rank in way:
                waiting.clear()
        worker = self.workers[rank] = Agreement(rank, range(self._size))
        worker.invite(self.choose.choice(members).view)
        self._told.pop(rank, None)
        return True

    def ask(self, rank: int) -> None:
        """Let every member hear that a worker is ready to join."""
        for each in self.workers.values():
            each.admit(rank)

    # ---- steps

    def possible(self) -> list[tuple[str, object]]:
        """Return the next possible events."""
        notices = [("notice", notice) for notice in self._notices if notice[0] in self.workers]
        waiting = [way for way, messages in self._links.items() if messages and way[1] in self.workers]
        return notices + [("deliver", way) for way in waiting]

    def happen(self, kind: str, what: tuple) -> None:
        """Let an event happen."""
        if kind == "notice":
            self._notices.remove(what)
            self._lose(*what)
        else:
            self._deliver(*what)
        self._speak()

    def settle(self) -> None:
        """Let everything happen that can, in any order."""
        self._speak()
        while events := self.possible():
            self.happen(*self.choose.choice(events))
        self.assert_one_group()

    def _lose(self, who: int, whom: int, why: str) -> None:
        self.workers[who].lose(whom, why, f"{whom} is lost: {why}")

    def _deliver(self, source: int, to: int) -> None:
        beat = self._links[source, to].popleft()
        for rank, why in self.workers[to].hear(source, View.decode(beat)).items():
            self._lose(to, rank, why)

    def _speak(self) -> None:
        for rank, worker in self.workers.items():
            view = worker.view
            if worker.is_member and self._told.get(rank) != view and (view.epoch or view.is_changing):
                self._told[rank] = view
                for other in self.workers:
                    if other != rank and (rank, other) not in self._unplugged():
                        self._links[rank, other].append(view.encode())
            if view.epoch and worker.is_member and not worker.excluded:
                self.entered[view.epoch, view.members].add(rank)

    def _unplugged(self) -> set[tuple[int, int]]:
        return {(who, whom) for who, whom, why in self._notices if why == "silent"}

    # ---- statements

    def assert_one_group(self) -> None:
        """Assert that at most one membership of each epoch was ever complete, so that it could compute."""
        complete = [(epoch, members) for (epoch, members), by in self.entered.items() if by == members]
        assert len({epoch for epoch, _ in complete}) == len(complete), complete

    def growth(self) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Return each pair of complete memberships that follow each other."""
        complete = sorted((epoch, members) for (epoch, members), by in self.entered.items() if by == members)
        return [(before, after) for (_, before), (_, after) in pairwise(complete)]

    def groups(self) -> set[frozenset[int]]:
        """Return the memberships in which workers go on at last."""
        return {
            worker.view.members
            for worker in self.workers.values()
            if worker.is_member and not worker.excluded and not worker.view.is_changing
        }


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_two_groups_never_both_may_go_on(size: int) -> None:
    members = range(size)
    for count in range(size + 1):
        for part in combinations(members, count):
            other = [rank for rank in members if rank not in part]
            for first in members:
                assert not (may_go_on(part, members, first) and may_go_on(other, members, first))


@pytest.mark.parametrize(
    ("left", "members", "first", "goes_on"),
    [
        ([0], [0, 1], 0, True),
        ([1], [0, 1], 0, False),
        ([1], [0, 1], 1, True),
        ([1, 2], [0, 1, 2], 0, True),
        ([2, 3], [0, 1, 2, 3], 0, False),
        ([1, 2], [1, 2, 5, 7], 1, True),
        ([0, 2, 3], [0, 1, 2, 3, 4], 0, True),
    ],
)
def test_more_than_half_go_on_or_half_with_the_first(
    left: list[int], members: list[int], first: int, goes_on: bool
) -> None:
    assert may_go_on(left, members, first) is goes_on


@pytest.mark.parametrize(("size", "lost"), [(2, [1]), (3, [0]), (3, [2]), (5, [1, 3]), (5, [0, 4]), (4, [2, 3])])
def test_all_survivors_agree_after_losses(size: int, lost: list[int]) -> None:
    for seed in range(SCHEDULES // 10):
        network = Network(size, random.Random(seed))
        for rank in lost:
            network.kill(rank)
        network.settle()
        assert network.groups() == {frozenset(range(size)) - set(lost)}
        for worker in network.workers.values():
            assert worker.view.survived.keys() == set(lost)


def test_a_worker_may_be_lost_at_any_message_of_the_agreement() -> None:
    """With five workers the others agree, whether or not some have entered a membership with the lost one."""
    for seed in range(SCHEDULES):
        choose = random.Random(seed)
        network = Network(5, choose)
        network.kill(4)
        network._speak()
        for _ in range(seed % 30):
            if events := network.possible():
                network.happen(*choose.choice(events))
        network.kill(choose.randrange(4))
        network.settle()
        assert network.groups() == {frozenset(network.workers)}


def test_whatever_is_lost_or_cut_no_two_groups_go_on() -> None:
    """Faults come at any time; links of pairs are cut, so that workers accuse each other, too."""
    went_on = 0
    for seed in range(SCHEDULES):
        choose = random.Random(seed)
        network = Network(choose.choice([3, 4, 5]), choose)
        for _ in range(choose.randint(1, FAULTS_AT_MOST)):
            running = sorted(network.workers)
            if len(running) > 1 and choose.random() < 0.5:
                network.cut(*choose.sample(running, 2))
            elif running:
                network.kill(choose.choice(running))
            network._speak()
            for _ in range(choose.randrange(40)):
                if events := network.possible():
                    network.happen(*choose.choice(events))
        network.settle()
        assert len(network.groups()) <= 1
        went_on += bool(network.groups())
    assert went_on > SCHEDULES // 4


def test_a_worker_that_is_started_again_joins() -> None:
    for seed in range(SCHEDULES // 10):
        network = Network(3, random.Random(seed))
        network.kill(1)
        network.settle()
        assert network.restart(1)
        network.ask(1)
        network.settle()
        assert network.groups() == {frozenset(range(3))}
        assert {worker.view.epoch for worker in network.workers.values()} == {2}
        assert all(worker.view.voters is None for worker in network.workers.values())


def test_a_lone_worker_goes_on_whatever_becomes_of_the_one_that_joins() -> None:
    """Also if the one that joins has a lower rank: half of two would go on only with the first member."""
    for seed in range(SCHEDULES // 10):
        network = Network(3, random.Random(seed))
        for rank in (0, 2):
            network.kill(rank)
            network.settle()
        assert network.restart(0)
        network.ask(0)
        for _ in range(network.choose.randrange(8)):
            network._speak()
            if events := network.possible():
                network.happen(*network.choose.choice(events))
        network.kill(0)
        network.settle()
        assert network.groups() == {frozenset({1})}
        assert network.restart(2)
        network.ask(2)
        network.settle()
        assert network.groups() == {frozenset({1, 2})}


def test_a_worker_that_has_joined_does_not_join_once_more() -> None:
    """A worker may say that it is ready before it learns that it has joined."""
    network = Network(3, random.Random(0))
    network.kill(1)
    network.settle()
    assert network.restart(1)
    for _ in range(2):
        network.ask(1)
        network.settle()
    assert {worker.view.epoch for worker in network.workers.values()} == {2}


def test_whatever_happens_while_workers_join_no_two_groups_go_on() -> None:
    """Workers are lost, cut off, started again and lost once more, in any order."""
    joined = 0
    for seed in range(SCHEDULES):
        choose = random.Random(seed)
        size = choose.choice([3, 4, 5])
        network = Network(size, choose)
        for _ in range(2 * FAULTS_AT_MOST):
            running = sorted(network.workers)
            kind = choose.choice(["kill", "cut", "restart", "restart", "ask"])
            if kind == "cut" and len(running) > 1:
                network.cut(*choose.sample(running, 2))
            elif kind == "kill" and len(running) > 1:
                network.kill(choose.choice(running))
            elif kind == "restart":
                network.restart(choose.randrange(size))
            elif kind == "ask":
                for rank, worker in list(network.workers.items()):
                    if not worker.is_member:
                        network.ask(rank)
            network._speak()
            for _ in range(choose.randrange(40)):
                if events := network.possible():
                    network.happen(*choose.choice(events))
        network.settle()
        groups = network.groups()
        assert len(groups) <= 1
        joined += any(before < after for before, after in network.growth())
    assert joined > SCHEDULES // 20


def test_half_of_a_cut_network_goes_on_and_the_other_half_does_not() -> None:
    for seed in range(SCHEDULES // 10):
        network = Network(4, random.Random(seed))
        for one in (0, 2):
            for other in (1, 3):
                network.cut(one, other)
        network.settle()
        assert network.groups() <= {frozenset({0, 2})}
        assert not network.workers[1].may_go_on or network.workers[1].excluded


def test_a_worker_that_the_others_have_given_up_learns_of_it() -> None:
    one, other = Agreement(0, range(3)), Agreement(1, range(3))
    one.lose(1, "silent", "worker 1 is lost: silent")
    other.hear(0, one.view)
    assert other.excluded == "silent"
    assert other.why_revoked(0) == "the others go on without this worker (silent)"


def test_a_worker_that_meets_the_others_during_a_change_works_in_the_next_membership_only() -> None:
    worker = Agreement(1, range(3))
    worker.invite(View(0, frozenset(range(3)), {2: "gone"}, True))
    worker.hear(0, View(1, frozenset({0, 1})))
    assert worker.view.epoch == 1
    assert worker.why_revoked(0)
    assert not worker.why_revoked(1)


def test_views_of_an_earlier_epoch_change_nothing() -> None:
    worker = Agreement(0, range(3))
    worker.lose(2, "gone", "worker 2 is lost: gone")
    worker.hear(1, View(0, frozenset(range(3)), {2: "gone"}, True))
    before = worker.view
    assert (before.epoch, before.members, before.is_changing) == (1, {0, 1}, False)
    assert worker.hear(1, View(0, frozenset(range(3)), {0: "slow"}, True)) == {}
    assert worker.view is before
    assert worker.excluded == ""


def test_a_wish_without_a_loss_begins_a_new_epoch_with_the_same_members() -> None:
    network = Network(3, random.Random(0))
    network.workers[1].change("the workers connect anew")
    network.settle()
    assert [worker.view for worker in network.workers.values()] == [View(1, frozenset(range(3)))] * 3


@pytest.mark.parametrize(
    "beat",
    [
        b"view ",
        b"view 7",
        b"view [1, [0], {}, null, null, null]",
        b'view ["1", [0], {}, false, {}, null, null, null]',
        b'view [1, ["0"], {}, false, {}, null, null, null]',
        b'view [1, [0], {"1": "x"}, false, {}, null, null, null]',
        b'view [1, [0], {"a": "x"}, false, {}, null, null, null]',
        b"view [1, [0], {}, false, 1, null, null, null]",
        b"view [1, [0], {}, 3, {}, null, null, null]",
        b"view [1, [0], [], false, {}, null, null, null]",
        b"view [true, [0], {}, false, {}, null, null, null]",
        b"view [1, [0], {}, false, {}, null, null, 1]",
        b"view [1, [], {}, false, {}, null, null, null]",
        b"view [1, [0], {}, false, {}, null, null]",
        b"view " + b"[" * 100_000,
    ],
)
def test_other_bytes_are_no_view(beat: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        View.decode(beat)


def test_a_view_survives_its_encoding() -> None:
    view = View(3, frozenset({0, 2, 5}), {2: "its connection broke"}, True, {1: "silent"}, eldest=2)
    assert View.decode(view.encode()) == view
