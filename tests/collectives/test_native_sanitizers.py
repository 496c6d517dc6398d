"""The native kernel under the sanitizers of the C compiler: memory, undefined behaviour and data races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNEL = ROOT / "collectives" / "native" / "kernel.c"
LIMIT_S = 200.0

pytestmark = [pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(LIMIT_S + 20)]


def built(source: Path, target: Path, sanitizers: str, *options: str) -> Path:
    """Compile with sanitizers; skip the test if the compiler cannot."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-std=c11", "-g", "-O1", "-ffp-contract=off", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    probe = target.with_suffix(".c")
    probe.write_text("int main(void) { return 0; }\n")
    for each, given in ((probe, ()), (source, options)):
        command = [compiler, *flags, *given, str(each), "-o", str(target)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if each is probe and made.returncode:
            pytest.skip(f"{compiler} has no -fsanitize={sanitizers}: {made.stderr.strip()}")
        assert made.returncode == 0, made.stderr
    return target


def library(name: str) -> str:
    """Return the path of a library of the compiler."""
    command = [os.environ.get("CC", "cc"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(command: Sequence[str | Path], **environ: str) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_ranks_as_threads_are_clean(sanitizers: str, tmp_path: Path) -> None:
    run([built(HERE / "sanitized" / "ranks.c", tmp_path / "ranks", sanitizers, "-pthread")])


def test_the_module_is_clean(tmp_path: Path) -> None:
    """Python itself is not built with sanitizers, so it loads their library first, and leaks are not looked for."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        pytest.skip(f"the headers of Python are not in {headers}")
    options = ("-fPIC", "-shared", "-DPy_LIMITED_API=0x030b0000", f"-I{headers}")
    kernel = built(KERNEL, tmp_path / "_kernel.abi3.so", "address,undefined", *options)
    tests = [str(HERE / f"test_{name}.py") for name in ("native_sums", "prepared_reductions")]
    reuses_memory = "freed_one"  # the sanitizer does not reuse memory
    run(
        [sys.executable, HERE / "sanitized" / "run_tests.py", kernel, *tests, "-k", f"not {reuses_memory}"],
        LD_PRELOAD=" ".join(library(name) for name in ("libasan.so", "libubsan.so")),
        ASAN_OPTIONS="detect_leaks=0",
        PYTHONMALLOC="malloc",
    )
