"""The variables and refusals of `poprun --metrics`."""

import shlex
import socket
import sys

import pytest

from poprun.cli.command_line import read_command_line, settings_from
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.launch.placement import InstancePlace
from poprun.launch.program import check_sinks
from poprun.launch.variables import job_variables

HERE = Host("here", is_this_machine=True)
FIRST = InstancePlace(0, "here", 0, range(1))


def settings(text, environ=None, program="train.py"):
    return settings_from(read_command_line([*shlex.split(text), program]), environ or {})


def test_words_of_several_options_add_up_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = settings("--metrics csv:a.csv,wandb --metrics=jsonl:b.jsonl")
    words = f"csv:{tmp_path / 'a.csv'},wandb,jsonl:{tmp_path / 'b.jsonl'}"
    assert job_variables(asked) == {"POPDIST_METRICS": words, "POPDIST_METRICS_RUN": asked.metrics_run}


def test_a_job_gets_a_unique_name_for_metric_services_unless_the_user_sets_one():
    assert settings("--metrics wandb").metrics_run != settings("--metrics wandb").metrics_run != ""
    assert settings("--metrics wandb", {"POPDIST_METRICS_RUN": "mine"}).metrics_run == "mine"


def test_no_variables_are_set_without_the_option():
    assert settings("").metrics_run == ""
    assert job_variables(settings("")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--metrics xml:a", "^--metrics xml:a: 'xml' is no kind of destination; use one of csv:FILE"),
        ("--metrics=,", "--metrics is empty; give a destination for metrics, such as csv:run.csv"),
        ("--metrics csv:a --metrics csv:a", "--metrics csv:a: metrics would go there twice; leave one out"),
        ("--metrics --debug", "--metrics needs a destination for metrics, such as csv:run.csv, got '--debug'"),
    ],
)
def test_invalid_destinations_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        settings(text)


def test_an_unwritable_destination_is_refused_on_the_host_of_instance_0(tmp_path):
    asked = settings(f"--metrics csv:{tmp_path}")
    with pytest.raises(UsageError, match=f"^--metrics csv:{tmp_path}: it is a folder; write csv:FILE$"):
        check_sinks(asked, (HERE,), FIRST, {})
    check_sinks(asked, (Host("there"), HERE), InstancePlace(0, "there", 0, range(1)), {})


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="Address already in use"):
            check_sinks(settings(f"--metrics prometheus:{port}"), (HERE,), FIRST, {})


def test_a_missing_library_is_refused_only_for_programs_of_the_same_environment(monkeypatch):
    monkeypatch.setattr("popdist.records.metric_words.LIBRARIES", {"wandb": ("no_such_module", "wandb")})
    with pytest.raises(UsageError, match="no_such_module is not installed; run: pip install wandb"):
        check_sinks(settings("--metrics wandb", program=sys.executable), (HERE,), FIRST, {})
    check_sinks(settings("--metrics wandb", program="/bin/sh"), (HERE,), FIRST, {})


def test_norms_and_histograms_are_asked_for_by_variables():
    asked = {"POPDIST_NORMS_EVERY": "10", "POPDIST_HISTOGRAMS_EVERY": "0"}
    assert job_variables(settings("--norms-every 10")) == asked
    assert job_variables(settings("--histograms-every=5 --norms-every 10"))["POPDIST_HISTOGRAMS_EVERY"] == "5"
    assert job_variables(settings("--norms-every 0")) == {}


@pytest.mark.parametrize("text", ["--norms-every -1", "--norms-every 1.5", "--histograms-every often"])
def test_numbers_of_steps_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match=text.split()[0]):
        settings(text)
