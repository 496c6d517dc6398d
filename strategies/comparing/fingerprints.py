"""Fingerprints of variables: equal if and only if all the bits are."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from strategies.roles import Variables


def fingerprint(variables: Variables) -> str:
    """The SHA-256 of the bits of all leaves, in tree order, as 64 hexadecimal digits.

    Args:
        variables: a pytree of arrays.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(variables):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
