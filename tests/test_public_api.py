"""Public names, compared with the documentation."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES as ALL_PAGES
from pages import page_text

from popdist import horovod

ROOT = Path(__file__).parents[1]


def listed(page):
    """Return the names that begin a table row, in the chapter on public names if the page has one."""
    return re.findall(r"^\| `(\w+)", page_text(page).split("## Public names")[-1], flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("package", "page"),
    [("collectives", "collectives.md"), ("popdist", "popdist.md"), ("strategies", "strategies_names.md")],
)
def test_the_tables_list_every_public_name_once(package, page):
    assert sorted(listed(page)) == sorted(importlib.import_module(package).__all__)


def test_pages_have_no_marks_of_a_merge():
    assert not [
        page for page in ALL_PAGES if re.search(r"^(<{7}|={7}|>{7})", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def test_the_page_on_horovod_lists_its_interface():
    described = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page_text("horovod.md"), flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)", row)
    }
    operations = {"Adasum", "Average", "Max", "Min", "Product", "Sum"}
    assert described | operations == set(horovod.__all__)


@pytest.mark.parametrize("package", ["collectives", "popdist", "strategies"])
def test_public_names_exist_are_sorted_and_described(package):
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__, name


def test_listed_names_can_be_read_without_optional_libraries():
    """`help` and `inspect.getmembers` read all that `dir` lists, and Keras may be absent."""
    program = "import strategies; print({*strategies.__all__} <= {*dir(strategies)}, 'keras' in dir(strategies))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == "True False\n"


@pytest.mark.parametrize("package", ["collectives", "popdist", "poprun", "strategies"])
def test_packages_are_typed_and_described(package):
    module = importlib.import_module(package)
    assert module.__doc__
    assert (Path(module.__file__).parent / "py.typed").exists()
