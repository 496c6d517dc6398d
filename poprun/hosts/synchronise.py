"""`--synchronise-python-venv`: copies the Python environment to hosts that do not share its file system."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from poprun.cli.log import Log
from poprun.errors import PopRunError
from poprun.hosts import copying
from poprun.hosts.python_environment import TOKEN_PREFIX, PythonEnvironment, digest_tree
from poprun.hosts.ssh import CommandResult, run_commands, shell_commands, ssh_words
from poprun.hosts.survey import LIMIT_VARIABLE, limit_from

COPY_LIMIT_S = 3600.0
COPY_LIMIT_VARIABLE = "POPRUN_COPY_TIMEOUT_S"
"""Seconds that copying to all hosts may take. Default: 3600."""

_KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


def synchronise(hosts: Sequence[str], environment: PythonEnvironment, environ: Mapping[str, str], log: Log) -> None:
    """Copy the environment to every host that does not have it on a shared file system.

    Args:
        hosts: The hosts without this machine.
        environment: The environment to copy.
        environ: Environment variables; PATH, POPRUN_SSH_ARGS and the limits POPRUN_{CHECK,COPY}_TIMEOUT_S are read.
        log: The log for a line about each host.

    Raises:
        PopRunError: Some hosts cannot get a copy; one line for each. If this is known early, nothing is copied.
    """
    job = _Synchronisation(environment, environ, log)
    try:
        job.claim(hosts)
        job.copy()
    finally:
        job.release()


class _Synchronisation:
    """The state of one synchronisation.

    Args:
        environment: The environment to copy.
        environ: Environment variables of ssh and rsync.
        log: The log for progress.
    """

    def __init__(self, environment: PythonEnvironment, environ: Mapping[str, str], log: Log) -> None:
        self._environment = environment
        self._environ = environ
        self._log = log
        self._token = TOKEN_PREFIX + secrets.token_hex(8)
        self._claims: dict[str, copying.FolderClaim] = {}
        self._finished: list[copying.Copy] = []
        self._digests: dict[Path, str] = {}

    def claim(self, hosts: Sequence[str]) -> None:
        """Ask all hosts which folders they need; the answers are kept even if a host is refused."""
        limit_s = limit_from(self._environ)
        late = f"did not report within {limit_s:g} s which files it shares ({LIMIT_VARIABLE})"
        has_rsync = shutil.which("rsync", path=self._environ.get("PATH")) is not None
        script = copying.claim_script(self._environment, self._token, has_rsync)
        faults: dict[str, list[str]] = {}
        with _tokens(self._environment.folders, self._token):
            for host, ended in self._tell({host: script for host in hosts}):
                claim = copying.read_claim(ended.out, self._environment)
                faults[host] = copying.claim_faults(host, claim, ended, late)
                if claim is not None:
                    self._claims[host] = claim
        if any(faults.values()):
            raise PopRunError("\n".join(line for host in hosts for line in faults[host]))

    def copy(self) -> None:
        """Copy the needed folders to all hosts at the same time."""
        by_tar = [claim for claim in self._claims.values() if not claim.has_rsync]
        self._digests = {folder: digest_tree(folder) for folder in {path for claim in by_tar for path in claim.mine}}
        copies = [
            copy
            for host, claim in self._claims.items()
            for copy in copying.plan_copies(host, claim, self._environment, self._digests)
        ]
        for host, claim in self._claims.items():
            self._comment(host, claim, [copy for copy in copies if copy.host == host])
        limit_s = limit_from(self._environ, COPY_LIMIT_VARIABLE, COPY_LIMIT_S)
        ssh = (*ssh_words(self._environ), *_KEEP_ALIVE)
        commands = {copy: copying.copy_command(copy, ssh) for copy in copies}
        failed: dict[copying.Copy, CommandResult] = {}
        late = f"took more than {limit_s:g} s ({COPY_LIMIT_VARIABLE})"
        for copy, ended in run_commands(commands, {**self._environ, "LC_ALL": "C"}, limit_s):
            if copying.copy_fault(copy, ended, late) is None:
                self._finished.append(copy)
                self._log.info(copying.describe_copy(copy, ended))
            else:
                failed[copy] = ended
        faults = [copying.copy_fault(copy, ended, late) for copy, ended in self._with_reasons(failed).items()]
        if faults:
            raise PopRunError("\n".join(sorted(filter(None, faults))))

    def release(self) -> None:
        """Remove the tokens, and record tar's copies; if this fails, the next synchronisation copies again."""
        texts: dict[str, str] = {}
        for host, claim in self._claims.items():
            by_tar = [copy for copy in self._finished if copy.host == host and not copy.uses_rsync]
            noted = {folder: self._digests[folder] for copy in by_tar for folder in copy.tree.folders}
            if claim.mine:
                texts[host] = copying.release_script(list(claim.mine), self._token, noted)
        for _ in self._tell(texts):
            pass

    def _with_reasons(self, failed: Mapping[copying.Copy, CommandResult]) -> dict[copying.Copy, CommandResult]:
        """Return the failed copies, with the reasons of their hosts if rsync has lost the reason."""
        lost = [copy for copy, ended in failed.items() if copying.has_lost_reason(copy, ended)]
        words = ssh_words(self._environ)
        probes = {
            copy: shell_commands({copy.host: copying.probe_script(copy, self._token)}, words)[copy.host]
            for copy in lost
        }
        known = dict(failed)
        for copy, probed in run_commands(probes, self._environ, limit_from(self._environ)):
            known[copy] = replace(known[copy], err=f"{known[copy].err}\n{probed.err}")
        return known

    def _tell(self, scripts: Mapping[str, str]) -> Iterator[tuple[str, CommandResult]]:
        """Run a shell program on each host."""
        commands = shell_commands(scripts, ssh_words(self._environ))
        return run_commands(commands, self._environ, limit_from(self._environ))

    def _comment(self, host: str, claim: copying.FolderClaim, copies: Sequence[copying.Copy]) -> None:
        if not claim.mine:
            self._log.info(f"host {host}: has the Python environment on a shared file system, nothing to copy")
        elif not copies:
            self._log.info(f"host {host}: nothing has changed since the last copy")
        for copy in copies:
            self._log.info(f"host {host}: copying {copy.what} with {'rsync' if copy.uses_rsync else 'tar'}")
            if not copy.uses_rsync and any(claim.mine[folder] for folder in copy.tree.folders):
                self._log.warn(
                    f"host {host}: files that were removed from {copy.what} here stay there, because tar cannot tell; "
                    f"install rsync here and there"
                )


@contextmanager
def _tokens(folders: Sequence[Path], token: str) -> Iterator[None]:
    """Keep an empty folder in each of the folders while hosts look for it."""
    made: list[Path] = []
    try:
        for folder in folders:
            try:
                (folder / token).mkdir()
            except OSError as error:
                raise PopRunError(
                    f"{folder} cannot be written here ({error.strerror}), so poprun cannot tell which hosts share it; "
                    f"use an environment of your own (`python -m venv`), or leave out {copying.OPTION}"
                ) from None
            made.append(folder / token)
        yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
