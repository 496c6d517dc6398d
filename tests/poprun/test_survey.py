"""The survey of hosts, with this machine as the host and other programs in place of ssh."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from popdist.instance import this_host
from popdist.version import __version__
from poprun.errors import UsageError
from poprun.hosts import survey_script
from poprun.hosts.host_facts import HostFacts, HostFault, HostQuestion, facts_from, question_about
from poprun.hosts.ssh import name_behind, remote_words, ssh_words, way_out_of
from poprun.hosts.survey import (
    LONGEST_AGE_S,
    SurveyCache,
    cache_folder,
    limit_from,
    stamp_of,
    survey,
    survey_starting,
)
from poprun.hosts.this_machine import Core, is_this_machine, usable_cores

LIMIT_S = 60.0
"""The limit for surveys that end by themselves; test machines may be busy."""

LOCAL = ("sh", "-c", 'eval "$3"', "ssh")
"""A replacement for ssh: it runs the command here; its words are `--`, the host and the command."""


@pytest.fixture(scope="module")
def question() -> HostQuestion:
    return question_about(sys.executable, "mpirun", os.environ)


def pretend(text: str) -> tuple[str, ...]:
    """Return a shell program in place of ssh."""
    return ("sh", "-c", text, "ssh")


def fault_of(question: HostQuestion, ssh: tuple[str, ...], limit_s: float = LIMIT_S) -> HostFault:
    fault = survey(["far"], question, ssh, limit_s)["far"]
    assert isinstance(fault, HostFault)
    return fault


@pytest.fixture(scope="module")
def facts(question: HostQuestion) -> HostFacts:
    found = survey(["far"], question, LOCAL, LIMIT_S)["far"]
    assert isinstance(found, HostFacts)
    return found


def test_a_host_reports_its_facts(facts):
    assert (facts.host, facts.name, facts.program) == ("far", this_host(), sys.executable)
    assert facts.cores == usable_cores()
    assert facts.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.versions["project"] == __version__
    assert facts.sources
    assert facts.has_directory
    assert "127.0.0.1" in [each.address for each in facts.interfaces]


def test_the_local_machine_is_asked_without_ssh(question):
    facts = survey([this_host(), "localhost"], question, ("false",), LIMIT_S)
    assert all(isinstance(each, HostFacts) for each in facts.values())
    assert list(facts) == [this_host(), "localhost"]


def test_text_from_a_login_shell_does_no_harm(question):
    noisy = pretend('echo Welcome; echo "No mail." >&2; eval "$3"; echo Bye')
    assert isinstance(survey(["far"], question, noisy, LIMIT_S)["far"], HostFacts)


@pytest.mark.parametrize(
    ("in_between", "said"),
    [
        ('{ echo "print(1)"; cat; } | eval "$3"', "exit status 1"),
        ('head -c 100 >/dev/null; eval "$3"', "exit status 1"),
        ('sed s/poprun-survey/poprun-Survey/ | eval "$3"', "exit status 1"),
    ],
    ids=["more", "less", "other"],
)
def test_a_host_runs_only_the_unchanged_survey_script(question, in_between, said):
    fault = fault_of(question, pretend(in_between))
    assert said in fault.fact
    assert "standard input did not bring the program of poprun" in fault.fact


def test_a_host_without_the_interpreter_is_named(question):
    fault = fault_of(replace(question, python="/no/python"), LOCAL)
    assert fault.fact.startswith("cannot start the interpreter /no/python: ")
    assert "not found" in fault.fact
    assert "same path" in fault.way_out


@pytest.mark.parametrize(
    ("complaint", "way_out"),
    [
        ("ssh: Could not resolve hostname far: Name or service not known", "check the spelling in --host"),
        ("me@far: Permission denied (publickey).", "ssh-copy-id far"),
        ("Host key verification failed.", "run `ssh far` once by hand"),
        ("ssh: connect to host far port 22: Connection refused", "start sshd there"),
        ("ssh: connect to host far port 22: Connection timed out", "start the host"),
        ("ssh: connect to host far port 22: No route to host", "check the network"),
        ("kex_exchange_identification: read: Connection reset by peer", "try `ssh far true` by hand"),
    ],
)
def test_the_message_of_ssh_is_passed_on_with_advice(question, complaint, way_out):
    failing = pretend(f'echo "Warning: something" >&2; echo "{complaint}" >&2; exit 255')
    fault = fault_of(question, failing)
    assert fault.fact == complaint
    assert fault.way_out.startswith(way_out) or way_out in fault.way_out
    assert fault.way_out == way_out_of(complaint, "far")


def test_a_changed_host_key_gets_its_own_advice(question):
    changed = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nIt may be.\nHost key verification failed."
    fault = fault_of(question, pretend(f"echo '{changed}' >&2; exit 255"))
    assert fault.fact == "Host key verification failed."
    assert fault.way_out.startswith("if far was set up anew: `ssh-keygen -R far`")


def test_the_last_message_of_ssh_is_the_reason():
    said = "Permission denied, try again.\nssh: connect to host far port 22: Connection refused\nrsync error: 255"
    assert way_out_of(said, "far").startswith("start sshd there")


class TestStarting:
    """Hosts that may start later than poprun; each first call of ssh to a host leaves a file behind."""

    @pytest.fixture
    def first_says(self, tmp_path, monkeypatch):
        """Return a function that makes an ssh whose first call fails; later ones run the command here."""
        monkeypatch.setattr("poprun.hosts.survey.PAUSE_S", 0.01)

        def make(complaint):
            called = f"{tmp_path}/called-$2"
            return pretend(
                f'if [ -e "{called}" ]; then eval "$3"; else : >"{called}"; echo "{complaint}" >&2; exit 255; fi'
            )

        return make

    @pytest.mark.parametrize(
        "complaint",
        [
            "ssh: Could not resolve hostname far: Name or service not known",
            "ssh: connect to host far port 2222: Connection refused",
            "ssh: connect to host far port 2222: No route to host",
        ],
    )
    def test_a_host_is_asked_until_it_answers(self, question, first_says, complaint, capfd):
        found = survey_starting(["far", "near"], question, first_says(complaint), LIMIT_S, LIMIT_S)
        assert [type(each) for each in found.values()] == [HostFacts, HostFacts]
        [line] = capfd.readouterr().err.splitlines()
        assert line.endswith(
            f"waiting until far, near can be reached ({complaint}), for 60 s at most (--start-timeout-s)"
        )

    def test_a_host_that_refuses_the_key_is_asked_once(self, question, first_says, capfd):
        ssh = first_says("me@far: Permission denied (publickey).")
        assert isinstance(survey_starting(["far"], question, ssh, LIMIT_S, LIMIT_S)["far"], HostFault)
        assert capfd.readouterr().err == ""

    def test_outside_of_kubernetes_each_host_is_asked_once(self, question, first_says):
        fault = survey_starting(["far"], question, first_says("Connection refused"), LIMIT_S, 0)["far"]
        assert fault == HostFault("far", "Connection refused", fault.way_out, may_be_starting=True)


def test_an_invalid_answer_is_a_fault(question):
    fault = survey(["far"], question, pretend('echo "poprun-survey {}"'), LIMIT_S)["far"]
    assert fault == HostFault("far", "gave no answer, exit status 0", "check that `ssh far echo ok` prints ok")


def test_a_late_answer_is_a_fault(question, tmp_path, monkeypatch):
    """The fake limit expires when the program has started, so load does not matter."""
    started = tmp_path / "started"
    clock = SimpleNamespace(monotonic=lambda: 9.0 * started.exists(), sleep=time.sleep)
    monkeypatch.setattr("poprun.hosts.ssh.time", clock)
    fault = fault_of(question, pretend(f"touch {started}; exec sleep 1000"), 2.5)
    assert fault.fact == "did not answer within 2.5 s"
    assert "POPRUN_CHECK_TIMEOUT_S" in fault.way_out


def test_a_slow_host_is_named_while_it_is_waited_for(question, tmp_path, monkeypatch, capfd):
    """The host answers after poprun has looked at the clock ten times past the notice."""
    started, seen = tmp_path / "started", tmp_path / "seen"
    looks = iter(range(10))

    def look() -> float:
        if not started.exists():
            return 0.0
        if next(looks, None) is None:
            seen.touch()
        return 3.0

    monkeypatch.setattr("poprun.hosts.ssh.time", SimpleNamespace(monotonic=look, sleep=time.sleep))
    busy = pretend(f'touch {started}; until [ -e {seen} ]; do sleep 0.01; done; eval "$3"')
    assert isinstance(survey(["far"], question, busy)["far"], HostFacts)
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith(
        "no answer from far after 2.5 s (a busy host, a slow network or name server); "
        "waiting for 20 s at most (POPRUN_CHECK_TIMEOUT_S)"
    )


def test_a_process_that_ssh_leaves_behind_is_not_waited_for(question, tmp_path):
    """A connection master of ssh holds standard error open; this one ends after the answer."""
    answered = tmp_path / "answered"
    leaving = pretend(f'until [ -e {answered} ]; do sleep 0.05; done >/dev/null </dev/null & eval "$3"')
    try:
        assert isinstance(survey(["far"], question, leaving, 1000.0)["far"], HostFacts)
    finally:
        answered.touch()


def test_hosts_are_asked_at_the_same_time(question, tmp_path):
    """Each host waits until the other has started."""
    wait = f"touch {tmp_path}/$2; until [ -e {tmp_path}/a ] && [ -e {tmp_path}/b ]; do sleep 0.01; done; "
    facts = survey(["a", "b"], question, pretend(wait + 'eval "$3"'), LIMIT_S)
    assert all(isinstance(each, HostFacts) for each in facts.values())


def test_a_host_name_is_never_taken_for_an_ssh_option():
    assert remote_words(["ssh"], "-oProxyCommand=x", ["a b"]) == ["ssh", "--", "-oProxyCommand=x", "'a b'"]


def test_ssh_resolves_an_alias():
    assert name_behind("far", pretend("echo user me; echo hostname 192.0.2.7; echo port 22")) == "192.0.2.7"
    assert name_behind("far", pretend("exit 255")) == "far"
    assert name_behind("far", ("/no/ssh",)) == "far"


def test_the_user_s_ssh_arguments_come_first():
    words = ssh_words({"POPRUN_SSH_ARGS": "-F 'my config' -o ConnectTimeout=9"})
    assert words[:5] == ("ssh", "-F", "my config", "-o", "ConnectTimeout=9")
    assert "BatchMode=yes" in words
    assert "ConnectTimeout=5" in words


def test_ssh_arguments_with_an_open_quote_are_refused():
    with pytest.raises(
        UsageError, match="POPRUN_SSH_ARGS cannot be split into words as in a shell: No closing quot.*check"
    ):
        ssh_words({"POPRUN_SSH_ARGS": "-F 'my config"})


@pytest.mark.parametrize(("text", "limit_s"), [("", 20), ("7", 7.0), ("0", 20), ("soon", 20), ("inf", 20)])
def test_the_limit_is_read_from_the_environment(text, limit_s):
    assert limit_from({"POPRUN_CHECK_TIMEOUT_S": text}) == limit_s


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1", this_host()])
def test_names_of_the_local_machine_are_recognised(name):
    assert is_this_machine(name)
    assert not is_this_machine(f"not-{name}")


def test_the_users_own_ssh_login_is_ignored(question, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 50000 192.0.2.2 22")
    facts = survey([this_host()], question, ("false",), LIMIT_S)[this_host()]
    assert isinstance(facts, HostFacts)
    assert facts.reached_at == ""


def test_the_script_finds_the_usable_cores():
    assert tuple(Core(*each) for each in survey_script.cores()) == usable_cores()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("run", ("{}/bin/run", "")),
        ("./bin/run", ("{}/./bin/run", "")),
        ("data", ("", "missing")),
        ("bin/data", ("", "not executable")),
        ("./bin", ("", "a directory")),
        ("bin/none", ("", "missing")),
    ],
)
def test_a_program_is_looked_up_as_in_a_shell(tmp_path, program, found):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").touch(mode=0o755)
    (tmp_path / "bin" / "data").touch(mode=0o644)
    expected = tuple(each.format(tmp_path) for each in found)
    assert survey_script.find_program(program, f"/none:{tmp_path}/bin", str(tmp_path)) == expected


def test_a_foreign_open_mpi_is_asked_for_its_version(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'; echo; echo Report bugs\n")
    mpirun.chmod(0o755)
    assert survey_script.version_of_mpirun(str(mpirun)) == "4.1.4"
    assert survey_script.version_of_mpirun("/no/mpirun") == ""


class TestCache:
    @pytest.fixture
    def cache(self, question, facts, tmp_path):
        """Provide a cache that has the facts of one host, in a folder beside other things."""
        cache = SurveyCache(tmp_path / "a", question, LOCAL, "stamp")
        cache.store(facts)
        return cache

    @pytest.fixture
    def kept(self, cache, tmp_path):
        """Provide the only file of the cache."""
        (kept,) = (tmp_path / "a").iterdir()
        return kept

    def test_stored_facts_are_loaded(self, question, facts, tmp_path):
        cache = SurveyCache(tmp_path / "a" / "b", question, LOCAL, "stamp")
        assert cache.load("far") is None
        cache.store(facts)
        assert cache.load("far") == replace(facts, is_cached=True)
        assert cache.load("near") is None
        assert os.stat(tmp_path / "a" / "b").st_mode & 0o777 == 0o700

    @pytest.mark.usefixtures("cache")
    def test_another_question_has_no_cached_answer(self, question, tmp_path):
        for other in (
            SurveyCache(tmp_path / "a", replace(question, program="other"), LOCAL, "stamp"),
            SurveyCache(tmp_path / "a", question, ("ssh",), "stamp"),
            SurveyCache(tmp_path / "a", question, LOCAL, "other"),
        ):
            assert other.load("far") is None

    def test_facts_expire_after_some_minutes(self, cache, kept, facts):
        old_s = time.time() - LONGEST_AGE_S - 1
        os.utime(kept, (old_s, old_s))
        assert cache.load("far") is None
        cache.store(replace(facts, host="near"))
        assert not kept.exists()

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": 7}', "\0" * 100])
    def test_a_damaged_file_is_ignored(self, cache, kept, damage):
        kept.write_text(damage)
        assert cache.load("far") is None

    def test_cache_files_are_readable_only_by_the_user(self, kept):
        assert kept.stat().st_mode & 0o777 == 0o600

    def test_a_folder_writable_by_others_is_not_used(self, cache, facts, tmp_path):
        (tmp_path / "a").chmod(0o777)
        assert cache.load("far") is None
        cache.store(replace(facts, host="near"))
        assert len(list((tmp_path / "a").iterdir())) == 1
        (tmp_path / "a").chmod(0o700)
        assert cache.load("far") is not None

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    @pytest.mark.parametrize("what", ["folder", "file"])
    def test_files_of_another_user_are_not_read(self, cache, kept, what):
        os.chown(kept if what == "file" else kept.parent, 65534, 65534)
        assert cache.load("far") is None

    @pytest.mark.parametrize("what", ["link", "pipe", "writable"])
    def test_links_pipes_and_files_writable_by_others_are_ignored(self, cache, kept, tmp_path, what):
        if what == "writable":
            kept.chmod(0o666)
        else:
            kept.rename(tmp_path / "elsewhere")
            kept.symlink_to(tmp_path / "elsewhere") if what == "link" else os.mkfifo(kept)
        assert cache.load("far") is None

    def test_an_unwritable_folder_is_not_a_fault(self, question, facts, tmp_path):
        (tmp_path / "file").touch()
        cache = SurveyCache(tmp_path / "file" / "below", question, LOCAL, "stamp")
        cache.store(facts)
        assert cache.load("far") is None

    def test_the_cache_folder_follows_the_xdg_standard(self):
        assert cache_folder({"HOME": "/home/me"}) == Path("/home/me/.cache/popdist-everywhere/hosts")
        assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/popdist-everywhere/hosts")

    def test_installed_packages_are_part_of_the_key(self, question, tmp_path):
        asked = replace(question, python_path=(str(tmp_path),))
        before = stamp_of(asked)
        assert stamp_of(asked) == before
        os.utime(tmp_path, (1, 1))
        assert stamp_of(asked) != before

    def test_facts_survive_json(self, question, facts):
        answer = survey_script.answer(question.as_json())
        again = facts_from("far", json.loads(json.dumps(answer)))
        assert again.cores == facts.cores
        assert again.versions == facts.versions
