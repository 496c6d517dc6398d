"""The copy of the Python environment: shell programs and commands for each host, and readers of their answers. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poprun.cli.wording import count, cut_off
from poprun.hosts.python_environment import LEFT_OUT, MARKER, TOKEN_PREFIX, PythonEnvironment, Tree
from poprun.hosts.ssh import SSH_FAILED, CommandResult, HostCommand, last_line, remote_words, way_out_of

OPTION = "--synchronise-python-venv"

_SAYS = "poprun-synchronise "
_VANISHED = 24  # rsync: files were removed here meanwhile, such as another program's temporary files
_FILE_IO = 11  # rsync: a file error; the host's message about it gets lost if the connection ends before it arrives
_STALLED_S = 60
_PROBED_BYTES = 1 << 20

# The first pass only looks, so that a refused host stays as it was. Making a folder is atomic, on NFS too, so
# only one of the machines that share a file system makes the token. This machine does so before it asks the others.
_CLAIM = f"""\
export LC_ALL=C
marker={MARKER}
fault=
say() {{ printf '%s\n' "{_SAYS}$*"; }}
is_shared() {{ [ -e "$1/$token" ]; }}
need() {{ [ -e "$2" ] || {{ say missing "$1"; fault=1; }}; }}
look() {{
    if [ ! -e "$2" ] || [ -e "$2/$marker" ] || is_shared "$2"; then return; fi
    if [ -d "$2" ] && [ -z "$(ls -A "$2")" ]; then return; fi
    is_shared "$2" || {{ say foreign "$1"; fault=1; }}
}}
claim() {{
    if is_shared "$2"; then say shared "$1"; return; fi
    mkdir -p "$2" && touch "$2/$marker" || exit 1
    if ! said=$(mkdir "$2/$token" 2>&1); then
        if is_shared "$2"; then say shared "$1"; return; fi
        echo "$said" >&2
        exit 1
    fi
    say mine "$1" "$(cat "$2/$marker")"
    if [ -n "$rsync" ]; then : >"$2/$marker"; fi
}}
"""

_WAYS_OUT = {
    "no space left": "free some space there",
    "quota exceeded": "free some space there, or have the quota raised",
    "permission denied": "let the user write there, or use an environment in a folder that is writable on every host",
    "read-only file system": "use an environment in a folder that is writable on every host",
}
_NUMBERS = {"files": r"regular files transferred: ([\d,.]+)", "bytes": r"transferred file size: ([\d,.]+)"}


@dataclass(frozen=True)
class FolderClaim:
    """A host's answer about the folders.

    Attributes:
        has_rsync: Whether both the host and this machine have rsync.
        mine: The folders to copy to this host, each with the digest of the folder that tar copied last.
        shared: The folders that the host shares with this machine, or with a host that gets a copy.
        foreign: The folders that poprun did not make and that are not empty.
        missing: The paths that the environment refers to and the host lacks.
    """

    has_rsync: bool
    mine: Mapping[Path, str]
    shared: tuple[Path, ...] = ()
    foreign: tuple[Path, ...] = ()
    missing: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Copy:
    """The copy of one tree to one host.

    Attributes:
        host: Name of the host.
        tree: The tree, reduced to the folders that the host needs.
        uses_rsync: Whether rsync copies the differences only; otherwise tar copies everything.
    """

    host: str
    tree: Tree
    uses_rsync: bool

    @property
    def what(self) -> str:
        """The folders, as messages name them."""
        return f"{self.tree.root}" + (f" ({', '.join(self.tree.names)})" if self.tree.names else "")


def claim_script(environment: PythonEnvironment, token: str, has_rsync: bool) -> str:
    """Return the shell program that prepares the folders on a host and prints the needed ones.

    Args:
        environment: The environment to copy.
        token: Name of the empty folder that all folders of this machine contain, which reveals shared folders.
        has_rsync: Whether this machine has rsync.
    """
    folders = environment.folders
    lines = [f"token={token}", "rsync=" + ("$(command -v rsync)" if has_rsync else "")]
    lines += [f"need {number} {shlex.quote(str(path))}" for number, path in enumerate(environment.needed)]
    lines += [f"look {number} {shlex.quote(str(path))}" for number, path in enumerate(folders)]
    lines += ['[ -z "$fault" ] || exit 1', 'if [ -n "$rsync" ]; then say rsync; fi']
    lines += [f"claim {number} {shlex.quote(str(path))}" for number, path in enumerate(folders)]
    return "\n".join([_CLAIM, *lines, "say end", ""])


def read_claim(said: str, environment: PythonEnvironment) -> FolderClaim | None:
    """Read the answer to `claim_script`; None if the answer is neither complete nor a refusal."""
    words = [line.removeprefix(_SAYS).split() for line in said.splitlines() if line.startswith(_SAYS)]
    try:
        return _claim_from(words, environment)
    except (IndexError, ValueError):  # not an answer of our program
        return None


def _claim_from(words: list[list[str]], environment: PythonEnvironment) -> FolderClaim | None:
    folders = environment.folders

    def numbers(topic: str) -> list[int]:
        return [int(each[1]) for each in words if each[0] == topic]

    digests = [each[2] if len(each) > 2 else "" for each in words if each[0] == "mine"]
    claim = FolderClaim(
        has_rsync=["rsync"] in words,
        mine=dict(zip([folders[number] for number in numbers("mine")], digests, strict=True)),
        shared=tuple(folders[number] for number in numbers("shared")),
        foreign=tuple(folders[number] for number in numbers("foreign")),
        missing=tuple(environment.needed[number] for number in numbers("missing")),
    )
    return claim if ["end"] in words or claim.foreign or claim.missing else None


def claim_faults(host: str, claim: FolderClaim | None, ended: CommandResult, late: str) -> list[str]:
    """Return a line for each reason why a host cannot get the environment."""
    if claim is None:
        return [f"host {host}: {_complain(host, ended, late)}"]
    lines = [
        f"host {host}: the Python environment refers to {path}, which is missing there; install the same Python there"
        for path in claim.missing
    ]
    return lines + [
        f"host {host}: {path} was not made by poprun and is not empty; remove it there if it may be replaced, "
        f"or leave out {OPTION}"
        for path in claim.foreign
    ]


def plan_copies(
    host: str, claim: FolderClaim, environment: PythonEnvironment, digests: Mapping[Path, str]
) -> list[Copy]:
    """Return the copies that a host needs.

    Args:
        host: Name of the host.
        claim: The host's answer.
        environment: The environment to copy.
        digests: Digest of each folder on this machine; needed only for hosts without rsync.
    """
    needed = {path for path, known in claim.mine.items() if claim.has_rsync or known != digests[path]}
    trees = [_without(tree, needed) for tree in environment.trees]
    return [Copy(host, tree, claim.has_rsync) for tree in trees if tree is not None]


def copy_command(copy: Copy, ssh: Sequence[str]) -> HostCommand:
    """Return the command that copies a tree.

    rsync also removes files that this machine no longer has, in the tree's own folders only. tar removes nothing.
    """
    root = str(copy.tree.root)
    if copy.uses_rsync:
        # `s`: the host's shell does not interpret the path, in any version of rsync.
        words = ["rsync", "-srlpt", "--omit-dir-times", "--delete", "--stats", f"--timeout={_STALLED_S}"]
        # `p`: a folder of this name does not keep a removed package alive.
        filters = [f"--filter=-p {name}" for name in LEFT_OUT] + [f"--filter=H {TOKEN_PREFIX}*"]
        sources = [f"{root}/{name}" for name in copy.tree.names] or [f"{root}/"]
        options = [*filters, f"--exclude={MARKER}", "-e", shlex.join(ssh)]
        return HostCommand((*words, *options, "--", *sources, f"{copy.host}:{root}/"))
    omitted = [f"--exclude={name}" for name in (*LEFT_OUT, MARKER, f"{TOKEN_PREFIX}*")]
    words = ["tar", *omitted, "-cf", "-", "--", *(copy.tree.names or ["."])]
    # A shell changes the folder: tar's own `-C` interprets backslashes. Status 1: a file changed meanwhile.
    feeder = ("sh", "-c", 'cd "$1" && shift && { "$@" || [ $? = 1 ]; }', "sh", root, *words)
    unpack = ["sh", "-c", 'cd "$1" && LC_ALL=C exec tar -xpof -', "sh", root]
    return HostCommand(tuple(remote_words(ssh, copy.host, unpack)), feeder=feeder)


def has_lost_reason(copy: Copy, ended: CommandResult) -> bool:
    """Return whether rsync failed to read or write files and the host's reason did not arrive."""
    return copy.uses_rsync and ended.status == _FILE_IO and not _known_reasons(ended.err)


def probe_script(copy: Copy, token: str) -> str:
    """Return the shell program that writes a test file on a host; its error message explains why writing fails."""
    file = shlex.quote(f"{copy.tree.folders[0]}/{token}-probe")
    return f"""\
export LC_ALL=C
file={file}
trap 'rm -f -- "$file"' EXIT
head -c {_PROBED_BYTES} /dev/zero >"$file"
"""


def copy_fault(copy: Copy, ended: CommandResult, late: str) -> str | None:
    """Return the message about a failed copy, or None if the copy succeeded."""
    if ended.status == 0 or (copy.uses_rsync and ended.status == _VANISHED):
        return None
    return f"host {copy.host}: cannot copy {copy.what}: {_complain(copy.host, ended, late)}"


def describe_copy(copy: Copy, ended: CommandResult) -> str:
    """Return the message about a successful copy."""
    if not copy.uses_rsync:
        return f"host {copy.host}: copied all of {copy.what} with tar in {ended.seconds:.1f} s"
    files, size = (_number(pattern, ended.out) for pattern in _NUMBERS.values())
    if not files:
        return f"host {copy.host}: nothing has changed in {copy.what}"
    return f"host {copy.host}: copied {count(files, 'file')}, {size} bytes, of {copy.what} in {ended.seconds:.1f} s"


def release_script(folders: Sequence[Path], token: str, digests: Mapping[Path, str]) -> str:
    """Return the shell program that removes the tokens and records the digests of tar's copies."""
    lines = [f"rmdir {shlex.quote(str(folder / token))}" for folder in folders]
    lines += [f"echo {digest} >{shlex.quote(str(folder / MARKER))}" for folder, digest in digests.items()]
    return "\n".join([*lines, ""])


def _without(tree: Tree, needed: set[Path]) -> Tree | None:
    if not tree.names:
        return tree if tree.root in needed else None
    names = tuple(name for name in tree.names if tree.root / name in needed)
    return Tree(tree.root, names) if names else None


def _complain(host: str, ended: CommandResult, late: str) -> str:
    """Return fact and way out for a failed command; the fact is the command's own message."""
    complaint = _reason(ended.err)
    if ended.status is None:
        return f"{late}; see what `ssh {host}` is busy with" + (f" ({complaint})" if complaint else "")
    advice = next((advice for sign, advice in _WAYS_OUT.items() if sign in complaint.lower()), None)
    if ended.status == SSH_FAILED:
        advice = way_out_of(ended.err, host)
    return f"{complaint or f'exit status {ended.status}'}; {advice or f'try `ssh {host} true` by hand'}"


def _reason(text: str) -> str:
    """Return the first line with a known reason, because rsync and tar add a summary; otherwise the last line."""
    own = "\n".join(line for line in text.splitlines() if not line.startswith("rsync error: "))
    return next(iter(_known_reasons(text)), last_line(own))


def _known_reasons(text: str) -> list[str]:
    return [cut_off(line.strip()) for line in text.splitlines() if any(sign in line.lower() for sign in _WAYS_OUT)]


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(re.sub(r"\D", "", found[1])) if found else 0
