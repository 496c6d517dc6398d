"""`IPUMultiWorkerStrategy`: real processes, each started with its own TF_CONFIG and nothing else in common."""

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import strategy_program as program
from certificates import Authority
from grpc_jobs import socket_addresses
from rows_of_the_original import RowsOfTheOriginal
from workers import Worker, disposed_of, last_line, port_addresses

import popdist
import strategies
from popdist.examples import digits as train_digits
from popdist.examples.digits_data import load_digits

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, program.__file__, "multi-worker"]
MAIN_JOB = [sys.executable, str(ROOT / "popdist" / "examples" / "digits.py"), "--strategy", "multi-worker"]
FOREIGN = ("PJRT_", "XLA_", "POPDIST_", "OMPI_", "PMIX_", "TF_CONFIG")
END_LIMIT_S = 170.0
MAIN_STEPS = 5

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Cluster:
    """The addresses of the tasks of a job, in the order of their ranks.

    Attributes:
        addresses: The addresses of all tasks.
        chiefs: The number of leading tasks that are chiefs instead of workers; 0 or 1.
        environ: Further environment variables for all tasks.
    """

    addresses: list[str]
    chiefs: int = 0
    environ: dict[str, str] = field(default_factory=dict)

    def start(self, rank, *command):
        """Start one task."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        process = subprocess.Popen(
            [*map(str, command)],
            env=clean | {"PYTHONPATH": str(ROOT), "TF_CONFIG": self.config(rank)} | self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return Worker(process)

    def config(self, rank):
        """Return the TF_CONFIG of one task."""
        jobs = {"chief": self.addresses[: self.chiefs], "worker": self.addresses[self.chiefs :]}
        is_chief = rank < self.chiefs
        task = {"type": "chief" if is_chief else "worker", "index": rank if is_chief else rank - self.chiefs}
        return json.dumps({"cluster": {job: tasks for job, tasks in jobs.items() if tasks}, "task": task})


@contextlib.contextmanager
def running(cluster, *command):
    """Run all tasks of a cluster, started together; none outlives the block."""
    with disposed_of() as workers:
        for rank in range(len(cluster.addresses)):
            workers.append(cluster.start(rank, *command))
        yield workers


def results_of(workers):
    """Return the results of successful tasks: JSON in their last line."""
    for worker in workers:
        assert worker.end(END_LIMIT_S) == 0, worker.text
    return [found(worker) for worker in workers]


def found(worker):
    return json.loads([line for line in worker.lines if line.startswith(("{", "["))][-1])


def finish(cluster, *command):
    """Run all tasks to their successful end, and return the results in the order of the ranks."""
    with running(cluster, *command) as workers:
        return results_of(workers)


@functools.cache
def fingerprint_alone(replicas, steps):
    """Return the fingerprint of one process that drives all replicas."""
    return program.trained(strategies.IPUStrategy(replicas), steps)


@functools.cache
def rows_of(variables):
    """Return the results of two workers for each test."""
    if variables == "on_device":
        first, second = (of["rows"] for of in everything_of("2 workers"))
    else:
        with socket_addresses(2) as addresses:
            first, second = finish(Cluster(addresses), *OURS, "rows", variables, 1)
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("variables", ["on_host", pytest.param("on_device", marks=pytest.mark.complete)])
class TestTheRowsOfTheOriginal(RowsOfTheOriginal):
    """Tests of `ipu_multi_worker_strategy_test.py`: two workers with one replica each."""

    @pytest.fixture
    def rows(self, variables):
        return rows_of(variables)


CLUSTERS = {
    "2 workers": (2, 0, 1, "on_device"),
    "chief and 2 workers": (3, 1, 2, "on_host"),
}


@functools.cache
def everything_of(shape):
    """Return the results and the output of each task; two replicas also ran the tests of the original."""
    tasks, chiefs, local, variables = CLUSTERS[shape]
    words = ("rows,everything", f"{variables},{variables}") if tasks * local == 2 else ("everything", variables)
    with (
        socket_addresses(tasks) as addresses,
        running(Cluster(addresses, chiefs), *OURS, *words, local) as workers,
    ):
        results = results_of(workers)
        firsts = [json.loads(next(line for line in worker.lines if line.startswith("{"))) for worker in workers]
        return [
            result | {"rows": rows, "text": worker.text}
            for result, rows, worker in zip(results, firsts, workers, strict=True)
        ]


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize("shape", CLUSTERS)
class TestAnyCluster:
    """Clusters of any size: roles, data of replicas, and results."""

    @pytest.fixture
    def tasks(self, shape):
        """Provide the number of tasks, and the replicas of each."""
        return CLUSTERS[shape][0], CLUSTERS[shape][2]

    @pytest.fixture
    def found(self, shape):
        return everything_of(shape)

    @pytest.fixture
    def alone(self, tasks):
        return strategies.IPUStrategy(tasks[0] * tasks[1])

    def test_tasks_are_numbered_and_so_are_their_replicas(self, found, tasks):
        count, local = tasks
        assert [of["who"] for of in found] == [
            [index, count, list(range(index * local, (index + 1) * local))] for index in range(count)
        ]

    def test_the_first_task_writes_files(self, found, tasks):
        assert [of["is leader"] for of in found] == [index == 0 for index in range(tasks[0])]

    def test_each_task_has_its_own_input_pipeline(self, found, tasks):
        count, local = tasks
        assert [of["context"] for of in found] == [[count, index, count * local] for index in range(count)]
        assert {of["per replica"] for of in found} == {2}

    @pytest.mark.parametrize("source", ["arrays", "iterable"])
    def test_each_replica_reads_the_same_elements_as_in_one_process(self, found, alone, source):
        rows = {"arrays": program.ROWS, "iterable": program.ROWS.tolist()}[source]
        steps = zip(*(of[source] for of in found), strict=True)
        assert [list(itertools.chain(*parts)) for parts in steps] == program.read(alone, rows)

    def test_unequal_amounts_of_data_end_at_the_same_step_with_a_message(self, found, tasks):
        others = ", ".join(map(str, range(1, tasks[0])))
        left = f"the rest on instance{'s' if tasks[0] > 2 else ''} {others} is not used"
        for of in found:
            assert of["uneven"] == [0, 1, 2]
            assert "instance 0 ran out of data after 3 steps of the data set" in of["text"]
            assert left in of["text"]

    def test_statistics_of_the_replicas_are_added_when_they_are_read(self, found, tasks):
        replicas = tasks[0] * tasks[1]
        assert [of["statistics"] for of in found] == [[sum(range(replicas)), replicas]] * tasks[0]

    def test_training_gives_the_bits_of_one_process(self, found, alone):
        wanted = fingerprint_alone(alone.num_replicas_in_sync, program.STEPS)
        assert [of["trained"] for of in found] == [wanted] * len(found)


@functools.cache
def digits_alone(model, replicas, **changes):
    """Return the output of the main job in one process that drives all replicas."""
    options = train_digits.read_options(["--model", model, "--max-steps", str(MAIN_STEPS), "--replicas", str(replicas)])
    data = load_digits("digits")
    strategy = strategies.IPUStrategy(replicas)
    dataset = train_digits.distribute(strategy, data, options)
    return train_digits.train(strategy, dataset, data, options)


def assert_equal_to_one_process(result, model, instances, replicas):
    assert (result["instances"], result["replicas"], result["steps"]) == (instances, replicas, MAIN_STEPS)
    alone = digits_alone(model, replicas)
    for fact in ("final_loss", "final_accuracy", "test_accuracy", "variables_sha256"):
        assert result[fact] == alone[fact], fact


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
class TestTheMainJob:
    """Main job: `popdist.examples.digits --strategy multi-worker` gives the bits of `--strategy ipu`.

    `--strategy popdist` under poprun gives them too, as `tests/jobs/test_promises.py` shows for the same MLP.
    """

    def test_workers_that_start_together_have_the_bits_of_one_process(self):
        command = [*MAIN_JOB, "--replicas", 6, "--model", "mlp", "--max-steps", MAIN_STEPS, "--json", "-"]
        cluster = Cluster(port_addresses(3, "localhost"))
        with running(cluster, *command) as workers:
            for worker in workers:
                assert worker.end(END_LIMIT_S) == 0, worker.text
            assert_equal_to_one_process(found(workers[0]), "mlp", 3, 6)

    def test_workers_with_certificates_and_a_token_can_start_in_reverse_order(self, tmp_path):
        files = Authority(tmp_path, "authority").issue("workers", ["localhost"])
        cluster = Cluster(port_addresses(2, "localhost"), environ=files.environ | {"POPDIST_JOB_TOKEN": "secret"})
        command = [*MAIN_JOB, "--replicas", "4", "--model", "cnn", "--max-steps", MAIN_STEPS, "--json", "-"]
        with disposed_of() as workers:
            workers.append(cluster.start(1, *command))
            news = f"worker 1 at {cluster.addresses[1]} has waited", f"worker 0 at {cluster.addresses[0]}"
            workers[0].wait_for(*news, limit_s=END_LIMIT_S)
            workers.append(cluster.start(0, *command))
            for worker in workers:
                assert worker.end(END_LIMIT_S) == 0, worker.text
            assert_equal_to_one_process(found(workers[1]), "cnn", 2, 4)


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
class TestAWorkerThatIsLost:
    @pytest.mark.parametrize(
        ("tasks", "victim", "variables"),
        [(2, 0, "on_device"), (3, 1, "on_host")],
    )
    def test_a_lost_worker_ends_all_others_between_two_updates(self, tasks, victim, variables):
        """The others name the lost worker, its place and the operation; their state is that of a whole step."""
        with (
            socket_addresses(tasks) as addresses,
            running(Cluster(addresses), *OURS, "steps", variables, 1, 0) as all_,
        ):
            for worker in all_:
                worker.wait_for(f"step {program.SAYS_SO_AT_STEP}", limit_s=END_LIMIT_S)
            all_[victim].kill()
            others = [worker for worker in all_ if worker is not all_[victim]]
            for worker in others:
                assert worker.end(END_LIMIT_S) == 1, worker.text
            for worker in others:
                error = last_line(worker)
                assert error.startswith("collectives.errors.PeerLostError: "), worker.text
                assert f"worker {victim} at {addresses[victim]}" in error
                assert "'gradients/" in error
                step, fingerprint = found(worker)
                assert step >= program.SAYS_SO_AT_STEP
                assert fingerprint == fingerprint_alone(tasks, step)


@pytest.mark.job
@pytest.mark.cores(2)
@pytest.mark.parametrize(
    ("tasks", "victims", "variables"),
    [
        (3, [0], "on_host"),
        *(
            pytest.param(*case, marks=pytest.mark.complete)
            for case in ((2, [1], "on_device"), (3, [2], "on_device"), (5, [1, 4], "on_device"))
        ),
    ],
)
def test_the_others_go_on_without_lost_workers_to_the_bits_of_one_process(tasks, victims, variables):
    """All replicas go on, also those of the chief; every terminal tells who is lost and who goes on."""
    steps = 12
    with socket_addresses(tasks) as addresses:
        command = [*OURS[:2], "surviving-workers", "steps", variables, 2, steps, victims[0]]
        with running(Cluster(addresses), *command) as workers:
            workers[victims[0]].wait_for(f"step {program.SAYS_SO_AT_STEP}", limit_s=END_LIMIT_S)
            for victim in victims:
                workers[victim].kill()
            left = [rank for rank in range(tasks) if rank not in victims]
            survivors = [workers[rank] for rank in left]
            assert results_of(survivors) == [[steps, fingerprint_alone(2 * tasks, steps)]] * len(left)
            for worker in survivors:
                for victim in victims:
                    [text] = worker.containing(f"worker {victim} at {addresses[victim]} is lost: its connection broke")
                    assert text.endswith(" on without it")
                assert all(f"worker {rank} at" in text for rank in left)


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
@pytest.mark.parametrize(("tasks", "victim", "variables"), [(3, 0, "on_device"), (2, 1, "on_host")])
def test_a_worker_that_is_started_again_joins_and_no_bit_changes(tasks, victim, variables):
    """The worker is killed once more on its way, and started a third time: that does not disturb the others."""
    steps = 400
    command = [*OURS[:2], "surviving-workers", "joining", variables, 1, steps]
    with socket_addresses(tasks) as addresses, disposed_of() as workers:
        cluster = Cluster(addresses)
        workers += [cluster.start(rank, *command) for rank in range(tasks)]
        workers[victim].wait_for(f"step {program.SAYS_SO_AT_STEP}", limit_s=END_LIMIT_S)
        workers[victim].kill()
        others = [worker for worker in workers if worker is not workers[victim]]
        for worker in others:
            worker.wait_for(f"worker {victim} at {addresses[victim]} is lost", limit_s=END_LIMIT_S)
        for is_last in (False, True):
            again = cluster.start(victim, *command)
            workers.append(again)
            again.wait_for(f"worker {victim} at {addresses[victim]} was started again; it joins", limit_s=END_LIMIT_S)
            again.kill() if not is_last else None
        assert results_of([*others, again]) == [[steps, fingerprint_alone(tasks, steps), tasks]] * tasks
        for worker in others:
            worker.wait_for(f"worker {victim} at {addresses[victim]} has joined again")


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
def test_the_second_of_two_workers_ends_without_the_first_and_says_why():
    with socket_addresses(2) as addresses:
        command = [*OURS[:2], "surviving-workers", "steps", "on_device", 1, 12, 0]
        with running(Cluster(addresses), *command) as workers:
            workers[0].wait_for(f"step {program.SAYS_SO_AT_STEP}", limit_s=END_LIMIT_S)
            workers[0].kill()
            assert workers[1].end(END_LIMIT_S) == 1
            assert "cannot go on: 1 of 2 workers are left" in last_line(workers[1])


@pytest.mark.parametrize("wish", ["restart", None])
def test_an_unknown_wish_is_refused_before_the_worker_connects(monkeypatch, wish):
    monkeypatch.setenv("TF_CONFIG", CONFIG % 0)
    with pytest.raises(ValueError, match="use one of stop, shrink"):
        strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(), on_failure=wish)
    assert not popdist.isBackendInitialized()


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
def test_a_worker_that_is_stopped_for_8_s_is_named_and_changes_nothing():
    """The worker continues only after it is told to, which it reads when it runs again."""
    steps = 20
    with socket_addresses(2) as addresses:
        cluster = Cluster(addresses, environ={"POPDIST_STALL_WARNING_S": "2"})
        with running(cluster, *OURS, "steps", "on_host", 1, steps, 1) as workers:
            workers[1].wait_for(f"step {program.SAYS_SO_AT_STEP}", limit_s=END_LIMIT_S)
            workers[1].stop()
            workers[1].tell("go on")
            names = "worker 0 at", " s for worker 1 at", "'gradients/"
            waits = workers[0].wait_for(*names, count=4, limit_s=END_LIMIT_S)  # one message every 2 s
            [waited_s] = re.findall(rf"{addresses[0]} has waited ([\d.]+) s for worker 1 at {addresses[1]} ", waits)
            assert float(waited_s) >= 8
            workers[1].resume()
            assert results_of(workers) == [[steps, fingerprint_alone(2, steps)]] * 2


CONFIG = '{"cluster":{"worker":["localhost:3737","localhost:3738"]},"task":{"type":"worker","index":%s}}'


@pytest.mark.parametrize(
    ("config", "replicas", "words"),
    [
        (None, "2", "TF_CONFIG is not set"),
        ("{'cluster': {}}", "2", "TF_CONFIG is not JSON"),
        (CONFIG % 2, "2", "the task index is 2, but the cluster lists 2 of type worker"),
        (CONFIG.replace("3738", "3737") % 0, "2", 'TF_CONFIG lists the address "localhost:3737" twice'),
        (CONFIG.replace("localhost:3738", "localhost") % 0, "2", 'the address "localhost" in TF_CONFIG has no port'),
        (CONFIG % 0, "3", "--replicas 3 on 2 workers; each has equally many: use a multiple of 2"),
    ],
)
def test_a_wrong_cluster_is_one_clear_line(monkeypatch, capsys, config, replicas, words):
    monkeypatch.setattr(sys, "argv", ["digits.py", "--strategy", "multi-worker", "--replicas", replicas])
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", config)
    assert train_digits.main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("digits.py: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not popdist.isBackendInitialized()


def test_a_cluster_resolver_of_another_type_is_refused():
    with pytest.raises(
        TypeError, match=r"cluster_resolver is None, a NoneType; use popdist.TFConfigClusterResolver\(\)"
    ):
        strategies.IPUMultiWorkerStrategy(None)


def test_a_worker_without_replicas_is_refused():
    with pytest.raises(ValueError, match="num_local_replicas is 0; it must be at least 1"):
        strategies.IPUMultiWorkerStrategy(popdist.TFConfigClusterResolver(environ={"TF_CONFIG": CONFIG % 0}), False, 0)
