#!/bin/sh
# Builds the documentation site into build/docs; any warning is an error.
#
#   sh launch_scripts/docs.sh [arguments of sphinx-build]
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
# shellcheck source=environment.sh
. "$here/environment.sh"

say "docs.sh: builds the documentation site."
prepare docs
cd -- "${root:?}"
run python -m sphinx --builder html --fresh-env --nitpicky --fail-on-warning --keep-going --quiet "$@" docs build/docs
say "The site is in $root/build/docs; open $root/build/docs/index.html in a browser."
