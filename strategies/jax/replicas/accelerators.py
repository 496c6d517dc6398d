"""The facts about this instance's accelerators, found before JAX starts, and the exchange that follows from them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
from dataclasses import replace
from pathlib import Path

from collectives.cuda.driver import visible_gpus
from popdist.instance import Instance
from popdist.timeline.recorder import Recorder
from strategies.exchange.choice import (
    CPU,
    GPU,
    ON_CPUS,
    SINGLE,
    ExchangeChoice,
    InstanceFacts,
    agreed_choice,
    are_facts_needed,
    asked_exchange,
)
from strategies.jax.programs.xla_pitfalls import jax_has_started
from strategies.jax.replicas.membership import Membership
from strategies.jax.replicas.processes import RuntimeState, runtime_state
from strategies.late_jax import is_jax_loaded, jax

_PLUGINS = "jax_plugins"
_OF_GPUS = ("cuda", "gpu", "rocm")


def exchange_of(
    membership: Membership, platform: str, variables_on_host: bool, gpu: str | None = None
) -> ExchangeChoice:
    """Return the exchange of a job, and note it in the timeline. Collective, except on CPUs with the default exchange.

    Args:
        membership: Membership of this instance.
        platform: Platform of its replicas.
        variables_on_host: Whether variables and optimizer state live in host memory.
        gpu: UUID of its first GPU in another framework than JAX; default: the first GPU by JAX's numbers.

    Raises:
        DeviceError, ValueError: As in `agreed_choice` and `asked_exchange`.
    """
    asked = asked_exchange(membership.defaults.exchange, os.environ)
    if not are_facts_needed(platform, asked):
        return ON_CPUS
    facts = facts_of(membership, platform, variables_on_host)
    own = facts if gpu is None else replace(facts, gpu=gpu, can_connect=True)  # for another framework than JAX
    chosen = agreed_choice(membership.communicator, own, asked)
    for each in membership.communicator.instruments.attached:
        if isinstance(each, Recorder):
            each.measured(f"exchange {chosen.word}", 1.0)
    return chosen


def facts_of(membership: Membership, platform: str, variables_on_host: bool) -> InstanceFacts:
    """Return the facts about this instance.

    Args:
        membership: Membership of this instance.
        platform: Platform of its replicas.
        variables_on_host: Whether variables and optimizer state live in host memory.
    """
    instance = membership.instance
    return InstanceFacts(
        platform,
        first_gpu(instance) if platform == GPU else "",
        machine_of(instance),
        membership.transport if instance.count > 1 else SINGLE,
        has_nccl(),
        membership.can_carry_on,
        variables_on_host,
        runtime_state(instance.count) in (RuntimeState.UNSTARTED, RuntimeState.CONNECTED),
    )


def expected_platform() -> str:
    """Return the platform of `jax.local_devices()`, "cpu", "gpu" or another word, without starting JAX.

    A plugin for GPUs counts only if the CUDA driver sees a GPU, because JAX falls back to the CPU without one.
    """
    if jax_has_started():
        return str(jax.local_devices()[0].platform)
    configured = _configured_platforms().split(",")[0].strip().lower()
    if configured:
        return GPU if configured in _OF_GPUS else configured
    plugins = _plugins()
    of_cuda = [each for each in plugins if "cuda" in each]
    if "rocm" in " ".join(plugins) or (of_cuda and visible_gpus()):
        return GPU
    others = [each for each in plugins if each not in of_cuda]
    if importlib.util.find_spec("libtpu") is not None:
        others.append("tpu")
    return others[0] if others else CPU


def _configured_platforms() -> str:
    """Return JAX's option `jax_platforms`; if JAX is not imported, the variable from which it will take the option."""
    if not is_jax_loaded():
        return os.environ.get("JAX_PLATFORMS", "")
    return str(jax.config.jax_platforms or "")  # type: ignore[attr-defined]


def first_gpu(instance: Instance) -> str:
    """Return the UUID of the GPU that `choose_grid` gives to an instance's first replica; "" without a driver."""
    gpus = visible_gpus()
    place = instance.local_index * instance.local_replicas * instance.ipus_per_replica
    return gpus[place % len(gpus)].uuid if gpus else ""


def machine_of(instance: Instance) -> str:
    """Return a text that is equal for processes able to map each other's memory: host, boot and namespaces."""
    parts = [instance.host]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot.read_text().strip() if boot.exists() else "")
    namespaces = (Path("/proc/self/ns") / name for name in ("ipc", "pid"))
    parts += [str(each.stat().st_ino) for each in namespaces if each.exists()]
    return " ".join(parts)


def has_nccl() -> bool:
    """Return whether NCCL is installed, as the package that JAX and PyTorch require or as a library of the system."""
    try:
        if importlib.util.find_spec("nvidia.nccl") is not None:
            return True
    except ModuleNotFoundError:
        pass
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")
    return any(Path(folder, "libnccl.so.2").exists() for folder in folders)


def _plugins() -> list[str]:
    """Return the names of the plugins that JAX will load, as `jax._src.xla_bridge.discover_pjrt_plugins` finds them."""
    names = {entry.value for entry in importlib.metadata.entry_points(group=_PLUGINS)}
    found = importlib.util.find_spec(_PLUGINS)
    if found is not None and found.submodule_search_locations:
        names.update(each.name for each in pkgutil.iter_modules(list(found.submodule_search_locations)))
    return sorted(name.rpartition(".")[2] for name in names)
