from __future__ import annotations

import os

import pytest

from poprun.cli.log import show
from poprun.errors import OutputError


def test_show_writes_the_bytes_that_the_user_wrote(capfdbinary):
    show(os.fsdecode(b"b\xffc"))
    show("zwölf", 2)
    assert capfdbinary.readouterr() == (b"b\xffc\n", "zwölf\n".encode())


def test_show_exits_with_141_when_its_reader_is_gone():
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit) as left:
        show("text", writer)
    os.close(writer)
    assert left.value.code == 141


def test_show_names_a_full_disk():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OutputError, match="cannot be written: No space left on device; nothing was started"):
        show("text", descriptor)
    os.close(descriptor)
