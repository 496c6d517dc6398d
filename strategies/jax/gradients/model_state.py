"""The agreement of replicas on the model state: values that change without being trained, such as moving means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from strategies.jax.replicas.devices import is_key
from strategies.typing import Leaf, Tree

MEAN, FIRST, PER_REPLICA, SUM, ALIKE, CONSTANT = WORDS = ("mean", "first", "per_replica", "sum", "alike", "constant")
"""The rules for the new value of a leaf of the model state.

`mean`: the mean over all replicas, in order. `first`: the value of replica 0. `per_replica`: each replica's own value.
`sum`: each replica begins with zero, and the sum of their values, in the order of replicas, is added to the old value.
`alike`: the value that every replica has made, equal on all. `constant`: the old value.
"""
KEPT = (FIRST, ALIKE, PER_REPLICA)
"""The words of the leaves that a replica keeps, in the order of its kept values. `alike` leaves do not travel."""

_WAY_OUT = f"use None, {', '.join(map(repr, WORDS))}, or a pytree of these that is a prefix of the model state"


def check_aggregation(aggregation: Tree) -> None:
    """Check the words before there is a model state.

    Raises:
        ValueError: A word is not one of `WORDS`.
    """
    for word in jax.tree.leaves(aggregation):
        if not isinstance(word, str) or word not in WORDS:
            raise ValueError(f"model_state_aggregation has {word!r}; {_WAY_OUT}")


def has_own(aggregation: Tree) -> bool:
    """Return whether some leaves are `per_replica`."""
    return any(word == PER_REPLICA for word in jax.tree.leaves(aggregation))


@dataclass(frozen=True)
class ModelStateRule:
    """The rules by which replicas agree on the leaves of a model state.

    In a state, `per_replica` leaves have the local replicas along a first axis of their own.

    Attributes:
        structure: Structure of the model state.
        words: One of `WORDS` for each leaf.
        names: Names of the leaves for messages.
    """

    structure: jax.tree_util.PyTreeDef
    words: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, model_state: Tree, aggregation: Tree) -> ModelStateRule:
        """Return the rule of a model state, or of its shapes and dtypes.

        Args:
            model_state: Pytree; None has no leaves.
            aggregation: Word, or pytree of words, each for all leaves below it. None is the mean of floating-point
                leaves, and replica 0's value of others.

        Raises:
            ValueError: The words are of another structure, or a word does not fit its leaf.
        """
        leaves, structure = jax.tree.flatten(model_state)
        words, of_words = jax.tree.flatten(aggregation)
        return _rule_of(structure, tuple([leaf.dtype for leaf in leaves]), of_words, tuple(words))

    def pick(self, model_state: Tree, word: str) -> list[Tree]:
        """Return the leaves whose word is `word`."""
        return [leaf for leaf, own in zip(jax.tree.leaves(model_state), self.words, strict=True) if own == word]

    def put(self, model_state: Tree, leaves: Mapping[str, Sequence[Leaf]]) -> Tree:
        """Return the model state with new leaves for some words, given by word."""
        others = {word: iter(of_word) for word, of_word in leaves.items()}
        pairs = zip(jax.tree.leaves(model_state), self.words, strict=True)
        return jax.tree.unflatten(
            self.structure, [next(others[word]) if word in others else leaf for leaf, word in pairs]
        )

    def travelling(self, model_state: Tree) -> list[Tree]:
        """Return the leaves that have means: first those to be averaged, then those to be added."""
        return [*self.pick(model_state, MEAN), *self.pick(model_state, SUM)]

    def sent(self, model_state: Tree, replicas: int) -> list[Tree]:
        """Return the values that a replica sends for its averaged and added leaves; traceable.

        A sum travels as the mean of values multiplied by the number of replicas. That is exact for whole numbers, and
        for all numbers if the number of replicas is a power of two.

        Args:
            model_state: Model state that the replica has made.
            replicas: Number of all replicas.
        """
        sums = [leaf * jnp.asarray(replicas, leaf.dtype) for leaf in self.pick(model_state, SUM)]
        return [*self.pick(model_state, MEAN), *sums]

    def arrived(self, model_state: Tree, means: Sequence[np.ndarray]) -> Mapping[str, Sequence[Tree]]:
        """Return the new leaves that have means.

        Args:
            model_state: Model state before the step.
            means: Means of the values that replicas have sent; copied, because they may be overwritten later.
        """
        averaged = self.words.count(MEAN)
        pairs = zip(self.pick(model_state, SUM), means[averaged:], strict=True)
        return {MEAN: [mean.copy() for mean in means[:averaged]], SUM: [np.asarray(old) + mean for old, mean in pairs]}

    def begun(self, model_state: Tree) -> Tree:
        """Return the model state at the start of a step: with zeros for the leaves that are added."""
        if SUM not in self.words:
            return model_state
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.pick(model_state, SUM)]
        return self.put(model_state, {SUM: zeros})

    def map_own(self, function: Callable[[Leaf], Leaf], model_state: Tree) -> Tree:
        """Return the model state with `function` applied to each `per_replica` leaf."""
        if PER_REPLICA not in self.words:
            return model_state
        return self.put(model_state, {PER_REPLICA: [function(leaf) for leaf in self.pick(model_state, PER_REPLICA)]})

    def with_own(self, shared: Tree, own: Sequence[Tree]) -> Tree:
        """Return the model state, from its `per_replica` leaves and a tree with all other leaves."""
        leaves, parts = iter(jax.tree.leaves(shared)), iter(own)
        every = [next(parts) if word == PER_REPLICA else next(leaves) for word in self.words]
        return jax.tree.unflatten(self.structure, every)

    def check_returned(self, given: Tree, returned: Tree) -> None:
        """Check the model state that a loss function returns against the one it was given, both as shapes and dtypes.

        Raises:
            TypeError: The structure, or the shape or dtype of a leaf, is different.
        """
        if not self.names and returned is not None:
            raise TypeError(
                "the loss function returns a model state, but gets none; give it to init: "
                "trainer.init(variables, model_state=...), or leave it out of the Outcome"
            )
        if jax.tree.structure(returned) != self.structure:
            raise TypeError(
                f"the loss function returns a model state of {jax.tree.structure(returned)}, but gets "
                f"{self.structure}; return strategies.Outcome(loss, model_state=...) with one of the same structure"
            )
        pairs = zip(self.names, jax.tree.leaves(given), jax.tree.leaves(returned), strict=True)
        for name, old, new in pairs:
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise TypeError(
                    f"the loss function returns {new.dtype}{list(new.shape)} as leaf {name} of the model state, but "
                    f"gets {old.dtype}{list(old.shape)}; return the same shape and dtype: cast it with astype"
                )


@lru_cache(256)
def _rule_of(
    structure: jax.tree_util.PyTreeDef,
    dtypes: tuple[np.dtype, ...],
    of_words: jax.tree_util.PyTreeDef,
    given: tuple[str, ...],
) -> ModelStateRule:
    """Return the rule of a model state of this structure and these dtypes; every step asks for it."""
    model_state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes])
    aggregation = jax.tree.unflatten(of_words, given)
    try:
        below = jax.tree.map(
            lambda word, tree: jax.tree.map(lambda leaf: _word(word, leaf), tree),
            aggregation,
            model_state,
            is_leaf=lambda word: word is None,
        )
    except ValueError as error:
        raise ValueError(
            f"model_state_aggregation is {aggregation!r}, but the model state is a "
            f"{jax.tree.structure(model_state)}; {_WAY_OUT}"
        ) from error
    named = jax.tree_util.tree_leaves_with_path(model_state)
    names, words = tuple(keystr(path) for path, _ in named), tuple(jax.tree.leaves(below))
    for name, word, (_, leaf) in zip(names, words, named, strict=True):
        if word == MEAN and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"model_state_aggregation has 'mean' for leaf {name}, which is {leaf.dtype}; only floating-point "
                "leaves have a mean: use 'first' or 'per_replica'"
            )
        if word == SUM and not jnp.issubdtype(leaf.dtype, jnp.number):
            raise ValueError(
                f"model_state_aggregation has 'sum' for leaf {name}, which is {leaf.dtype}; only numbers have a "
                "sum: use 'first' or 'per_replica'"
            )
        if word == PER_REPLICA and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"model_state_aggregation has 'per_replica' for leaf {name}, which is a random key; use 'first', "
                "because the key that the loss function gets differs for each replica already, or keep "
                "jax.random.key_data of it"
            )
    return ModelStateRule(structure, words, names)


def check_model_state(model_state: Tree) -> None:
    """Check the first model state.

    Raises:
        TypeError: A leaf is not an array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not is_key(leaf) and not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"leaf {keystr(path)} of the model state is of type {type(leaf).__name__}; give init a pytree of arrays"
            )


def as_arrays(model_state: Tree) -> Tree:
    """Return the model state with its Python numbers as arrays."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jnp.asarray(leaf), model_state)


def _word(word: Any, leaf: Leaf) -> str:
    if word is not None:
        return str(word)
    return MEAN if jnp.issubdtype(leaf.dtype, jnp.floating) else FIRST
