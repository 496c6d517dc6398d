"""Faults that place a job elsewhere, lose its instances, or blame the wrong one."""

from __future__ import annotations

from fault import Fault

IN_POPRUN = (
    Fault(
        name="transports that the user names are overruled",
        path="poprun/launch/transports.py",
        old="return {} if _names_any(_TRANSPORTS, arguments, environ) else dict(_WITHIN_A_HOST)",
        new="return dict(_WITHIN_A_HOST)",
        caught_by="tests/poprun/test_loopback.py::test_transports_and_networks_named_by_the_user_are_kept",
    ),
    Fault(
        name="neighbouring instances are placed on different hosts",
        path="poprun/launch/placement.py",
        old="host=located[index][0],",
        new="host=hosts[index % len(hosts)],",
        caught_by="tests/poprun/test_placement.py::test_hosts_get_equal_blocks_of_instances_in_their_order",
    ),
    Fault(
        name="variables that the user forwards are lost if none is exported",
        path="poprun/launch/variables.py",
        old="{**own, **dict.fromkeys(forwarded), **exported}",
        new="{**own, **exported}",
        caught_by="tests/poprun/test_command.py::test_the_words_of_the_command_have_the_order_of_the_original",
    ),
    Fault(
        name="an instance that ended with an error counts as complete",
        path="poprun/ipc/facts.py",
        old="return self.kind is EndKind.EXIT and self.number == 0",
        new="return self.kind is EndKind.EXIT",
        caught_by="tests/poprun/test_diagnosis.py::TestVerdict::test_the_verdict_names_instance_host_end_and_collectives",
    ),
    Fault(
        name="the instance that failed last is blamed",
        path="poprun/supervisor/diagnosis.py",
        old="blamed = min(failed, key=lambda each: _order(each, failed))",
        new="blamed = max(failed, key=lambda each: _order(each, failed))",
        caught_by="tests/poprun/test_diagnosis.py::TestFirstCause::test_the_first_cause_of_each_case_is_blamed",
    ),
    Fault(
        name="only one of several instances with the same wait is named",
        path="poprun/supervisor/diagnosis.py",
        old="groups.setdefault(_describe_wait(each), []).append(each.index)",
        new="groups[_describe_wait(each)] = [each.index]",
        caught_by="tests/poprun/test_diagnosis.py::TestVerdict::test_the_verdict_names_instance_host_end_and_collectives",
    ),
    Fault(
        name="a stuck instance is never noticed",
        path="poprun/supervisor/lookout.py",
        old="if limit_s and not self.in_vain and now_s - self._heeded_s >= limit_s:",
        new="if limit_s and not self.in_vain and now_s - self._heeded_s < 0:",
        caught_by="tests/poprun/test_lookout.py::TestLookout::test_a_stuck_instance_is_found_after_the_limit",
    ),
    Fault(
        name="children of children are not found and outlive the job",
        path="poprun/ipc/processes.py",
        old="found += children.get(pid, ())",
        new="children.get(pid, ())",
        caught_by="tests/poprun/test_descendants.py::test_children_of_children_are_found",
    ),
    Fault(
        name="a signal that ends poprun is not forwarded to the programs",
        path="poprun/supervisor/job_machine.py",
        old="        self._actions += self._members.pass_on(number)\n        self._actions += self._members.ask()",
        new="        self._actions += self._members.ask()",
        caught_by="tests/poprun/test_job_machine.py::TestSignals::test_ending_signals_are_forwarded_and_the_job_ends_with_its_programs",
    ),
    Fault(
        name="a program's remaining processes are killed only once, although they start others",
        path="poprun/agent/guard_machine.py",
        old="self._sweep_at_s = now_s + SWEEP_S",
        new="self._sweep_at_s = _NEVER",
        caught_by="tests/poprun/test_guard_machine.py::TestAProgramThatEnds::test_descendants_have_a_grace_period_and_are_then_killed_repeatedly",
    ),
    Fault(
        name="comparisons of environments ignore file sizes",
        path="poprun/hosts/python_environment.py",
        old="state.st_size, state.st_mtime_ns",
        new="state.st_mtime_ns",
        caught_by="tests/poprun/test_synchronise.py::TestDigest::test_a_different_size_changes_the_digest_even_at_the_same_time",
    ),
    Fault(
        name="the loss of a sleeping spare interrupts the training",
        path="poprun/supervisor/survival.py",
        old="        if lost:\n            actions += self._release(left)",
        new="        actions += self._release(left)",
        caught_by="tests/poprun/test_spares_of_jobs.py::TestSleepingSpares::test_the_loss_of_a_spare_is_a_warning_and_disturbs_nobody",
    ),
    Fault(
        name="a job ends with status 0 although a spare that has taken a place has failed",
        path="poprun/supervisor/members.py",
        old="            self._update(index, is_spare=False)",
        new="            pass",
        caught_by="tests/poprun/test_spares_of_jobs.py::TestReplacement::test_the_job_fails_if_the_former_spare_does_not_complete",
    ),
    Fault(
        name="sleeping spares count for --min-instances",
        path="poprun/supervisor/survival.py",
        old="if active + called < max(1, self._least):",
        new="if len(left) < max(1, self._least):",
        caught_by="tests/poprun/test_spares_of_jobs.py::TestReplacement::test_a_spare_on_a_host_to_be_left_does_not_count_for_min_instances",
    ),
    Fault(
        name="verify proves a program whose instances were not lost",
        path="poprun/verify/losses.py",
        old="return not self.spared and not self.asleep",
        new="return True",
        caught_by="tests/poprun/test_verify_losses.py::TestTheCourse::test_a_loss_that_did_not_happen_is_no_success",
    ),
    Fault(
        name="a new instance is to join although it has not come to the place where the others are",
        path="poprun/ipc/facts.py",
        old="return self.is_asleep and (self.record.is_ready or not self.is_reserve)",
        new="return self.is_asleep",
        caught_by="tests/poprun/test_regrowth.py::test_a_new_instance_starts_after_a_pause_and_joins_when_it_is_ready",
    ),
    Fault(
        name="instances act on a wish for other active instances before all of them have it",
        path="poprun/supervisor/resizing.py",
        old="self._is_complete = all(each.record.wanted.number == self._number for each in there)",
        new="self._is_complete = any(each.record.wanted.number == self._number for each in there)",
        caught_by="tests/poprun/test_resizing.py::test_a_wish_that_is_not_shown_by_all_is_never_complete",
    ),
    Fault(
        name="instances at their end are not called to a change that others have begun, which then wait for ever",
        path="poprun/supervisor/resizing.py",
        old="if not any(each.record.is_changing for each in here):",
        new="if True:",
        caught_by="tests/poprun/test_resizing.py::test_a_process_at_its_end_is_called_to_a_change_that_another_one_has_begun",
    ),
)
