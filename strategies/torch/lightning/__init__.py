"""The strategy `"popdist"` of PyTorch Lightning's Trainer: `import strategies.torch.lightning` registers it."""

try:
    from pytorch_lightning.strategies import StrategyRegistry
except ModuleNotFoundError as error:
    if error.name != "pytorch_lightning":
        raise
    raise ModuleNotFoundError(
        "strategies.torch.lightning needs PyTorch Lightning, which is not installed; run "
        "pip install -e '.[torch,lightning]' in a checkout of the project",
        name="pytorch_lightning",
    ) from None

from strategies.torch.lightning.environment import PopDistEnvironment as PopDistEnvironment
from strategies.torch.lightning.replica_batches import ReplicaBatches as ReplicaBatches
from strategies.torch.lightning.strategy import PopDistLightningStrategy as PopDistLightningStrategy

__all__ = ["PopDistEnvironment", "PopDistLightningStrategy", "ReplicaBatches"]

if "popdist" not in StrategyRegistry:
    StrategyRegistry.register(
        "popdist", PopDistLightningStrategy, description="Replicas of PopDist, with the same bits for every spread"
    )
