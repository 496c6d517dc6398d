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

# Where all cores are busy, a limit of time may pass for reasons that are not the test's: what failed runs once more, one
# test at a time, and that decides. Both runs are shown.
check_tests() {
    marked=$1
    shift
    run python -m pytest -m "$marked" "$@" && return
    say "test.sh: what failed runs once more, one test at a time."
    check python -m pytest -m "$marked" -v --last-failed --last-failed-no-failures none --maxfail 1
}

check ruff check .
check ruff format --check .
check mypy
check codespell
check shellcheck launch_scripts/*.sh launch_scripts/*.sbatch tests/cluster/testbed/*.sh .ci/run
if [ $# -eq 0 ]; then # most tests share the cores, in the order of their files, which begins with slow ones
    check_tests "not alone" --numprocesses 3 --dist loadfile --no-loadscope-reorder
    check_tests alone
else
    check python -m pytest "$@"
fi

[ -z "$failed" ] || fail "failed:$failed"
