"""What a function that makes a data set knows about its reader."""

from dataclasses import dataclass

from strategies.argument_checks import at_least, positive


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a data set knows about its reader (`tf.distribute.InputContext`).

    Attributes:
        num_input_pipelines: how many times the function is called in the whole job: once per instance.
        input_pipeline_id: which of these calls this is, from 0.
        num_replicas_in_sync: replicas of all instances.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        positive("num_input_pipelines", self.num_input_pipelines)
        positive("num_replicas_in_sync", self.num_replicas_in_sync)
        if at_least(0, "input_pipeline_id", self.input_pipeline_id) >= self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id is {self.input_pipeline_id} of {self.num_input_pipelines} pipelines; "
                f"they are numbered 0 to {self.num_input_pipelines - 1}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch size of one replica; ValueError when the replicas do not divide `global_batch_size`."""
        size, rest = divmod(positive("global_batch_size", global_batch_size), self.num_replicas_in_sync)
        if rest:
            lower = size * self.num_replicas_in_sync
            upper = lower + self.num_replicas_in_sync
            raise ValueError(
                f"the global batch of {global_batch_size} is not divisible by {self.num_replicas_in_sync} "
                f"replicas; use {f'{lower} or {upper}' if lower else upper}"
            )
        return size
