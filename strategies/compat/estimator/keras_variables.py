"""The variables of Keras layers inside a `model_fn`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import keras
from keras.src.backend.common import global_state

from strategies.argument_checks import wrong_type
from strategies.compat.estimator.variables import CallVariables
from strategies.typing import Leaf

_PENDING = "uninitialized_variables"


class KerasVariables(keras.StatelessScope):
    """A scope in which layers read and assign the variables of a call, also of models made inside the scope."""

    def __init__(self, call: CallVariables) -> None:
        super().__init__(initialize_variables=False)
        self._call = call
        self._names: dict[int, str] = {}
        self._seen: list[keras.Variable] = []  # keeps the identities of variables from being used again
        self._pending = list(global_state.get_global_attribute(_PENDING, []))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        global_state.set_global_attribute(_PENDING, self._pending)  # Keras would initialize those of the call

    def get_current_value(self, variable: keras.Variable) -> Leaf:
        """Return the value of a variable; the first request decides its place among the variables of the model."""
        if id(variable) not in self.state_mapping:
            self._seen.append(variable)
            if _is_random_state(variable):
                value = jax.random.key_data(self._call.next_key())
            else:
                name = self._names[id(variable)] = unique_name(variable.path, self._call.values)
                value = self._call.read(name, lambda: _initial_value(variable), variable.trainable, variable)
            self.state_mapping[id(variable)] = value
        return self.state_mapping[id(variable)]

    def add_update(self, update: tuple[keras.Variable, Leaf]) -> None:
        """Keep the value that a layer assigns."""
        variable, value = update
        self.get_current_value(variable)
        super().add_update(update)
        if id(variable) in self._names:
            self._call.assigned[self._names[id(variable)]] = value


def unique_name(path: str, known: Mapping[str, object]) -> str:
    """Return the name of a variable without Keras's running numbers of layers, which differ from call to call.

    The number in a name that the program has given to a layer, such as `tower_2`, is no running number.
    """
    numbered: Mapping[str, int] = global_state.get_global_attribute("object_name_uids", {})
    name = re.sub(r"([^/]+)_\d+(?=/)", lambda found: found[1] if found[1] in numbered else found[0], path)
    names = (f"{name}_{number}" if number else name for number in range(len(known) + 1))
    return next(found for found in names if found not in known)


def fill(model: keras.Model, values: Mapping[str, Leaf]) -> None:
    """Give a built model the trained values; raise ValueError if one of its variables was not trained."""
    if not isinstance(model, keras.Model):
        raise wrong_type("model", model, "give a built Keras model, whose signature serves requests")
    named: dict[str, keras.Variable] = {}
    for variable in model.variables:
        if not _is_random_state(variable):
            named[unique_name(variable.path, named)] = variable
    if missing := named.keys() - values.keys():
        raise ValueError(f"the model has {sorted(missing)}, but the trained variables are {sorted(values)}")
    for name, variable in named.items():
        variable.assign(values[name])


def _is_random_state(variable: keras.Variable) -> bool:
    return not variable.trainable and tuple(variable.shape) == (2,) and variable.dtype == "uint32"


def _initial_value(variable: Any) -> Leaf:
    if variable._value is not None:
        return variable._value
    return variable._initializer(variable.shape, dtype=variable._dtype)
