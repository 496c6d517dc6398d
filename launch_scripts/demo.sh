#!/bin/sh
# Trains a small network on handwritten digits with 4 replicas on 2 instances.
#
#   sh launch_scripts/demo.sh [arguments of popdist.examples.digits]
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

say "demo.sh: trains on handwritten digits with 4 replicas, 2 in each of 2 instances."
prepare examples
set -- python -m popdist.examples.digits "$@"
if is_root; then
    set -- --allow-run-as-root yes "$@"
fi
run poprun --num-instances 2 --num-replicas 4 "$@"
