#!/bin/sh
# Runs the tests of what depends on them on other versions of Python and JAX, each in an environment of its own.
#
#   sh tests/versions.sh [PYTHON=JAX ...]     default: 3.11=oldest 3.12=newest 3.13=newest
#
# "oldest" is the JAX that setup.cfg still allows. Interpreters are looked for in PATH and among those of pyenv; one that is
# not there is left out, and named. The environments are kept in .venv-versions.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
root=$(dirname -- "$here")
cd -- "$root"

# Of what reaches into JAX, or lives by how it traces, rounds, compiles and lays out; of what Orbax, Grain and Keras keep.
of_strategies="callbacks casts checkpoints collective_equations compilation devices elementwise feed_program gradients
    grain_source host_calls iterations jaxpr loops precision products program_text programs recomputation right_sums segments
    step_record trainer updates"
# Of what NumPy adds, of threads, processes and command lines, which are Python's, and of whole jobs.
others="tests/collectives/test_exact_sums.py tests/collectives/test_exchange.py tests/collectives/test_lanes.py
    tests/collectives/test_long_arrays.py tests/collectives/test_losing_members.py tests/collectives/test_reduction.py
    tests/popdist/test_sums.py tests/poprun tests/strategies/keras_models/test_keras_metrics.py
    tests/strategies/pipelines/test_pipeline_cuts.py tests/strategies/pipelines/test_pipeline_stages.py
    tests/jobs/test_promises.py"

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

run_on() {
    version=$1
    jax=$2
    if ! python=$(find_python "$version"); then
        say "left out: no Python $version in PATH, nor among those of pyenv"
        return
    fi
    environment=$root/.venv-versions/$version-$jax
    wanted=$(cksum setup.cfg pyproject.toml && "$python" --version)
    if [ "$(cat "$environment/made-of" 2>/dev/null)" != "$wanted" ]; then
        rm -rf "$environment"
        "$python" -m venv "$environment"
        pin=
        [ "$jax" = newest ] || pin="jax==$(oldest_jax).*"
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[test]' ${pin:+"$pin"}
        printf '%s\n' "$wanted" >"$environment/made-of"
    fi
    say "$("$environment/bin/python" -c 'import sys, jax, jaxlib; print("Python", sys.version.split()[0], "JAX", jax.__version__, "jaxlib", jaxlib.__version__)')"
    # shellcheck disable=SC2046,SC2086 # several words
    PATH=$environment/bin:$PATH VIRTUAL_ENV=$environment "$environment/bin/python" -m pytest -q \
        --numprocesses "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder \
        $others $(printf 'tests/strategies/test_%s.py ' $of_strategies) ||
        failed="$failed $version=$jax"
}

unset PYTHONDONTWRITEBYTECODE
unset POPDIST_REQUIRE_HOROVOD # it is built for another environment
failed=
[ $# -gt 0 ] || set -- 3.11=oldest 3.12=newest 3.13=newest
for pair in "$@"; do
    run_on "${pair%%=*}" "${pair#*=}"
done
if [ -n "$failed" ]; then
    say "failed on:$failed"
    exit 1
fi
