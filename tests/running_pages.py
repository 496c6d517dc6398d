"""Program that runs the code of documentation pages: the blocks of each page one after another.

python -W error running_pages.py [DEVICES] < pages.json

Without DEVICES each page has a separate process, in which nothing of the project is imported before. With DEVICES all
pages share this process, and JAX has this number of devices. The input maps pages to blocks, the output maps pages to
printed texts or tracebacks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any


def run_page(name: str, blocks: list[str]) -> dict[str, Any]:
    """Run the blocks of a page in one namespace; return their output, and the traceback of a failing block."""
    names: dict[str, Any] = {"__name__": "__main__"}
    environ = dict(os.environ)
    printed: list[str] = []
    try:
        for number, block in enumerate(blocks, 1):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, f"{name}, block {number}", "exec"), names)
            printed.append(output.getvalue())
    except Exception:
        return {"printed": printed, "failed": traceback.format_exc()}
    finally:
        os.environ.clear()
        os.environ.update(environ)
    return {"printed": printed, "failed": ""}


def run_alone(name: str, blocks: list[str]) -> dict[str, Any]:
    """Run a page in a separate process."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with open(read, encoding="utf-8") as result:
            text = result.read()
        os.waitpid(child, 0)
        return dict(json.loads(text)) if text else {"printed": [], "failed": "the process ended"}
    os.close(read)
    with open(write, "w", encoding="utf-8") as result:
        result.write(json.dumps(run_page(name, blocks)))
    os._exit(0)


def main() -> None:
    """Run the pages."""
    pages: dict[str, list[str]] = json.load(sys.stdin)
    results = {}
    if len(sys.argv) > 1:
        import strategies

        strategies.LocalStrategy(int(sys.argv[1]))  # the devices of JAX are fixed when it starts
        results = {name: run_page(name, blocks) for name, blocks in pages.items()}
    else:
        import jax  # noqa: F401 - imports that take most of a start: nothing of this project
        import jax.numpy  # noqa: F401
        import optax  # noqa: F401

        results = {name: run_alone(name, blocks) for name, blocks in pages.items()}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
