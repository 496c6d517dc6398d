"""Single compilation: turns between instances, folders of executables, and reasons for compiling again."""

import grp
import logging
import os
import pwd
import stat
import tempfile
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from strategies.jax.programs.compilation import (
    compiled_once_per_host,
    explain_recompilation,
    folder_lock,
    use_executable_cache,
)


def test_without_a_folder_nothing_is_kept():
    assert use_executable_cache({}) is None
    program = jax.jit(lambda x: x)
    assert compiled_once_per_host(program, None) is program


def test_a_folder_that_cannot_be_made_is_one_clear_error():
    with pytest.raises(ValueError, match="is /dev/null/x, but no folder can be made there: Not a dir.*name another"):
        use_executable_cache({"POPDIST_EXECUTABLE_CACHE_PATH": "/dev/null/x"})


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """Provide a function that sets a umask for this test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def jax_as_it_was():
    """Restore JAX's folder of executables after the test."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@contextmanager
def another_user():
    """Act as user nobody instead of root."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")


@pytest.mark.usefixtures("jax_as_it_was")
class TestFolderPermissions:
    """Folder permissions; files in the folder are executed."""

    def use(self, path):
        return use_executable_cache({"POPDIST_EXECUTABLE_CACHE_PATH": str(path)})

    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
    def test_created_files_are_for_this_user_alone(self, tmp_path, umask, mask):
        umask(mask)
        folder = self.use(tmp_path / "above" / "named")
        with folder_lock(folder) as is_first:
            assert is_first
        assert [mode_of(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
        assert [mode_of(path) for path in folder.iterdir()] == [0o600]

    @pytest.mark.parametrize("mode", [0o770, 0o757, 0o707, 0o1777])
    @pytest.mark.parametrize("is_named", [True, False])
    def test_a_folder_to_which_others_can_write_is_refused(self, tmp_path, mode, is_named):
        named = tmp_path / "named"
        folder = named if is_named else self.use(named)
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        with pytest.raises(ValueError, match="POPDIST_EXECUTABLE_CACHE_PATH is .*named, whose programs") as error:
            self.use(named)
        assert str(error.value).endswith(f"others can write to {folder} (mode {mode:04o}); chmod go-w {folder}")
        folder.chmod(mode & ~0o022)
        assert self.use(named).parent == named

    @pytest.mark.parametrize(("mode", "is_fine"), [(0o777, False), (0o1777, True), (0o755, True)])
    def test_a_folder_that_others_can_replace_is_refused(self, tmp_path, mode, is_fine):
        (tmp_path / "above").mkdir()
        (tmp_path / "above").chmod(mode)
        if is_fine:
            self.use(tmp_path / "above" / "named")
            return
        with pytest.raises(ValueError, match=r"others can write to .*above \(mode 0777\); chmod go-w .*above$"):
            self.use(tmp_path / "above" / "named")

    @needs_root
    def test_a_group_of_one_user_counts_as_that_user(self, tmp_path):
        (tmp_path / "above").mkdir(mode=0o700)
        (tmp_path / "above").chmod(0o770)
        users = [user.pw_uid for user in pwd.getpwall() if user.pw_gid == 0]
        if users != [0] or set(grp.getgrgid(0).gr_mem) - {"root"}:
            pytest.skip("others are in the group of root")
        assert self.use(tmp_path / "above" / "named")
        os.chown(tmp_path / "above", 0, 65533)
        with pytest.raises(ValueError, match=r"others can write to .*above \(mode 0770\)"):
            self.use(tmp_path / "above" / "named")

    @needs_root
    @pytest.mark.parametrize("what", [".", "processor", "processor/program-cache"])
    def test_a_folder_of_another_user_is_refused(self, tmp_path, what):
        folder = self.use(tmp_path)
        (folder / "program-cache").touch()
        path = tmp_path / what.replace("processor", folder.name)
        os.chown(path, 65533, -1)
        with pytest.raises(ValueError, match=f"but {path} belongs to user 65533, and this is user 0; name a folder of"):
            self.use(tmp_path)

    def test_a_program_that_others_can_enter_and_change_is_refused(self, tmp_path):
        folder = self.use(tmp_path)
        (folder / "program-cache").touch()
        (folder / "program-cache").chmod(0o664)
        assert self.use(tmp_path) == folder
        folder.chmod(0o755)
        with pytest.raises(ValueError, match=f"others can write to .*program-cache; chmod -R go-w {folder}"):
            self.use(tmp_path)

    @needs_root
    def test_a_read_only_folder_of_root_serves_all_users(self, caplog):
        with tempfile.TemporaryDirectory(dir="/tmp") as named:  # test folders are closed to others
            folder = self.use(named)
            for path in (folder, folder.parent):
                path.chmod(0o755)
            with another_user(), caplog.at_level(logging.INFO):
                assert self.use(named) == folder
                assert jax.config.jax_persistent_cache_min_entry_size_bytes > 1 << 60  # nothing is written
                with folder_lock(folder) as is_first:
                    assert not is_first
        assert "every instance compiles by itself" in caplog.text

    def test_a_lock_is_not_taken_through_a_link(self, tmp_path):
        with folder_lock(tmp_path):
            pass
        [lock] = tmp_path.iterdir()
        lock.rename(tmp_path / "elsewhere")
        lock.symlink_to("elsewhere")
        with folder_lock(tmp_path) as is_first:
            assert not is_first

    def test_child_processes_do_not_inherit_the_lock(self, tmp_path):
        with folder_lock(tmp_path):
            [held] = [name for name in os.listdir("/proc/self/fd") if leads_into(name, tmp_path)]
            assert not os.get_inheritable(int(held))


def leads_into(descriptor, folder):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder))
    except OSError:  # the file was open for that list only
        return False


def test_every_instance_compiles_if_the_folder_cannot_be_written(tmp_path):
    with folder_lock(tmp_path / "none") as is_first:
        assert not is_first


def test_one_instance_compiles_at_a_time_and_the_others_wait_for_a_limited_time(tmp_path, caplog):
    with folder_lock(tmp_path) as is_first, caplog.at_level(logging.WARNING):
        assert is_first
        with folder_lock(tmp_path, wait_s=0) as is_second:
            assert not is_second
        program = compiled_once_per_host(jax.jit(lambda x: x + 1), tmp_path, wait_s=0)
        assert program(np.float32(1)) == 2
    assert "waited 0 s for an instance that compiles" in caplog.text
    with folder_lock(tmp_path, wait_s=0) as is_next:
        assert is_next


def test_a_process_waits_in_vain_for_a_folder_once(tmp_path, caplog):
    """A second wait for the same folder returns at once."""
    with folder_lock(tmp_path):
        for wait_s in (0, 3600, 3600):
            with folder_lock(tmp_path, wait_s) as is_second:
                assert not is_second
    assert caplog.text.count("not waiting again") == 1


def test_a_program_that_is_only_traced_is_not_compiled(tmp_path):
    program = compiled_once_per_host(jax.jit(lambda x: x + 1), tmp_path)
    with folder_lock(tmp_path):
        assert jax.eval_shape(program, np.float32(1)).shape == ()


def test_a_recompilation_is_explained_by_the_old_and_new_shapes():
    first, last = {"x": np.zeros((8, 3), np.float32)}, {"x": np.zeros((5, 3), np.float32), "y": np.zeros(2, np.int32)}
    assert explain_recompilation([], first) is None
    reason = explain_recompilation([first], last)
    assert "for the 2nd time: ['x'] was float32[8, 3] and is float32[5, 3]; ['y'] was absent and is int32[2]" in reason
    assert "the batch was float32[2] and is float32[1]" in explain_recompilation(
        [np.zeros(2, np.float32)], np.zeros(1, np.float32)
    )
