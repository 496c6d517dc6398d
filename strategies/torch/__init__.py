"""Training of PyTorch modules under the strategies, with the same bits for every number of instances."""

from popdist.extras import describe_missing
from strategies.late_jax import without_collections
from strategies.late_names import late_names, places_in

try:
    with without_collections():
        import torch  # noqa: F401
except ModuleNotFoundError as error:
    if text := describe_missing(error, __name__):
        raise ModuleNotFoundError(text, name=error.name) from None
    raise

from strategies.torch.process_group import register

register()

_PLACES = places_in(__file__)

__all__ = sorted(_PLACES)

__getattr__, __dir__ = late_names(__name__, _PLACES)
