"""Run tests with another build of the native kernel: `run_tests.py KERNEL TEST...`."""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest

NAME = "collectives.native._kernel"


def main(path: str, *tests: str) -> int:
    loader = ExtensionFileLoader(NAME, path)
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    sys.modules[NAME] = module_from_spec(spec)
    loader.exec_module(sys.modules[NAME])
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
