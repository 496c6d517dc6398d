"""Digests and fingerprints of pytrees of arrays."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import strategies.trees as trees
from strategies.core.digest import Digest, digest_of_arrays
from strategies.jax.replicas.devices import borrow, is_key
from strategies.late_jax import jax
from strategies.typing import Tree, Variables


def host_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Return the arrays of a tree on the host by their paths, on CPUs without a copy. Random keys become numbers."""
    return {
        trees.keystr(path): borrow(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in trees.leaves_with_path(tree)
    }


def digest_of(tree: Tree) -> Digest:
    """Return `digest_of_arrays` of the arrays of a tree, which may be random keys."""
    return digest_of_arrays(host_arrays(tree).values())


def flip_bit(variables: Variables) -> Tree:
    """Return the variables with one bit flipped in the middle of one number, for planted faults."""
    leaves, structure = trees.flatten(variables)
    changed = np.array(leaves[0])
    changed.reshape(-1).view(np.uint8)[changed.itemsize // 2] ^= 1
    return trees.unflatten(structure, [jax.device_put(changed, next(iter(leaves[0].devices()))), *leaves[1:]])


def fingerprint(variables: Variables) -> str:
    """Return the SHA-256 of the bits of all leaves, in tree order, as 64 hexadecimal digits.

    Args:
        variables: Pytree of arrays, or of tensors of PyTorch on any device.
    """
    digest = hashlib.sha256()
    for leaf in trees.leaves(variables):
        digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Tree) -> bytes:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):  # NumPy converts no bfloat16, and nothing on a device
        on_host = leaf.detach().cpu().resolve_conj().resolve_neg()
        return bytes(on_host.reshape(-1).view(torch.uint8).numpy())
    return np.asarray(leaf).tobytes()
