"""Handwritten digits: scikit-learn's 8x8 set, or MNIST from IDX or npz files on disk."""

import gzip
import importlib.util
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
TEST_FRACTION = 0.2
SPLIT_SEED = 0
SCIKIT_LEARN_FILE = ("datasets", "data", "digits.csv.gz")

Images = NDArray[np.float32]
Labels = NDArray[np.int32]
Array = NDArray[Any]


class DataError(Exception):
    """A data set that cannot be used; the message names the file and its expected content."""


@dataclass(frozen=True)
class Digits:
    """Images `[N, height, width, 1]` with values in [0, 1], and labels `[N]` from 0 to 9."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width and channels of one image."""
        return self.train_images.shape[1:]


def load_digits(data: str) -> Digits:
    """Load `"digits"` (scikit-learn's set), an npz file, or a directory with the four IDX files of MNIST.

    Raises:
        DataError: A file is missing, unreadable, or has unexpected content.
    """
    if data == "digits":
        return load_scikit_learn()
    path = Path(data)
    if path.is_dir():
        return load_idx_directory(path)
    if path.is_file():
        return load_npz(path)
    raise DataError(f"{data}: no such file or directory; give 'digits', an npz file or a directory of IDX files")


def load_scikit_learn() -> Digits:
    """Load the 1797 digits of scikit-learn, with a fixed split into 1438 for training and 359 for testing."""
    table = _read_scikit_learn()
    order = np.argsort(np.random.PCG64(SPLIT_SEED).random_raw(len(table)), kind="stable")
    train, test = np.split(order, [math.ceil(len(order) * (1 - TEST_FRACTION))])
    images = (table[:, :-1].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    labels = table[:, -1].astype(np.int32)
    return Digits(images[train], labels[train], images[test], labels[test])


def _read_scikit_learn() -> Array:
    """Return one row per digit: 64 values from 0 to 16, and the label.

    The file is read without importing scikit-learn, because the import would take each instance a second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("the digits come with scikit-learn, which is not installed; run: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0], *SCIKIT_LEARN_FILE)
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits as load

    bunch = load()  # a version of scikit-learn that keeps its file elsewhere
    return np.column_stack([bunch.data, bunch.target])


def load_npz(path: Path) -> Digits:
    """Load an npz file with `x_train`, `y_train`, `x_test` and `y_test`, as Keras publishes MNIST."""
    names = ("x_train", "y_train", "x_test", "y_test")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: not an npz file, or a truncated one; it should hold {', '.join(names)}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive]
            if missing:
                raise DataError(
                    f"{path}: {', '.join(missing)} missing, found {', '.join(archive) or 'nothing'}; "
                    f"an npz file needs {', '.join(names)}"
                )
            arrays = [np.asarray(archive[name]) for name in names]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an npz file ({error}); it may be damaged") from error
    train_images, train_labels, test_images, test_labels = arrays
    return _checked(
        _scaled(f"{path}: x_train", train_images),
        _as_labels(f"{path}: y_train", train_labels),
        _scaled(f"{path}: x_test", test_images),
        _as_labels(f"{path}: y_test", test_labels),
        where=str(path),
    )


def load_idx_directory(directory: Path) -> Digits:
    """Load MNIST's four files, `train-images-idx3-ubyte` etc.; also with `.` before `idx`, and gzipped."""
    arrays = []
    for part in ("train", "t10k"):
        images = _find_idx(directory, f"{part}-images", dimensions=3)
        labels = _find_idx(directory, f"{part}-labels", dimensions=1)
        arrays.append(_scaled(str(images), read_idx(images, dimensions=3)))
        arrays.append(_as_labels(str(labels), read_idx(labels, dimensions=1)))
    return _checked(*arrays, where=str(directory))


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped or not.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit number, then the values (http://yann.lecun.com/exdb/mnist).

    Raises:
        DataError: The file has another format, or another length than its header says.
    """
    content = _read(path)
    expected = bytes([0, 0, 8, dimensions])
    if content[:4] != expected:
        raise DataError(
            f"{path}: begins with 0x{content[:4].hex() or '(nothing)'}; an IDX file of unsigned bytes with "
            f"{dimensions} dimensions begins with 0x{expected.hex()}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path}: ends after {len(content)} bytes; its header alone takes {start}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path}: has {len(content)} bytes; its header promises {' x '.join(map(str, shape))} values, "
            f"which take {start + math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _find_idx(directory: Path, stem: str, dimensions: int) -> Path:
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(f"{directory}: has no {names[0]}; expected that, or {', '.join(names[1:])}")


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); it may be truncated") from error


def _scaled(name: str, images: Array) -> Images:
    """Return images as float32 `[N, height, width, 1]`; bytes are divided by 255, floats are not changed."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] != 1:
        raise DataError(f"{name}: has shape {images.shape}; images are [N, height, width]")
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    if not np.issubdtype(images.dtype, np.floating):
        raise DataError(f"{name}: has type {images.dtype}; images are unsigned bytes, or floats from 0 to 1")
    if not ((images >= 0) & (images <= 1)).all():
        raise DataError(
            f"{name}: has values from {images.min()} to {images.max()}; images are unsigned bytes, or floats "
            "from 0 to 1"
        )
    return images.astype(np.float32)


def _as_labels(name: str, labels: Array) -> Labels:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{name}: has shape {labels.shape} and type {labels.dtype}; labels are integers [N]")
    if labels.size and not 0 <= labels.min() <= labels.max() < CLASSES:
        raise DataError(f"{name}: has labels from {labels.min()} to {labels.max()}; digits are 0 to {CLASSES - 1}")
    return labels.astype(np.int32)


def _checked(
    train_images: Images, train_labels: Labels, test_images: Images, test_labels: Labels, *, where: str
) -> Digits:
    pairs = (("training", train_images, train_labels), ("test", test_images, test_labels))
    for part, images, labels in pairs:
        if len(images) != len(labels):
            raise DataError(f"{where}: has {len(images)} {part} images and {len(labels)} {part} labels")
        if not images.size:
            raise DataError(f"{where}: has no {part} images")
    if train_images.shape[1:] != test_images.shape[1:]:
        sizes = (f"{images.shape[1]}x{images.shape[2]}" for _, images, _ in pairs)
        raise DataError(f"{where}: training and test images differ in size: {' and '.join(sizes)}")
    return Digits(train_images, train_labels, test_images, test_labels)
