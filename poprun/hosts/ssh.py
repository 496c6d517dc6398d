"""How poprun calls ssh, and what to do about ssh's own complaints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from poprun.cli.wording import cut_off
from poprun.errors import UsageError

ARGUMENTS_VARIABLE = "POPRUN_SSH_ARGS"
"""Options for every ssh that is started, split like a shell does, such as `-F my_ssh_config -p 2222`."""

SSH_FAILED = 255
"""What ssh ends with when it has a complaint of its own; otherwise with the status of the command."""

SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--export=ALL", "--nodes=1", "--ntasks=1")
"""What takes the place of ssh inside a job of Slurm, whose nodes need not let anybody log in.

After `sbatch --export=NONE` steps would find no variables at all, not even PATH.
"""

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
    """What the user adds to every ssh, from POPRUN_SSH_ARGS; Open MPI's daemons need them too.

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
    """The words of an ssh that asks nothing and gives up soon; the host and the command come after them.

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
    """What ssh's configuration says a host is really called; the host itself where it says nothing."""
    import subprocess  # seldom needed

    try:
        ended = subprocess.run([*ssh, "-G", "--", host], capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host
    lines = (line.partition(" ") for line in ended.stdout.splitlines())
    return next((name for word, _, name in lines if word == "hostname"), host)


def way_out_of(said: str, host: str) -> str:
    """What to do about all that ssh has said on its standard error; its own words are what the user reads besides."""
    lines = said.lower().splitlines()
    reasons = [_CHANGED] if any(_CHANGED in line for line in lines) else reversed(lines)
    found = (advice for line in reasons for sign, advice in _WAYS_OUT.items() if sign in line)
    return next(found, "try `ssh {host} true` by hand").format(host=host)


def by_hand(ssh: Sequence[str], host: str, command: str) -> str:
    """What a user can try to see whether a host answers: by ssh, or by what takes its place."""
    if ssh[:1] == SRUN[:1]:
        return f"srun --overlap --nodelist={host} --nodes=1 --ntasks=1 {command}"
    return f"ssh {host} {command}"


def last_line(complaint: str) -> str:
    """The line that says why, cut off where it is endless; warnings come before it."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    return cut_off(lines[-1]) if lines else ""


def remote_words(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """The words that run a command on a host.

    Args:
        ssh: the words of ssh before the host, or SRUN.
        host: its name.
        command: one for a shell there.
    """
    if ssh[0] == SRUN[0]:
        return [*ssh, f"--nodelist={host}", "sh", "-c", shlex.join(command)]
    return [*ssh, "--", host, shlex.join(command)]
