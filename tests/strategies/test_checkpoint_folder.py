"""Folder of checkpoints, without a training: written checkpoints are read, damaged ones are not."""

import errno
import hashlib
import logging
import math
import os
import stat

import numpy as np
import pytest

from strategies import Best

pytest.importorskip("orbax.checkpoint")

from strategies import CheckpointError, Position  # noqa: E402
from strategies.checkpoints import checkpoint_folder as module  # noqa: E402
from strategies.checkpoints.checkpoint_folder import CheckpointFolder, SavedTraining, _reason  # noqa: E402
from strategies.checkpoints.sealed_folders import (
    Packing,  # noqa: E402
    fault_of,  # noqa: E402
)

POSITION = Position(1, 2, seed=3, batch_size=4, total_replicas=2, length=50)
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int32)}
PACKING = Packing.of(ARRAYS)


def training(step=10, position=POSITION):
    return SavedTraining(step, replicas=2, seed=5, position=position, packing=PACKING)


def flat():
    found = PACKING.allocate()
    for name, view in PACKING.views(found).items():
        view[...] = ARRAYS[name]
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Provide a folder with one checkpoint, for reading."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("written") / "checkpoints", keep=2)
    folder.write(training(), flat())
    return folder


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def pretend(folder, *steps):
    """Make checkpoints that consist of names and sums only."""
    for step in steps:
        path = folder.path / f"step_{step:08d}"
        path.mkdir(parents=True)
        (path / "training.json").write_text("{}")
        (path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'{}').hexdigest()}  training.json\n")


def test_a_written_checkpoint_is_read_back(written):
    found, arrays = written.read_newest()
    assert found == training()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_files_are_readable_by_the_user_alone(tmp_path, mask):
    folder = CheckpointFolder(tmp_path / "above" / "checkpoints", keep=2)
    before = os.umask(mask)
    try:
        folder.write(training(), flat())
    finally:
        os.umask(before)
    for path in (tmp_path / "above", *(tmp_path / "above").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_existing_folder_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    CheckpointFolder(tmp_path, keep=2).write(training(), flat())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_new_folder_has_no_checkpoint(folder):
    assert folder.steps() == []
    assert folder.read_newest() is None
    assert not folder.path.exists()


def test_steps_are_those_of_complete_checkpoints_in_order(folder):
    pretend(folder, 30, 4, 123456789)
    for name in ("step_00000007.incomplete", "step_00000008.damaged", "step_9", "notes"):
        (folder.path / name).mkdir()
    assert folder.steps() == [4, 30, 123456789]


def test_the_newest_are_kept(folder):
    pretend(folder, 1, 2, 3)
    folder.write(training(4), flat())
    assert folder.steps() == [3, 4]


def test_unfinished_checkpoints_are_removed(folder, caplog):
    pretend(folder, 3)
    for name in ("step_00000004.incomplete", "step_00000002.removed"):
        (folder.path / name).mkdir()
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="is intact, but this version"):
        folder.read_newest()  # the made-up checkpoint cannot be read
    assert sorted(path.name for path in folder.path.iterdir()) == ["step_00000003"]
    assert "is incomplete, because its writer died; it was removed; using step 3" in caplog.text


def test_pipes_and_files_in_the_way_are_removed(folder, caplog):
    """Unfinished checkpoints left pipes and files under these names."""
    folder.path.mkdir()
    (folder.path / "step_00000002.removed").write_text("")
    os.mkfifo(folder.path / "step_00000004.incomplete")
    os.mkfifo(folder.path / "step_00000010.incomplete")
    folder.write(training(10), flat())
    assert folder.read_newest()[0].step == 10
    assert [path.name for path in folder.path.iterdir()] == ["step_00000010"]


def test_a_pipe_under_the_name_of_a_checkpoint_is_set_aside(folder, caplog):
    folder.write(training(2), flat())
    os.mkfifo(folder.path / "step_00000003")
    assert folder.read_newest()[0].step == 2
    assert sorted(path.name for path in folder.path.iterdir()) == ["step_00000002", "step_00000003.damaged"]


class TestFaults:
    @pytest.fixture
    def path(self, folder):
        pretend(folder, 3)
        return folder.path / "step_00000003"

    def test_an_intact_checkpoint_has_no_fault(self, path):
        assert fault_of(path) == ""

    def test_a_flipped_bit_is_noticed(self, path):
        (path / "training.json").write_text("{]")
        assert fault_of(path) == "training.json has changed since it was written"

    def test_a_file_that_is_missing_is_noticed(self, path):
        (path / "training.json").unlink()
        assert fault_of(path) == "training.json cannot be read: No such file or directory"

    def test_sums_that_are_missing_or_cut_off_are_noticed(self, path):
        (path / "SHA256SUMS").write_text("")
        assert fault_of(path) == "SHA256SUMS is cut off"
        (path / "SHA256SUMS").unlink()
        assert fault_of(path).startswith("SHA256SUMS cannot be read")

    def test_damaged_checkpoints_are_left_alone_if_none_is_intact(self, folder, path):
        (path / "training.json").write_text("{]")
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact \(step_00000003: training.json has"):
            folder.read_newest()
        assert path.is_dir()

    def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(self, folder, caplog):
        folder.write(training(2), flat())
        pretend(folder, 3)
        (folder.path / "step_00000003" / "training.json").write_text("{]")
        found, _ = folder.read_newest()
        assert found.step == 2
        assert sorted(path.name for path in folder.path.iterdir()) == ["step_00000002", "step_00000003.damaged"]
        assert "step_00000003 is damaged (training.json has changed since it was written)" in caplog.text


def test_a_write_that_would_not_fit_the_disk_is_not_begun(folder, monkeypatch):
    pretend(folder, 1)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        folder.write(training(2), flat())
    assert [path.name for path in folder.path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("position", [None, POSITION])
def test_a_training_survives_json(position):
    assert SavedTraining.from_json(training(position=position).to_json()) == training(position=position)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "{}",
        '{"position": null, "packing": []}',
        '{"position": {}, "packing": []}',
        '{"step": "7", "replicas": 2, "seed": 5, "position": null, "packing": []}',
        '{"step": 7, "replicas": "2", "seed": 5, "position": null, "packing": []}',
        '{"step": -7, "replicas": 2, "seed": 5, "position": null, "packing": []}',
    ],
)
def test_other_texts_are_no_training(text):
    with pytest.raises(ValueError):  # noqa: PT011  several messages, of Python and of ours
        SavedTraining.from_json(text)


class SaverWhoseThreadsStay:
    """A stand-in for orbax's saver, which fails while one of its threads still has to write to its path."""

    def __init__(self):
        self.paths = []

    def save(self, path, args):
        self.write(path)
        self.paths.append(path)
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    @staticmethod
    def write(path):
        (path / "d").mkdir(parents=True)
        (path / "d" / "piece").write_bytes(b"late")


def test_late_writes_of_a_failed_checkpoint_reach_no_folder(folder, monkeypatch):
    folder.write(training(3), flat())
    writer, saver = folder._arrays, SaverWhoseThreadsStay()
    many = module.MAX_FAILED + 3
    for _ in range(many):
        monkeypatch.setattr(folder, "_arrays", saver)
        with pytest.raises(CheckpointError, match="step_00000004 could not be written: File too large"):
            folder.write(training(4), flat())
    for path in saver.paths[-module.MAX_FAILED :]:
        with pytest.raises(FileNotFoundError):
            saver.write(path)
    assert [path.name for path in folder.path.iterdir()] == ["step_00000003"]
    assert len(set(saver.paths)) == many
    assert len(folder._failed) == module.MAX_FAILED
    monkeypatch.setattr(folder, "_arrays", writer)
    folder.write(training(4), flat())
    assert (folder.steps(), len(folder._failed)) == ([3, 4], module.MAX_FAILED)


def test_large_arrays_are_cut_into_pieces_and_empty_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 12)
    arrays = {"float32": np.arange(7, dtype=np.float32), "int32": np.zeros(0, np.int32)}
    pieces = module._pieces(arrays)
    assert {dtype: [len(piece) for piece in of.values()] for dtype, of in pieces.items()} == {"float32": [3, 3, 1]}
    assert module._put_together(pieces)["float32"].tolist() == list(range(7))


def test_the_reason_is_the_first_error_of_the_operating_system_apart_from_tensorstore_locks():
    def said(*codes):
        return ValueError("; ".join(f"writing failed [os_error_code='{code}']" for code in codes) or "no reason")

    assert _reason(said(errno.EFBIG)) == os.strerror(errno.EFBIG)
    assert _reason(said(errno.EEXIST, errno.ENOSPC, errno.EFBIG)) == os.strerror(errno.ENOSPC)
    assert _reason(said(errno.EEXIST)) == os.strerror(errno.EEXIST)
    assert _reason(said()) == "no reason"
    assert _reason(OSError(errno.EEXIST, "there it is")) == "there it is"


# ---- the best checkpoints, by a metric


METRICS = {1: {"a": 0.5}, 2: {"a": 0.75, "b": 3.0}, 3: {"a": 0.75}, 4: {}, 5: {"a": math.nan}, 6: {"a": -1.0}}


@pytest.mark.parametrize(
    ("best", "steps"),
    [
        (Best("a"), [2]),
        (Best("a", count=2), [2, 3]),
        (Best("a", count=9), [2, 3, 1, 6]),
        (Best("a", "min"), [6]),
        (Best("a", "min", 2), [6, 1]),
        (Best("b", "min", 2), [2]),
        (Best("c"), []),
    ],
)
def test_keep_best_prefers_the_earlier_of_equal_checkpoints(best, steps):
    assert best.steps(METRICS) == steps


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("a", "most"), ValueError, r"mode is 'most'; the best values are the largest \('max'\)"),
        (("a", "max", 0), ValueError, "count is 0"),
        (("a", "max", 1.5), TypeError, "count is 1.5; an integer"),
    ],
)
def test_invalid_options_are_refused(words, error, message):
    with pytest.raises(error, match=message):
        Best(*words)
