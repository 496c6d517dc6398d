"""Workers described by TF_CONFIG: each task of the cluster is one instance; no launcher is needed.

TensorFlow defines the variable: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG.
"""

from __future__ import annotations

import ipaddress
import json
import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from popdist.environments.environment import Environment, LaunchedProcess
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

VARIABLE = "TF_CONFIG"
"""TensorFlow's JSON text with the addresses of all workers and the index of this worker."""
REPLICAS = "num_replicas"
"""Our own key in TF_CONFIG, unknown to TensorFlow: the total number of replicas, unless the program gives it."""
_WORKERS = '"worker":["localhost:3737","localhost:3738"]'
_TASK = '"type":"worker","index":0'
EXAMPLE = f"""TF_CONFIG='{{"cluster":{{{_WORKERS}}},"task":{{{_TASK}}}}}'"""

JOBS = ("chief", "worker")
"""Names of the jobs that train, in rank order."""

_OTHER_JOBS = {
    "evaluator": "evaluators are not supported; evaluate on a worker, or in a program started without TF_CONFIG",
    "ps": "parameter servers are not supported; leave them out, every worker holds the variables",
    "master": 'the old name of the chief; write "chief"',
}
_LONGEST_SOCKET_PATH_BYTES = 107  # unix(7): sun_path has 108 bytes; the last one is the terminating zero
_HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?", re.ASCII)


@dataclass(frozen=True)
class Cluster:
    """The tasks that train together, and the task of this process.

    Attributes:
        chief: Address of the chief; empty without a chief.
        worker: Addresses of the workers.
        task_type: Job of this task: `chief` or `worker`.
        task_id: Position of this task in its job.
        rpc_layer: Protocol that the user asked for, or None.

    Raises:
        EnvironmentMismatchError: An address is invalid or listed twice, or the task does not exist.
    """

    chief: tuple[str, ...]
    worker: tuple[str, ...]
    task_type: str
    task_id: int
    rpc_layer: str | None = None

    def __post_init__(self) -> None:
        if len(self.chief) > 1:
            _refuse(
                f"TF_CONFIG lists {len(self.chief)} chiefs, {_shown(self.chief)}",
                'keep one and list the others as "worker"',
            )
        _require_different_places(self.addresses)
        self._require_task()
        if self.rpc_layer not in (None, "grpc"):
            _refuse(
                f"the rpc_layer is {_shown(self.rpc_layer)}, but workers speak only gRPC",
                'write "grpc" or leave it out',
            )

    def _require_task(self) -> None:
        if self.task_type not in JOBS:
            _refuse_job(self.task_type, "the task type is")
        tasks = self.jobs.get(self.task_type, ())
        if not tasks:
            _refuse(
                f"the task type is {_shown(self.task_type)}, but the cluster has only the job {', '.join(self.jobs)}",
                "add the job to the cluster or change the type",
            )
        if not 0 <= self.task_id < len(tasks):
            _refuse(
                f"the task index is {self.task_id}, but the cluster lists {len(tasks)} of type {self.task_type}: "
                f"{_shown(tasks)}",
                "use 0" if len(tasks) == 1 else f"use one of 0..{len(tasks) - 1}",
            )

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        """The addresses of each job that has at least one task."""
        return {job: tasks for job, tasks in (("chief", self.chief), ("worker", self.worker)) if tasks}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all tasks as written in TF_CONFIG, in rank order: the chief, then the workers."""
        return self.chief + self.worker

    @property
    def rank(self) -> int:
        """The position of this task among `addresses`."""
        return self.task_id + (len(self.chief) if self.task_type == "worker" else 0)

    @property
    def local_index(self) -> int:
        """The number of tasks with a lower rank on the same machine, judged by the addresses."""
        machines = [_place_of(address).machine for address in self.addresses]
        return machines[: self.rank].count(machines[self.rank])

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each task in messages, in rank order."""
        return tuple(f"{job} {number}" for job, tasks in self.jobs.items() for number in range(len(tasks)))

    def instance(self, num_replicas: int | None = None) -> Instance:
        """Return this task as an instance with its even share of the replicas; default: one replica per task.

        Raises:
            EnvironmentMismatchError: The replicas cannot be divided evenly.
        """
        task = LaunchedProcess(self.rank, len(self.addresses), self.local_index)
        return task.instance(num_replicas, f"TF_CONFIG lists {_shown(self.addresses)}", "tf_config")


class TFConfigEnvironment(Environment):
    """A task of a TF_CONFIG cluster. The tasks share the replicas evenly; by default there is one per task."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return bool(environ.get(VARIABLE))

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        cluster, said = read_cluster(environ), _load(environ[VARIABLE]).get(REPLICAS)
        if said is not None and (not isinstance(said, int) or isinstance(said, bool) or said < 1):
            _refuse(f'"{REPLICAS}" in TF_CONFIG is {_shown(said)}, not a whole number of at least 1', "correct it")
        if None not in (said, num_replicas) and said != num_replicas:
            _refuse(
                f'the program asks for num_replicas={num_replicas}, but "{REPLICAS}" in TF_CONFIG is {said}',
                "give both the same number",
            )
        return cluster.instance(said if num_replicas is None else num_replicas)


def read_cluster(
    environ: Mapping[str, str],
    task_type: str | None = None,
    task_id: int | None = None,
    rpc_layer: str | None = None,
) -> Cluster:
    """Read the cluster from TF_CONFIG. Unknown keys are ignored.

    Args:
        environ: Environment variables of the process.
        task_type: Type of this task; default: from TF_CONFIG.
        task_id: Index of this task; default: from TF_CONFIG.
        rpc_layer: Protocol; default: from TF_CONFIG.

    Raises:
        EnvironmentMismatchError: TF_CONFIG is unset or invalid. The message quotes the invalid part.
    """
    if not environ.get(VARIABLE):
        _refuse(
            "TF_CONFIG is not set, so this process does not know the other workers",
            f"set it on each of them, for example {EXAMPLE}, or use LocalStrategy for one process",
        )
    config = _load(environ[VARIABLE])
    jobs = _read_jobs(config)
    task = {} if task_type is not None and task_id is not None else _read_object(config, "task", _TASK)
    return Cluster(
        chief=jobs.get("chief", ()),
        worker=jobs.get("worker", ()),
        task_type=_read_task_type(task) if task_type is None else task_type,
        task_id=_whole_number(_read(task, "index", "0", inside="task") if task_id is None else task_id),
        rpc_layer=config.get("rpc_layer") if rpc_layer is None else rpc_layer,
    )


def _refuse(facts: str, way_out: str) -> NoReturn:
    raise EnvironmentMismatchError(f"{facts}; {way_out}")


def _shown(value: object) -> str:
    """Format a part of TF_CONFIG as JSON, for messages."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- the JSON


def _load(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        where = f"character {error.pos + 1}" if error.pos < len(text) else "its end"
        raise EnvironmentMismatchError(
            f"TF_CONFIG is not JSON, {error.msg} at {where} near {around!r}; "
            f"write it with double quotes inside single ones: {EXAMPLE}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or thousands of open brackets
        raise EnvironmentMismatchError(f"TF_CONFIG cannot be read, {error}: {text[:60]!r}...; use {EXAMPLE}") from error
    if not isinstance(config, dict):
        _refuse(f"TF_CONFIG is {_shown(config)}, not an object", f"write {EXAMPLE}")
    return config


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object, and refuse duplicate keys: by default json.loads keeps the last one without a warning."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        _refuse(f"TF_CONFIG has the key {_shown(twice)} twice in one object", "keep one of them")
    return dict(pairs)


def _read(parent: dict[str, object], key: str, example: str, inside: str = "") -> object:
    if key not in parent:
        place = f'"{inside}" in TF_CONFIG' if inside else "TF_CONFIG"
        _refuse(f'{place} has no "{key}", only {_shown(parent)}', f'add "{key}":{example}')
    return parent[key]


def _read_object(config: dict[str, object], key: str, example: str) -> dict[str, object]:
    value = _read(config, key, f"{{{example}}}")
    if not isinstance(value, dict):
        _refuse(f'"{key}" in TF_CONFIG is {_shown(value)}, not an object', f'write "{key}":{{{example}}}')
    return value


def _read_jobs(config: dict[str, object]) -> dict[str, tuple[str, ...]]:
    jobs = _read_object(config, "cluster", _WORKERS)
    for job in jobs:
        if job not in JOBS:
            _refuse_job(job, 'the "cluster" in TF_CONFIG has the job')
    if not jobs:
        _refuse('the "cluster" in TF_CONFIG is {}, without a task', f"add {_WORKERS}")
    return {job: _read_addresses(job, tasks) for job, tasks in jobs.items()}


def _read_addresses(job: str, tasks: object) -> tuple[str, ...]:
    if not isinstance(tasks, list) or not tasks:
        _refuse(
            f'the job "{job}" in TF_CONFIG is {_shown(tasks)}, not a list of at least one address',
            f'write "{job}":["localhost:3737"]',
        )
    for address in tasks:
        if not isinstance(address, str):
            _refuse(f'the job "{job}" in TF_CONFIG lists {_shown(address)}, not a string', 'write "host:port"')
    return tuple(tasks)


def _read_task_type(task: dict[str, object]) -> str:
    task_type = _read(task, "type", '"worker"', inside="task")
    if not isinstance(task_type, str):
        _refuse(f"the task type in TF_CONFIG is {_shown(task_type)}, not a string", 'write "worker" or "chief"')
    return task_type


def _whole_number(index: object) -> int:
    """Return the index of a task. Like TensorFlow, accept a string of digits as well."""
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        return int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        _refuse(f"the task index is {_shown(index)}, not a whole number", "write 0 for the first task of its type")
    return index


def _refuse_job(job: str, where: str) -> NoReturn:
    raise EnvironmentMismatchError(
        f"{where} {_shown(job)}, {_OTHER_JOBS.get(job, 'which is unknown; use worker or chief')}"
    )


# ---- addresses


@dataclass(frozen=True)
class _Place:
    """The place where a task listens; equal for all spellings of an address."""

    host: str
    port: str

    @property
    def machine(self) -> str:
        """The host, or `localhost` for every address that only this machine can reach."""
        ip = _ip_of(self.host)
        return "localhost" if ip is not None and ip.is_loopback else self.host


def _require_different_places(addresses: tuple[str, ...]) -> None:
    taken: dict[_Place, str] = {}
    for address in addresses:
        place = _place_of(address)
        if place in taken:
            same = "" if taken[place] == address else f", once as {_shown(taken[place])}"
            _refuse(f"TF_CONFIG lists the address {_shown(address)} twice{same}", "give each task its own address")
        taken[place] = address


def _place_of(address: str) -> _Place:
    if not address.isprintable():
        _refuse_address(address, "holds characters that cannot be printed", "write host:port")
    if address.startswith("unix:"):
        return _Place("localhost", f"unix:{_socket_path(address)}")
    host, port = _split(address)
    if not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        _refuse_address(address, f"has the port {_shown(port)}", "use a whole number of 1..65535")
    if not host:
        _refuse_address(address, "has no host", f"write localhost:{port} or the name of the machine")
    return _Place(_canonical_host(address, host), port)


def _split(address: str) -> tuple[str, str]:
    """Split an address into its host, with any brackets, and its port."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        _refuse_address(address, "begins with a scheme", "leave it out and write host:port")
    if not colon or address.endswith("]"):
        _refuse_address(address, "has no port", f"write {address}:3737")
    if ":" in host and not host.startswith("["):
        if _ip_of(host) or _ip_of(address):
            _refuse_address(address, "is IPv6 without brackets", "write [::1]:3737 for port 3737 of ::1")
        _refuse_address(address, "has several colons", "write host:port, or [address]:port for IPv6")
    return host, port


def _canonical_host(address: str, host: str) -> str:
    in_brackets = host.startswith("[") and host.endswith("]")
    ip = _ip_of(host[1:-1]) if in_brackets else _ip_of(host)
    if ip is not None and ip.is_unspecified:
        _refuse_address(address, "stands for every interface, not for one machine", "name the machine")
    if ip is not None and in_brackets == (ip.version == 6):
        return str(ip)
    if in_brackets or re.fullmatch("[0-9.]+", host) or not _HOST_NAME.fullmatch(host):
        _refuse_address(
            address, f"has the host {_shown(host)}, neither a name nor an IP address", "write host:port or [IPv6]:port"
        )
    return host.lower().rstrip(".")


def _socket_path(address: str) -> str:
    path = address.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//") or path.endswith("/"):
        _refuse_address(address, "is not an absolute path of a file", "write unix:/path/to/socket")
    if len(path.encode()) > _LONGEST_SOCKET_PATH_BYTES:
        _refuse_address(
            address,
            f"has a path of {len(path.encode())} bytes; a socket path has at most {_LONGEST_SOCKET_PATH_BYTES}",
            "use a shorter path",
        )
    return os.path.normpath(path)


def _ip_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _refuse_address(address: str, fact: str, way_out: str) -> NoReturn:
    _refuse(f"the address {_shown(address)} in TF_CONFIG {fact}", way_out)
