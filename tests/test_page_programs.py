"""Runs of the documentation's code: blocks of Python and of shells, and examples in docstrings."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks_in, page_programs

from collectives.simulation.__main__ import command_line_parser
from poprun.cli.command_line import find_option
from poprun.cli.launch_options import OPTIONS
from poprun.cli.options import OptionKind
from poprun.doctor import DOCTOR
from poprun.errors import UsageError
from poprun.monitor.command import TOP
from poprun.monitor.resize_command import RESIZING
from poprun.trace.command import TIMELINE
from poprun.verify.options import OPTIONS_OF_VERIFY

LIMIT_S = 200.0
DEVICES = "4"

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S + 20)]

MIGRATE = ROOT / "docs" / "how_to" / "migrate"
RUN_BY = {
    "README.md": "tests/test_readme.py",
    "from_python.md": "tests/jobs/test_notebooks.py",
    "tutorial.md": "tests/launch_scripts/test_tutorial.py",
    "flax_equinox.md": "tests/test_cookbook.py",
    "torch_distributed.md": "tests/jobs/test_process_group_jobs.py",
    **dict.fromkeys(
        (page.name for page in PAGES if page.parent == MIGRATE and page.name != "index.md"),
        "tests/test_migration.py",
    ),
}
"""Pages whose programs need several instances or more libraries, or are a part of a larger one, and their tests."""

CONTINUES = {"torch_modules.md": "torch.md"}
"""Pages that continue with the names of another page's programs, as their text says."""

KERAS_WITH_NUMPY = "ignore:__array__ implementation:DeprecationWarning"

PROGRAMS = {page.name: page_programs(page.name) for page in PAGES if page.name != "index.md"}
OPTIONAL = ("torch", "keras")


def missing_library(programs):
    """Return the name of an imported library that is not installed; empty if all are installed."""
    text = "\n".join(programs)
    needed = [
        name for name in OPTIONAL if re.search(rf"^(?:import|from) (?:strategies\.)?{name}\b", text, re.MULTILINE)
    ]
    return next((name for name in needed if importlib.util.find_spec(name) is None), "")


RUN_HERE = {
    name: [*PROGRAMS.get(CONTINUES.get(name, ""), []), *programs]
    for name, programs in PROGRAMS.items()
    if programs and name not in RUN_BY
}


def results_of(folder, *devices):
    """Run the programs of all pages, and return the result of each page."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "POPDIST_", "PJRT_", "XLA_"))}
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "KERAS_BACKEND": "jax"}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-W", KERAS_WITH_NUMPY, str(ROOT / "tests" / "running_pages.py"), *devices],
        env=clean | places,
        cwd=folder,  # files made by the programs stay there
        input=json.dumps({page: programs for page, programs in RUN_HERE.items() if not missing_library(programs)}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("pages"), DEVICES)


@pytest.fixture(scope="module")
def each_alone(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("pages"))


def check(page, results):
    if missing := missing_library(PROGRAMS[page]):
        pytest.skip(f"{missing} is not installed")
    result = results[page]
    assert not result["failed"], result["failed"]
    for program, output in zip(RUN_HERE[page], result["printed"], strict=True):
        check_comments(program, output)


NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]\d+)?")


CLAIM = re.compile(r"[\[(\d-]|\w+$")
"""The beginning of a comment with the printed value; other comments explain."""


def check_comments(program, output):
    """Check comments after calls of print: a comment like a value begins with the output, or has its numbers."""
    comments = re.findall(r"^print\(.*?\)(?:  # (.+))?$", program, flags=re.MULTILINE)
    lines = output.splitlines()
    if len(lines) != len(comments):
        return
    for comment, line in zip(comments, lines, strict=True):
        if CLAIM.match(comment) and not comment.startswith(line) and "..." not in comment:
            expected = NUMBER.findall(comment)
            found = [rounded_as(text, example) for text, example in zip(NUMBER.findall(line), expected, strict=False)]
            said = f"{line!r} is printed, and the page says {comment!r}"
            assert expected, said
            assert found == [float(text) for text in expected], said


def rounded_as(text, example):
    """Return a number with as many decimals as an example has."""
    return round(float(text), len(example.partition(".")[2]))


@pytest.mark.job
@pytest.mark.parametrize("page", RUN_HERE)
def test_programs_of_a_page_run_one_after_another(page, in_one_process):
    check(page, in_one_process)


@pytest.mark.complete
@pytest.mark.job
@pytest.mark.parametrize("page", RUN_HERE)
def test_programs_of_a_page_run_in_a_separate_process(page, each_alone):
    check(page, each_alone)


@pytest.mark.parametrize("page", RUN_BY)
def test_a_page_run_elsewhere_has_a_test(page):
    assert PROGRAMS[page]
    assert page in (ROOT / RUN_BY[page]).read_text(encoding="utf-8")


def test_every_block_of_python_begins_at_the_margin_and_is_labelled_python():
    """Only these blocks are found and run."""
    others = re.compile(r"^(?:[ >]+```python|```(?:py|Python|python3|pycon)\b)", re.MULTILINE)
    assert [page.name for page in PAGES if others.search(page.read_text(encoding="utf-8"))] == []


def blocks_of(page, language):
    return blocks_in(page.read_text("utf-8"), language)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "sh")], ids=lambda page: page.name)
def test_blocks_of_shell_commands_can_be_parsed(page):
    for block in blocks_of(page, "sh"):
        done = subprocess.run(["sh", "-n"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{block}{done.stderr}"


SUBCOMMANDS = {
    "verify": (*OPTIONS, *OPTIONS_OF_VERIFY),
    "timeline": TIMELINE.options,
    "top": TOP.options,
    "resize": RESIZING.options,
    "doctor": DOCTOR.options,
}


def commands_on(page):
    """Return the commands of poprun on a page: in blocks, behind a prompt or not, and in code spans."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    shells = "\n".join(block for language, block in fenced.findall(text) if language in ("", "sh"))
    lines = re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*poprun .*$", shells, re.MULTILINE)
    return [*lines, *re.findall(r"`(poprun [^`\n]+)`", fenced.sub("", text))]


def unknown_options(command):
    """Return unknown options of poprun or its subcommand, before the program."""
    try:
        words = shlex.split(command.partition("poprun ")[2], comments=True)
    except ValueError:  # a truncated command
        words = command.partition("poprun ")[2].split()
    if words[:1] == ["simulate"]:
        return unknown_to_argparse(words[1:])
    options = SUBCOMMANDS.get(words[0], OPTIONS) if words else OPTIONS
    words = words[1:] if words[:1] and words[0] in SUBCOMMANDS else words
    unknown = []
    while words and (words[0].startswith("-") or words[0] in ("...", "[options]", "merge", "report")):
        word = words.pop(0)
        if word.startswith("-") and word != "--":
            try:
                option = find_option(word.partition("=")[0], options)
            except UsageError:
                unknown.append(word)
            else:
                if "=" not in word and option.kind is not OptionKind.FLAG and not option.if_bare:
                    words = words[1:]
    return unknown


def unknown_to_argparse(words):
    [commands] = (each for each in command_line_parser()._actions if isinstance(each, argparse._SubParsersAction))
    known = commands.choices[words[0]]._option_string_actions if words[:1] and words[0] in commands.choices else {}
    return [word for word in words[1:] if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_on(page)], ids=lambda page: page.name)
def test_options_in_commands_of_poprun_exist(page):
    assert {command: unknown for command in commands_on(page) if (unknown := unknown_options(command))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_in_commands_exist(page):
    scripts = re.findall(r"\b(?:sh|python|sbatch) ((?:launch_scripts|docs|benchmarks|tests)/[\w/.]+)", page.read_text())
    assert [script for script in scripts if not (ROOT / script.rstrip(".")).exists()] == []


UNLOADABLE = tuple(f"strategies.{name}." for name in OPTIONAL if importlib.util.find_spec(name) is None)
WITH_DOCTESTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("collectives", "popdist", "poprun", "strategies")
    for path in (ROOT / package).rglob("*.py")
    if re.search(r"^\s+>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
)


DOCTESTS = """
import doctest, importlib, sys
results = {name: doctest.testmod(importlib.import_module(name.removesuffix(".__init__"))) for name in sys.argv[1:]}
sys.exit(any(failed or not tried for failed, tried in results.values()))
"""


@pytest.mark.job
def test_examples_in_docstrings_print_the_documented_results(tmp_path):
    """They run in a separate process, because some call popdist.init."""
    names = [name for name in WITH_DOCTESTS if not name.startswith(UNLOADABLE)]
    command = [sys.executable, "-W", "error", "-c", DOCTESTS, *names]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
