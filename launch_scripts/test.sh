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
check shellcheck launch_scripts/*.sh .ci/run
check python -m pytest "$@"

[ -z "$failed" ] || fail "failed:$failed"
