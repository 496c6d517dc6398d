"""The strategy `"popdist"` of PyTorch Lightning's Trainer: `import strategies.torch.lightning` registers it."""

from popdist.extras import describe_missing

try:
    from pytorch_lightning.strategies import StrategyRegistry
except ModuleNotFoundError as error:
    if text := describe_missing(error, __name__):
        raise ModuleNotFoundError(text, name=error.name) from None
    raise

from strategies.torch.lightning.loader import ReplicaBatches as ReplicaBatches
from strategies.torch.lightning.strategy import PopDistEnvironment as PopDistEnvironment
from strategies.torch.lightning.strategy import PopDistLightningStrategy as PopDistLightningStrategy

__all__ = ["PopDistEnvironment", "PopDistLightningStrategy", "ReplicaBatches"]

if "popdist" not in StrategyRegistry:
    StrategyRegistry.register(
        "popdist", PopDistLightningStrategy, description="Replicas of PopDist, with the same bits for every spread"
    )
