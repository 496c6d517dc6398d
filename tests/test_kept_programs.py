import os

from kept_programs import UNUSED_S, kept_programs, remove_unused


def test_programs_are_kept_in_the_user_s_cache_folder_with_private_permissions(tmp_path):
    folder = kept_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder.parent == tmp_path / "popdist-everywhere/compiled"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_project_s_variable_precedes_the_user_s_cache_and_home_folders(tmp_path):
    environ = {"POPDIST_CACHE": str(tmp_path / "a"), "XDG_CACHE_HOME": str(tmp_path / "b"), "HOME": str(tmp_path / "c")}
    assert kept_programs(environ).is_relative_to(tmp_path / "a")
    del environ["POPDIST_CACHE"], environ["XDG_CACHE_HOME"]
    assert kept_programs(environ).is_relative_to(tmp_path / "c/.cache/popdist-everywhere")


def test_the_same_machine_has_the_same_folder(tmp_path):
    environ = {"POPDIST_CACHE": str(tmp_path)}
    assert kept_programs(environ) == kept_programs(environ)


def test_unread_and_empty_programs_are_removed_and_others_stay(tmp_path):
    environ = {"POPDIST_CACHE": str(tmp_path)}
    old, new, empty = (kept_programs(environ) / name for name in ("old", "new", "empty"))
    empty.touch()
    now_s = 1e9
    for path, read_s in ((old, now_s - UNUSED_S - 1), (new, now_s - UNUSED_S + 1)):
        path.write_bytes(b"program")
        os.utime(path, (read_s, now_s))
    remove_unused(environ, now_s)
    assert not old.exists()
    assert not empty.exists()
    assert new.exists()
