"""Layers of the project: the packages that each package may import."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import draw_rooms
import pytest
from draw_rooms import EXAMPLES, modules_of

from strategies.late_names import places_in

ROOT = Path(__file__).parents[1]
OURS = {"collectives", "popdist", "poprun", "strategies"}

NUMERIC = {"numpy", "ml_dtypes"}
MACHINE_LEARNING = {"jax", "jaxlib", "optax", "sklearn", "tqdm", *NUMERIC}

ALLOWED = {
    "collectives": {"typing_extensions", *NUMERIC},
    "popdist": {"collectives", "mpi4py", "numpy", "typing_extensions"},
    "poprun": {"ClusterShell", "popdist", "tomli_w", "typing_extensions"},
    "strategies": {"collectives", "popdist", "typing_extensions", *MACHINE_LEARNING},
    "popdist/examples": {"popdist", "strategies", "collectives", *MACHINE_LEARNING},
}
TRANSPORTS = {
    "collectives/backends/horovod.py": {"horovod", "mpi4py", "torch"},
    "collectives/backends/mpi.py": {"mpi4py"},
    "collectives/network/__init__.py": {"grpc"},
    "collectives/network/admission.py": {"grpc"},
    "collectives/network/meeting.py": {"grpc"},
    "collectives/network/node.py": {"grpc"},
    "collectives/network/peer.py": {"grpc"},
    "collectives/network/wire.py": {"grpc"},
    "collectives/network/worker.py": {"grpc"},
    "collectives/simulation/plotting.py": {"matplotlib"},
    "popdist/examples/keras_digits.py": {"keras"},
    "popdist/examples/listings/estimator_workers.py": {"keras"},
    "popdist/examples/listings/keras_pipelined.py": {"keras"},
    "popdist/examples/listings/keras_quick_start.py": {"keras"},
    "popdist/examples/listings/poptorch_network.py": {"torch"},
    "popdist/examples/poptorch_digits.py": {"torch"},
    "popdist/examples/torch_digits.py": {"torch"},
    "popdist/launching/travelling.py": {"cloudpickle"},
    "popdist/timeline/profiles.py": {"jax", "torch"},
    "poprun/__main__.py": {"collectives"},
    "poprun/monitor/rich_screen.py": {"rich"},
    "strategies/checkpoints/checkpoint_folder.py": {"orbax"},
    "strategies/compat/estimator/keras_variables.py": {"keras"},
    "strategies/data/grain_source.py": {"absl", "grain"},
    "strategies/sinks/services.py": {"mlflow", "prometheus_client", "tensorboard", "wandb"},
}
LIBRARIES = {
    "poprun/trace": {"numpy"},
    "strategies/keras": {"keras"},
    "strategies/torch": {"torch"},
    "strategies/torch/lightning": {"lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"},
    "strategies/compat/poptorch": {"torch"},
}
POPRUN_MAY_KNOW = tuple(
    f"popdist.{name}"
    for name in (
        "environments",
        "errors",
        "instance",
        "launching",
        "records",
        "membership.standby",
        "timeline",
        "version",
        "xla",
    )
)
IN_PROGRAMS = "poprun/agent/holding/sitecustomize.py"
"""The file of poprun that runs in the programs' processes, and may use what they use."""
OF_TORCH = {"popdist.poptorch", "strategies.torch", "strategies.torch.poptorch"}
DOORS = {
    "collectives/__init__.py": "connects by the transport that the user names, and needs the libraries of no other",
    "popdist/compat.py": "looks the original's names up in a table when a program asks for one",
    "strategies/late_names.py": "imports the public names of a package, which type checkers find in a stub",
    "popdist/poptorch.py": "is the original's name of a module; a program that imports it asks for PopTorch",
}
"""The files that import modules by name, chosen here or by the user, and their reasons."""
PUBLIC = {"popdist", "strategies", "strategies.keras", "collectives", *OF_TORCH}


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the full names of all imports in a module, including imports by name unless the file is a door."""
    tree = ast.parse(path.read_text())
    names = set() if path.relative_to(ROOT).as_posix() in DOORS else set(draw_rooms.imported_by_name(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module
            names.add(node.module)
    return frozenset(names)


def test_only_doors_import_our_modules_by_name() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for package in OURS
        for path in modules_of(package)
        for name in draw_rooms.imported_by_name(ast.parse(path.read_text()))
        if not name or name.partition(".")[0] in OURS
    }
    assert found == set(DOORS)


def test_no_package_imports_a_door() -> None:
    """Therefore no circle contains a door."""
    doors = {path.removesuffix(".py").replace("/", ".") for path in DOORS if not path.endswith("__init__.py")}
    others = [path for package in OURS for path in modules_of(package) if path.name != "__init__.py"]
    assert [path for path in others if doors & imports_of(path)] == []


def allowed_in(path: Path) -> set[str]:
    """Return the modules that a file may import besides its package's: a transport, or its room's library."""
    file = path.relative_to(ROOT).as_posix()
    rooms = [libraries for room, libraries in LIBRARIES.items() if file.startswith(f"{room}/")]
    return TRANSPORTS.get(file, set()).union(*rooms)


def is_foreign(name: str, siblings: set[str]) -> bool:
    return name not in sys.stdlib_module_names and name not in siblings


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_the_layers_below(package: str) -> None:
    assert modules_of(package)
    siblings = {package}
    forbidden = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(package)
        for name in imports_of(path)
        if is_foreign(name.partition(".")[0], siblings)
        and name.partition(".")[0] not in ALLOWED[package] | allowed_in(path)
    ]
    assert forbidden == []


def test_poprun_imports_only_descriptions_of_instances() -> None:
    forbidden = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of("poprun")
        if path.relative_to(ROOT).as_posix() != IN_PROGRAMS
        for name in imports_of(path)
        if name.partition(".")[0] == "popdist"
        and not any(name == known or name.startswith(f"{known}.") for known in POPRUN_MAY_KNOW)
    ]
    assert forbidden == []


def test_examples_use_only_the_public_interface() -> None:
    forbidden = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(EXAMPLES)
        if path.name != "__init__.py"  # which runs before an example, and is none
        for name in imports_of(path)
        if name.partition(".")[0] in OURS and name not in PUBLIC and not name.startswith("popdist.examples")
    ]
    assert forbidden == []


def test_a_backend_is_loaded_only_by_its_name() -> None:
    """Only its users need its library; threads need none."""
    importers = [
        path.relative_to(ROOT).as_posix()
        for package in ("collectives", "popdist", "strategies")
        for path in modules_of(package)
        for name in imports_of(path)
        if name.startswith("collectives.backends") and name != "collectives.backends.thread"
    ]
    assert importers == []


def loaded_by(*statements: str) -> list[set[str]]:
    """Return the top-level modules that are loaded after each of the statements, in one fresh interpreter."""
    shown = "print(*{name.partition('.')[0] for name in sys.modules})"
    program = "\n".join(["import sys", *(f"{statement}; {shown}" for statement in statements)])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return [set(line.split()) for line in ended.stdout.splitlines()]


OF_JAX = {"absl", "flax", "grain", "jax", "jaxlib", "keras", "optax", "orbax", "tensorboard"}
NEVER = OF_JAX | {"mpi4py", "grpc", "horovod"}
HEAVY = NEVER | {"ml_dtypes", "numpy", "torch"}
LOADING = {
    "import poprun.__main__, poprun.agent.guard": HEAVY,
    "import popdist, popdist.environments": HEAVY,
    "import strategies": HEAVY,
    "import collectives": NEVER | {"torch"},
    "strategies.LocalStrategy, strategies.PopDistStrategy, strategies.Checkpoints, strategies.config": NEVER
    | {"torch"},
}
"""The libraries that these imports, one after another in one process, do not load."""
OF_PYTORCH = "import strategies.torch; [getattr(strategies.torch, name) for name in strategies.torch.__all__]"


def test_imports_load_only_the_libraries_that_they_need() -> None:
    """A name of `strategies` loads what it needs at its first use; `strategies.torch` needs no JAX."""
    of_torch = {OF_PYTORCH: NEVER} if importlib.util.find_spec("torch") else {}
    lists = LOADING | of_torch
    found = dict(zip(lists, loaded_by(*lists), strict=True))
    assert {statement: found[statement] & lists[statement] for statement in lists} == dict.fromkeys(lists, set())


@pytest.mark.parametrize("package", ["strategies", "strategies/torch"])
def test_programs_find_all_public_names_of_the_stub_for_type_checkers(package: str) -> None:
    init = ROOT / package / "__init__.py"
    [docstring, *imports] = ast.parse(init.with_suffix(".pyi").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert names_imported_in(imports) == places_in(str(init))


def names_imported_in(statements: Sequence[ast.stmt]) -> dict[str, str | None]:
    """Return the module of each name, which all statements import under its own name."""
    assert all(isinstance(node, ast.ImportFrom) for node in statements)
    found = [(alias, node.module) for node in statements for alias in node.names]
    assert all(alias.name == alias.asname for alias, _ in found)
    return {alias.name: module for alias, module in found}


def test_every_package_of_the_project_has_a_rule() -> None:
    """The rules are above."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= OURS


def test_only_the_room_of_programs_walks_through_equations() -> None:
    """Other rooms ask `strategies/jax/programs/jaxpr.py` about traced programs."""
    looking = {
        path.parent.relative_to(ROOT).as_posix()
        for path in modules_of("strategies")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "eqns"
    }
    assert looking == {"strategies/jax/programs"}


FREE_OF_FRAMEWORKS = ("strategies/core", "strategies/exchange")
"""The rooms that use only NumPy and protocols, so that any engine may use them."""
FRAMEWORKS = {"jax", "jaxlib", "keras", "optax", "torch"}
LATE = {"strategies.late_jax", "strategies.trees"}
"""The modules by which rooms reach JAX, which these rooms must not use either."""


class RunTimeImports(ast.NodeVisitor):
    """The names that a module imports at run time, anywhere in it."""

    def __init__(self, path: Path) -> None:
        self.names: set[str] = set()
        self.visit(ast.parse(path.read_text()))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.names.update([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])


def test_core_and_exchange_use_no_framework_even_indirectly() -> None:
    files = {draw_rooms.name_of(path): path for package in OURS for path in modules_of(package)}
    left = [path for room in FREE_OF_FRAMEWORKS for path in modules_of(room)]
    used: dict[Path, set[str]] = {}
    while left:
        if (path := left.pop()) not in used:
            used[path] = RunTimeImports(path).names
            left += [files[name] for name in used[path] if name in files]
    assert len(used) > len(modules_of(FREE_OF_FRAMEWORKS[0]))
    forbidden = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path, names in used.items()
        for name in names
        if name in LATE
        or name.partition(".")[0] in FRAMEWORKS - allowed_in(path)  # what records a framework's own profile may know it
    }
    assert forbidden == set()


def test_core_and_exchange_load_no_framework() -> None:
    """The package is built by hand, because its own `__init__` loads what all users need."""
    names = [draw_rooms.name_of(path) for room in FREE_OF_FRAMEWORKS for path in modules_of(room)]
    empty = f"types; empty = types.ModuleType('strategies'); empty.__path__ = [{str(ROOT / 'strategies')!r}]"
    [loaded] = loaded_by("; import ".join([f"import {empty}; sys.modules['strategies'] = empty", *names]))
    assert "numpy" in loaded
    assert loaded & FRAMEWORKS == set()


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_files_do_not_import_each_other_in_a_circle(package: str) -> None:
    """Imports for types or within functions count, too: neither file could be understood without the other."""
    TopologicalSorter(draw_rooms.imported_by(package)).prepare()
