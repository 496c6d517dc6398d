"""Faults by which a report about a timeline says what was not so."""

from __future__ import annotations

from fault import Fault

IN_TIMELINES = (
    Fault(
        name="collectives that failed are matched with those of other instances",
        path="poprun/trace/matching.py",
        old='waits = waits[~waits["failed"]]',
        new="waits = waits",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestACollectiveThatFails::test_is_none_of_those_that_instances_have_in_common",
        ),
    ),
    Fault(
        name="the time until a collective fails is not time of waiting",
        path="poprun/trace/spans.py",
        old='rest["sort"][rest["failed"]] = Sort.WAIT  # it failed before all had come',
        new="pass",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestACollectiveThatFails::test_is_a_wait_for_the_others",
        ),
    ),
    Fault(
        name="times in which connections of two instances are busy are added, though they overlap",
        path="poprun/trace/report/links.py",
        old="busy[link] = max(busy.get(link, 0.0), min(lasted, (end_ns - begin_ns) / 1e9))",
        new="busy[link] = busy.get(link, 0.0) + min(lasted, (end_ns - begin_ns) / 1e9)",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestTrafficBetweenHosts::test_of_two_instances_of_a_host_is_busy_as_long_as_the_busier_one",
        ),
    ),
    Fault(
        name="a link between hosts may be busy for longer than there is time",
        path="poprun/trace/report/links.py",
        old="min(lasted, (end_ns - begin_ns) / 1e9))",
        new="lasted)",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestTrafficBetweenHosts::test_is_busy_no_longer_than_there_is_time",
        ),
    ),
    Fault(
        name="the cause of lateness is what takes longer than in the mean of the others",
        path="poprun/trace/report/findings.py",
        old="np.median(category_ns[others], axis=0)",
        new="np.mean(category_ns[others], axis=0)",
        caught_by=("tests/poprun/test_timeline_confusions.py::TestWhatIsUsual::test_cause_of_lateness",),
    ),
    Fault(
        name="an instance is said to be late by the mean",
        path="poprun/trace/report/findings.py",
        old="float(np.median(late[own, row])) / 1e9",
        new="float(np.mean(late[own, row])) / 1e9",
        caught_by=("tests/poprun/test_timeline_confusions.py::TestWhatIsUsual::test_lateness_itself",),
    ),
    Fault(
        name="the load of a host is compared with the mean of the others",
        path="poprun/trace/report/findings.py",
        old="float(np.median([waited[each] for each in others]))",
        new="float(np.mean([waited[each] for each in others]))",
        caught_by=("tests/poprun/test_timeline_confusions.py::TestWhatIsUsual::test_waits_for_cores",),
    ),
    Fault(
        name="clocks that are not known well enough are trusted",
        path="poprun/trace/aligned.py",
        old="elif each.uncertainty_ns > shortest_ns:",
        new="elif each.uncertainty_ns < 0:",
        caught_by=("tests/poprun/test_timeline_merge.py::TestClocks::test_that_are_not_known_well_enough_are_said",),
    ),
    Fault(
        name="clocks are trusted that are known well enough for the longest exchange only",
        path="poprun/trace/merging.py",
        old="shortest = float(np.median(exchanges)) if len(exchanges) else 0.0",
        new="shortest = float(np.max(exchanges)) if len(exchanges) else 0.0",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestWhatIsUsual::test_exchanges_with_which_clocks_are_compared",
        ),
    ),
    Fault(
        name="connections inside of a host count as links between hosts",
        path="poprun/trace/report/links.py",
        old="if link[0] != link[1]:",
        new="if True:",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestTrafficBetweenHosts::test_has_nothing_of_what_stays_inside_of_a_host",
        ),
    ),
    Fault(
        name="a slow link is compared with the fastest one",
        path="poprun/trace/report/links.py",
        old="usual = float(np.median([each.rate for each in by_rate[place + 1 :]]))",
        new="usual = float(np.max([each.rate for each in by_rate[place + 1 :]]))",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestTrafficBetweenHosts::test_is_compared_with_the_median_of_the_others",
        ),
    ),
    Fault(
        name="two collectives of one name in one step are one",
        path="poprun/trace/matching.py",
        old="turn = np.arange(len(step)) - starts[np.cumsum(is_new) - 1] if len(step)",
        new="turn = np.zeros(len(step), np.int64) if len(step)",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::test_collectives_of_one_name_in_one_step_are_matched_in_their_order",
        ),
    ),
    Fault(
        name="compiling inside of compute is counted twice",
        path="poprun/trace/report/step_table.py",
        old="of[COMPUTE] = np.maximum(of[COMPUTE] - of[COMPILE], 0)",
        new="of[COMPUTE] = of[COMPUTE] + 0",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::test_what_is_compiled_inside_of_compute_is_counted_once",
        ),
    ),
    Fault(
        name="an evaluation counts as a part of the step after it",
        path="poprun/trace/report/step_table.py",
        old="np.where(follows & ~disturbed,",
        new="np.where(follows,",
        caught_by=("tests/poprun/test_timeline_confusions.py::test_a_step_does_not_begin_before_an_evaluation",),
    ),
    Fault(
        name="clocks on walls are compared without heed of when recordings began",
        path="poprun/trace/aligned.py",
        old="ahead = (recording.began_at_s - other.began_at_s) * 1e9 - (recording.began_ns - other.began_ns)",
        new="ahead = (recording.began_at_s - other.began_at_s) * 1e9 + (recording.began_ns - other.began_ns)",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::test_clocks_on_walls_are_compared_when_each_recording_began",
        ),
    ),
    Fault(
        name="one of two that are late in turn is blamed",
        path="poprun/trace/report/findings.py",
        old=" or sums[row] < LEAST_SHARE * sums.sum():",
        new=":",
        caught_by=("tests/poprun/test_timeline_confusions.py::test_two_that_are_late_in_turn_are_none_to_blame",),
    ),
    Fault(
        name="time in which the receiver had no room counts as time of the link",
        path="popdist/timeline/connections.py",
        old="(busy_us - full_us) / 1e6",
        new="busy_us / 1e6",
        caught_by=(
            "tests/popdist/test_timeline_connections.py::test_of_several_the_sums_and_the_shortest_round_trip_and_no_time_in_which_the_receiver_was_full",
        ),
    ),
    Fault(
        name="clocks do not drift while an exchange lasts",
        path="popdist/timeline/clocks.py",
        old="lowest = (answered - returned - slack)[order]",
        new="lowest = (answered - returned)[order]",
        caught_by=(
            "tests/popdist/test_timeline_clocks.py::test_an_exchange_bounds_the_difference_with_what_clocks_may_drift_meanwhile",
        ),
    ),
    Fault(
        name="a good exchange says nothing of the time before it",
        path="popdist/timeline/clocks.py",
        old="np.minimum(forward, backward)",
        new="forward",
        caught_by=("tests/popdist/test_timeline_clocks.py::test_a_good_exchange_helps_all_before_it_and_all_after_it",),
    ),
    Fault(
        name="a host is blamed for slow links though others of its links are fast",
        path="poprun/trace/report/links.py",
        old="common -= {host for each in others for host in (each.source, each.target)}",
        new="pass",
        caught_by=(
            "tests/poprun/test_timeline_confusions.py::TestTrafficBetweenHosts::test_blames_a_host_only_if_all_other_links_are_fast_elsewhere",
        ),
    ),
    Fault(
        name="a process that an instance starts takes itself for the instance",
        path="popdist/spawned.py",
        old="if joined == job and int(starter) not in _joined:",
        new="if False:",
        caught_by=("tests/popdist/test_spawned.py::test_a_program_that_an_instance_starts_is_not_the_instance",),
    ),
    Fault(
        name="a recording that is damaged in its middle is read as one that is cut off",
        path="popdist/timeline/blocks.py",
        old="return not any(_block_at(data, place) for each in _KINDS for place in _places(data, each, position + 1))",
        new="return True",
        caught_by=(
            "tests/popdist/test_timeline_recording.py::TestAFile::test_that_is_damaged_is_refused_after_the_blocks_before",
        ),
    ),
    Fault(
        name="events unpack to whatever they say",
        path="popdist/timeline/blocks.py",
        old="if most_bytes is not None and nbytes > most_bytes:",
        new="if False:",
        caught_by=(
            "tests/poprun/test_timeline_damage.py::test_many_small_blocks_of_events_do_not_add_up_to_more_either",
        ),
    ),
    Fault(
        name="code between steps counts as what is in no phase",
        path="poprun/trace/report/step_table.py",
        old="free: np.ndarray = np.maximum(",
        new="free: np.ndarray = np.minimum(",
        caught_by=(
            "tests/poprun/test_timeline_report.py::TestALateInstance::test_that_does_something_else_between_its_steps_is_told_the_line",
        ),
    ),
    Fault(
        name="a host runs whatever text comes through its standard input",
        path="poprun/hosts/ssh.py",
        old="hashlib.sha256(text).hexdigest() == '{digest}' or ",
        new="hashlib.sha256(text).hexdigest() != '{digest}x' or ",
        caught_by=("tests/poprun/test_survey.py::test_a_host_runs_no_other_text_than_ours",),
    ),
    Fault(
        name="a report tells the first time of a step that was made twice",
        path="poprun/trace/report/step_table.py",
        old="known = len(made) - 1 - from_the_end",
        new='known = np.unique(made["step"], return_index=True)[1]',
        caught_by=("tests/poprun/test_timeline_report.py::test_of_a_step_that_was_made_twice_the_last_time_is_told",),
    ),
    Fault(
        name="bubbles of a pipeline are filled with the work of other replicas",
        path="poprun/trace/report/step_table.py",
        old='replicas["name"].astype(np.int64)',
        new='0 * replicas["name"].astype(np.int64)',
        caught_by=(
            "tests/poprun/test_timeline_report.py::TestOverlap::test_of_several_pipelines_leaves_the_bubbles_of_each",
        ),
    ),
    Fault(
        name="events that came too fast are missing without a word",
        path="popdist/timeline/spilling.py",
        old="            if lost:",
        new="            if lost < 0:",
        caught_by=(
            "tests/popdist/test_timeline_recording.py::TestARecording::test_says_how_much_came_too_fast_to_be_kept",
        ),
    ),
)
