"""Settings that XLA reads before it starts, so that sums are right and bits do not depend on the machine.

From jaxlib 0.10.2 on, XLA gives sums, maxima and windows to YNNPACK, where several of them come out wrong: see
bits.md for what was measured. A flag of XLA keeps them where they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

FLAGS_VARIABLE = "XLA_FLAGS"
OVERRULE = "POPDIST_ALLOW_WRONG_SUMS"
"""1 leaves a jaxlib that computes wrong sums as it is. Default: XLA flags that make its sums right."""
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
WITHOUT_SUMS = f"{FUSIONS}=-reduce"

FIRST_WRONG = "0.10.2"
LAST_MEASURED = "0.12.0.1"
"""The newest jaxlib that was looked at, and is wrong; newer ones are held to be so as long as they know the flag."""

DETERMINISTIC = "--xla_gpu_deterministic_ops"
SHARDED_AUTOTUNING = "--xla_gpu_shard_autotuning"
"""Without it XLA times kernels and takes the fastest, and adds in any order in scatters; see gpus.md."""

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_OF_MEMORY = (PREALLOCATE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")

POOL_VARIABLE = "PJRT_NPROC"
SMALLEST_POOL = 8

_SUMS = "reduce"
_PREFIX = "library_fusion_type_"


def adds_up_wrongly(jaxlib: str) -> bool:
    """Return whether a version of jaxlib gives wrong sums on CPUs unless it is set up; False for none ("")."""
    return bool(jaxlib) and _numbers(jaxlib) >= _numbers(FIRST_WRONG)


def is_measured(jaxlib: str) -> bool:
    """Return whether what is known of a version of jaxlib was found out by running it."""
    return _numbers(jaxlib) <= _numbers(LAST_MEASURED)


def right_sums_setting(jaxlib: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set so that sums are right, with the user's own flags in it; before JAX starts.

    Nothing where it is not needed, where no program of JAX runs on a CPU, and where the user has decided.

    Args:
        jaxlib: its version; "" where there is none.
        environ: the variables of the process.
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
    """Return why sums will be wrong on CPUs, and the way out, where JAX has started with these variables; else None.

    Args:
        jaxlib: its version; "" where there is none.
        environ: the variables of the process.
    """
    flags = _flags(environ)
    if flags is None or not adds_up_wrongly(jaxlib) or not _gives_sums_away(flags):
        return None
    if _asks_for_it(flags):
        fact, way_out = f"{FLAGS_VARIABLE} asks for it ({FUSIONS})", f"take {_SUMS} out of it"
    else:
        fact = f"JAX has started without {WITHOUT_SUMS}"
        way_out = f"make the strategy before JAX is used, or put that into {FLAGS_VARIABLE}"
    return (
        f"jaxlib {jaxlib} adds up wrongly on CPUs when it leaves sums to YNNPACK, and {fact}; "
        f"{way_out} ({OVERRULE}=1 lets it add up wrongly)"
    )


def deterministic_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set so that programs on GPUs have the same bits in each run; before JAX starts.

    Nothing where the user's own flags name the flag, with either value, and where XLA will not start.

    Args:
        environ: the variables of the process.
    """
    return _setting(DETERMINISTIC, "true", environ)


def own_autotuning_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set so that an instance compiles for GPUs without the others; before JAX starts.

    JAX's processes otherwise share the timing of kernels, so that each of them waits until all compile the same program
    (openxla/xla#13108). Instances compile at different times, and load what another one has compiled.

    Args:
        environ: the variables of the process.
    """
    return _setting(SHARDED_AUTOTUNING, "false", environ)


def names_deterministic(environ: Mapping[str, str]) -> bool:
    """Return whether XLA's flags say whether operations on GPUs are deterministic."""
    return _names(DETERMINISTIC, _flags(environ) or "")


def shared_memory_setting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set so that JAX leaves memory of a GPU to other processes; before JAX starts.

    Otherwise it takes three quarters when it starts. Nothing where the user has set how much it takes.

    Args:
        environ: the variables of the process.
    """
    return {} if any(name in environ for name in _OF_MEMORY) else {PREALLOCATE: "false"}


def is_overruled(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants jaxlib to be left as it is."""
    return environ.get(OVERRULE) == "1"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning, so that 0.11.1.dev20260901 is 0.11.1."""
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
    """XLA's flags; what does not begin with a minus is the name of a file with them. None: XLA will not start."""
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
    """Return whether sums are still among what XLA gives to YNNPACK; each flag changes or replaces what was so far."""
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
    """Return whether the last word about sums is the user's wish for YNNPACK."""
    words = [word for wanted in _choices(flags) for word in wanted if word.lstrip("+-") == _SUMS]
    return bool(words) and not words[-1].startswith("-") and _gives_sums_away(flags)


def _choices(flags: str) -> list[list[str]]:
    """Return the values of the flag, in order; XLA takes upper and lower case, a long name and quotes."""
    values = re.findall(rf"(?:^|\s){FUSIONS}=(\S*)", flags)
    return [value.strip("\"'").lower().replace(_PREFIX, "").split(",") for value in values]


def thread_pool_size(total_replicas: int) -> int:
    """Return how many threads XLA's CPU pool has in every instance of a job.

    XLA splits a matrix product by the size of this pool, and how it is split decides the order in which the
    terms are added, hence the last bits of the result. By default the size is max(cores, devices) and so
    depends on the machine and on how many replicas the instance drives. `PJRT_NPROC`, read when JAX starts
    its first backend, fixes it. For the same bits however the replicas are spread it may depend on nothing
    but their total number, and it must not be smaller than the devices of one process.

    Args:
        total_replicas: the replicas of all instances.
    """
    return max(SMALLEST_POOL, total_replicas)


def thread_pool_setting(environ: Mapping[str, str], total_replicas: int) -> dict[str, str]:
    """Return the variable to set so that the pool has its size; nothing where the user has set it already."""
    if POOL_VARIABLE in environ:
        return {}
    return {POOL_VARIABLE: str(thread_pool_size(total_replicas))}
