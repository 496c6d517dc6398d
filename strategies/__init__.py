"""Data-parallel training on R replicas, with the same bits however the replicas are spread over instances.

A strategy says where the replicas run, a data set gives each replica its rows, and a trainer makes the steps. Models
are functions of JAX, or of Keras (`strategies.keras`); for modules of PyTorch there is `strategies.torch`.

Example::

    strategy = strategies.PopDistStrategy()
    dataset = strategy.distribute_dataset({"image": x, "label": y}, batch_size=32)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))
    state = trainer.init(variables)
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
    strategies.fingerprint(state.variables)  # the same on all instances, and for every number of instances
"""

import os

from popdist.records.recording import FOLDER_VARIABLE
from strategies.late_names import late_names, places_in

_PLACES = places_in(__file__)

__all__ = sorted(_PLACES)

__getattr__, __dir__ = late_names(__name__, {**_PLACES, "keras": "strategies"})

if FOLDER_VARIABLE in os.environ:  # a record begins with the random state that this import finds
    import strategies.jax.step_record  # noqa: F401
