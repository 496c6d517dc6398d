#!/bin/sh
# Runs tests that depend on the versions of Python and JAX with other versions, each in an environment of its own.
#
#   sh tests/versions.sh [PYTHON[=JAX] ...]     default: 3.11=oldest 3.12 3.13=newest
#
# "oldest" is the oldest JAX that setup.cfg allows; only tests of JAX run with it. Without a JAX, tests of Python run with
# the newest JAX. Interpreters are searched in PATH and in pyenv; a missing interpreter is skipped with a message. The
# environments are kept in .venv-versions.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
root=$(dirname -- "$here")
cd -- "$root"

# Tests of code that uses JAX's internals, or depends on its tracing, rounding, compiling or layouts; of files of Orbax,
# Grain and Keras; of whole jobs.
modules="callbacks casts checkpoints collective_equations compilation dataflow devices feed_program gradients
    grain_source host_calls iterations jaxpr loops precision program_text programs recomputation right_sums segments
    step_record trainer updates xla_pitfalls"
# shellcheck disable=SC2086 # several words
of_jax="$(printf 'tests/strategies/test_%s.py ' $modules)
    tests/strategies/keras_models/test_keras_metrics.py
    tests/strategies/pipelines/test_pipeline_stages.py tests/jobs/test_promises.py"
# Tests of sums by NumPy, and of threads, processes and command lines, which belong to Python.
of_python="tests/collectives/test_exact_sums.py tests/collectives/test_exchange.py tests/collectives/test_lanes.py
    tests/collectives/test_long_arrays.py tests/collectives/test_losing_members.py tests/collectives/test_reduction.py
    tests/popdist/test_sums.py tests/poprun"

say() {
    printf '%s\n' "versions.sh: $*" >&2
}

find_python() {
    for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
            printf '%s\n' "$python"
            return
        fi
    done
    return 1
}

oldest_jax() {
    sed -n 's/^ *jax *>= *\([0-9.]*\).*/\1/p' setup.cfg
}

pip_install() {
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Makes an environment and fills it in the background, because pip computes on one core.
begin_environment() {
    environment=$root/.venv-versions/$1-$2
    if ! python=$(find_python "$1"); then
        say "left out: no Python $1 in PATH or in pyenv"
        return
    fi
    wanted=$(cksum setup.cfg pyproject.toml setup.py collectives/native/kernel.c && "$python" --version)
    if [ "$(cat "$environment/made-of" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    rm -rf "$environment"
    "$python" -m venv "$environment"
    pip_install --no-deps --editable .
    pin=
    [ "$2" = newest ] || pin="jax==$(oldest_jax).*"
    { pip_install 'popdist-everywhere[test]' ${pin:+"$pin"} && printf '%s\n' "$wanted" >"$environment/made-of"; } &
}

run_on() {
    environment=$root/.venv-versions/$1-$2
    find_python "$1" >/dev/null || return 0
    if [ ! -f "$environment/made-of" ]; then
        failed="$failed $1=$2"
        return
    fi
    say "$("$environment/bin/python" -c 'import sys, jax, jaxlib; print("Python", sys.version.split()[0], "JAX", jax.__version__, "jaxlib", jaxlib.__version__)')"
    # shellcheck disable=SC2086 # several words
    PATH=$environment/bin:$PATH VIRTUAL_ENV=$environment "$environment/bin/python" -m pytest -q \
        --numprocesses "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder \
        $3 ||
        failed="$failed $1=$2"
}

unset PYTHONDONTWRITEBYTECODE
unset POPDIST_REQUIRE_HOROVOD # Horovod is built for another environment
failed=
[ $# -gt 0 ] || set -- 3.11=oldest 3.12 3.13=newest
for pair in "$@"; do
    case $pair in *=*) ;; *) pair=$pair=newest ;; esac
    begin_environment "${pair%%=*}" "${pair#*=}"
done
wait
for pair in "$@"; do
    case $pair in
    *=oldest) run_on "${pair%%=*}" oldest "$of_jax" ;;
    *=*) run_on "${pair%%=*}" "${pair#*=}" "$of_jax $of_python" ;;
    *) run_on "$pair" newest "$of_python" ;;
    esac
done
if [ -n "$failed" ]; then
    say "failed on:$failed"
    exit 1
fi
