from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from collectives import instruments
from collectives.calls import Call
from popdist.environments.detection import ENVIRONMENTS, describe_left_out_replicas, detect_instance
from popdist.environments.flux import FluxTaskEnvironment
from popdist.environments.open_mpi import OpenMPIEnvironment
from popdist.environments.poprun import PopRunEnvironment, process_index
from popdist.environments.single import AloneEnvironment, SingleEnvironment
from popdist.environments.slurm import SlurmEnvironment, SlurmWithoutPMIxEnvironment
from popdist.environments.tf_config import TFConfigEnvironment
from popdist.errors import EnvironmentMismatchError
from popdist.records.progress import (
    DESCRIPTOR_VARIABLE,
    PAGE_BYTES,
    PHASES,
    Made,
    ProgressPage,
    ProgressRecord,
    State,
    new_page,
    parse_progress,
)
from popdist.xla import thread_pool_setting, thread_pool_size


def mpirun_variables(rank=0, size=2, local_rank=None):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local_rank is None else local_rank),
    }


def poprun_variables(index=1, count=2, total=6, ipus=1):
    local = total // count
    return mpirun_variables(index, count) | replica_variables(total, local, index * local, index, ipus)


def replica_variables(total, local, offset=0, local_instance=0, ipus=1):
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(total),
        "POPDIST_NUM_LOCAL_REPLICAS": str(local),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(ipus),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": str(offset),
        "POPDIST_LOCAL_INSTANCE_INDEX": str(local_instance),
    }


LEFT_OUT = {"POPDIST_REPLICAS_LEFT_OUT": "1"}
WORKERS = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'}


@pytest.mark.parametrize(
    ("environ", "num_replicas", "way_out"),
    [
        (poprun_variables(0, 2, 2) | LEFT_OUT, None, "poprun --num-replicas 2"),
        (poprun_variables(0, 2, 2), None, ""),
        (poprun_variables(0, 2, 2) | LEFT_OUT, 2, ""),
        (poprun_variables(0, 1, 1) | LEFT_OUT, None, ""),
        (mpirun_variables(0, 3), None, "popdist.init(3)"),
        (mpirun_variables(0, 3), 6, ""),
        (mpirun_variables(0, 1), None, ""),
        (WORKERS, None, "popdist.init(2), or with num_local_replicas of the strategy"),
        (WORKERS, 4, ""),
        ({}, None, ""),
    ],
)
def test_a_number_of_replicas_that_nobody_fixes_is_described(environ, num_replicas, way_out):
    instance = detect_instance(environ, num_replicas)
    said = describe_left_out_replicas(instance, num_replicas, environ)
    assert said.startswith(f"R = {instance.count}: ") == bool(way_out)
    assert said.endswith(way_out)


class TestPopRun:
    def test_the_index_is_the_offset_divided_by_the_local_replicas(self):
        instance = detect_instance(poprun_variables(index=2, count=3, total=9, ipus=4))
        assert (instance.index, instance.count) == (2, 3)
        assert instance.local_replica_range == range(6, 9)
        assert (instance.total_replicas, instance.ipus_per_replica, instance.local_index) == (9, 4, 2)
        assert instance.launcher == "poprun"

    @pytest.mark.parametrize("name", replica_variables(1, 1))
    def test_a_half_set_environment_is_refused_with_the_missing_variable(self, name):
        environ = poprun_variables()
        del environ[name]
        with pytest.raises(EnvironmentMismatchError, match=f"{name} unset.*set {name}"):
            detect_instance(environ)

    @pytest.mark.parametrize("name", mpirun_variables())
    def test_incomplete_variables_of_open_mpi_are_refused(self, name):
        environ = poprun_variables()
        del environ[name]
        with pytest.raises(EnvironmentMismatchError, match=f"{name} unset"):
            detect_instance(environ)

    @pytest.mark.parametrize("value", ["two", "", "-1", "1.5"])
    def test_an_invalid_number_is_quoted(self, value):
        environ = poprun_variables() | {"POPDIST_NUM_LOCAL_REPLICAS": value}
        with pytest.raises(EnvironmentMismatchError, match=f"POPDIST_NUM_LOCAL_REPLICAS='{value}'"):
            detect_instance(environ)

    @pytest.mark.parametrize(
        "change",
        [
            {"OMPI_COMM_WORLD_RANK": "0"},
            {"OMPI_COMM_WORLD_SIZE": "3"},
            {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            {"POPDIST_REPLICA_INDEX_OFFSET": "2"},
            {"POPDIST_REPLICA_INDEX_OFFSET": "5"},
            {"POPDIST_NUM_TOTAL_REPLICAS": "8"},
            {"POPDIST_NUM_LOCAL_REPLICAS": "2"},
        ],
    )
    def test_contradictions_are_refused_with_both_sets_of_variables(self, change):
        with pytest.raises(EnvironmentMismatchError, match=r"POPDIST_NUM_TOTAL_REPLICAS=.*COMM_WORLD_RANK="):
            detect_instance(poprun_variables() | change)

    def test_the_program_must_ask_for_the_launched_number_of_replicas(self):
        assert detect_instance(poprun_variables(total=6), num_replicas=6).total_replicas == 6
        with pytest.raises(EnvironmentMismatchError, match="asks for num_replicas=4, but poprun started 6"):
            detect_instance(poprun_variables(total=6), num_replicas=4)

    def test_without_open_mpi_one_process_drives_all_replicas(self):
        instance = detect_instance(replica_variables(total=4, local=4))
        assert (instance.count, instance.local_replicas) == (1, 4)

    def test_without_open_mpi_one_of_several_instances_is_refused(self):
        with pytest.raises(EnvironmentMismatchError, match="one of several instances"):
            detect_instance(replica_variables(total=4, local=2))

    def test_uneven_replicas_take_the_index_from_open_mpi(self):
        environ = mpirun_variables(1, 2) | replica_variables(total=5, local=2, offset=3, local_instance=1)
        instance = detect_instance(environ | {"POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "0"})
        assert (instance.index, instance.uniform) == (1, False)
        assert instance.local_replica_range == range(3, 5)


def spare_variables(number=0, count=2, spares=2, total=6, local_rank=None):
    """Return the variables of a spare; `number` counts the spares of the job."""
    rank, local = count + number, total // count
    local_rank = rank if local_rank is None else local_rank
    of_launcher = mpirun_variables(rank, count + spares, local_rank)
    of_spares = {"POPDIST_NUM_SPARES": str(spares), "POPDIST_SPARE": "1"}
    return of_launcher | of_spares | replica_variables(total, local, total - local, local_rank)


class TestSpares:
    @pytest.mark.parametrize("number", [0, 1])
    def test_a_spare_is_described_as_the_last_instance(self, number):
        instance = detect_instance(spare_variables(number))
        assert (instance.index, instance.count, instance.local_replica_range) == (1, 2, range(3, 6))
        assert process_index(spare_variables(number), instance) == 2 + number

    def test_spares_do_not_change_the_instances(self):
        environ = poprun_variables(0, 2) | {"OMPI_COMM_WORLD_SIZE": "4", "POPDIST_NUM_SPARES": "2"}
        instance = detect_instance(environ)
        assert (instance.index, instance.count, instance.local_replica_range) == (0, 2, range(3))
        assert process_index(environ, instance) == 0

    def test_a_single_instance_may_have_spares_on_its_host(self):
        instance = detect_instance(spare_variables(0, count=1, spares=1, total=4))
        assert (instance.index, instance.count, instance.local_replicas, instance.local_index) == (0, 1, 4, 0)

    @pytest.mark.parametrize(
        "change",
        [
            {"POPDIST_NUM_SPARES": "1"},
            {"POPDIST_NUM_SPARES": "4"},
            {"POPDIST_NUM_SPARES": "9"},
            {"POPDIST_REPLICA_INDEX_OFFSET": "0"},
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "POPDIST_LOCAL_INSTANCE_INDEX": "1"},
        ],
    )
    def test_contradictions_are_refused_with_the_variables_of_spares(self, change):
        with pytest.raises(EnvironmentMismatchError, match=r"POPDIST_NUM_SPARES=\d, POPDIST_SPARE=1"):
            detect_instance(spare_variables() | change)

    def test_a_spare_needs_the_word_that_it_is_one(self):
        environ = spare_variables()
        del environ["POPDIST_SPARE"]
        with pytest.raises(EnvironmentMismatchError, match="POPDIST_NUM_SPARES=2"):
            detect_instance(environ)

    def test_a_spare_without_open_mpi_is_refused(self):
        environ = replica_variables(total=4, local=4) | {"POPDIST_NUM_SPARES": "1", "POPDIST_SPARE": "1"}
        with pytest.raises(EnvironmentMismatchError, match="one of several instances"):
            detect_instance(environ)


class TestOpenMPI:
    def test_each_rank_has_one_replica_by_default(self):
        instance = detect_instance(mpirun_variables(rank=2, size=3, local_rank=1))
        assert (instance.index, instance.count, instance.local_index) == (2, 3, 1)
        assert instance.local_replica_range == range(2, 3)
        assert instance.launcher == "mpirun"

    def test_the_program_may_ask_for_more_replicas(self):
        assert detect_instance(mpirun_variables(1, 2), num_replicas=6).local_replica_range == range(3, 6)

    @pytest.mark.parametrize(("replicas", "ways_out"), [(5, "use 4 or 8"), (3, "use 4$"), (0, "use 4$")])
    def test_replicas_are_divided_evenly(self, replicas, ways_out):
        with pytest.raises(EnvironmentMismatchError, match=ways_out):
            detect_instance(mpirun_variables(1, 4), num_replicas=replicas)

    def test_a_rank_must_be_less_than_the_size(self):
        with pytest.raises(EnvironmentMismatchError, match="OMPI_COMM_WORLD_RANK=2"):
            detect_instance(mpirun_variables(rank=2, size=2))


class TestSingle:
    @pytest.mark.parametrize(("asked", "replicas"), [(None, 1), (1, 1), (7, 7)])
    def test_one_instance_drives_every_replica(self, asked, replicas):
        instance = detect_instance({}, num_replicas=asked)
        assert (instance.index, instance.count, instance.launcher) == (0, 1, "single")
        assert instance.local_replica_range == range(replicas)

    def test_zero_replicas_are_refused(self):
        with pytest.raises(EnvironmentMismatchError, match="asked for 0 replicas; use 1 or more"):
            detect_instance({}, num_replicas=0)


class TestFlux:
    def task(self, rank, size):
        return {"FLUX_JOB_ID": "f9", "FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(size)}

    def test_several_tasks_are_refused_because_nothing_connects_them(self):
        with pytest.raises(EnvironmentMismatchError, match="FLUX_TASK_RANK=1, FLUX_JOB_SIZE=2.*poprun in `flux alloc`"):
            detect_instance(self.task(1, 2))

    def test_a_single_task_is_a_single_instance(self):
        instance = detect_instance(self.task(0, 1), num_replicas=4)
        assert (instance.count, instance.local_replicas) == (1, 4)

    def test_instances_that_poprun_starts_in_a_task_are_its_own(self):
        assert detect_instance(self.task(0, 1) | poprun_variables(index=1, count=2)).index == 1


def test_environments_are_detected_from_specific_to_general():
    assert [type(environment) for environment in ENVIRONMENTS] == [
        AloneEnvironment,
        PopRunEnvironment,
        OpenMPIEnvironment,
        SlurmEnvironment,
        TFConfigEnvironment,
        SlurmWithoutPMIxEnvironment,
        FluxTaskEnvironment,
        SingleEnvironment,
    ]


def test_detection_imports_no_heavy_package():
    heavy = "{'numpy', 'mpi4py', 'jax', 'collectives', 'strategies'}"
    program = f"import sys, popdist.environments; sys.exit(repr({heavy} & set(sys.modules) or ''))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.stderr in ("", "''\n")


class TestThreadPool:
    @pytest.mark.parametrize(("replicas", "threads"), [(1, 8), (8, 8), (9, 9), (64, 64)])
    def test_the_size_of_the_pool_depends_only_on_the_replicas(self, replicas, threads):
        assert thread_pool_size(replicas) == threads
        assert thread_pool_setting({}, replicas) == {"PJRT_NPROC": str(threads)}

    def test_the_users_pool_size_wins(self):
        assert thread_pool_setting({"PJRT_NPROC": "2"}, 64) == {}


@pytest.fixture
def descriptor():
    made = os.memfd_create("progress")
    os.write(made, new_page())
    yield made
    os.close(made)


def record_in(descriptor):
    return parse_progress(os.pread(descriptor, PAGE_BYTES, 0))


def enter(page, number, label):
    page.operation_begins(number, Call(label.decode()))


class TestProgress:
    @pytest.fixture
    def page(self, descriptor):
        return ProgressPage.from_environ({DESCRIPTOR_VARIABLE: str(descriptor)})

    def test_an_untouched_page_gives_an_empty_record(self, descriptor):
        assert record_in(descriptor) == ProgressRecord()
        assert parse_progress(b"") == ProgressRecord()
        assert parse_progress(bytes(PAGE_BYTES)) == ProgressRecord()

    def test_a_collective_is_recorded_while_it_lasts(self, page, descriptor):
        page.step_begins(12)
        enter(page, 5, b"all_reduce 'gradients'")
        inside = record_in(descriptor)
        assert (inside.step, inside.number, inside.label) == (12, 5, "all_reduce 'gradients'")
        assert inside.state == State.IN_COLLECTIVE
        assert inside.is_inside
        page.operation_ends()
        assert record_in(descriptor).state == State.RUNNING
        assert record_in(descriptor).since_s >= inside.since_s > 0

    def test_the_label_is_that_of_the_current_collective(self, page, descriptor):
        for label in (b"broadcast 'variables'", b"barrier", "all_reduce 'größe'".encode(), b"x" * 5000):
            enter(page, 1, label)
            assert record_in(descriptor).label == label[:1024].decode()

    def test_awaited_instances_are_cleared_when_the_collective_ends(self, page, descriptor):
        enter(page, 1, b"barrier")
        page.waiting_for([1, 3])
        assert record_in(descriptor).waiting_for == (1, 3)
        page.operation_ends()
        assert record_in(descriptor).waiting_for == ()

    def test_a_long_list_of_awaited_instances_is_truncated(self, page, descriptor):
        enter(page, 1, b"barrier")
        page.waiting_for(range(5000))
        record = record_in(descriptor)
        assert record.label == "barrier"
        assert record.waiting_for == tuple(range(len(record.waiting_for)))

    def test_leaving_keeps_an_unfinished_collective(self, page, descriptor):
        enter(page, 3, b"barrier")
        page.waiting_for([0])
        page.leaving()
        page.leaving()
        record = record_in(descriptor)
        assert record.state == State.LEAVING_INSIDE
        assert (record.is_leaving, record.is_inside, record.number, record.waiting_for) == (
            True,
            True,
            3,
            (0,),
        )

    def test_the_grace_period_is_recorded(self, page, descriptor):
        page.grace(1.5)
        assert record_in(descriptor).grace_s == 1.5
        page.grace(0)
        assert record_in(descriptor).grace_s == 0

    def test_steps_are_counted_and_timed_from_the_end_of_the_first(self, page, descriptor):
        page.step_begins(7)
        assert record_in(descriptor).made == Made()
        page.steps_made(1, 64, lambda: 2.0)
        first = record_in(descriptor).made
        assert (first.steps, first.samples, first.timed_steps, first.timed_samples) == (1, 64, 0, 0)
        assert (first.loss, first.waited_s, first.timed_s) == (2.0, 0.0, 0.0)
        page.steps_made(5, 320, lambda: math.nan)
        later = record_in(descriptor).made
        assert (later.steps, later.samples, later.timed_steps, later.timed_samples) == (6, 384, 5, 320)
        assert later.from_s == first.to_s < later.to_s
        assert math.isnan(later.loss)

    def test_waits_are_timed_until_data_move_from_the_second_step_on(self, page, descriptor):
        enter(page, 1, b"broadcast")
        page.data_moves(8)
        page.steps_made(1, 1, lambda: None)
        enter(page, 2, b"all_reduce")
        begun_s = record_in(descriptor).since_s
        page.data_moves(8)
        page.operation_ends()
        moved_by_s = record_in(descriptor).since_s
        page.steps_made(1, 1, lambda: None)
        made = record_in(descriptor).made
        assert 0 < made.waited_s <= moved_by_s - begun_s
        assert made.loss is None

    def test_a_loss_that_is_still_computed_is_read_in_later_steps(self, page, descriptor):
        known = []
        page.steps_made(1, 1, lambda: known[0] if known else None)
        page.steps_made(1, 1, lambda: None)
        assert record_in(descriptor).made.loss is None
        known.append(3.0)
        page.steps_made(1, 1, lambda: None)
        assert record_in(descriptor).made.loss == 3.0
        page.steps_made(1, 1, lambda: 1.5)
        assert record_in(descriptor).made.loss == 1.5

    def test_phases_are_recorded_and_may_be_nested(self, page, descriptor):
        assert ("", *instruments.PHASES) == PHASES
        page.phase_begins(instruments.FORWARD_BACKWARD)
        page.phase_begins(instruments.COMPILE)
        assert record_in(descriptor).phase == "compile"
        page.phase_ends(instruments.COMPILE)
        assert record_in(descriptor).phase == "forward and backward"
        page.phase_ends(instruments.FORWARD_BACKWARD)
        assert record_in(descriptor).phase == ""
        page.phase_begins(instruments.UPDATE)  # and it fails
        page.step_begins(3)
        assert record_in(descriptor).phase == ""

    def test_a_page_of_another_layout_gives_an_empty_record(self):
        assert parse_progress(b"POPRUN1\0" + new_page()[8:]) == ProgressRecord()

    def test_leaving_between_collectives_and_finishing_are_recorded(self, page, descriptor):
        page.leaving()
        assert record_in(descriptor).state == State.LEAVING
        page.finished()
        assert record_in(descriptor).state == State.FINISHED

    @pytest.mark.parametrize("value", [None, "", "x", "-1", "999999", "0"])
    def test_without_a_page_nothing_is_written(self, value):
        environ = {} if value is None else {DESCRIPTOR_VARIABLE: value}
        page = ProgressPage.from_environ(environ)
        assert not page.is_supervised
        page.joining()
        page.joined()
        page.grace(1)
        page.leaving()
        page.finished()

    def test_a_page_belongs_to_one_living_process(self, page, descriptor):
        program = "import os; from popdist.records.progress import ProgressPage;"
        program += "print(ProgressPage.from_environ(os.environ).is_supervised)"
        environ = os.environ | {DESCRIPTOR_VARIABLE: str(descriptor)}

        def child():
            command = [sys.executable, "-c", program]
            return subprocess.check_output(command, env=environ, pass_fds=[descriptor], text=True).strip()

        assert child() == "False"
        os.pwrite(descriptor, (2**22 + 1).to_bytes(8, "little"), 8)  # an owner that is dead
        assert child() == "True"
