"""Agreement of instances on the changes that programs and callbacks make between steps, even if one is lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import jax
import keras
import numpy as np

from strategies.core.agreement import Terms, insist_on_agreement
from strategies.core.journal import Recorded
from strategies.core.survival import together
from strategies.errors import DisagreementError
from strategies.jax.comparing.digest import digest_of, fingerprint
from strategies.jax.replicas.replicas import Replicas
from strategies.keras.protocols import Array, ModelLike, State, Values
from strategies.placeholders import packed, unpacked
from strategies.typing import Batch, Tree

_WAY_OUT = (
    "; give all instances the same program, arguments and callbacks, or wrap a callback that only writes in "
    "strategies.keras.OnChief"
)
_FEW = 4  # variables of at most so many elements are shown in messages
_OWN = ("name", "learning_rate")  # names differ between processes; the rate is broadcast from instance 0

T = TypeVar("T")


def broadcast(replicas: Replicas, tree: T) -> T:
    """Return instance 0's tree on every instance, placed as a step needs it. Collective."""
    recorded = Recorded[T]("broadcast", packed, lambda told: unpacked(told, replicas.wait_for_values))
    return together(replicas, lambda: replicas.broadcast(tree), replicas.broadcast, lambda: tree, recorded)


def number_of_leader(replicas: Replicas, number: int, name: str) -> int:
    """Return instance 0's number on every instance. Collective; `name` names the call in messages."""
    return _agreed(replicas, lambda: _told(replicas, number, 0, name), name)


def compared(replicas: Replicas, flag: bool, digest: bytes, name: str) -> tuple[bool, bool]:
    """Return whether a flag is set on any instance, and whether all instances have the same digest. Collective.

    Args:
        replicas: The replicas of all instances.
        flag: Flag of this instance.
        digest: Digest of this instance, of the same length on all instances.
        name: Name of the call, for messages.
    """

    def asked() -> int:
        mine = np.frombuffer(bytes([flag]) + digest, np.uint8)
        of_all = replicas.communicator.all_gather(mine, name=name)
        return int(of_all[:, 0].any()) + 2 * int((of_all[:, 1:] == of_all[0, 1:]).all())

    answer = _agreed(replicas, asked, name)
    return bool(answer & 1), bool(answer & 2)


def insist(replicas: Replicas, terms: Terms, name: str) -> None:
    """Refuse terms that differ between instances. Collective.

    Args:
        replicas: The replicas of all instances.
        terms: Terms of this instance.
        name: Name of the call, for messages.

    Raises:
        DisagreementError: On all instances, if the terms differ.
    """

    def asked() -> int:
        insist_on_agreement(replicas, terms, name, _WAY_OUT)
        return 1

    _agreed(replicas, asked, name)


def bits_of(tree: Tree) -> bytes:
    """Return a digest of arrays."""
    return np.array(digest_of(list(map(np.asarray, jax.tree.leaves(tree)))), np.uint64).tobytes()


def refuse_other_rows(replicas: Replicas, rows: Batch) -> None:
    """Refuse data whose rows differ between instances. Collective.

    Raises:
        DisagreementError: On all instances, if the rows differ.
    """
    is_same = compared(replicas, False, bytes.fromhex(fingerprint(rows)), "rows of the data")[1]
    if not is_same:
        raise DisagreementError(
            "the instances were given different rows or weights of rows. Each instance reads all data, or the batches "
            "of its replicas, so give all of them the same data; if something shuffles, call "
            "keras.utils.set_random_seed first"
        )


def _agreed(replicas: Replicas, ask: Callable[[], int], name: str) -> int:
    """Return the number that a collective call returns on all instances; repeat the call if instances are lost."""
    recorded = Recorded[int](name, lambda number: partial(int, number), int)
    return together(replicas, ask, lambda number, root: _told(replicas, number, root, name), lambda: 0, recorded)


def _told(replicas: Replicas, number: int, root: int, name: str) -> int:
    """Return the number of instance `root` on all instances. Collective."""
    array = np.array(number, np.int64)
    replicas.communicator.broadcast(array, root, name=name)
    return int(array)


class VariableWatch:
    """A watcher of changes of a model's variables between steps.

    Arrays of JAX never change, so the same object has the same value.

    Args:
        model: Model of Keras.

    Attributes:
        is_changed: Whether the present step began with other arrays than those that the last step left, or that all
            instances agreed on.
    """

    def __init__(self, model: ModelLike) -> None:
        self.is_changed = True
        self._model = model
        self._left: list[Array] = []
        self._changes = hashlib.blake2b(digest_size=16)  # digest of changes since the last call of `taken`

    def before_step(self, state: State) -> None:
        """Note the changes in the state with which a step begins."""
        self.is_changed = self._note(_arrays(state))

    def after_step(self, state: State) -> None:
        """Remember the state that a step has left."""
        self._left = _arrays(state)

    def begin(self) -> None:
        """Take the present variables of the model as unchanged."""
        self._left = self.arrays()
        self._changes = hashlib.blake2b(digest_size=16)

    def taken(self, with_flags: bool) -> bytes:
        """Return a digest of the variables that were changed since the last call.

        Args:
            with_flags: Whether to include the flags `trainable`, which takes longer.
        """
        if self._model._jax_state_synced:  # else Keras's loop holds the state, and no code can change it
            self._note(self.arrays())
        if with_flags:
            self._changes.update(bytes(variable.trainable for variable in self._model.variables))
        changes, self._changes = self._changes, hashlib.blake2b(digest_size=16)
        return changes.digest()

    def arrays(self) -> list[Array]:
        """Return the values of all variables but those of metrics, as Keras knows them."""
        return [variable.value for variable in _variables(self._model)]

    def assign(self, values: Values) -> None:
        """Assign values to the variables, in the order of `arrays`."""
        for variable, value in zip(_variables(self._model), values, strict=True):
            variable.assign(value)

    def _note(self, arrays: list[Array]) -> bool:
        """Note the arrays that differ from those of the last step; return whether any does."""
        pairs = enumerate(zip(arrays, self._left, strict=False))
        changed = [place for place, (new, old) in pairs if not _is_same(new, old)]
        for place in changed:
            self._changes.update(str((place, digest_of(arrays[place]))).encode())
        is_changed = bool(changed) or len(arrays) != len(self._left)
        self._left = arrays
        return is_changed


def _variables(model: ModelLike) -> list[keras.Variable]:
    return [*model.trainable_variables, *model.non_trainable_variables, *_variables_of_optimizer(model)]


def _variables_of_optimizer(model: ModelLike) -> list[keras.Variable]:
    return [] if model.optimizer is None else model.optimizer.variables


def _is_same(one: Array, other: Array) -> bool:
    if one is other:
        return True
    is_scalar = np.ndim(one) == 0 == np.ndim(other)  # Keras copies scalars
    return is_scalar and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _arrays(state: State) -> list[Array]:
    return [array for part in state[:-1] for array in part]  # without metrics: these begin anew in each epoch


def terms_of_call(model: ModelLike, called: str, callbacks: Sequence[str], arguments: Mapping[str, object]) -> Terms:
    """Return the terms on which all instances must call a function of Keras.

    Args:
        model: Model of Keras.
        called: Name of the function.
        callbacks: Descriptions of the given callbacks.
        arguments: Other arguments by name.
    """
    given = {name: _text(value) for name, value in arguments.items()}
    listed = {"the list of callbacks": f"[{', '.join(callbacks)}]"}
    functions = (model.train_function, model.test_function, model.predict_function)
    anew = ", ".join(str(function is None) for function in functions)
    compiled = {"compile, or new options, since the last call (to train, evaluate, predict)": anew}
    return [{"a call of": called}, listed, given, _of_optimizer(model), _flags(model), compiled]


def terms_of_model(model: ModelLike, hook: str) -> Terms:
    """Return the terms that must be equal on all instances after a hook of callbacks: flags and all variables."""
    scalars = [variable for variable in _variables_of_optimizer(model) if not variable.shape]
    rates = {f"{variable.name} after {hook},": _value(variable.value) for variable in scalars}
    pairs = enumerate(_variables(model))
    values = {f"{variable.name} ({number}) after {hook},": _value(variable.value) for number, variable in pairs}
    # A difference in rates causes differences in other variables, so rates come earlier.
    return [_flags(model), rates, values]


def _flags(model: ModelLike) -> dict[str, str]:
    pairs = enumerate(model.variables)
    return {f"trainable of variable {number} ({each.name})": str(each.trainable) for number, each in pairs}


def _of_optimizer(model: ModelLike) -> dict[str, str]:
    if model.optimizer is None:
        return {"optimizer": "None"}
    return {"optimizer": type(model.optimizer).__name__} | _flat("optimizer", model.optimizer.get_config())


def _flat(prefix: str, config: Mapping[str, object]) -> dict[str, str]:
    """Return the values of a nested configuration by their paths. Names and rates, which may differ, are left out."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix} {name}", value)
        elif name not in _OWN:
            found[f"{prefix} {name}"] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda other: type(other).__name__, skipkeys=True)


def _value(array: Array) -> str:
    values = np.asarray(array)
    return str(values.tolist()) if values.size <= _FEW else f"{values.shape} {digest_of(values)[0]:016x}"
