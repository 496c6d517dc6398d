"""The agreement of replicas on the model state: values such as moving means, which change without being trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from strategies.jax.replicas.devices import is_key
from strategies.typing import Leaf, Tree

MEAN, FIRST, PER_REPLICA, SUM, ALIKE, CONSTANT = WORDS = ("mean", "first", "per_replica", "sum", "alike", "constant")
"""The new value of a leaf of the model state.

`mean`: the mean over all replicas, in their order. `first`: the value of replica 0. `per_replica`: for each replica its
own value. `sum`: the old value and the sum, in the order of replicas, of what they have made of zero. `alike`: the
value that every replica has made, the same on all. `constant`: the old value.
"""
KEPT = (FIRST, ALIKE, PER_REPLICA)
"""The words of leaves that a replica keeps, in the order in which it keeps them. Nothing travels for the second."""

_WAY_OUT = f"use None, {', '.join(map(repr, WORDS))}, or a pytree of these that begins as the model state does"


def check_aggregation(aggregation: Tree) -> None:
    """Look at the words, before there is a model state.

    Raises:
        ValueError: if one is none of `WORDS`.
    """
    for word in jax.tree.leaves(aggregation):
        if not isinstance(word, str) or word not in WORDS:
            raise ValueError(f"model_state_aggregation has {word!r}; {_WAY_OUT}")


def has_own(aggregation: Tree) -> bool:
    """Return whether replicas have parts of their own."""
    return any(word == PER_REPLICA for word in jax.tree.leaves(aggregation))


@dataclass(frozen=True)
class ModelStateRule:
    """The ways in which replicas agree on the leaves of a model state.

    What each replica has for itself lies in a state with the local replicas along a first axis of its own.

    Attributes:
        structure: of the model state.
        words: one of `WORDS` for each leaf.
        names: of the leaves, for messages.
    """

    structure: Any
    words: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, model_state: Tree, aggregation: Tree) -> ModelStateRule:
        """That of a model state, or of its shapes and dtypes.

        Args:
            model_state: a pytree; None has no leaves.
            aggregation: a word, or a pytree of them, for all leaves below; None is the mean of floating-point leaves,
                and replica 0's for others.

        Raises:
            ValueError: if the words are of another structure, or one does not fit to its leaf.
        """
        try:
            below = jax.tree.map(
                lambda word, tree: jax.tree.map(lambda leaf: _word(word, leaf), tree),
                aggregation,
                model_state,
                is_leaf=lambda word: word is None,
            )
        except ValueError as error:
            raise ValueError(
                f"model_state_aggregation is {aggregation!r}, and the model state is a "
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
                    f"model_state_aggregation has 'per_replica' for leaf {name}, which is a random key; the key that "
                    "the loss function gets differs for each replica already, so use 'first', or keep "
                    "jax.random.key_data of it"
                )
        return cls(jax.tree.structure(model_state), words, names)

    def pick(self, model_state: Tree, word: str) -> list[Tree]:
        """Return the leaves on which replicas agree in one way."""
        return [leaf for leaf, own in zip(jax.tree.leaves(model_state), self.words, strict=True) if own == word]

    def put(self, model_state: Tree, leaves: Mapping[str, Sequence[Leaf]]) -> Tree:
        """Return the model state with others in place of all leaves on which replicas agree in some ways."""
        others = {word: iter(of_word) for word, of_word in leaves.items()}
        pairs = zip(jax.tree.leaves(model_state), self.words, strict=True)
        return jax.tree.unflatten(
            self.structure, [next(others[word]) if word in others else leaf for leaf, word in pairs]
        )

    def travelling(self, model_state: Tree) -> list[Tree]:
        """Return the leaves of which there are means: first those to be averaged, then those to be added."""
        return [*self.pick(model_state, MEAN), *self.pick(model_state, SUM)]

    def sent(self, model_state: Tree, replicas: int) -> list[Tree]:
        """Return the values that a replica sends for the leaves that are averaged or added; traceable.

        A sum is the mean of what is so many times as large: exact for whole numbers, and where their number is a power
        of two for all.

        Args:
            model_state: what the replica has made.
            replicas: how many there are.
        """
        sums = [leaf * jnp.asarray(replicas, leaf.dtype) for leaf in self.pick(model_state, SUM)]
        return [*self.pick(model_state, MEAN), *sums]

    def arrived(self, model_state: Tree, means: Sequence[np.ndarray]) -> Mapping[str, Sequence[Tree]]:
        """Return the new leaves of which there are means.

        Args:
            model_state: before the step.
            means: of what replicas have sent; they may be overwritten later.
        """
        averaged = self.words.count(MEAN)
        pairs = zip(self.pick(model_state, SUM), means[averaged:], strict=True)
        return {MEAN: [mean.copy() for mean in means[:averaged]], SUM: [np.asarray(old) + mean for old, mean in pairs]}

    def begun(self, model_state: Tree) -> Tree:
        """Return the model state with which replicas begin a step: zeros for what is to be added."""
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.pick(model_state, SUM)]
        return self.put(model_state, {SUM: zeros})

    def map_own(self, function: Callable[[Leaf], Leaf], model_state: Tree) -> Tree:
        """Return the model state with something made of each leaf that replicas have for themselves."""
        return self.put(model_state, {PER_REPLICA: [function(leaf) for leaf in self.pick(model_state, PER_REPLICA)]})

    def with_own(self, shared: Tree, own: Sequence[Tree]) -> Tree:
        """Return the model state of what replicas have for themselves, and the rest, which has None for that."""
        leaves, parts = iter(jax.tree.leaves(shared)), iter(own)
        every = [next(parts) if word == PER_REPLICA else next(leaves) for word in self.words]
        return jax.tree.unflatten(self.structure, every)

    def check_returned(self, given: Tree, returned: Tree) -> None:
        """Look at what a loss function has made of a model state; both as shapes and dtypes.

        Raises:
            TypeError: if it is of another structure, or a leaf of another shape or dtype.
        """
        if not self.names and returned is not None:
            raise TypeError(
                "the loss function returns a model state, and gets none; give it to init: "
                "trainer.init(variables, model_state=...), or leave it out of the Outcome"
            )
        if jax.tree.structure(returned) != self.structure:
            raise TypeError(
                f"the loss function returns a model state of {jax.tree.structure(returned)}, and got "
                f"{self.structure}; return strategies.Outcome(loss, model_state=...) with one of the same structure"
            )
        pairs = zip(self.names, jax.tree.leaves(given), jax.tree.leaves(returned), strict=True)
        for name, old, new in pairs:
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise TypeError(
                    f"the loss function returns {new.dtype}{list(new.shape)} as leaf {name} of the model state, and "
                    f"got {old.dtype}{list(old.shape)}; return the same shape and dtype: cast it with astype"
                )


def check_model_state(model_state: Tree) -> None:
    """Look at what is to be the first model state.

    Raises:
        TypeError: if a leaf is no array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        if not is_key(leaf) and not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"leaf {keystr(path)} of the model state is of type {type(leaf).__name__}; give init a pytree of arrays"
            )


def as_arrays(model_state: Tree) -> Tree:
    """Return the model state with arrays for the numbers of Python."""
    return jax.tree.map(lambda leaf: leaf if is_key(leaf) else jnp.asarray(leaf), model_state)


def _word(word: Any, leaf: Leaf) -> str:
    if word is not None:
        return str(word)
    return MEAN if jnp.issubdtype(leaf.dtype, jnp.floating) else FIRST
