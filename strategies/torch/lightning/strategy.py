"""The strategy "popdist" of Lightning's Trainer: replicas of PopDist instead of processes of DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar, final

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import ClusterEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only as of_fabric
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.plugins import CheckpointIO, DoublePrecision, HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.model_helpers import is_overridden
from typing_extensions import override

from strategies.errors import StrategyError
from strategies.job_strategies import PopDistStrategy
from strategies.strategy import Strategy, get_strategy
from strategies.torch.agreement import broadcast_object, gather_objects
from strategies.torch.lightning.loader import ReplicaBatches, ReplicaLoader, by_replica, is_sharded, sharded_loader
from strategies.torch.lightning.resuming import ResumedPlace, is_in_batch, place_of
from strategies.torch.lightning.steps import ReplicaSteps
from strategies.torch.replicas.generators import has_baton
from strategies.torch.tensors import HOST, as_tensor, chosen_here, host_array, use_deterministic_operations
from strategies.typing import Batch, Tree

_Value = TypeVar("_Value")
_SEED = "PL_GLOBAL_SEED"
"""The variable in which `seed_everything` leaves its seed."""
_KEY = "popdist"
"""The key of this strategy's state in a checkpoint."""
_HOOK = "_on_before_batch_transfer"
"""The method of a LightningModule that Lightning's loop calls with each batch, before it is moved to the device."""
_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


@final
class PopDistEnvironment(ClusterEnvironment):
    """The instances of a strategy. A process of Lightning is an instance, which may drive several replicas.

    Args:
        strategy: The strategy that connects the instances.
    """

    creates_processes_externally = True

    def __init__(self, strategy: Strategy) -> None:
        self._instance, self._hosts = strategy.instance, strategy.communicator.hosts

    @property
    @override
    def main_address(self) -> NoReturn:
        raise StrategyError(
            "PopDist's strategy connects the instances without a process group of torch.distributed, so there is no "
            "address for one; call torch.distributed.init_process_group with an address of your own"
        )

    main_port = main_address

    @staticmethod
    @override
    def detect() -> bool:
        """Return False: the strategy brings its environment, and other strategies need another one."""
        return False

    @override
    def world_size(self) -> int:
        return self._instance.count

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the number: the launcher has started the instances."""

    @override
    def global_rank(self) -> int:
        return self._instance.index

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the number: the launcher has numbered the instances."""

    @override
    def local_rank(self) -> int:
        return self._instance.local_index

    @override
    def node_rank(self) -> int:
        return self._hosts[self._instance.index]

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise if a program's numbers differ from the job's.

        Raises:
            StrategyError: If `num_devices` is neither 1 nor the number of this host's instances, or `num_nodes` is
                neither 1 nor the number of hosts.
        """
        hosts = len(set(self._hosts))
        here = self._hosts.count(self.node_rank())
        for name, number, count in (("devices", num_devices, here), ("num_nodes", num_nodes, hosts)):
            if number not in (1, count):
                raise StrategyError(
                    f"the program asks Lightning for {name}={number}, but the launcher has started "
                    f"{self._instance.count} instances, {here} of them on this host, on {hosts} "
                    f"{'host' if hosts == 1 else 'hosts'}; leave out {name}, and give the numbers to poprun: "
                    "poprun --num-instances 2 --num-replicas 4 python train.py"
                )


@final
class PopDistLightningStrategy(ParallelStrategy):
    """A strategy of Lightning's Trainer whose results do not depend on how replicas are spread over instances.

        import strategies.torch.lightning  # registers "popdist"

        trainer = pytorch_lightning.Trainer(strategy="popdist", max_epochs=3)  # poprun -n 2 --num-replicas 4
        trainer.fit(module, loader)

    Every replica reads its own batches of the loader, `batch_size` rows each, and calls `training_step` with them. The
    gradients are averaged over all replicas in a fixed order. Everything behind that happens once per instance, with
    the same values on all of them: clipping, the step of the optimizer, schedulers, callbacks. An instance runs its
    replicas one after another.

    A process of Lightning is an instance: `trainer.world_size` is the number of instances, `trainer.global_rank` the
    index of this one.

    Args:
        strategy: The strategy whose replicas train. Default: that of the open scope, or a new `PopDistStrategy`.
        seed: The seed of the replicas' random numbers and of the order of rows. Default: that of `seed_everything`,
            or 0.
        checkpoint_io: A plugin of Lightning that writes and reads checkpoints.
        precision_plugin: A plugin of Lightning for precision: 32, 64, "bf16-true", "16-true" or mixed.
        options: Options of `DistributedModel`, such as `intra_op_threads` and `gradient_transfer_dtype`.

    Attributes:
        strategy: The strategy whose replicas train.
    """

    strategy_name = "popdist"
    is_distributed = True

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        seed: int | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Tree,
    ) -> None:
        self.strategy = strategy or get_strategy() or PopDistStrategy()
        super().__init__(
            cluster_environment=PopDistEnvironment(self.strategy),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._given_seed, self._options = seed, options
        self._steps = ReplicaSteps(self, self.strategy)
        self._place: ResumedPlace | None = None

    @property
    def _module(self) -> pl.LightningModule:
        return self._steps.module

    @property
    def _seed(self) -> int:
        return int(os.environ.get(_SEED, 0)) if self._given_seed is None else self._given_seed

    # ---- the job

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return len(set(self.strategy.communicator.hosts))

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        devices = len(self.parallel_devices or ()) if self._is_on_cpu else 1
        PopDistEnvironment(self.strategy).validate_settings(devices, number)

    @property
    def _is_on_cpu(self) -> bool:
        return all(device.type == "cpu" for device in self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell Lightning which of its functions run on instance 0 only. Called by each new Trainer."""
        rank_zero_only.rank = of_fabric.rank = self.global_rank

    @property
    @override
    def root_device(self) -> torch.device:
        first, *others = self.parallel_devices or [HOST]
        is_chosen = self._is_on_cpu or not others
        return torch.device(first) if is_chosen else chosen_here(torch.device(first.type), self.local_rank)

    @override
    def setup_environment(self) -> None:
        """Prepare the process. Called by Lightning before the module's `setup`.

        Raises:
            StrategyError: If the precision is unknown, or the program asks for what replicas cannot do.
        """
        self._check_setup()
        connector = self._module.trainer._accelerator_connector
        if connector.use_distributed_sampler:
            connector.use_distributed_sampler = None  # Lightning would deal rows to processes
        if not self._is_on_cpu and self.strategy.defaults.deterministic:
            use_deterministic_operations(os.environ)  # before Lightning starts CUDA
        if (threads := self._options.get("intra_op_threads", 1)) is not None:
            torch.set_num_threads(threads)  # also for evaluations without a training
        super().setup_environment()
        self._steps.begin(self._seed)
        vars(self._module)[_HOOK] = _before_transfer(self._module, self._steps, self.precision_plugin)

    def _check_setup(self) -> None:
        if type(self.precision_plugin) not in _PRECISIONS:
            raise StrategyError(
                f"the precision {type(self.precision_plugin).__name__} is not known to keep the same bits for every "
                "number of instances; use 32-true, 64-true, bf16-true, 16-true, bf16-mixed or 16-mixed"
            )
        if self.strategy.replicas.is_spare:
            raise StrategyError(
                "a spare cannot follow Lightning's Trainer, because it would not get the state of its loops; start the "
                "job without spares, and use poprun --on-failure restart"
            )
        module = self._module
        if is_overridden("backward", module):
            raise StrategyError(
                f"{type(module).__name__}.backward would run once for each replica, and Lightning means it to run once "
                "for each step; leave it out, and change gradients in on_after_backward"
            )
        if not module.automatic_optimization and self.strategy.num_replicas_in_sync > 1:
            raise StrategyError(
                "automatic_optimization=False lets training_step call the optimizer, but each replica runs "
                "training_step, and the optimizer makes one step for all of them; use automatic optimization, or a "
                "loop of your own with strategies.torch.DistributedModel"
            )

    @override
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Connect the module's gradients, for a training. Collective."""
        if self._module.trainer.state.fn != TrainerFn.FITTING or not self._module.automatic_optimization:
            return model
        if self._layer_sync is not None:
            self._layer_sync.apply(self._module)
        self._steps.connect(**self._options)
        return model

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @override
    def teardown(self) -> None:
        self._steps.disconnect()
        self._place = None
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop(_HOOK, None)
        super().teardown()

    # ---- data

    @override
    def process_dataloader(self, dataloader: object) -> ReplicaLoader:
        """Return the loader of the local replicas' batches.

        Raises:
            StrategyError: If the rows cannot be dealt to replicas.
        """
        trainer = self._module.trainer
        is_training = bool(trainer.training)
        loader = sharded_loader(
            dataloader,
            self.strategy,
            self._seed,
            pass_now=None if is_training else self._evaluation_now,
            injects=trainer._accelerator_connector.use_distributed_sampler is None,
        )
        state = None if self._place is None else self._place.state_of_loader(trainer, is_training)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def _evaluation_now(self) -> int:
        """Return the number of steps made; -1 for the sanity check."""
        return -1 if self._module.trainer.sanity_checking else self._steps.steps_made

    @override
    def batch_to_device(self, batch: Batch, device: torch.device | None = None, dataloader_idx: int = 0) -> Batch:
        """Move the batches of the replicas to the device."""
        parent = super().batch_to_device
        if not isinstance(batch, ReplicaBatches):
            return parent(batch, device, dataloader_idx)
        self._steps.next_batch()
        return self._steps.mapped(lambda rows: parent(rows, device, dataloader_idx), batch)

    def _begin_loop(self) -> None:
        self._steps.batches = 0

    on_validation_start = on_test_start = on_predict_start = _begin_loop

    @override
    def on_train_start(self) -> None:
        self._begin_loop()
        if self._place is not None:
            self._place.enter(self._module.trainer)

    # ---- steps

    @override
    def training_step(self, batch: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        """Compute the gradients of all replicas. Collective.

        Returns:
            The mean loss; in a dictionary with lists of the local replicas' values if `training_step` returns one.

        Raises:
            StrategyError: If a replica returns no loss, or replicas log different names.
        """
        return self._steps.train(batch, *args, **kwargs)

    @override
    def validation_step(self, batch: Tree, *args: Tree, **kwargs: Tree) -> list[Tree]:
        """Run the module's `validation_step` for each local replica with rows, and list the outputs. Collective."""
        return self._steps.run("validation_step", self.precision_plugin.val_step_context, batch, *args, **kwargs)

    @override
    def test_step(self, batch: Tree, *args: Tree, **kwargs: Tree) -> list[Tree]:
        """Run the module's `test_step` for each local replica with rows, and list the outputs. Collective."""
        return self._steps.run("test_step", self.precision_plugin.test_step_context, batch, *args, **kwargs)

    @override
    def predict_step(self, batch: Tree, *args: Tree, **kwargs: Tree) -> list[Tree]:
        """Run the module's `predict_step` for each replica with rows, and list the outputs in the order of the rows.

        Collective if Lightning returns predictions: the list then has the outputs of all replicas, and only those of
        this instance otherwise.
        """
        found = self._steps.run("predict_step", self.precision_plugin.predict_step_context, batch, *args, **kwargs)
        if not self._module.trainer.predict_loop.return_predictions:
            return found
        on_host = pl.utilities.move_data_to_device(found, HOST)
        gathered = gather_objects(self.strategy.communicator, on_host, "predictions")
        return [one for of_instance in gathered for one in of_instance]

    @override
    def on_predict_end(self) -> None:
        """Make the predictions a list of batches, as one process returns them."""
        loop = self._module.trainer.predict_loop
        of_loaders = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
        for steps in of_loaders:
            steps[:] = [one for of_replicas in steps for one in of_replicas]

    # ---- collective calls

    def _check_outside_step(self, function: str) -> None:
        local = len(self.strategy.local_replicas)
        if has_baton() and self.strategy.num_replicas_in_sync > self.strategy.num_instances:
            raise StrategyError(
                f"{function} in a step would join processes, but this one drives {local} replicas, which run one after "
                "another; call it in a hook such as on_validation_epoch_end, or start one instance per replica"
            )

    @override
    def reduce(self, tensor: Tree, group: object = None, reduce_op: object = "mean") -> Tree:
        """Return the value over all instances. A mean counts each instance as often as it has replicas. Collective.

        Args:
            tensor: A tensor, or a number.
            group: None: there are no groups.
            reduce_op: "mean", "sum", "min" or "max", or a ReduceOp of torch.
        """
        self._check_outside_step("reduce")
        kind = str(getattr(reduce_op, "name", reduce_op) or "mean").lower().rpartition(".")[2]
        kind = {"avg": "mean"}.get(kind, kind)
        value = torch.as_tensor(tensor)
        own = host_array(value).copy()
        communicator = self.strategy.communicator
        if kind == "mean":
            own = own if own.dtype.kind == "f" else own.astype(np.float32)
            found = communicator.ordered_all_reduce([own] * len(self.strategy.local_replicas), op="mean", name="reduce")
        else:
            found = communicator.all_reduce(own, kind, name="reduce")
        return as_tensor(found).to(value.device)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all instances. Collective."""
        self.strategy.communicator.barrier(name=name or "barrier")

    @override
    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        """Return the object of instance `src` on all instances. Collective."""
        return broadcast_object(self.strategy.communicator, obj, src, "broadcast")

    @override
    def all_gather(self, tensor: torch.Tensor, group: object = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all instances, stacked, without a graph. Collective.

        Raises:
            StrategyError: In a step of several replicas, or if gradients would have to flow to other instances.
        """
        self._check_outside_step("all_gather")
        if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
            raise StrategyError("all_gather(sync_grads=True) is not supported: gathered tensors have no gradients")
        found = self.strategy.communicator.all_gather(np.ascontiguousarray(host_array(tensor)), name="all_gather")
        return as_tensor(found).to(tensor.device)

    # ---- checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Tree], filepath: Path | str, storage_options: object = None
    ) -> None:
        """Write a checkpoint on instance 0. It does not depend on the number of instances. Collective."""
        state: Tree = {"replicas": self.strategy.num_replicas_in_sync, "steps": self._steps.steps_made}
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            if is_in_batch(trainer):
                state["steps"] = self._steps.steps_before
            state["place"] = place_of(trainer)
        checkpoint[_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Path | str, weights_only: bool | None = None) -> dict[str, Tree]:
        """Return the checkpoint that instance 0 reads. Collective.

        Raises:
            StrategyError: If a training is to continue with another number of replicas.
            Exception: On all instances, the error with which instance 0 could not read it.
        """
        found: Tree = None
        if self.is_global_zero:
            try:
                found = super().load_checkpoint(checkpoint_path, weights_only)
            except Exception as error:
                found = error
        found = self.broadcast(found)
        if isinstance(found, Exception):
            raise found
        state = found.get(_KEY, {}) if isinstance(found, Mapping) else {}
        replicas = self.strategy.num_replicas_in_sync
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            if state.get("replicas", replicas) != replicas:
                raise StrategyError(
                    f"the checkpoint {checkpoint_path} is of a training with {state['replicas']} replicas, and this "
                    f"job has {replicas}; give poprun --num-replicas {state['replicas']}, or begin a new training with "
                    "its weights"
                )
            self._place = ResumedPlace(found, state.get("place", {}))
        self._steps.steps_made = state.get("steps", found.get("global_step", 0))
        return dict(found)


def _before_transfer(
    module: pl.LightningModule, steps: ReplicaSteps, precision: Precision
) -> Callable[[Batch, int], Batch]:
    """Return the hook of a module before a batch is moved, which calls the module's own for each replica's batch."""
    own = getattr(type(module), _HOOK)

    def before(batch: Batch, dataloader_idx: int = 0) -> Batch:
        if not is_sharded(batch):  # the module's example_input_array, which summaries and loggers read
            return own(module, batch, dataloader_idx)
        return steps.mapped(lambda rows: own(module, precision.convert_input(rows), dataloader_idx), by_replica(batch))

    return before
