"""XLA's settings before its start, for right sums and for bits that do not depend on the machine.

Since jaxlib 0.10.2 XLA passes sums, maxima and windows to YNNPACK, and several of them come out wrong; bits.md has the
measurements. A flag of XLA keeps them in XLA itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

FLAGS_VARIABLE = "XLA_FLAGS"
OVERRULE = "POPDIST_ALLOW_WRONG_SUMS"
"""1 leaves a jaxlib that computes wrong sums as it is. Default: XLA flags that make its sums right."""
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
WITHOUT_SUMS = f"{FUSIONS}=-reduce"

FIRST_WRONG = "0.10.2"
LAST_MEASURED = "0.12.0.1"
"""The newest jaxlib that was measured; it sums wrongly. Newer versions are assumed to do so if they know the flag."""

DETERMINISTIC = "--xla_gpu_deterministic_ops"
SHARDED_AUTOTUNING = "--xla_gpu_shard_autotuning"
"""GPU flags. By default XLA times kernels and picks the fastest, and scatters add in any order; see gpus.md."""

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OF_MEMORY = (PREALLOCATE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")

POOL_VARIABLE = "PJRT_NPROC"
SMALLEST_POOL = 8

_SUMS = "reduce"
_PREFIX = "library_fusion_type_"


def adds_up_wrongly(jaxlib: str) -> bool:
    """Return whether a version of jaxlib sums wrongly on CPUs unless it is configured; False for "" (no jaxlib)."""
    return bool(jaxlib) and _numbers(jaxlib) >= _numbers(FIRST_WRONG)


def is_measured(jaxlib: str) -> bool:
    """Return whether a version of jaxlib is covered by our measurements."""
    return _numbers(jaxlib) <= _numbers(LAST_MEASURED)


def right_sums_setting(jaxlib: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set before JAX starts so that sums are right, including the user's own flags.

    The result is empty if the setting is unnecessary, no JAX program runs on a CPU, or the user has decided already.

    Args:
        jaxlib: Version of jaxlib; "" without jaxlib.
        environ: Environment variables of the process.
    """
    flags = _flags(environ)
    if (
        flags is None
        or not adds_up_wrongly(jaxlib)
        or not _may_use_cpu(environ)
        or is_overruled(environ)
        or not _gives_sums_away(flags)
        or _asks_for_it(flags)
    ):
        return {}
    return {FLAGS_VARIABLE: f"{flags} {WITHOUT_SUMS}".strip()}


def complain_of_sums(jaxlib: str, environ: Mapping[str, str]) -> str | None:
    """Return why sums on CPUs will be wrong, with advice, if JAX has started with these variables; else None.

    Args:
        jaxlib: Version of jaxlib; "" without jaxlib.
        environ: Environment variables of the process.
    """
    flags = _flags(environ)
    if flags is None or not adds_up_wrongly(jaxlib) or not _gives_sums_away(flags):
        return None
    if _asks_for_it(flags):
        fact, way_out = f"{FLAGS_VARIABLE} asks for it ({FUSIONS})", f"take {_SUMS} out of it"
    else:
        fact = f"JAX has started without {WITHOUT_SUMS}"
        way_out = f"make the strategy before JAX is used, or put that flag into {FLAGS_VARIABLE}"
    return (
        f"jaxlib {jaxlib} computes wrong sums on CPUs if it passes them to YNNPACK, and {fact}; "
        f"{way_out} ({OVERRULE}=1 allows wrong sums)"
    )


def deterministic_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set before JAX starts so that GPU programs have the same bits in every run.

    The result is empty if the user's own flags name the flag, with either value, or if XLA will not start.

    Args:
        environ: Environment variables of the process.
    """
    return _setting(DETERMINISTIC, "true", environ)


def own_autotuning_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set before JAX starts so that an instance compiles for GPUs independently of the others.

    By default JAX's processes share the timing of kernels, so each of them waits until all compile the same program
    (openxla/xla#13108). Instances compile at different times, and load each other's executables.

    Args:
        environ: Environment variables of the process.
    """
    return _setting(SHARDED_AUTOTUNING, "false", environ)


def names_deterministic(environ: Mapping[str, str]) -> bool:
    """Return whether XLA's flags set the determinism of GPU operations, to either value."""
    return _names(DETERMINISTIC, _flags(environ) or "")


def shared_memory_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set before JAX starts so that JAX leaves GPU memory to other processes.

    By default JAX takes three quarters of it at its start. The result is empty if the user has set JAX's share.

    Args:
        environ: Environment variables of the process.
    """
    return {} if any(name in environ for name in _OF_MEMORY) else {PREALLOCATE: "false"}


def is_overruled(environ: Mapping[str, str]) -> bool:
    """Return whether the user forbids our setting for right sums."""
    return environ.get(OVERRULE) == "1"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.11.1 for 0.11.1.dev20260901."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _setting(flag: str, value: str, environ: Mapping[str, str]) -> dict[str, str]:
    flags = _flags(environ)
    if flags is None or _names(flag, flags):
        return {}
    return {FLAGS_VARIABLE: f"{flags} {flag}={value}".strip()}


def _names(flag: str, flags: str) -> bool:
    return re.search(rf"(?:^|\s){flag}(?:=|\s|$)", flags) is not None


def _flags(environ: Mapping[str, str]) -> str | None:
    """Return XLA's flags. Text that does not begin with a minus is the name of a file. None: XLA will not start."""
    flags = environ.get(FLAGS_VARIABLE, "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        return " ".join(Path(flags).read_text().split())
    except OSError:
        return None


def _may_use_cpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    return not platforms or "cpu" in platforms.split(",")


def _gives_sums_away(flags: str) -> bool:
    """Return whether XLA passes sums to YNNPACK. Each flag changes or replaces the choice of the flags before it."""
    gives = True
    for wanted in _choices(flags):
        if f"-{_SUMS}" in wanted:
            gives = False
        elif f"+{_SUMS}" in wanted or _SUMS in wanted:
            gives = True
        elif not any(each.startswith(("+", "-")) for each in wanted):
            gives = False
    return gives


def _asks_for_it(flags: str) -> bool:
    """Return whether the user's last flag about sums asks for YNNPACK."""
    words = [word for wanted in _choices(flags) for word in wanted if word.lstrip("+-") == _SUMS]
    return bool(words) and not words[-1].startswith("-") and _gives_sums_away(flags)


def _choices(flags: str) -> list[list[str]]:
    """Return the values of the flag in order. XLA ignores case, and accepts a long name and quotes."""
    values = re.findall(rf"(?:^|\s){FUSIONS}=(\S*)", flags)
    return [value.strip("\"'").lower().replace(_PREFIX, "").split(",") for value in values]


def thread_pool_size(total_replicas: int) -> int:
    """Return the size of XLA's CPU thread pool in every instance of a job.

    XLA splits a matrix product by the size of this pool. The split decides the order of additions, hence the last bits
    of the result. The default size is max(cores, devices): it depends on the machine and on the instance's number of
    replicas. `PJRT_NPROC`, read when JAX starts its first backend, fixes the size. For the same bits
    with any spread of replicas, it may depend only on their total number. It must be at least the number of devices of
    one process.

    Args:
        total_replicas: Number of replicas of all instances.
    """
    return max(SMALLEST_POOL, total_replicas)


def thread_pool_setting(environ: Mapping[str, str], total_replicas: int) -> dict[str, str]:
    """Return the variable that sets the size of the pool; empty if the user has set it."""
    if POOL_VARIABLE in environ:
        return {}
    return {POOL_VARIABLE: str(thread_pool_size(total_replicas))}


_own_setting: dict[str, str] = {}


def fix_thread_pool(environ: MutableMapping[str, str], total_replicas: int) -> None:
    """Set the size of the pool in this process's environment, unless the user has set it.

    Args:
        environ: The environment of this process.
        total_replicas: Number of replicas of all instances.
    """
    setting = thread_pool_setting(environ, total_replicas)
    environ.update(setting)
    _own_setting.update(setting)


def without_own_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the size of the pool if `fix_thread_pool` has set it.

    It belongs to the replicas of this process. A job that this process starts may have another number of replicas.
    """
    return {name: value for name, value in environ.items() if _own_setting.get(name) != value}
