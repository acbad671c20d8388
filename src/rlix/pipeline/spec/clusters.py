"""The sections of a job spec that say on how many devices it runs, or on which."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from rlix.control.registration import describe_ids
from rlix.pipeline.spec.section import Count, Index, Section
from rlix.protocol.spec_file import Problem
from rlix.protocol.types import DEVICE_RANGE, ClusterName

_LARGER_POOL = "or run on a larger pool (without GPUs: --gpus N makes N virtual ones)"


class GpuRange(Section):
    """As many devices as `max`, or fewer down to `min` where the cluster would otherwise wait: for longer than it gains
    by the others, or nobody knows how long."""

    min: Count
    max: Count


def _gpus(value: Any) -> Any:
    """A number or a range in any of its spellings; a range of one number is that number."""
    if isinstance(value, GpuRange):
        value = {"min": value.min, "max": value.max}
    elif isinstance(value, str) and (match := DEVICE_RANGE.fullmatch(value)):
        value = {"min": int(match[1]), "max": int(match[2])}
    if isinstance(value, Mapping) and value.keys() == {"min", "max"} and all(map(_is_count, value.values())):
        least, most = value["min"], value["max"]
        if least > most:
            raise ValueError(f"min {least} is more than max {most}; exchange them")
        return most if least == most else GpuRange(min=least, max=most)
    if value is None or _is_count(value):
        return value
    raise ValueError(
        f"must be a number of devices such as 8, or a range such as {{min: 4, max: 8}} or 4-8, not {value!r}"
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class ClusterSpec(Section):
    """How many devices one worker set uses, or which, in rank order: `gpus` or `devices`, not both."""

    unit_field: ClassVar[str] = ""

    gpus: Annotated[Count | GpuRange | None, BeforeValidator(_gpus)] = None
    """A number; RLix chooses devices that other jobs' training uses least, and the same for all parts of this job. For
    `actor_infer` the most it may use, of a pool with as many. A range, `{min: 4, max: 8}` or `4-8`, is for pipelines of
    your own that run where their lease says: those that ship with RLix stay as wide as they are built, for on another
    number of ranks gradients are summed in another order, and what is learnt is not the same to the bit."""
    devices: Annotated[tuple[Index, ...] | None, Field(strict=False)] = None
    """Ids of devices, where it matters which."""

    @field_validator("devices")
    @classmethod
    def _distinct(cls, devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if devices is None:
            return None
        if not devices:
            raise ValueError("is empty; list at least one device")
        if twice := sorted({d for d in devices if devices.count(d) > 1}):
            raise ValueError(f"device {twice[0]} is listed twice; list each device once")
        return devices

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.gpus is not None and self.devices is not None:
            raise ValueError("gives both gpus (how many) and devices (which ones); keep one")
        return self

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}

    @property
    def field(self) -> str:
        """The key that says how many devices there are."""
        return "gpus" if self.devices is None else "devices"

    @property
    def count(self) -> int | None:
        """How many devices, at most; None: as many as the pool has."""
        if self.devices is not None:
            return len(self.devices)
        return self.gpus.max if isinstance(self.gpus, GpuRange) else self.gpus

    @property
    def unit(self) -> int:
        """It runs on a multiple of so many devices."""
        return getattr(self, self.unit_field) or 1

    def copy_of(self, devices: int) -> int:
        """How many of so many devices hold one copy of the weights between them."""
        return getattr(self, self.unit_field) or devices

    @property
    def together(self) -> int:
        """How many of the devices compute on each sequence together."""
        return 1

    @property
    def least(self) -> int:
        """The fewest devices it can run on."""
        return self.gpus.min if isinstance(self.gpus, GpuRange) else self.unit

    def on(self, *, gpus: int | None = None, devices: tuple[int, ...] | None = None) -> Self:
        """The same on so many devices, or on these; without either, left open."""
        kept = {self.unit_field: getattr(self, self.unit_field)}
        return type(self)(**kept, gpus=gpus, devices=devices)

    @property
    def goes(self) -> bool:
        """Whether it may be granted other devices than those it was placed on; a range says so, too."""
        return isinstance(self.gpus, GpuRange)

    @property
    def mapping(self) -> list[int] | int | dict[str, int] | None:
        """What `register_pipeline` takes for it in `cluster_device_mappings`."""
        if self.devices is not None:
            return list(self.devices)
        return {"min": self.gpus.min, "max": self.gpus.max} if isinstance(self.gpus, GpuRange) else self.gpus


class TrainerSpec(ClusterSpec):
    """Devices that train or score together."""

    unit_field: ClassVar[str] = "shards"

    shards: Count | None = None
    """How many of the devices hold one copy of weights and optimizer state between them (FSDP); left out: all. With
    fewer there are several whole copies (replicas), which average their gradients. `tensor_parallel` is read as
    this."""
    sequence_parallel: Count = 1
    """How many of the devices compute on each sequence together, each on a part of it, so that activations of long
    sequences fit (DeepSpeed-Ulysses). It divides the devices, and the model's key heads; layers with sliding windows
    are refused. A batch is then split among fewer parts."""
    moves: bool = False
    """With a number in `gpus`: at each phase the scheduler may grant as many other devices, if waiting for the
    cluster's own would cost more than the move does. The weights and the optimizer's state are taken there first. What
    is learnt is the same to the bit."""

    @property
    def together(self) -> int:
        return self.sequence_parallel

    @property
    def goes(self) -> bool:
        return self.moves or super().goes

    def on(self, *, gpus: int | None = None, devices: tuple[int, ...] | None = None) -> Self:
        kept = {"moves": self.moves and devices is None, "sequence_parallel": self.sequence_parallel}
        return super().on(gpus=gpus, devices=devices).model_copy(update=kept)

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_called(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "tensor_parallel" in value and "shards" not in value:
            return {("shards" if key == "tensor_parallel" else key): given for key, given in value.items()}
        return value


class ReplicasSpec(ClusterSpec):
    """Devices that replicas of the model generate on."""

    unit_field: ClassVar[str] = "tensor_parallel"

    tensor_parallel: Count = 1
    """Consecutive devices that hold one replica between them. They are on one node, where they fit; with `vllm` they
    may be on several, as many on each."""


class ClustersSpec(Section):
    """A worker set that is left out but needed is as large as `actor_train`, and in the same place."""

    actor_train: TrainerSpec = TrainerSpec()
    """Must say how many devices, or which, unless a plan does."""
    actor_infer: ReplicasSpec = ReplicasSpec()
    """The rollouts; without `gpus` or `devices` they may use the whole pool."""
    reference: TrainerSpec | None = None
    """Of the reference model, which an algorithm with a `kl_coefficient` above 0 has."""
    critic: TrainerSpec | None = None
    """Of the critic, which `ppo` has."""

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}

    def items(self) -> list[tuple[str, ClusterSpec]]:
        """The clusters that are given, `actor_infer` always."""
        return [(name, getattr(self, name)) for name in type(self).model_fields if getattr(self, name) is not None]


def cluster_problems(
    clusters: ClustersSpec, *, fixed: bool, runs: bool = False, planned: bool = False
) -> Iterator[Problem]:
    """What is wrong with the clusters alone.

    Args:
        fixed: whether the job's engines are as wide as they are built.
        runs: whether it is a job of several adapters.
        planned: whether a plan that is still to be made says how many devices they get.
    """
    for name, cluster in clusters.items():
        where = f"clusters.{name}"
        if isinstance(cluster, TrainerSpec) and cluster.moves:
            yield from _move_problems(f"{where}.moves", cluster, runs=runs)
        if isinstance(cluster, TrainerSpec) and cluster.sequence_parallel > 1:
            yield from _sequence_problems(f"{where}.sequence_parallel", cluster)
        if planned and cluster.count is not None:
            yield Problem(
                f"{where}.{cluster.field}",
                f"is what the plan decides; remove it ({cluster.unit_field} may stay), or remove 'plan'",
            )
        elif planned:
            continue
        elif cluster.count is None and name != ClusterName.ACTOR_INFER:
            yield Problem(
                where,
                "says neither how many devices nor which; add e.g. 'gpus: 2' or 'devices: [0, 1]', or have the job "
                "planned: 'plan: auto'",
            )
        if isinstance(cluster.gpus, GpuRange):
            yield from _range_problems(name, cluster, cluster.gpus, fixed)
        elif cluster.count is not None and cluster.count % cluster.unit:
            listed = "" if cluster.devices is None else f" {list(cluster.devices)}"
            yield Problem(
                f"{where}.{cluster.unit_field}",
                f"{cluster.unit} does not divide the {cluster.count} devices{listed}; use a divisor of "
                f"{cluster.count}, or another number of devices",
            )


def _move_problems(where: str, cluster: TrainerSpec, *, runs: bool) -> Iterator[Problem]:
    if cluster.devices is not None:
        yield Problem(where, f"names no others to go to; write 'gpus: {len(cluster.devices)}' in place of 'devices'")
    elif runs:
        yield Problem(where, "is not for 'runs', whose replicas would load the model anew at each move; remove it")


def _sequence_problems(where: str, cluster: TrainerSpec) -> Iterator[Problem]:
    size, count = cluster.sequence_parallel, cluster.count
    if count is None:
        yield Problem(where, "is for a number of devices that is given; write 'gpus', or remove it")
    elif count % size:
        yield Problem(where, f"{size} does not divide the {count} devices; use a divisor of {count}")


def _range_problems(name: str, cluster: ClusterSpec, gpus: GpuRange, fixed: bool) -> Iterator[Problem]:
    where = f"clusters.{name}.gpus"
    if name == ClusterName.ACTOR_INFER:
        yield Problem(where, f"rollouts grow and shrink by themselves; give the most they may use: 'gpus: {gpus.max}'")
    elif fixed:
        yield Problem(
            where,
            f"{gpus.min}-{gpus.max} is a range, but this job's engines are built on devices that are fixed when it "
            f"starts; give one number, e.g. 'gpus: {gpus.max}' (a range is for a pipeline of your own that runs where "
            "its lease says)",
        )
    elif gpus.max // cluster.unit * cluster.unit < gpus.min:
        yield Problem(where, f"no multiple of {cluster.unit_field} {cluster.unit} lies from {gpus.min} to {gpus.max}")


def pool_problems(clusters: ClustersSpec, pool: Collection[int]) -> Iterator[Problem]:
    """What a pool of devices with these ids lacks."""
    for name, cluster in clusters.items():
        where = f"clusters.{name}.{cluster.field}"
        absent = [device for device in cluster.devices or () if device not in pool]
        least = max(cluster.count or 0, cluster.unit)
        if not pool:
            how = "on a machine without GPUs set RLIX_VIRTUAL_GPUS; of a Ray cluster, `rlix doctor` says how"
            yield Problem(where, f"the pool has no devices: {how}")
        elif absent:
            yield Problem(
                where,
                f"device {absent[0]} does not exist: the pool has {describe_ids(pool)}; list those, let RLix choose "
                f"with 'gpus: {cluster.count}', {_LARGER_POOL}",
            )
        elif least > len(pool):
            yield Problem(where, f"needs {least} devices, and the pool has {len(pool)}; ask for fewer, {_LARGER_POOL}")


def node_problems(clusters: ClustersSpec, nodes: Sequence[int], *, spans: bool) -> Iterator[Problem]:
    """What nodes with so many devices each are too small for; `spans`: whether a replica may be on several of them."""
    infer, largest = clusters.actor_infer, max(nodes)
    if infer.tensor_parallel <= largest:
        return
    where = "clusters.actor_infer.tensor_parallel"
    if not spans:
        yield Problem(
            where,
            f"the devices of a replica must be on one node, and the pool's largest has {largest}; write at most that, "
            "or where the weights do not fit then a smaller model.dtype or 'rollout.executor: vllm'",
        )
    elif infer.devices is None and (len(set(nodes)) > 1 or infer.tensor_parallel % largest):
        yield Problem(
            where,
            f"a replica that is larger than a node takes whole nodes of one size, and the pool's have "
            f"{', '.join(map(str, nodes))}; write a multiple of that size, or name the devices: as many on each node",
        )
