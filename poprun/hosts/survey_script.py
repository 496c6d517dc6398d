"""A script that reports a machine's facts; other hosts receive it as text, so it imports nothing of poprun."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "poprun-survey "
"""The beginning of the one line that is the answer; other lines, such as those of a login shell, are ignored."""

CONNECTIONS = ("SSH_CONNECTION", "SLURM_SRUN_COMM_HOST")
"""The variables in which sshd and srun name the machine that called them."""

_ANY_PORT = 9
_CPUS = Path("/sys/devices/system/cpu")
SOURCES = ("collectives", "popdist", "poprun", "strategies")
_GET_ADDRESSES, _NEW_ADDRESS, _END_OF_LIST = 22, 20, 3  # rtnetlink(7)
_IS_DUMP_REQUEST = 0x301
_LOCAL_ADDRESS = (2, 1)  # IFA_LOCAL, which point-to-point links and IPv4 have; otherwise IFA_ADDRESS
_GET_FLAGS, _GET_MTU = 0x8913, 0x8921  # netdevice(7)
_IS_RUNNING = 0x41  # IFF_UP and IFF_RUNNING


def answer(question: Mapping[str, object]) -> dict[str, object]:
    """Return all facts as plain JSON values; `poprun.hosts.host_facts.HostFacts` describes them.

    Args:
        question: The fields of `poprun.hosts.host_facts.HostQuestion`.
    """
    program, program_fault = find_program(str(question["program"]), str(question["path"]), str(question["directory"]))
    return {
        "name": os.uname().nodename,
        "identity": identity(),
        "reached_at": reached_at(os.environ),
        "versions": versions(question),
        "sources": digest_sources(Path(str(question["project"]))),
        "program": program,
        "program_fault": program_fault,
        "has_directory": os.path.isdir(str(question["directory"])),
        "cores": [list(core) for core in cores()],
        "shm_free_bytes": free_bytes("/dev/shm"),
        "interfaces": [list(interface) for interface in interfaces()],
        "load": os.getloadavg()[0],
        "open_files": open_files(),
    }


def reached_at(environ: Mapping[str, str]) -> str:
    """Return the address at which ssh reached this machine, or from which this machine talks to srun."""
    connection, caller = (environ.get(name, "") for name in CONNECTIONS)
    if not connection and caller:
        with contextlib.suppress(OSError):
            kind, _, _, _, place = socket.getaddrinfo(caller, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as asked:
                asked.connect(place)  # sends nothing
                return str(asked.getsockname()[0])
    return (connection.split() + [""] * 3)[2]


def identity() -> str:
    """Return a text that no two machines share; the network namespace tells containers of one machine apart."""
    network = ""
    with contextlib.suppress(OSError):
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{read('/proc/sys/kernel/random/boot_id')} {read('/etc/machine-id')} {network}"


def versions(question: Mapping[str, object]) -> dict[str, str]:
    """Return the versions of Python and packages, as the program will find them; empty if not installed."""
    import site

    paths = [*_strings(question["python_path"]), *sys.path]
    if question["has_user_site"]:
        paths.append(site.getusersitepackages())
    found = {name: _installed(name, paths) for name in _strings(question["packages"])}
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    found["project"] = _project_version(Path(str(question["project"])))
    if not found.get("openmpi", "?"):
        found["openmpi"] = version_of_mpirun(str(question["mpirun"]))
    return found


def digest_sources(project: Path) -> str:
    """Return a digest of the project's sources, which reveals a stale copy; empty without sources."""
    import hashlib  # takes some milliseconds to load; poprun itself imports this module and seldom needs it

    files = [path for package in SOURCES for path in sorted((project / package).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in files:
        with contextlib.suppress(OSError):
            digest.update(b"%s\0%s\0" % (path.relative_to(project).as_posix().encode(), path.read_bytes()))
    return digest.hexdigest()[:16] if files else ""


def find_program(program: str, path: str, directory: str) -> tuple[str, str]:
    """Return the program's path and "", or "" and its fault: `missing`, `a directory` or `not executable`."""
    folders = path.split(os.pathsep) if "/" not in program else [""]
    fault = "missing"
    for folder in folders:
        found = os.path.join(directory, folder, program)
        if os.path.isfile(found) and os.access(found, os.X_OK):
            return found, ""
        if "/" in program and os.path.exists(found):
            fault = "a directory" if os.path.isdir(found) else "not executable"
    return "", fault


def cores() -> list[tuple[int, int, int, int]]:
    """Return NUMA node, package, core and number of each CPU that this process may run on, sorted.

    If the machine reports no topology, every CPU is a core of its own on one node.
    """
    return sorted(_core(cpu) for cpu in os.sched_getaffinity(0))


def interfaces() -> list[tuple[str, str, int, int]]:
    """Return name, address, prefix length and MTU of each interface that is up, without IPv6's link-local addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        found = []
        for index, address, prefix in _addresses():
            with contextlib.suppress(OSError):
                name = socket.if_indextoname(index)
                flags = _ask_interface(asked, _GET_FLAGS, name) & 0xFFFF
                if flags & _IS_RUNNING == _IS_RUNNING and not address.startswith("fe80:"):
                    found.append((name, address, prefix, _ask_interface(asked, _GET_MTU, name)))
        return found


def open_files() -> int:
    """Return the number of files that a process may open; -1 is unlimited."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_bytes(folder: str) -> int:
    """Return the free bytes of a file system; 0 if the folder does not exist."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def version_of_mpirun(mpirun: str) -> str:
    """Return the version that an mpirun reports; empty if it reports none."""
    import subprocess

    try:
        ended = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=1, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (ended.stdout.split("\n")[0].split() or [""])[-1]


def read(path: str) -> str:
    """Return the text of a small file without surrounding white space; empty if the file cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _strings(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def _installed(name: str, paths: list[str]) -> str:
    from importlib.metadata import Distribution

    return next((each.version for each in Distribution.discover(name=name, path=paths)), "")


def _project_version(project: Path) -> str:
    found = re.search(r'__version__ = "(.+)"', read(str(project / "popdist" / "version.py")))
    return found[1] if found else ""


def _core(cpu: int) -> tuple[int, int, int, int]:
    folder = _CPUS / f"cpu{cpu}"
    package, core = (read(f"{folder}/topology/{name}") for name in ("physical_package_id", "core_id"))
    nodes = [path.name[4:] for path in folder.glob("node[0-9]*")]
    return int(nodes[0] if nodes else 0), int(package or 0), int(core or cpu), cpu


def _addresses() -> Iterator[tuple[int, str, int]]:
    """Yield interface index, address and prefix length of every address that the kernel reports by rtnetlink(7)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(1)
        kernel.send(struct.pack("=IHHIIB7x", 24, _GET_ADDRESSES, _IS_DUMP_REQUEST, 1, 0, socket.AF_UNSPEC))
        while True:
            data = kernel.recv(1 << 17)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _NEW_ADDRESS:  # the end of the list, or an error
                    return
                yield from _parse_address(data[16:length])
                data = data[(length + 3) & ~3 :]


def _parse_address(message: bytes) -> Iterator[tuple[int, str, int]]:
    family, prefix, _, _, index = struct.unpack_from("=BBBBI", message)
    attributes, rest = {}, message[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        attributes[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    for kind in _LOCAL_ADDRESS:
        if kind in attributes and family in (socket.AF_INET, socket.AF_INET6):
            yield index, socket.inet_ntop(family, attributes[kind]), prefix
            return


def _ask_interface(asked: socket.socket, request: int, name: str) -> int:
    reply = fcntl.ioctl(asked, request, struct.pack("16s24x", name.encode()))
    return int(struct.unpack_from("=i", reply, 16)[0])


def reply(question: str, limit_s: int) -> None:
    """Print the answer to a question as JSON; the process ends at the limit, even if a call hangs."""
    import json

    signal.alarm(limit_s)
    print(MARK + json.dumps(answer(json.loads(question))), flush=True)
