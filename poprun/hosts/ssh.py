"""The words with which poprun runs commands on other hosts, and the ways out of ssh's complaints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from poprun.cli.wording import cut_off
from poprun.errors import UsageError

ARGUMENTS_VARIABLE = "POPRUN_SSH_ARGS"
"""Options for every ssh that is started, split like a shell does, such as `-F my_ssh_config -p 2222`."""

SSH_FAILED = 255
"""The exit status of ssh itself if it fails; otherwise ssh ends with the status of the command."""

SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--export=ALL", "--nodes=1", "--ntasks=1")
"""The words that take the place of ssh in a job of Slurm, whose nodes need not let anybody log in.

After `sbatch --export=NONE` steps would find no variables at all, not even PATH.
"""

_BOOTSTRAP = (
    "import hashlib, sys; text = sys.stdin.buffer.read({nbytes}); "
    "hashlib.sha256(text).hexdigest() == '{digest}' or "
    "sys.exit('what came through standard input is not the program of poprun: look for what reads or writes there, "
    "such as a start-up file of the shell'); exec(text)"
)

_CHANGED = "identification has changed"  # long before the last line, which is that of a key that is not known
_WAYS_OUT = {
    _CHANGED: "if {host} was set up anew: `ssh-keygen -R {host}`, then `ssh {host}` once by hand",
    "could not resolve": "check the spelling in --host, or give the name an address (/etc/hosts, DNS, ~/.ssh/config)",
    "permission denied": "let `ssh {host} true` work without a password: `ssh-copy-id {host}`, or start an ssh agent",
    "host key": "run `ssh {host}` once by hand and compare its key, or `ssh-keyscan {host} >> ~/.ssh/known_hosts`",
    "refused": f"start sshd there, or name its port (~/.ssh/config, {ARGUMENTS_VARIABLE})",
    "timed out": "start the host, or let ssh pass through the firewall",
    "no route": "check the network and the host's address",
    "unreachable": "check the network and the host's address",
}


def user_arguments(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's options for every ssh, from POPRUN_SSH_ARGS; Open MPI's daemons need them too.

    Raises:
        UsageError: they cannot be split.
    """
    text = environ.get(ARGUMENTS_VARIABLE, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{ARGUMENTS_VARIABLE} cannot be split like a shell does: {error} in {text!r}; check the quotes"
        ) from None


def ssh_words(environ: Mapping[str, str], connect_s: int = 5) -> tuple[str, ...]:
    """Return the words of an ssh that asks nothing and gives up soon; the host and the command come after them.

    The user's own arguments come first, because the first value that ssh sees for an option holds.
    """
    return (
        "ssh",
        *user_arguments(environ),
        "-x",
        "-T",
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={connect_s}"),
        *("-o", "ClearAllForwardings=yes"),
        *("-o", "LogLevel=ERROR"),
    )


def name_behind(host: str, ssh: Sequence[str], limit_s: float = 1.0) -> str:
    """Return the host name in ssh's configuration; the host itself if ssh has no other name."""
    import subprocess  # seldom needed

    try:
        ended = subprocess.run([*ssh, "-G", "--", host], capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host
    lines = (line.partition(" ") for line in ended.stdout.splitlines())
    return next((name for word, _, name in lines if word == "hostname"), host)


def way_out_of(said: str, host: str) -> str:
    """Return the way out of ssh's complaints on its standard error."""
    lines = said.lower().splitlines()
    reasons = [_CHANGED] if any(_CHANGED in line for line in lines) else reversed(lines)
    found = (advice for line in reasons for sign, advice in _WAYS_OUT.items() if sign in line)
    return next(found, "try `ssh {host} true` by hand").format(host=host)


def by_hand(ssh: Sequence[str], host: str, command: str) -> str:
    """Return a command with which a user can try whether a host answers."""
    if ssh[:1] == SRUN[:1]:
        return f"srun --overlap --nodelist={host} --nodes=1 --ntasks=1 {command}"
    return f"ssh {host} {command}"


def last_line(complaint: str) -> str:
    """Return the line that says why, cut off where it is endless; warnings come before it."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    return cut_off(lines[-1]) if lines else ""


def remote_words(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the words that run a command on a host."""
    if ssh[0] == SRUN[0]:
        return [*ssh, f"--nodelist={host}", "sh", "-c", shlex.join(command)]
    return [*ssh, "--", host, shlex.join(command)]


def program_words(python: str, program: bytes) -> tuple[str, ...]:
    """Return the words that run a program of ours on a host, where nothing of ours is installed.

    The program is the first part of standard input, and nothing else is run.

    The words have its length and digest, so text that somebody else has put there, or taken away, is refused.
    """
    import hashlib  # costs some milliseconds, needed only where hosts are asked

    code = _BOOTSTRAP.format(nbytes=len(program), digest=hashlib.sha256(program).hexdigest())
    return (python, "-I", "-u", "-c", code)
