#!/bin/sh
# Runs the linters, then the tests.
#
#   sh launch_scripts/test.sh [arguments of pytest]
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

say "test.sh: runs the linters, then the tests."
prepare dev
cd -- "${root:?}"

failed=
check() {
    run "$@" || failed="$failed $1"
}

check ruff check .
check ruff format --check .
check mypy
check codespell
check shellcheck launch_scripts/*.sh launch_scripts/*.sbatch tests/cluster/testbed/*.sh .ci/run
if [ $# -eq 0 ]; then # most tests share the cores, in the order of their files, which begins with slow ones
    check python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not alone"
    check python -m pytest -m alone
else
    check python -m pytest "$@"
fi

[ -z "$failed" ] || fail "failed:$failed"
