"""The requested profile, and the profiled steps."""

from __future__ import annotations

import pytest

from popdist.errors import EnvironmentMismatchError
from popdist.timeline.asked import TimelineOptions
from popdist.timeline.profiles import Profiling, WantedProfile


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("jax", WantedProfile("jax", 2, 5)),
        ("torch:20", WantedProfile("torch", 2, 20)),
        ("jax:20@100", WantedProfile("jax", 100, 20)),
        ("jax@0", WantedProfile("jax", 0, 5)),
        ("torch:all", WantedProfile("torch", 0, None)),
        ("torch:all@7", WantedProfile("torch", 7, None)),
    ],
)
def test_the_profile_word_is_parsed(text, wanted):
    assert WantedProfile.parse(text) == wanted
    assert TimelineOptions.from_environ({"POPDIST_TIMELINE": "/a", "POPDIST_PROFILE": text}).profile == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tensorflow", "'tensorflow' names no profile; write jax or torch"),
        ("jax@", "'jax@' names no profile"),
        ("jax:3@-1", "names no profile"),
        ("jax:0", "asks for 0 steps, but a profile has at least 1; write a number or all"),
        ("torch:some", "asks for some steps"),
    ],
)
def test_an_invalid_word_is_refused(text, why):
    with pytest.raises(EnvironmentMismatchError, match=why):
        TimelineOptions.from_environ({"POPDIST_TIMELINE": "/a", "POPDIST_PROFILE": text})


def test_a_profile_without_a_timeline_is_refused():
    with pytest.raises(EnvironmentMismatchError, match="POPDIST_TIMELINE is not, .*; set both"):
        TimelineOptions.from_environ({"POPDIST_PROFILE": "jax"})


def test_a_profiler_that_cannot_be_imported_is_refused_at_the_start(tmp_path):
    with pytest.raises(EnvironmentMismatchError, match="by not_there was asked for, but .* import it; install it"):
        Profiling(WantedProfile("not_there"), tmp_path, int, print)


def test_steps_are_counted_from_the_first_one_of_the_process():
    wanted = WantedProfile("jax", 2, 3)
    assert [(wanted.begins_before(made), wanted.ends_before(made)) for made in range(6)] == [
        *[(False, False)] * 2,
        *[(True, False)] * 3,
        (True, True),
    ]
    assert not WantedProfile("jax", 0, None).ends_before(10**9)
