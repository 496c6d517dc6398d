"""The working directory of instances."""

from __future__ import annotations

import os

import pytest

from poprun.agent.guard import check_directory

WAY_OUT = f"make it on {os.uname().nodename}, or start poprun in one that all hosts have"


def test_the_directory_of_poprun_is_accepted_by_any_path(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    check_directory(str(tmp_path / "real"))
    check_directory(str(tmp_path / "link"))


def test_another_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(OSError, match=rf"sub of poprun is not where .* instance, {tmp_path}; {WAY_OUT}"):
        check_directory(str(tmp_path / "sub"))


def test_a_missing_directory_is_refused_with_the_host_and_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=rf"none of poprun cannot be used here: No such file or directory; {WAY_OUT}"):
        check_directory(str(tmp_path / "none"))
