#!/bin/sh
# Does the same as demo.sh under plain mpirun: 4 replicas, 2 in each of 2 processes.
#
#   sh launch_scripts/mpirun_digits.sh [arguments of popdist.examples.digits, such as --strategy horovod]
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

say "mpirun_digits.sh: trains on handwritten digits with 4 replicas, 2 in each of 2 processes of mpirun."
prepare examples
set -- python -m popdist.examples.digits --strategy popdist --replicas 4 "$@"
if is_root; then
    set -- --allow-run-as-root "$@"
fi
run mpirun -np 2 --oversubscribe "$@"
