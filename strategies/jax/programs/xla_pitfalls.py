"""Faults and silent choices of JAX and XLA, and measures that protect the bits of a program from them.

They are wrong sums of some jaxlibs, aborts for lack of address space, silent loss of precision, the order of
computations, and products contracted with sums.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import mmap
import resource
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from popdist.xla import (
    DETERMINISTIC,
    FLAGS_VARIABLE,
    FUSIONS,
    adds_up_wrongly,
    complain_of_sums,
    deterministic_setting,
    is_measured,
    is_overruled,
    names_deterministic,
    right_sums_setting,
)
from strategies.errors import DeviceError
from strategies.jax.programs.jaxpr import Equation, Variable, bind, body_of_call, evaluate, variables
from strategies.late_jax import is_jax_loaded, jax, jnp
from strategies.late_jax import jax_core as core
from strategies.typing import Function, Leaf, Tree

_LIBRARY = "libjax_common.so"

THREADS_RESERVE_BYTES = 5 << 28
"""The address space that XLA's threads reserve when its first program runs, most of it never used.

26 threads each have a stack and a malloc arena of 64 MiB. Measured on two cores: 1.2 GB with up to 8 replicas, and more
with more replicas.
"""

_XLA_THREADS = "tf_"  # beginning of their names, which Linux cuts to 15 characters

_PRODUCTS = frozenset(
    {"mul", "square", "integer_pow", "div", "pow", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic"}
)
"""The operations that end in a product, or may end in one after XLA has rewritten them."""

# ---- wrong sums


def use_right_sums(environ: MutableMapping[str, str]) -> None:
    """Set the XLA flag that makes sums on CPUs right. It has an effect only if JAX has not started.

    Args:
        environ: `os.environ`, from which XLA reads its flags when JAX starts; the flag stays there for child
            processes.
    """
    if not jax_has_started() and _can_be_wrong():
        environ.update(right_sums_setting(_version_of_jaxlib(), environ))


def insist_on_right_sums(environ: Mapping[str, str]) -> None:
    """Refuse to compute on CPUs with sums that may be wrong. Call it once JAX has started.

    Args:
        environ: Environment variables, with XLA's flags and the variable that overrules this check.

    Raises:
        DeviceError: JAX has started without the flag of `use_right_sums`, or the user's flags make XLA add wrongly.
    """
    complaint = complain_of_sums(_version_of_jaxlib(), environ) if _can_be_wrong() else None
    if complaint is None:
        return
    if not is_overruled(environ):
        raise DeviceError(complaint)
    _warn(complaint)


def jax_has_started() -> bool:
    """Return whether JAX has made its devices. Only then does it refuse to change their number."""
    if not is_jax_loaded():
        return False
    number: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # JAX adds its options later
    try:
        jax.config.update("jax_num_cpu_devices", number + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


@cache
def _version_of_jaxlib() -> str:
    """Return the version of jaxlib, without importing it."""
    return importlib.metadata.version("jaxlib")


@cache
def _can_be_wrong() -> bool:
    """Return whether the installed jaxlib may add wrongly; an unmeasured version counts only if it knows the flag.

    XLA ends the process at a flag that it does not know.
    """
    version = _version_of_jaxlib()
    return adds_up_wrongly(version) and (is_measured(version) or _is_in_library(FUSIONS.lstrip("-")))


def _is_in_library(word: str) -> bool:
    """Return whether jaxlib's library contains a word; that takes 15 ms if it does."""
    found = importlib.util.find_spec("jaxlib")
    library = Path(found.origin).with_name(_LIBRARY) if found is not None and found.origin else None
    if library is None or not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(word.encode()) >= 0


@cache
def _warn(complaint: str) -> None:
    """Warn once in a process."""
    logger.warning("%s", complaint)


# ---- address space: without enough of it XLA aborts the process silently


def warn_of_little_address_space() -> None:
    """Warn, before XLA starts, that the process will probably abort because of `ulimit -v`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and not _xla_has_threads() and (fault := describe_lack(limit, _used_bytes())):
        logger.warning("%s", fault)


def describe_lack(limit: int, used: int) -> str:
    """Return the warning about a limit of address space that is too low, or "" if enough is left."""
    if limit - used >= THREADS_RESERVE_BYTES:
        return ""
    return (
        f"this process may use {limit / 1e9:.2f} GB of address space (ulimit -v) and uses {used / 1e9:.2f} GB; XLA's "
        f"threads reserve {THREADS_RESERVE_BYTES / 1e9:.2f} GB and more, and it aborts if they cannot; raise "
        "the limit, or limit memory by a cgroup instead (systemd-run -p MemoryMax=..., Slurm's --mem)"
    )


def _xla_has_threads() -> bool:
    """Return whether XLA has started its threads; JAX has no public way to ask."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            if name.read_text().startswith(_XLA_THREADS):
                return True
    return False


def _used_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# ---- lost precision


def check_no_float64(value: Tree, role: str = "input") -> Tree:
    """Return the value if JAX will not silently change its precision.

    Raises:
        TypeError: A leaf is float64, and JAX has no 64 bits enabled.
    """
    if not jax.config.read("jax_enable_x64"):
        for leaf in jax.tree.leaves(value):
            if getattr(leaf, "dtype", None) == np.float64:
                raise TypeError(f"Unsupported data type for {role}: float64; convert it to float32")
    return value


def check_integers_fit(value: Tree) -> Tree:
    """Return the value if JAX will not cut off integers.

    Raises:
        ValueError: A NumPy array has integers that do not fit into 32 bits, and JAX has no 64 bits enabled.
    """
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iu":
            continue
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if kept != leaf.dtype and not np.array_equal(leaf.astype(kept), leaf):
            raise ValueError(
                f"{leaf.dtype} numbers from {leaf.min()} to {leaf.max()} do not fit into {kept}, which JAX would keep; "
                "use smaller numbers, or enable 64 bits (JAX_ENABLE_X64=1)"
            )
    return value


# ---- the order of computations
#
# `jax.lax.optimization_barrier` does not reach XLA's scheduler on CPU: XLA drops barriers before it orders what it
# computes.


def is_true(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return True as soon as all arrays are computed; the compiler does not know that the value is constant."""
    answer = jnp.array(True)
    for array in arrays:
        if array.size:
            first = array.reshape(-1)[0]
            if jnp.issubdtype(array.dtype, jnp.floating):
                answer &= first * 0 != 1  # 0 times NaN is not 0, so it is not folded
            else:
                answer &= first.astype(jnp.int32) & 1 != 2
    return answer


def behind(condition: jax.Array, array: jax.Array) -> jax.Array:
    """Return the same array, which programs can read only after the condition, a result of `is_true`."""
    return jnp.where(condition, array, jnp.zeros_like(array))


# ---- products that are contracted with sums
#
# XLA's CPU backend lets LLVM contract a product and a sum to one operation with a single rounding (a fused
# multiply-add). If two products are added, only one of them can be contracted. The loop around them decides which one:
# its length, its vectorisation, and the operations fused into it. So an update of a part of an array could differ in
# the last bit from the update of the whole array. That was seen with AdamW behind a clip, Adan, schedule-free and
# `optax.MultiSteps`. Without contraction sums, products, quotients and square roots follow IEEE 754, which leaves no
# choice.


def with_rounded_products(function: Function) -> Function:
    """Return the same function, in which no product is contracted with a sum; traceable.

    Args:
        function: Function of pytrees of arrays. Loops, branches and calls in it are rounded too. It is not
            differentiated.
    """

    def rounded(*arguments: Tree, **named: Tree) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments, **named)
        leaves = jax.tree.leaves((arguments, named))
        found = next((leaf for leaf in leaves if leaf.size), None)
        if found is None:
            return function(*arguments, **named)
        zero = jnp.where(is_true([found]), jnp.uint32(0), jnp.uint32(1))  # always 0, which the compiler does not know
        results = _evaluate(closed, leaves, zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Leaf], zero: jax.Array) -> list[Leaf]:
    summed = set(_summed(closed.jaxpr))

    def results_of(equation: Equation, given: list[Leaf]) -> Sequence[Leaf]:
        results = _results(closed.jaxpr, equation, given, zero)
        if equation.primitive.name in _PRODUCTS and equation.outvars[0] in summed:
            results = [_rounded(results[0], zero)]
        return results

    return evaluate(closed, arguments, results_of)


def _summed(jaxpr: core.Jaxpr) -> Iterator[Variable]:
    """Return the variables that operations other than products read, because they may go into a sum.

    The result of a product that only other products read is left out. XLA may then rewrite products of products (it
    merges two divisions into one): it does the same everywhere, and the program is faster.
    """
    read = [equation.invars for equation in jaxpr.eqns if equation.primitive.name not in _PRODUCTS]
    return variables(itertools.chain(*read, jaxpr.outvars))


def _results(like: core.Jaxpr, equation: Equation, given: Sequence[Leaf], zero: jax.Array) -> Sequence[Leaf]:
    name, params = equation.primitive.name, equation.params
    if name in ("sqrt", "rsqrt"):
        root = _rounded(jax.lax.sqrt(given[0]), zero)
        return [root if name == "sqrt" else jnp.ones_like(root) / root]
    if name == "cond":
        return _chosen(params["branches"], given, zero)
    if name == "while":
        return _repeated(params, given, zero)
    if name == "scan":
        return _scanned(equation, given, zero)
    body = body_of_call(equation, is_derived=True)
    return bind(like, equation, given) if body is None else _evaluate(body, given, zero)


def _rounded(product: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the product by way of integers, through which LLVM does not contract."""
    if not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    if product.dtype == jnp.float16:  # on CPUs with avx512_fp16, LLVM aborts when float16 bits are read as integers
        return _rounded(product.astype(jnp.float32), zero).astype(jnp.float16)
    words = jnp.dtype(f"uint{8 * product.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(product, words) ^ zero.astype(words)
    return jax.lax.bitcast_convert_type(bits, product.dtype)


# ---- loops and branches


def _closed(body: core.ClosedJaxpr, zero: jax.Array) -> Callable[..., list[Leaf]]:
    return lambda *given: _evaluate(body, given, zero)


def _chosen(branches: Sequence[Any], given: Sequence[Leaf], zero: jax.Array) -> Sequence[Leaf]:
    index, *operands = given
    results: list[Leaf] = jax.lax.switch(index, [_closed(branch, zero) for branch in branches], *operands)
    return results


def _repeated(params: Any, given: Sequence[Leaf], zero: jax.Array) -> Sequence[Leaf]:
    of_condition, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    is_wanted, body = (_closed(params[name], zero) for name in ("cond_jaxpr", "body_jaxpr"))
    results: list[Leaf] = jax.lax.while_loop(
        lambda state: is_wanted(*given[:of_condition], *state)[0],
        lambda state: body(*given[of_condition:of_body], *state),
        list(given[of_body:]),
    )
    return results


def _scanned(equation: Equation, given: Sequence[Leaf], zero: jax.Array) -> Sequence[Leaf]:
    inner = equation.params["jaxpr"]
    body = _closed(inner, zero)
    # Shapes tell how many values are carried and how many are cut into rows: JAX's parameters for it have changed.
    cut = sum(outer.aval.ndim > row.aval.ndim for outer, row in zip(equation.invars, inner.jaxpr.invars, strict=True))
    carried = sum(
        outer.aval.ndim == result.aval.ndim for outer, result in zip(equation.outvars, inner.jaxpr.outvars, strict=True)
    )
    last = len(given) - cut
    first = last - carried

    def step(state: list[Leaf], rows: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        results = body(*given[:first], *state, *rows)
        return results[:carried], results[carried:]

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    state, rows = jax.lax.scan(step, list(given[first:last]), list(given[last:]), **options)
    return [*state, *rows]


logger = logging.getLogger(__name__)

WAY_OUT = "Defaults(deterministic=False) allows operations whose bits differ from run to run (docs: gpus)"
_COMPLAINT = "determinis"


def use_deterministic_operations(environ: MutableMapping[str, str]) -> None:
    """Make XLA compile deterministic operations on GPUs; warn once if JAX has started already without them.

    XLA then takes the first kernel that works and times none, except for kernels in a cache of timings
    (xla/backends/autotuner/autotuner.cc). JAX keeps such a cache beside its executables. Other programs may have filled
    it, so it is turned off.

    Args:
        environ: `os.environ`, from which XLA reads its flags when JAX starts.
    """
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    if not jax_has_started():
        environ.update(deterministic_setting(environ))
    elif not names_deterministic(environ):
        _warn(
            f"JAX has started without {DETERMINISTIC}=true, so programs on GPUs may give other bits in each run; make "
            f"the strategy before you use JAX, put the flag into {FLAGS_VARIABLE}, or choose that with "
            "Defaults(deterministic=False)"
        )


@contextmanager
def way_out_of_refusals() -> Iterator[None]:
    """Add a note with the way out to XLA's error about an operation that has no deterministic form."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _COMPLAINT in str(error):
            error.add_note(WAY_OUT)
        raise
