"""Remembers for some minutes what hosts have said, so that the next launch need not ask."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from poprun.host_facts import HostFacts, Question, facts_from
from poprun.survey_script import digest_sources

LONGEST_AGE_S = 300.0


class SurveyCache:
    """A folder with one small file per host; only good answers are kept, and nothing that goes wrong matters.

    Args:
        folder: it is made when something is kept.
        question: what the hosts are asked; another question has other answers.
        ssh: the words of ssh; they decide which machine a name leads to.
        stamp: what else the answers depend on here, as `stamp_of` makes it.
    """

    def __init__(self, folder: Path, question: Question, ssh: Sequence[str], stamp: str) -> None:
        self._folder = folder
        self._key = json.dumps([question.as_json(), list(ssh), stamp])

    def load(self, host: str) -> HostFacts | None:
        """What a host has said lately; None if it has not, or the file is damaged."""
        path = self._path(host)
        with suppress(OSError, ValueError):
            age_s = time.time() - path.stat().st_mtime
            if 0 <= age_s < LONGEST_AGE_S:
                return facts_from(host, json.loads(path.read_text()), is_cached=True)
        return None

    def store(self, facts: HostFacts) -> None:
        """Keep what a host has said; forget what is too old."""
        path = self._path(facts.host)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._forget_old()
            beside.write_text(json.dumps(_plain(facts)))
            beside.replace(path)

    def _path(self, host: str) -> Path:
        digest = hashlib.sha256(f"{host}\0{self._key}".encode()).hexdigest()[:32]
        return self._folder / f"{digest}.json"

    def _forget_old(self) -> None:
        now = time.time()
        for path in self._folder.iterdir():
            with suppress(OSError):
                if now - path.stat().st_mtime > LONGEST_AGE_S:
                    path.unlink()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/popdist-everywhere/hosts`."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "popdist-everywhere" / "hosts"


def stamp_of(question: Question) -> str:
    """What answers depend on besides the question, as far as it can be seen from here at little cost.

    Environments are mostly shared or copied, so a package that is installed here makes remembered answers doubtful
    everywhere. The cores count because this machine is asked too.
    """
    import sysconfig

    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *question.python_path)
    changed = [_changed_ns(folder) for folder in folders]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [os.uname().nodename, _text(boot), changed, sorted(os.sched_getaffinity(0))]
    return json.dumps(
        [*parts, digest_sources(Path(question.project)), _text(Path(__file__).with_name("survey_script.py"))]
    )


def _plain(facts: HostFacts) -> dict[str, object]:
    return asdict(facts) | {
        "cores": [[each.node, each.package, each.core, each.cpu] for each in facts.cores],
        "interfaces": [[each.name, each.address, each.prefix, each.mtu] for each in facts.interfaces],
    }


def _changed_ns(folder: str) -> int:
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
