"""How the processes share one model out: copies of it, shards of it, and layers that several of them compute."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from pulsetrain.engine.argument_checks import check_bool, check_choice, check_type, check_whole_number, is_whole
from pulsetrain.engine.distributed.ranks import DataRank, Ranks, VirtualRanks, ranks
from pulsetrain.engine.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TENSOR", "Topology"]

TENSOR = "tensor"  # the dimension of a mesh whose processes compute each layer together

SCHEDULES = ("1f1b", "gpipe", "interleaved")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A mesh of processes: `replicate` copies of the model, each in `shard` parts.

    With `shard=1` every process has the whole model (DistributedDataParallel). With more, weights, gradients and the
    optimizer's state are split over the processes, and gathered layer by layer while they compute (FSDP2). With
    `tensor` above 1, that many neighbouring processes compute each layer of the plan together, on the same batches.
    With `pipeline` above 1, each of that many processes has some of the layers, and passes on what it has computed.

    Args:
        replicate: copies; -1: as many as there are processes for.
        shard: processes that share one copy; -1: all that are left.
        tensor: processes that compute each layer together (tensor parallelism).
        sequence_parallel: with `tensor`, what lies between those layers is split along the sequence.
        pipeline: processes that have a part of the layers each (pipeline parallelism).
        schedule: of the pipeline, "1f1b", "gpipe", or "interleaved", where each process has two parts of the layers.
        microbatches: parts of each batch, which pass through the pipeline one after another; by default two for each
            process.
        blocks: the path of the model's list of layers, as "model.layers"; by default the one that its `pipeline_plan`
            names.
        param_dtype: sharded models compute in this type, "bfloat16" or "float16", and keep their weights in their own;
            None: they compute in their own, too.
        reduce_dtype: the type in which sharded gradients are averaged; None: the type they have.
        offload: keep the shards in the memory of the host.
        virtual: with `reduction="tree"`, into how many shares each global batch is divided, on any number of processes;
            a power of two.
        reduction: how copies add their gradients up: "fast", or "tree", in one fixed order, so that weights and losses
            have the same bits on 1, 2, 4 ... `virtual` processes.

    Raises:
        ConfigurationError: a number is neither positive nor -1, both are -1, a type is unknown, or two arguments
            cannot be combined.

    >>> Topology(shard=2).sizes(8), Topology().sizes(8), Topology(shard=2, tensor=2).sizes(8)
    ((4, 2), (8, 1), (2, 2))
    """

    replicate: int = -1
    shard: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    blocks: str | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    offload: bool = False
    virtual: int | None = None
    reduction: str = "fast"

    def __post_init__(self) -> None:
        for name in ("replicate", "shard"):
            value = getattr(self, name)
            if not is_whole(value) or (value < 1 and value != -1):
                raise ConfigurationError("needs a whole number of at least 1, or -1", "Topology", **{name: value})
        check_whole_number("Topology", "tensor", self.tensor)
        if self.replicate == self.shard == -1:
            raise ConfigurationError("-1 is what is left; give one of the two", "Topology", replicate=-1, shard=-1)
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _DTYPES:
                raise ConfigurationError(f"needs one of {', '.join(_DTYPES)}, or None", "Topology", **{name: value})
        check_bool("Topology", "offload", self.offload)
        check_choice("Topology", "reduction", self.reduction, ("fast", "tree"))
        self._check_virtual()
        check_bool("Topology", "sequence_parallel", self.sequence_parallel)
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigurationError(
                "splits what lies between layers that several processes compute; set tensor=2 or more",
                "Topology",
                sequence_parallel=True,
                tensor=1,
            )
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        check_whole_number("Topology", "pipeline", self.pipeline)
        check_choice("Topology", "schedule", self.schedule, SCHEDULES)
        check_whole_number("Topology", "microbatches", self.microbatches, or_none=True)
        check_type("Topology", "blocks", self.blocks, str | None, "the path of the list of layers, as 'model.layers'")
        if self.pipeline == 1:
            schedule = None if self.schedule == SCHEDULES[0] else self.schedule
            idle = {"schedule": schedule, "microbatches": self.microbatches, "blocks": self.blocks}
            given = {name: value for name, value in idle.items() if value is not None}
            if given:
                raise ConfigurationError("is for pipelines; set pipeline=2, or leave it out", "Topology", **given)
            return
        together = {"tensor": self.tensor > 1, "param_dtype": self.param_dtype, "offload": self.offload}
        for name, value in together.items():
            if value:
                raise ConfigurationError(
                    "is not supported together with a pipeline; leave one of the two out",
                    "Topology",
                    **{name: getattr(self, name), "pipeline": self.pipeline},
                )
        uneven = self.schedule == "interleaved" and self.parts_of_batch % self.pipeline
        if self.parts_of_batch < self.pipeline or uneven:
            raise ConfigurationError(
                "needs at least one for each process of the pipeline, and for 'interleaved' the same number for each; "
                "choose a multiple of their number",
                "Topology",
                microbatches=self.microbatches,
                pipeline=self.pipeline,
            )

    @property
    def parts_of_batch(self) -> int:
        """How many parts of each batch pass through the pipeline one after another."""
        return 2 * self.pipeline if self.microbatches is None else self.microbatches

    @property
    def parts_of_layers(self) -> int:
        """In how many parts, one after the other, the layers are split."""
        return self.pipeline * (2 if self.schedule == "interleaved" else 1)

    def _check_virtual(self) -> None:
        check_whole_number("Topology", "virtual", self.virtual, or_none=True)
        if self.virtual is None and self.reduction == "fast":
            return
        given = {"virtual": self.virtual, "reduction": self.reduction}
        rule = ""
        if self.virtual is None or self.reduction == "fast":
            rule = "one needs the other: virtual=2, reduction='tree' gives the same bits on one process and on two"
        elif self.virtual & (self.virtual - 1):
            rule = "needs a power of two, since shares are added in pairs: 2, 4, 8 ..."
        others = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in given and getattr(self, each.name) != each.default
        }
        if not rule and others:
            rule, given = (
                "each process has the whole model where virtual ranks add up; leave the others out",
                {
                    **given,
                    **others,
                },
            )
        if rule:
            raise ConfigurationError(rule, "Topology", **given)

    def sizes(self, world_size: int) -> tuple[int, int]:
        """How many copies there are, and in how many parts each.

        Raises:
            ConfigurationError: so many processes do not fit.
        """
        if self.virtual is not None:
            if self.virtual % world_size:
                fitting = ", ".join(str(2**each) for each in range(self.virtual.bit_length()))
                raise ConfigurationError(
                    f"cannot be shared out evenly to {world_size} processes: start one of {fitting}",
                    "Topology",
                    virtual=self.virtual,
                )
            return world_size, 1
        known = max(self.replicate, 1) * max(self.shard, 1) * self.tensor * self.pipeline
        fits = world_size % known == 0 if -1 in (self.replicate, self.shard) else world_size == known
        if not fits:
            raise ConfigurationError(
                f"does not fit {world_size} process{'' if world_size == 1 else 'es'}: start {_wanted(self, known)}, or "
                "change the topology",
                "Topology",
                replicate=self.replicate,
                shard=self.shard,
                **{name: each for name in ("tensor", "pipeline") if (each := getattr(self, name)) > 1},
            )
        replicate = world_size // known if self.replicate == -1 else self.replicate
        return replicate, world_size // (replicate * self.tensor * self.pipeline)

    def is_sharded(self, world_size: int) -> bool:
        """Whether so many processes split the model up."""
        return world_size > 1 and (self.tensor * self.pipeline > 1 or self.sizes(world_size)[1] > 1)

    def data_rank(self, here: Ranks) -> DataRank:
        """A process among those that train different samples; processes that compute one copy together share theirs.

        >>> Topology(tensor=2).data_rank(Ranks(3, 4)), Topology(pipeline=2).data_rank(Ranks(3, 4))
        (DataRank(rank=1, count=2, leads=False), DataRank(rank=1, count=2, leads=False))

        Raises:
            ConfigurationError: the processes do not fit.
        """
        replicate, shard = self.sizes(here.world_size)
        if self.virtual is not None:  # together they train what one process would
            return DataRank(leads=here.is_main)
        stage, place = divmod(here.rank, replicate * shard * self.tensor)
        leads = stage == 0 and place % self.tensor == 0
        return DataRank(place // self.tensor, replicate * shard, leads=leads)

    def virtual_ranks(self, here: Ranks) -> VirtualRanks | None:
        """Whose shares of each global batch a process computes; None without virtual ranks.

        >>> Topology(virtual=4, reduction="tree").virtual_ranks(Ranks(1, 2))
        VirtualRanks(here=range(2, 4), total=4)

        Raises:
            ConfigurationError: the processes do not fit.
        """
        if self.virtual is None:
            return None
        each = self.virtual // self.sizes(here.world_size)[0]
        return VirtualRanks(range(here.rank * each, (here.rank + 1) * each), self.virtual)

    def mesh(self, device: str | torch.device) -> DeviceMesh:
        """The mesh over all processes, for a kind of device.

        Its dimensions are "pipeline", "replicate", "shard" and "tensor", each if it is needed.

        Raises:
            ConfigurationError: the processes do not fit.
        """
        from torch.distributed.device_mesh import init_device_mesh

        replicate, shard = self.sizes(ranks().world_size)
        sizes = {"pipeline": self.pipeline} if self.pipeline > 1 else {}
        if replicate > 1:
            sizes["replicate"] = replicate
        sizes["shard"] = shard
        if self.tensor > 1:
            sizes[TENSOR] = self.tensor
        return init_device_mesh(torch.device(device).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _wanted(topology: Topology, known: int) -> str:
    return f"a multiple of {known}" if -1 in (topology.replicate, topology.shard) else str(known)
