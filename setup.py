"""The build of the optional kernel in C; setup.cfg holds everything else."""

from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

SOURCE = "collectives/native/kernel.c"
PYTHON = 0x030B0000  # one binary for Python 3.11 and newer

# The bits of sums must be NumPy's: no contraction of a multiplication and an addition, and no fast arithmetic.
OPTIONS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]

kernel = Extension(
    "collectives.native._kernel",
    [SOURCE],
    define_macros=[("Py_LIMITED_API", hex(PYTHON)), ("SOURCE_CRC32", f"{crc32(Path(SOURCE).read_bytes())}u")],
    extra_compile_args=OPTIONS,
    py_limited_api=True,
    optional=True,  # without a compiler, NumPy does the same work
)

setup(ext_modules=[kernel], options={"bdist_wheel": {"py_limited_api": "cp311"}})
