"""The elements of an infeed: their structure, shapes and dtypes, and the arguments that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from strategies.typing import Data, Element, Numbers, Tree

DTYPES = tuple(map(np.dtype, ("int8", "uint8", "bool", "int32", "float16", ml_dtypes.bfloat16, "float32")))


@dataclass(frozen=True)
class ElementSpec:
    """The structure, shapes and dtypes that all elements of a data set share.

    Attributes:
        structure: Structure of an element. The body of a loop gets a tuple or a dictionary as several arguments.
        leaves: Shape and dtype of each array.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, element: Element) -> ElementSpec:
        """Return the specification of an element.

        Raises:
            TypeError: "Unsupported datatype" for a dtype that cannot be fed, such as int64 or float64.
            ValueError: A dimension has size 0, or a tuple or list contains another one.
        """
        _refuse_nested(element)
        leaves, structure = jax.tree.flatten(_as_tuple(element))
        if not leaves:
            raise ValueError("the elements of the data set have no arrays; an infeed needs at least one")
        arrays = [np.asarray(leaf) for leaf in leaves]
        for index, array in enumerate(arrays):
            _refuse_dtype(index, array.dtype)
            if 0 in array.shape:
                raise ValueError(
                    f"Detected a tensor in the dataset with a dimension of size 0: {list(array.shape)} on index {index}"
                )
        return cls(structure, tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))

    def flatten(self, number: int, element: Element) -> list[np.ndarray]:
        """Return copies of the arrays of an element.

        Raises:
            ValueError: The element is not like the first one; "Output shape" if only shapes differ.
        """
        leaves, structure = jax.tree.flatten(_as_tuple(element))
        arrays = [np.array(leaf) for leaf in leaves]
        if structure != self.structure or [(array.shape, array.dtype) for array in arrays] != [
            (leaf.shape, leaf.dtype) for leaf in self.leaves
        ]:
            raise ValueError(self._difference(number, structure, arrays))
        return arrays

    def _difference(self, number: int, structure: jax.tree_util.PyTreeDef, arrays: Sequence[np.ndarray]) -> str:
        is_of_shapes = structure == self.structure and [array.dtype for array in arrays] == [
            leaf.dtype for leaf in self.leaves
        ]
        return (
            f"{'Output shape is not fully defined: ' if is_of_shapes else ''}element {number} of the data set is "
            f"{_described(structure, arrays)}, and the first was {_described(self.structure, self.leaves)}; all must "
            "be alike: leave out an incomplete batch (drop_remainder=True)"
        )

    def unflatten(self, leaves: Iterable[Numbers]) -> Element:
        """Return the element with these arrays."""
        return jax.tree.unflatten(self.structure, leaves)

    def arguments(self, leaves: Iterable[Numbers]) -> tuple[Sequence[Tree], Mapping[str, Tree]]:
        """Return the positional and the keyword arguments of a loop's body."""
        element = self.unflatten(leaves)
        if isinstance(element, tuple) and len(element) == 1 and _has_names(element[0]):
            element = element[0]
        if _has_names(element):
            return (), element
        return (element if isinstance(element, tuple) else (element,)), {}


def check_declared(dataset: Data) -> None:
    """Check the shapes that a data set declares in `element_spec`, as data sets of TensorFlow do.

    Raises:
        ValueError: "Output shape" if a shape is not fully defined.
    """
    for declared in jax.tree.leaves(
        getattr(dataset, "element_spec", None), is_leaf=lambda leaf: hasattr(leaf, "shape")
    ):
        shape = getattr(declared, "shape", ())
        if getattr(shape, "rank", 0) is None or any(size is None for size in shape):
            raise ValueError(
                f"Output shape {shape} is not fully defined; if the data set makes batches, have it drop the "
                "incomplete one with drop_remainder=True"
            )


def _as_tuple(element: Element) -> Element:
    return tuple(element) if isinstance(element, list | tuple) else element


def _has_names(element: Element) -> bool:
    return isinstance(element, dict) and all(isinstance(name, str) for name in element)


def _refuse_nested(element: Element) -> None:
    for part in element if isinstance(element, list | tuple) else ():
        if isinstance(part, list | tuple):
            raise ValueError("the elements of the data set have a tuple or list inside of another; make them flat")


def _refuse_dtype(index: int, dtype: np.dtype) -> None:
    if dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise TypeError(
            f"Unsupported datatype {dtype} on index {index} of feed operation; convert it to one of {known}"
        )


def _described(structure: jax.tree_util.PyTreeDef, leaves: Sequence[np.ndarray | jax.ShapeDtypeStruct]) -> str:
    return str(jax.tree.unflatten(structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves])).replace("'", "")
