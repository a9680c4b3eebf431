"""Training steps of Megatron-Core's GPT models, whose layers several processes may hold together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from pulsetrain.engine.argument_checks import check_bool, check_whole_number
from pulsetrain.engine.backends.megatron_models import MegatronGPT, build_gpt, without_advice
from pulsetrain.engine.backends.megatron_shards import COPIES, MegatronModel, show_wholes
from pulsetrain.engine.backends.model_store import InPlaceStore
from pulsetrain.engine.backends.torch import TorchBackend
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.joining import check_alike, join, join_alone
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.shared_batches import check_batches
from pulsetrain.engine.distributed.topology import TENSOR, Topology
from pulsetrain.engine.environment import version_of
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.step.backend import ModelStore, OptimizerRequest
from pulsetrain.engine.step.protocols import BackendSettings, Strategy, TrainingBatch, Tree

__all__ = ["MegatronBackend"]

_NEEDS_CUDA = {
    "pipeline": "Megatron's pipeline schedule receives activations on torch.cuda.current_device()",
    "distributed_optimizer": "Megatron's distributed optimizer keeps gradients on torch.cuda.current_device()",
}
_SPLITS_SEQUENCES = ("cuda",)  # devices; Megatron allocates what it gathers on torch.cuda.current_device()


class MegatronBackend(TorchBackend):
    """GPT models of Megatron-Core, in place: the model of a Trainer is a `MegatronGPT`, which is built here.

    With `tensor=2`, two processes hold each layer together: its heads, the width of its inner layer, and the tokens of
    the embedding and of the loss are split over them (tensor parallelism). Both train on the same batches. More
    processes hold further copies, which share the batches out. Everything else is as with `TorchBackend`: the
    optimizers are torch's.

    Args:
        device: "auto", "cpu", "cuda" ...
        tensor: processes that hold each layer together.
        pipeline: processes that hold different layers; only 1 is supported.
        sequence_parallel: with `tensor`, whether what lies between the layers, such as norms, is split over the
            positions of a row; needs CUDA, and a model without dropout.
        distributed_optimizer: Megatron's own, which splits its state over copies of the model; not supported.
        activation_checkpointing: names of the modules whose activations are computed again in the backward pass, as
            "gpt.decoder.layers.*"; None leaves it to the configuration.

    Raises:
        ConfigurationError: megatron-core is not installed, or an argument is out of range or not supported.
    """

    tensor: int
    sequence_parallel: bool

    builds_model = True

    def __new__(  # the arguments of the constructor, which jsonargparse reads here
        cls,
        device: str | torch.device | None = None,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        sequence_parallel: bool = False,
        distributed_optimizer: bool = False,
        activation_checkpointing: str | None = None,
    ) -> Any:
        return object.__new__(cls)

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        sequence_parallel: bool = False,
        distributed_optimizer: bool = False,
        activation_checkpointing: str | None = None,
    ) -> None:
        for name, count in (("tensor", tensor), ("pipeline", pipeline)):
            check_whole_number("MegatronBackend", name, count)
        for name, chosen in (
            ("sequence_parallel", sequence_parallel),
            ("distributed_optimizer", distributed_optimizer),
        ):
            check_bool("MegatronBackend", name, chosen)
        wanted = {
            "pipeline": pipeline if pipeline > 1 else None,
            "distributed_optimizer": distributed_optimizer or None,
        }
        for name, value in wanted.items():
            if value is not None:
                raise ConfigurationError(
                    f"{_NEEDS_CUDA[name]}, and is not supported here; leave it out", "MegatronBackend", **{name: value}
                )
        with without_advice():
            load_optional("MegatronBackend", "megatron.core", "megatron")
        self.tensor, self.sequence_parallel = tensor, sequence_parallel
        self._seed = 0
        self._uncompared: ProcessGroup | None = None  # with which to compare the first batch
        topology = Topology(tensor=tensor, sequence_parallel=sequence_parallel)
        super().__init__(device, activation_checkpointing=activation_checkpointing, topology=topology)

    def _configure(self, settings: BackendSettings) -> None:
        super()._configure(settings)
        self._seed = settings.seed
        if self.sequence_parallel and self.device.type not in _SPLITS_SEQUENCES:
            raise ConfigurationError(
                f"Megatron gathers sequences on torch.cuda.current_device(), and this is {self.device}; leave it out",
                "MegatronBackend",
                sequence_parallel=True,
            )
        unsupported: dict[str, object] = {}
        if self.activation_offload is not None:
            unsupported["activation_offload"] = self.activation_offload
        elif not self._plain:
            unsupported["precision"] = self.requested_precision or settings.precision
        if self.compile:
            unsupported["compile"] = True
        if self.optimizer_offload is not None:
            unsupported["optimizer_offload"] = self.optimizer_offload
        if unsupported:
            raise ConfigurationError(
                "not supported with Megatron's layers; leave it out, and for bfloat16 give the model that dtype",
                "MegatronBackend",
                **unsupported,
            )

    def environment(self) -> dict[str, object]:
        """The version of megatron-core, and how many processes hold each layer, if several do."""
        found = {**super().environment(), "megatron-core": version_of("megatron-core")}
        return found if self.tensor == 1 else {**found, "tensor": self.tensor}

    def make_store(self, model: object, optimizer: OptimizerRequest, strategy: Strategy) -> ModelStore:
        """The model, built if it is described, and the optimizer over this process's part of it."""
        module = self.build(model)
        mesh: Any = module.mesh
        self._uncompared = None if mesh is None else mesh[TENSOR].get_group()
        made = optimizer.build(module)
        if is_sharded(module):
            self.check_sharded(strategy, made)
        return InPlaceStore(self, module, made)

    def build(self, model: object) -> nn.Module:
        """The module that a description describes, with weights drawn by the seed; one that is built is returned.

        All processes call this. To load weights before the training, pass what it returns to the Trainer.

        Raises:
            ArgumentTypeError: it is neither a `MegatronGPT` nor a model that was built here.
            ConfigurationError: the processes cannot share it out, or were given different descriptions.
        """
        if isinstance(model, MegatronModel):
            held = 1 if model.mesh is None else model.mesh[TENSOR].size()
            if (held, model.splits_sequences) != (self.tensor, self.sequence_parallel):
                raise ConfigurationError(
                    f"the model was built with tensor={held}, sequence_parallel={model.splits_sequences}; pass the "
                    "backend that built it",
                    "MegatronBackend",
                    tensor=self.tensor,
                    sequence_parallel=self.sequence_parallel,
                )
            return self.module_to_device(model)
        if not isinstance(model, MegatronGPT):
            raise ArgumentTypeError("needs a MegatronGPT, which it builds itself", "MegatronBackend", model=model)
        model.check_split(self.tensor)
        if self.sequence_parallel and model.dropout:
            raise ConfigurationError(
                "no checkpoint has the random state from which Megatron draws on a part of a sequence; set it to 0, or "
                "leave sequence_parallel out",
                "MegatronGPT",
                dropout=model.dropout,
            )
        copies, mesh = self.data_rank.count, None
        check_alike(join(), {"model": model})
        _make_groups(self.tensor)
        if self.sequence_parallel:
            _make_generator(self._seed)
        if self.tensor > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(self.device.type, (copies, self.tensor), mesh_dim_names=(COPIES, TENSOR))
        return self.module_to_device(self._built(model, mesh))

    def _built(self, description: MegatronGPT, mesh: DeviceMesh | None) -> MegatronModel:
        with rng.seeded(self._seed):
            gpt = build_gpt(description, self.tensor, sequence_parallel=self.sequence_parallel).to(self.device)
        if mesh is not None:
            show_wholes(gpt, mesh)
        return MegatronModel(gpt, description, mesh, splits_sequences=self.sequence_parallel)

    def frozen_copy(self, module: nn.Module) -> nn.Module:
        """A copy of a model that was built here, which does not learn: for a strategy with a reference."""
        assert isinstance(module, MegatronModel)
        copied = self._built(module.config, module.mesh)
        copied.load_state_dict(module.state_dict())
        return copied.requires_grad_(False)

    def prepare_batch(self, batch: Tree, strategy: Strategy) -> TrainingBatch:
        """The strategy's batch, on the device; the first one is compared over the processes of each copy.

        Raises:
            ConfigurationError: they were given different ones.
        """
        prepared = super().prepare_batch(batch, strategy)
        if self._uncompared is not None:
            group, self._uncompared = self._uncompared, None
            check_batches((prepared.inputs, prepared.targets), group, "tensor", "MegatronBackend")
        return prepared


_made_in: object = None  # torch's default group, when Megatron's were made


def _make_groups(tensor: int) -> None:
    """Make Megatron's groups of processes, of which there is one set in a process.

    Raises:
        ConfigurationError: other code has made them, for other sizes.
    """
    global _made_in
    with without_advice():
        from megatron.core import parallel_state

    join_alone()
    world = torch.distributed.group.WORLD
    if parallel_state.model_parallel_is_initialized():
        if _made_in is None or _made_in is world:
            made = parallel_state.get_tensor_model_parallel_world_size()
            if made == tensor:
                return
            if _made_in is None:
                raise ConfigurationError(
                    f"megatron.core.parallel_state has been initialized with {made}; make the two equal",
                    "MegatronBackend",
                    tensor=tensor,
                )
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, create_gloo_process_groups=False)
    _made_in = world


def _make_generator(seed: int) -> None:
    """Make the generator that Megatron wants to draw from on a part of a sequence; without dropout nothing is drawn."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", seed)
