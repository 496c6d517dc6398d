"""Programs of ours that run on hosts where nothing of ours is installed: their text goes through standard input."""

from __future__ import annotations

import hashlib

_BOOTSTRAP = (
    "import hashlib, sys; text = sys.stdin.buffer.read({nbytes}); "
    "hashlib.sha256(text).hexdigest() == '{digest}' or "
    "sys.exit('what came through standard input is not the program of poprun: look for what reads or writes there, "
    "such as a start-up file of the shell'); exec(text)"
)


def words_for(python: str, program: bytes) -> tuple[str, ...]:
    """Return the words that run a program: it is the first of what standard input has, and nothing else is run.

    The words have its length and digest, so text that somebody else has put there, or taken away, is refused.

    Args:
        python: the interpreter on that host.
        program: the text, which comes through standard input.
    """
    code = _BOOTSTRAP.format(nbytes=len(program), digest=hashlib.sha256(program).hexdigest())
    return (python, "-I", "-u", "-c", code)
