"""`--distribute-ssh-key`: lets ssh reach the hosts without a password, and the hosts know each other.

Like ssh-copy-id, it appends the user's public key to `~/.ssh/authorized_keys` of the hosts. It neither makes nor copies
private keys. Hosts learn each other's host keys only from the keys that this machine trusts already.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poprun.cli.log import Log
from poprun.cli.wording import count
from poprun.errors import PopRunError
from poprun.hosts.ssh import (
    SSH_FAILED,
    CommandResult,
    HostCommand,
    last_line,
    remote_words,
    run_commands,
    shell_commands,
    ssh_words,
    user_arguments,
    way_out_of,
)
from poprun.hosts.survey import LIMIT_VARIABLE, limit_from

PASSWORD_LIMIT_S = 120.0

_ADDED = "poprun-key added"
_LOCAL_LIMIT_S = 10.0
_SSH_PORT = "22"

_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")
_ADD = f"""\
export LC_ALL=C
umask 077
cd && mkdir -p .ssh || exit 1
append() {{
    if [ -n "$(tail -c 1 "$1" 2>/dev/null)" ]; then echo >>"$1" || exit 1; fi
    printf '%s\\n' "$2" >>"$1" || exit 1
    if command -v restorecon >/dev/null; then restorecon -F .ssh "$1"; fi
    echo "{_ADDED}"
}}
allow() {{
    file=.ssh/authorized_keys
    grep -v '^[[:space:]]*#' "$file" 2>/dev/null | grep -qF -e "$2" || append "$file" "$1"
}}
know() {{
    file=.ssh/known_hosts
    grep -qxF -e "$1 $2" "$file" 2>/dev/null && return
    ssh-keygen -F "$1" -f "$file" 2>/dev/null | grep -qF -e "$2" || append "$file" "$1 $2"
}}
"""


@dataclass(frozen=True)
class Target:
    """The way by which ssh reaches a host from this machine.

    Attributes:
        known_as: The host's name in known_hosts, such as `h1` or `[h1]:2222`.
        known_hosts: The files with host keys, beginning with the user's.
        identities: The files of the private keys that ssh tries.
    """

    known_as: str
    known_hosts: tuple[str, ...]
    identities: tuple[str, ...]


def distribute_key(hosts: Sequence[str], environ: Mapping[str, str], log: Log) -> None:
    """Install the user's public key on the hosts, and the hosts' keys on each other; existing keys stay.

    Args:
        hosts: The hosts without this machine.
        environ: Environment variables; POPRUN_SSH_ARGS, SSH_AUTH_SOCK and POPRUN_CHECK_TIMEOUT_S are read.
        log: The log for a line about each host.

    Raises:
        PopRunError: The user has no key; or ssh still needs a password for some hosts (one line for each).
    """
    targets = _targets(hosts, environ)
    agent = read_keys(_run_here([["ssh-add", "-L"]], environ)[0].out)
    scripts: dict[str, str] = {}
    for host, target in targets.items():
        key = choose_key(agent, _public_keys(target))
        if key is None:
            raise PopRunError(
                f"host {host}: no key to install was found, neither in an ssh agent nor beside "
                f"{', '.join(target.identities) or '~/.ssh/id_*'} (.pub); make one with `ssh-keygen -t ed25519`"
            )
        scripts[host] = allow_script(key)
    _allow(scripts, environ, log)
    _introduce(targets, environ, log)


def read_target(said: str) -> Target:
    """Read the output of `ssh -G` about a host."""
    pairs = [line.split(maxsplit=1) for line in said.splitlines() if " " in line]
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    name = values.get("hostkeyalias", values.get("hostname", [""]))[0]
    port = values.get("port", [_SSH_PORT])[0]
    files = " ".join(values.get("userknownhostsfile", []) + values.get("globalknownhostsfile", []))
    return Target(
        known_as=name if port == _SSH_PORT or "hostkeyalias" in values else f"[{name}]:{port}",
        known_hosts=tuple(files.split()),
        identities=tuple(values.get("identityfile", ())),
    )


def read_keys(text: str) -> list[str]:
    """Return the public keys in a `.pub` file or in the output of `ssh-add -L`."""
    return [line.strip() for line in text.splitlines() if line.startswith(_KEY_TYPES) and len(line.split()) > 1]


def choose_key(agent: Sequence[str], files: Sequence[str]) -> str | None:
    """Return the public key that ssh will use without asking for a passphrase, or None.

    Args:
        agent: The public keys that an ssh agent offers.
        files: The public keys beside the private keys that ssh tries, in ssh's order.
    """
    offered = {key.split()[1] for key in agent}
    both = [key for key in files if key.split()[1] in offered]
    return next(iter([*both, *agent, *files]), None)


def allow_script(key: str) -> str:
    """Return the shell program that appends a public key to authorized_keys, unless the key is there in any form."""
    kind, body = key.split()[:2]
    return f"{_ADD}allow {shlex.quote(key)} {shlex.quote(f'{kind} {body}')}\n"


def introduce_script(known: Iterable[tuple[str, str]]) -> str:
    """Return the shell program that appends host keys to known_hosts, unless they are there, hashed or not.

    Args:
        known: Pairs of a name, such as `h1` or `[h1]:2222`, and a key with its type in front.
    """
    return _ADD + "".join(f"know {shlex.quote(name)} {shlex.quote(key)}\n" for name, key in known)


def read_known_hosts(found: str) -> list[str]:
    """Return the keys in the output of `ssh-keygen -F`, without keys of authorities and revoked keys."""
    lines = [line.split() for line in found.splitlines() if not line.startswith(("#", "@"))]
    return [" ".join(words[1:3]) for words in lines if len(words) > 2]


def fault_of(host: str, ended: CommandResult, limit_s: float, has_terminal: bool) -> str:
    """Return the reason why a key could not be installed on a host."""
    complaint = last_line(ended.err)
    if ended.status is None:
        return f"host {host}: did not answer within {limit_s:g} s ({LIMIT_VARIABLE}); see what `ssh {host}` waits for"
    if ended.status != SSH_FAILED:
        fact = complaint or f"exit status {ended.status}"
        return f"host {host}: cannot change ~/.ssh there: {fact}; see who owns it, and whether the disk is full"
    asks = "" if has_terminal else ", or run poprun in a terminal, where ssh can ask"
    return f"host {host}: {complaint or 'ssh failed and said nothing'}; {way_out_of(ended.err, host)}{asks}"


def _targets(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, Target]:
    asked = _run_here([["ssh", *user_arguments(environ), "-G", "--", host] for host in hosts], environ)
    faults = [f"host {host}: {last_line(each.err)}" for host, each in zip(hosts, asked, strict=True) if each.status]
    if faults:
        raise PopRunError("\n".join(f"{fault}; correct ~/.ssh/config or POPRUN_SSH_ARGS" for fault in faults))
    return {host: read_target(each.out) for host, each in zip(hosts, asked, strict=True)}


def _public_keys(target: Target) -> list[str]:
    keys: list[str] = []
    for name in target.identities:
        with suppress(OSError, UnicodeDecodeError):
            keys += read_keys(Path(f"{name}.pub").expanduser().read_text())[:1]
    return keys


def _allow(scripts: Mapping[str, str], environ: Mapping[str, str], log: Log) -> None:
    """Install the keys on all hosts; if ssh needs a password for a host, let it ask on the terminal."""
    limit_s, has_terminal = limit_from(environ), _has_terminal()
    ended = _tell(scripts, environ)
    for host, each in ended.items():
        if each.status == SSH_FAILED and has_terminal:
            log.info(f"host {host}: {last_line(each.err)}; trying again, and ssh may ask")
            by_hand = _tell_by_hand(host, scripts[host], environ)
            ended[host] = by_hand if by_hand.status != SSH_FAILED else each
    faults = [fault_of(host, each, limit_s, has_terminal) for host, each in ended.items() if each.status != 0]
    for host, each in ended.items():
        if each.status == 0:
            log.info(f"host {host}: the ssh key {'was added' if _ADDED in each.out else 'is there already'}")
    if faults:
        raise PopRunError("\n".join(faults))


def _introduce(targets: Mapping[str, Target], environ: Mapping[str, str], log: Log) -> None:
    """Add the host keys of all hosts to every host; this also proves that no host needs a password any more."""
    lookups = [
        (target.known_as, ["ssh-keygen", "-F", target.known_as, "-f", str(Path(file).expanduser())])
        for target in targets.values()
        for file in target.known_hosts
    ]
    found = _run_here([words for _, words in lookups], environ)
    known = {
        (name, key): None for (name, _), each in zip(lookups, found, strict=True) for key in read_known_hosts(each.out)
    }
    ended = _tell(dict.fromkeys(targets, introduce_script(known)), environ)
    refused = [(host, last_line(each.err)) for host, each in ended.items() if each.status != 0]
    if refused:
        way_out = "see `sshd -T` there (AuthorizedKeysFile, StrictModes), and whether the key needs `ssh-add` here"
        lines = [f"host {host}: has the key, but cannot be reached with it: {why}; {way_out}" for host, why in refused]
        raise PopRunError("\n".join(lines))
    for host, each in ended.items():
        log.info(f"host {host}: {count(each.out.count(_ADDED), 'host key')} added to its known hosts")


def _run_here(commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> list[CommandResult]:
    numbered = {number: HostCommand(tuple(words)) for number, words in enumerate(commands)}
    ended = dict(run_commands(numbered, environ, _LOCAL_LIMIT_S))
    return [ended[number] for number in numbered]


def _tell(scripts: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, CommandResult]:
    """Run shell programs on hosts: on the first host alone, so that hosts that share its home need not write."""
    commands = shell_commands(scripts, (*ssh_words(environ), "-o", "ControlPath=none"))
    ended: dict[str, CommandResult] = {}
    for group in (list(commands)[:1], list(commands)[1:]):
        ended |= run_commands({host: commands[host] for host in group}, environ, limit_from(environ))
    return {host: ended[host] for host in scripts}


def _tell_by_hand(host: str, script: str, environ: Mapping[str, str]) -> CommandResult:
    """Run a shell program on a host while ssh may ask on the terminal; ssh's messages go there too."""
    import subprocess  # takes some milliseconds to load, and few launches need it

    ssh = ["ssh", *user_arguments(environ), "-x", "-T", "-o", "BatchMode=no", "-o", "ClearAllForwardings=yes"]
    words = remote_words([*ssh, "-o", "ControlPath=none", "-o", "ConnectTimeout=2"], host, ["sh", "-s"])
    try:
        done = subprocess.run(
            words, input=script, stdout=subprocess.PIPE, text=True, timeout=PASSWORD_LIMIT_S, check=False, env=environ
        )
    except subprocess.TimeoutExpired:
        return CommandResult(SSH_FAILED, "", "", PASSWORD_LIMIT_S)
    return CommandResult(done.returncode, done.stdout, "", 0.0)


def _has_terminal() -> bool:
    """Return whether ssh can ask the user: this process has a terminal and is in its foreground."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
