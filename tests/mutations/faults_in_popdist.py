"""Faults that let a process take another instance's place, or a group another group's."""

from __future__ import annotations

from fault import Fault

IN_POPDIST = (
    Fault(
        name="an instance takes replicas of an earlier one",
        path="popdist/environments/environment.py",
        old="replica_offset=self.rank * local,",
        new="replica_offset=self.rank,",
        caught_by="tests/popdist/test_environments.py::TestOpenMPI::test_the_program_may_ask_for_more_replicas",
    ),
    Fault(
        name="the variables of mpirun take precedence over those of poprun",
        path="popdist/environments/detection.py",
        old="    PopRunEnvironment(),\n    OpenMPIEnvironment(),\n",
        new="    OpenMPIEnvironment(),\n    PopRunEnvironment(),\n",
        caught_by="tests/popdist/test_environments.py::TestPopRun::test_the_index_is_the_offset_divided_by_the_local_replicas",
    ),
    Fault(
        name="the chief in TF_CONFIG is not counted in the index of a worker",
        path="popdist/environments/tf_config.py",
        old='self.task_id + (len(self.chief) if self.task_type == "worker" else 0)',
        new="self.task_id",
        caught_by="tests/popdist/test_tf_config.py::TestInstance::test_the_chief_comes_first_and_the_workers_follow",
    ),
    Fault(
        name="a Slurm task uses its local number as its index",
        path="popdist/environments/slurm.py",
        old="LaunchedProcess.read(environ, RANK, SIZE, LOCAL_RANK)",
        new="LaunchedProcess.read(environ, LOCAL_RANK, SIZE, LOCAL_RANK)",
        caught_by="tests/popdist/test_slurm_environment.py::TestTasksConnectedByPMIx::test_each_task_is_an_instance",
    ),
    Fault(
        name="a group with a custom id contains all instances",
        path="popdist/groups.py",
        old="_registered[communicator_id] = _subgroup(members) if",
        new="_registered[communicator_id] = everybody if",
        caught_by="tests/popdist/test_groups.py::test_statements_hold_for_three_instances",
    ),
    Fault(
        name="a process considers a wish again that the others had earlier",
        path="popdist/records/progress.py",
        old="        if wish:\n            self._words[_CONSIDERED] = wish",
        new="        if wish == self.wish:\n            self._words[_CONSIDERED] = wish",
        caught_by="tests/poprun/test_program_output.py::test_an_instance_acts_on_a_wish_once_it_is_complete_and_until_it_has_considered_it",
    ),
)
