"""What a program is called and gets, as mpirun sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poprun.cli.settings import Settings
from poprun.hosts.hosts import Host
from poprun.ipc.wire import mark, unmark
from poprun.launch.command import AGENT, Launch, build_command
from poprun.launch.placement import place_instances

GRAMMAR = (":", "--", "-np", "-n", "-x", "--mca", "-gmca", "--prtemca", "--hostfile", "@file", "--bind-to", "--version")


def command(*program: str) -> list[str]:
    settings = Settings(program=("train",), num_instances=2, num_replicas=2)
    places = place_instances(settings, ["h"], {"h": ()}, ())
    here = (Host("h", is_this_machine=True),)
    launch = Launch(settings, here, places, "mpirun", "python", {}, (), False)
    return build_command(replace(launch, settings=replace(settings, program=program)))


@pytest.mark.parametrize("word", [*GRAMMAR, "", "+", "++", "+x", "-", " ", "=", "\n"])
def test_a_word_is_marked_and_comes_back(word):
    assert mark(word) == f"+{word}"
    assert unmark(mark(word)) == word


@pytest.mark.parametrize("word", ["python3", "./x.py", "/bin/true", "3e-4", "_x", "a:b", "key=--mca", "ü", "\udcff"])
def test_names_numbers_and_paths_stay_as_they_are(word):
    assert mark(word) == word == unmark(word)


@pytest.mark.parametrize("word", GRAMMAR)
def test_mpirun_sees_no_word_of_its_own_whether_it_names_the_program_or_follows_it(word):
    plain = command("train", "3")
    assert command(word, word) == [f"+{word}" if each in ("train", "3") else each for each in plain]
    assert plain.count(":") == 1
    assert plain.count(str(AGENT)) == 2
