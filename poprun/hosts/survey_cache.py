"""Remembers for some minutes what hosts have said, so that the next launch need not ask."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from popdist.records.private_files import fault_of, fault_of_file, make_private
from poprun.hosts.host_facts import HostFacts, Question, facts_from
from poprun.hosts.survey_script import digest_sources

LONGEST_AGE_S = 300.0


class SurveyCache:
    """A folder with one small file per host; only good answers are kept, and nothing that goes wrong matters.

    What others could have written is neither read nor added to.

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
        with suppress(OSError, ValueError):
            if not fault_of(self._folder.resolve()) and (text := _read_young(self._path(host))):
                return facts_from(host, json.loads(text), is_cached=True)
        return None

    def store(self, facts: HostFacts) -> None:
        """Keep what a host has said; forget what is too old."""
        path = self._path(facts.host)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            make_private(self._folder)
            if fault_of(self._folder.resolve()):
                return
            self._forget_old()
            beside.unlink(missing_ok=True)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(json.dumps(_plain(facts)))
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


def _read_young(path: Path) -> str:
    """The text of a file that is not too old and that nobody else can have written; empty otherwise."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        age_s = time.time() - status.st_mtime
        is_file = stat.S_ISREG(status.st_mode) and not fault_of_file(file.fileno())
        return file.read() if is_file and 0 <= age_s < LONGEST_AGE_S else ""


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
