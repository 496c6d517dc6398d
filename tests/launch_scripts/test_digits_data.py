"""Loading digits from scikit-learn, and MNIST from small files written here."""

import gzip
import io
import zipfile

import numpy as np
import pytest

from popdist.examples import digits_data
from popdist.examples.digits_data import DataError, load_digits, read_idx

GENERATOR = np.random.default_rng(0)
IMAGES = {"train": GENERATOR.integers(0, 256, (7, 6, 5), np.uint8), "t10k": np.full((3, 6, 5), 255, np.uint8)}
LABELS = {"train": np.arange(7, dtype=np.uint8), "t10k": np.array([9, 0, 9], np.uint8)}
TRAIN_IMAGES = "train-images-idx3-ubyte"


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def write_mnist(directory, spelling="{}-{}-idx{}-ubyte", pack=lambda content: content):
    for part in IMAGES:
        for kind, array in (("images", IMAGES[part]), ("labels", LABELS[part])):
            (directory / spelling.format(part, kind, array.ndim)).write_bytes(pack(idx(array)))


def check_mnist(digits):
    assert digits.image_shape == (6, 5, 1)
    assert digits.train_images.dtype == digits.test_images.dtype == np.float32
    assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
    np.testing.assert_array_equal(digits.train_images[..., 0], IMAGES["train"].astype(np.float32) / 255)
    assert (digits.test_images == 1).all()
    assert list(digits.train_labels) == list(range(7))
    assert list(digits.test_labels) == [9, 0, 9]


def test_scikit_learn_digits_always_have_the_same_split():
    digits, again = load_digits("digits"), load_digits("digits")
    assert digits.train_images.shape == (1438, 8, 8, 1)
    assert digits.test_images.shape == (359, 8, 8, 1)
    assert digits.train_images.dtype == np.float32
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    assert set(digits.test_labels) == set(range(10))
    np.testing.assert_array_equal(digits.test_images, again.test_images)


def test_digits_equal_those_that_scikit_learn_loads(monkeypatch):
    read = load_digits("digits")
    monkeypatch.setattr(digits_data, "SCIKIT_LEARN_FILE", ("elsewhere",))
    loaded = load_digits("digits")
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(read, name), getattr(loaded, name))
        assert getattr(read, name).dtype == getattr(loaded, name).dtype


def test_a_missing_scikit_learn_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(digits_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"run: pip install scikit-learn"):
        load_digits("digits")


@pytest.mark.parametrize("spelling", ["{}-{}-idx{}-ubyte", "{}-{}.idx{}-ubyte", "{}-{}-idx{}-ubyte.gz"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_mnist_is_read_from_plain_and_gzipped_idx_files(tmp_path, spelling, pack):
    write_mnist(tmp_path, spelling, pack)
    check_mnist(load_digits(str(tmp_path)))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mnist_is_read_from_an_npz_file(tmp_path, save):
    path = tmp_path / "mnist.npz"
    save(path, x_train=IMAGES["train"], y_train=LABELS["train"], x_test=IMAGES["t10k"], y_test=LABELS["t10k"])
    check_mnist(load_digits(str(path)))


def test_scaled_images_stay_unchanged(tmp_path):
    x = np.linspace(0, 1, 2 * 4 * 4).reshape(2, 4, 4, 1)
    np.savez(tmp_path / "m.npz", x_train=x, y_train=[1, 2], x_test=x, y_test=[3, 4])
    np.testing.assert_array_equal(load_digits(str(tmp_path / "m.npz")).train_images, x.astype(np.float32))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"begins with 0x\(nothing\); .* 3 dimensions begins with 0x00000803"),
        (b"PK\x03\x04abcd", "begins with 0x504b0304"),
        (idx(LABELS["train"]), "begins with 0x00000801"),
        (idx(IMAGES["train"])[:11], "ends after 11 bytes; its header alone takes 16"),
        (idx(IMAGES["train"])[:-1], "has 225 bytes; its header promises 7 x 6 x 5 values, which take 226"),
        (idx(IMAGES["train"]) + b"x", "has 227 bytes; its header promises"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "promises 4294967295 x 4294967295 x 4294967295 values"),
        (gzip.compress(idx(IMAGES["train"]))[:-9], r"cannot be read \(.*\); it may be truncated"),
        (b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_a_bad_idx_file_is_named_with_its_fault(tmp_path, content, words):
    write_mnist(tmp_path)
    (tmp_path / TRAIN_IMAGES).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path}/{TRAIN_IMAGES}: .*{words}"):
        load_digits(str(tmp_path))


def test_a_missing_idx_file_is_named_with_its_spellings(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has no t10k-labels-idx1-ubyte; expected that, or .*t10k-labels.idx1-ubyte"):
        load_digits(str(tmp_path))


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path}: cannot be read"):
        read_idx(tmp_path, dimensions=3)


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def damaged(content):
    """Return an npz file with one wrong bit in the first array, which its checksum reveals."""
    return content[:300] + bytes([content[300] ^ 1]) + content[301:]


def other_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x_train.npy", b"not an array")
        for name in ("y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", npy(LABELS["t10k"]))
    return buffer.getvalue()


GOOD = {
    "x_train": IMAGES["train"],
    "y_train": LABELS["train"],
    "x_test": IMAGES["t10k"],
    "y_test": LABELS["t10k"],
}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an npz file, or a truncated one; it should hold x_train, y_train, x_test, y_test"),
        (b"something else", "not an npz file"),
        (npz(**GOOD)[:-30], "not an npz file, or a truncated one"),
        (npy(IMAGES["train"]), "not an npz file"),
        (damaged(npz(**GOOD)), "cannot be read as an npz file .* it may be damaged"),
        (other_zip(), r"x_train: has shape \(\)"),
        (npz(x_train=IMAGES["train"], other=[1]), "y_train, x_test, y_test missing, found x_train, other"),
        (npz(), "x_train, y_train, x_test, y_test missing, found nothing"),
        (npz(**GOOD | {"y_train": np.array([None] * 7)}), "cannot be read as an npz file"),
        (npz(**GOOD | {"y_train": np.arange(6)}), "has 7 training images and 6 training labels"),
        (npz(**GOOD | {"y_test": [0, 10, 1]}), "y_test: has labels from 0 to 10; digits are 0 to 9"),
        (npz(**GOOD | {"y_test": [0.0, 1.0, 1.0]}), r"y_test: has shape \(3,\) and type float64"),
        (npz(**GOOD | {"x_test": np.zeros((3, 30))}), r"x_test: has shape \(3, 30\); images are"),
        (npz(**GOOD | {"x_test": np.full((3, 6, 5), 255.0)}), "x_test: has values from 255.0 to 255.0"),
        (npz(**GOOD | {"x_test": np.full((3, 6, 5), np.nan)}), "x_test: has values from nan to nan"),
        (npz(**GOOD | {"x_test": np.zeros((3, 6, 5), np.int64)}), "x_test: has type int64"),
        (
            npz(**GOOD | {"x_test": np.zeros((3, 8, 8))}),
            "training and test images differ in size: 6x5 and 8x8",
        ),
        (npz(**GOOD | {"x_test": np.zeros((0, 6, 5)), "y_test": LABELS["t10k"][:0]}), "has no test images"),
    ],
)
def test_a_bad_npz_file_is_named_with_its_fault(tmp_path, content, words):
    path = tmp_path / "mnist.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}: {words}"):
        load_digits(str(path))


def test_a_missing_path_is_named():
    with pytest.raises(DataError, match="nowhere: no such file or directory; give 'digits', an npz file"):
        load_digits("nowhere")
