"""The zoo: small models of many kinds, and optimizers, whose bits must not depend on the spread of replicas."""

from zoo.model import Model
from zoo.models import FOR_OPTIMIZERS, MODELS
from zoo.optimizers import ELEMENTWISE, OPTIMIZERS
from zoo.training import fingerprints

__all__ = ["ELEMENTWISE", "FOR_OPTIMIZERS", "MODELS", "OPTIMIZERS", "Model", "fingerprints"]
