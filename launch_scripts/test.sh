#!/bin/sh
# Runs the linters, then the tests.
#
#   sh launch_scripts/test.sh [arguments of pytest]              the default tier: minutes
#   sh launch_scripts/test.sh --complete [arguments of pytest]   everything: half an hour (docs/project/testing.md)
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

tier=default
if [ "${1:-}" = --complete ]; then
    tier=complete
    shift
fi
say "test.sh: runs the linters, then the tests ($tier tier)."
prepare dev
cd -- "${root:?}"
unset PYTHONDONTWRITEBYTECODE # hundreds of programs that the tests start would compile the project anew

failed=
check() {
    run "$@" || failed="$failed $*;"
}

# One more than there are cores: while a test waits for something, another one computes. They share tokens for the cores
# (tests/sharing_cores.py); the order of the files begins with slow ones.
test_all() {
    workers=$(($(nproc) + 1))
    check python -m pytest --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

mypy >/dev/null 2>&1 & # fills its cache beside the others; the one below says what it has found
check ruff check .
check ruff format --check .
check codespell
check shellcheck launch_scripts/*.sh launch_scripts/*.sbatch tests/*.sh tests/cluster/testbed/*.sh .ci/run
if [ $# -eq 0 ]; then # keeps what each worker of pytest would compile for itself
    python -m pytest --collect-only --quiet >/dev/null 2>&1 || true
fi
wait
check mypy
if [ $# -gt 0 ]; then
    [ "$tier" = default ] || set -- --complete "$@"
    check python -m pytest "$@"
elif [ "$tier" = default ]; then
    test_all
else
    test_all --complete
    check python tests/mutations --jobs "$(nproc)"
    check python benchmarks/soak.py --seed 4092 --count 8 # every kind of failure and phase, 2 to 4 instances
    check sh tests/versions.sh
fi

[ -z "$failed" ] || fail "failed:$failed"
