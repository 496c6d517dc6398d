"""Functions, results and exceptions on their way: cloudpickle, with large buffers beside the pickle.

Functions of the main program travel by value: a notebook and a script are no modules that instances could import.
"""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from popdist.errors import LaunchError
from popdist.launching.channel import Part

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_PROTOCOL = 5  # the first with buffers beside the pickle


def pack(value: object) -> list[Part]:
    """Return the pickle of a value, and the buffers of its arrays, which are not copied.

    Raises:
        LaunchError: cloudpickle is not installed.
        Exception: The value cannot be pickled.
    """
    cloudpickle = _cloudpickle()

    # Tracebacks show the file names of functions, and cloudpickle 3.1 drops them.
    table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reduce(self: object, value: object) -> object:
        _refuse_device_array(value)
        if isinstance(value, Exception) and _is_made_by_own_arguments(type(value)):
            return _exception, (type(value), value.args, vars(value))
        return cloudpickle.Pickler.reducer_override(self, value)

    pickler = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table, "reducer_override": reduce})
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    pickler(pickled, protocol=_PROTOCOL, buffer_callback=buffers.append).dump(value)
    return [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        raise LaunchError(
            "popdist.launch needs cloudpickle, which is not installed; install it with `pip install cloudpickle`"
        ) from None
    module: ModuleType = cloudpickle
    return module


def _refuse_device_array(value: object) -> None:
    """Refuse an array of JAX on an accelerator: loading it would start JAX before the strategy can configure it.

    On CPUs, poprun has set in the environment what JAX needs for equal bits.

    Raises:
        TypeError: The value is such an array.
    """
    if type(value).__module__.partition(".")[0] != "jaxlib" or not callable(devices := getattr(value, "devices", None)):
        return
    if others := {device.platform for device in devices()} - {"cpu"}:
        raise TypeError(f"an array of JAX on a {others.pop()} would start JAX there before a strategy; use np.asarray")


def _is_made_by_own_arguments(kind: type[Exception]) -> bool:
    """Return whether pickle would call a class's own `__init__` with the arguments of `Exception.__init__`."""
    return kind.__reduce__ is Exception.__reduce__ and inspect.isfunction(kind.__init__)


def _exception(kind: type[Exception], args: tuple[object, ...], state: dict[str, object]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    return _code_in_file, (code.co_filename, *_cloudpickle().Pickler.dispatch_table[CodeType](code))


def _code_in_file(file: str, make: Callable[..., CodeType], args: tuple[object, ...]) -> CodeType:
    return make(*args).replace(co_filename=file)


def unpack(parts: Sequence[Part]) -> object:
    """Return the value of `pack`; its arrays use the memory of the parts.

    Raises:
        Exception: A module is missing, or an object refuses.
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def pack_call(function: Callable[..., object], args: Sequence[object]) -> list[Part]:
    """Return a packed call.

    Raises:
        LaunchError: cloudpickle is not installed.
        TypeError: The function, an argument, or what the function refers to cannot be pickled.
    """
    try:
        with _by_value_if_necessary(function):
            return pack((function, tuple(args)))
    except LaunchError:
        raise
    except Exception as error:
        raise TypeError(
            f"the function {name_of(function)} cannot be sent to instances, because it {_culprit(function, args)}, "
            f"which cannot be pickled: {error}; make such objects (strategies, trainers, files, locks) inside the "
            "function"
        ) from error


def _culprit(function: Callable[..., object], args: Sequence[object]) -> str:
    """Return the first argument, or else variable outside of the function that it uses, that cannot be pickled."""
    for number, value in enumerate(args, 1):
        if not _can_be_packed(value):
            return f"gets argument {number}, a {type(value).__name__}"
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a Python function, or a variable without a value yet
        return "refers to an object"
    for name, value in {**used.globals, **used.nonlocals}.items():
        if not _can_be_packed(value):
            return f"refers to {name}, a {type(value).__name__}"
    return "refers to an object"


def _can_be_packed(value: object) -> bool:
    try:
        pack(value)
    except Exception:
        return False
    return True


def name_of(function: Callable[..., object]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def search_path() -> list[str]:
    """Return the folders in which this process finds modules, as absolute paths."""
    return [os.path.abspath(folder) for folder in sys.path]


def sources_of_main() -> dict[str, list[str]]:
    """Return the lines of the main program, and of source texts in no file, such as a notebook's cells, by name."""
    found = {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[2] and not os.path.exists(name)
    }
    file = getattr(sys.modules["__main__"], "__file__", None)
    return found | ({file: linecache.getlines(file)} if file else {})


def know_sources(sources: dict[str, list[str]]) -> None:
    """Let tracebacks of this process show these lines."""
    for name, lines in sources.items():
        if os.path.exists(name):
            continue
        # Without a time, `linecache.checkcache` does not look for a file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


@contextmanager
def _by_value_if_necessary(function: Callable[..., object]) -> Iterator[None]:
    """Let the functions of a module travel by value meanwhile, if instances could not import the module.

    pytest, for example, loads a file of tests from its path if `--import-mode` is importlib.
    """
    cloudpickle = _cloudpickle()
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value() or _is_importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Return whether a fresh process with the same search path imports the same file under this name."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends it by value in any case
    found, path, name = None, None, ""
    for word in module.__name__.split("."):
        name = f"{name}.{word}".lstrip(".")
        found = _find(name, path)
        if found is None:
            return False
        path = found.submodule_search_locations
    origin = getattr(module, "__file__", None)
    theirs = None if found is None else found.origin
    return origin is None or theirs is None or os.path.realpath(theirs) == os.path.realpath(origin)


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)
