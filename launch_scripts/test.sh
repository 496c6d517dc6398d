#!/bin/sh
# Runs the linters, then the tests.
#
#   sh launch_scripts/test.sh [arguments of pytest]              the default tier: minutes
#   sh launch_scripts/test.sh --complete [arguments of pytest]   everything: 40 minutes (docs/project/testing.md)
#   sh launch_scripts/test.sh --parts hosts,jobs                 the default tier, and these parts of the complete tier
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

parts= # parts of the complete tier
case ${1:-} in
--complete)
    parts=all
    shift
    ;;
--parts)
    [ -n "${2:-}" ] || fail "--parts needs a list, such as hosts,jobs; docs/project/testing.md has the names"
    parts=$2
    shift 2
    ;;
esac
say "test.sh: runs the linters, then the tests (default tier${parts:+; of the complete tier: $parts})."
prepare dev
cd -- "${root:?}"
unset PYTHONDONTWRITEBYTECODE # otherwise hundreds of programs in tests would compile the project again

failed=
check() {
    run "$@" || failed="$failed $*;"
}

# One more worker than cores: while a test waits, another one computes. Workers share tokens for the cores
# (tests/sharing_cores.py). Slow files come first.
test_all() {
    workers=$(($(nproc) + 1))
    check python -m pytest --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

mypy >/dev/null 2>&1 & # fills the cache while the others run; the later call reports
check ruff check .
check ruff format --check .
check codespell
check shellcheck launch_scripts/*.sh launch_scripts/*.sbatch tests/*.sh tests/cluster/testbed/*.sh .ci/run
if [ $# -eq 0 ]; then # compiles modules once, which each worker of pytest would otherwise do
    python -m pytest --collect-only --quiet >/dev/null 2>&1 || true
fi
wait
check mypy

has_part() {
    case ,$parts, in
    ,all, | *,"$1",*) ;;
    *) return 1 ;;
    esac
}

if [ $# -gt 0 ]; then
    [ -z "$parts" ] || set -- --parts "$parts" "$@"
    check python -m pytest "$@"
elif [ -z "$parts" ]; then
    test_all
else
    test_all --parts "$parts"
    ! has_part faults || check python tests/mutations --jobs "$(nproc)"
    # All kinds of failures and phases, on 2 to 4 instances.
    ! has_part soak || check python benchmarks/soak.py --seed 9 --count 8
    ! has_part versions || check sh tests/versions.sh
fi

[ -z "$failed" ] || fail "failed:$failed"
