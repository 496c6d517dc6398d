"""The choice of an ssh key and its installation; this machine plays the host."""

from __future__ import annotations

import subprocess

import pytest

from poprun.hosts.ssh import CommandResult
from poprun.hosts.ssh_keys import (
    Target,
    allow_script,
    choose_key,
    fault_of,
    introduce_script,
    read_keys,
    read_known_hosts,
    read_target,
)

ED, RSA, OTHER = "ssh-ed25519 AAAAed me@here", "ssh-rsa AAAArsa me@here", "ssh-ed25519 AAAAother"


class TestTarget:
    SAID = "user me\nhostname node1.cluster\nport {port}\nidentityfile ~/.ssh/a\nidentityfile ~/.ssh/b\n"
    FILES = "userknownhostsfile /u1 /u2\nglobalknownhostsfile /g\n"

    @pytest.mark.parametrize(("port", "name"), [(22, "node1.cluster"), (2222, "[node1.cluster]:2222")])
    def test_a_host_is_known_by_the_name_in_the_ssh_configuration(self, port, name):
        assert read_target(self.SAID.format(port=port) + self.FILES) == Target(
            name, ("/u1", "/u2", "/g"), ("~/.ssh/a", "~/.ssh/b")
        )

    def test_an_alias_has_no_port(self):
        assert read_target(self.SAID.format(port=2222) + "hostkeyalias cluster\n").known_as == "cluster"


class TestKey:
    def test_lines_without_keys_are_ignored(self):
        assert read_keys(f"{ED}\nThe agent has no identities.\n\nssh-rsa\nsk-ssh-ed25519@openssh.com AAAA\n") == [
            ED,
            "sk-ssh-ed25519@openssh.com AAAA",
        ]

    @pytest.mark.parametrize(
        ("agent", "files", "key"),
        [
            ([], [], None),
            ([], [RSA, ED], RSA),
            ([OTHER], [], OTHER),
            ([OTHER, ED], [RSA, ED], ED),  # the agent makes this key work without a passphrase
            ([OTHER], [RSA], OTHER),
        ],
    )
    def test_a_key_that_ssh_uses_without_a_passphrase_is_chosen(self, agent, files, key):
        assert choose_key(agent, files) == key


class TestHome:
    @pytest.fixture
    def tell(self, tmp_path):
        def tell(script):
            environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
            done = subprocess.run(["sh", "-s"], input=script, env=environ, capture_output=True, text=True, check=True)
            return done.stdout.count("poprun-key added")

        return tell

    @pytest.fixture
    def allowed(self, tmp_path):
        return tmp_path / ".ssh" / "authorized_keys"

    @pytest.fixture
    def known(self, tmp_path):
        (tmp_path / ".ssh").mkdir()
        return tmp_path / ".ssh" / "known_hosts"

    def test_a_key_is_added_once_and_is_readable_only_by_its_owner(self, tell, allowed):
        assert [tell(allow_script(ED)), tell(allow_script(ED))] == [1, 0]
        assert allowed.read_text() == f"{ED}\n"
        assert allowed.stat().st_mode & 0o777 == 0o600
        assert allowed.parent.stat().st_mode & 0o777 == 0o700

    def test_existing_keys_stay_if_their_last_line_end_is_missing(self, tell, allowed):
        allowed.parent.mkdir()
        allowed.write_text(RSA)
        assert tell(allow_script(ED)) == 1
        assert allowed.read_text() == f"{RSA}\n{ED}\n"

    def test_a_key_with_restrictions_gets_no_more_rights(self, tell, allowed):
        allowed.parent.mkdir()
        allowed.write_text(f'command="true" {ED}\n')
        assert tell(allow_script(ED)) == 0

    def test_a_commented_out_key_is_added(self, tell, allowed):
        allowed.parent.mkdir()
        allowed.write_text(f" # {ED}\n")
        assert tell(allow_script(ED)) == 1

    def test_quotes_in_a_key_comment_do_no_harm(self, tell, allowed, tmp_path):
        assert tell(allow_script(ED + "'; touch $HOME/harm; '")) == 1
        assert not (tmp_path / "harm").exists()

    def test_host_keys_are_added_once(self, tell, known):
        script = introduce_script([("h1", "ssh-ed25519 AAAA1"), ("[h2]:2222", "ssh-ed25519 AAAA2")])
        assert [tell(script), tell(script)] == [2, 0]
        assert known.read_text() == "h1 ssh-ed25519 AAAA1\n[h2]:2222 ssh-ed25519 AAAA2\n"

    def test_host_keys_known_in_another_form_are_not_added(self, tell, known, tmp_path):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
        key = " ".join((tmp_path / "key.pub").read_text().split()[:2])
        known.write_text(f"h1,10.0.0.1 {key}\n")
        assert tell(introduce_script([("h1", key)])) == 0
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], capture_output=True, check=True)
        assert all(line.startswith("|1|") for line in known.read_text().splitlines()), "the hosts' names are hashed"
        assert tell(introduce_script([("h1", key)])) == 0


def test_certificate_authorities_and_revoked_keys_are_not_passed_on():
    refused = "@revoked h1 ssh-rsa B\n@cert-authority * ssh-rsa C\n"
    assert read_known_hosts(f"# Host h1 found: line 1\nh1,10.0.0.1 ssh-rsa AAAA comment\n{refused}") == ["ssh-rsa AAAA"]


@pytest.mark.parametrize(
    ("status", "complaint", "has_terminal", "line"),
    [
        (255, "me@h1: Permission denied (password).", True, "Permission denied (password).; let `ssh h1 true` work"),
        (255, "me@h1: Permission denied (password).", False, "or run poprun in a terminal, where ssh can ask"),
        (255, "Host key verification failed.", True, "run `ssh h1` once by hand and compare its key"),
        (None, "", True, "did not answer within 2.5 s (POPRUN_CHECK_TIMEOUT_S)"),
        (1, "sh: 8: cannot create .ssh/authorized_keys: Permission denied", True, "cannot change ~/.ssh there: sh: 8:"),
    ],
)
def test_a_host_that_refuses_the_key_is_explained(status, complaint, has_terminal, line):
    found = fault_of("h1", CommandResult(status, "", complaint, 1.0), 2.5, has_terminal)
    assert found.startswith("host h1: ")
    assert line in found
