"""What is installed."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLED = ("collectives", "popdist", "poprun", "strategies")


def test_every_package_is_installed():
    """They are listed by name, so a new one is easily forgotten."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in INSTALLED for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == found
