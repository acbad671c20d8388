"""The jobs of one run, drawn from a workload by seed: the same ones for every policy."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlix.protocol.messages import Cluster, Device, DeviceKind, Registration
from rlix.protocol.types import ClusterName, Phase, pipeline_namespace
from rlix.sim.decoder import Decoder, Floats
from rlix.sim.fluid import Curve
from rlix.sim.multi_turn import MultiTurn, Trajectory
from rlix.sim.work import Work
from rlix.sim.workload import Decode, Environment, JobSpec, Lengths, RolloutSpec, Workload, cluster_of, phase_of

_P99 = 2.3263478740408408  # the standard normal's 99th percentile


@dataclass(frozen=True, slots=True)
class GangWork:
    phase: Phase
    cluster: str
    gpus: int  # as declared; `seconds` holds for that many
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One training step's work: a rollout, then gangs one after another."""

    work: Work
    useful: float  # share of the tokens that end up in a trajectory that is kept
    gangs: tuple[GangWork, ...]

    @property
    def gang_gpu_s(self) -> float:
        return sum(gang.gpus * gang.seconds for gang in self.gangs)

    @property
    def tight_gpu_s(self) -> float:
        return self.work.total.tight_gpu_s + self.gang_gpu_s

    @property
    def fluid_gpu_s(self) -> float:
        return self.work.total.tokens * self.work.decoder.reference_gpu_s + self.gang_gpu_s


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the run. `registration` is what its user declares."""

    id: str
    index: int
    spec: JobSpec
    seed: int
    steps: int
    arrives_s: float
    departs_s: float
    registration: Registration

    def step(self, number: int) -> Step:
        return _step(self.spec, self.seed, self.index, number)


def devices_of(workload: Workload) -> tuple[Device, ...]:
    node = workload.pool.gpus_per_node
    return tuple(
        Device(i, f"node-{i // node:05d}", f"10.0.{i // node // 256}.{i // node % 256}", i % node, DeviceKind.CUDA)
        for i in range(workload.pool.gpus)
    )


def draw_jobs(workload: Workload, seed: int) -> tuple[Job, ...]:
    """All jobs in order of arrival."""
    specs = [spec for spec in workload.jobs for _ in range(spec.count)]
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(specs))  # so that sizes and gang blocks mix
    specs = [specs[i] for i in order]
    steps = [_steps(spec, rng) for spec in specs]
    arrivals = _arrivals(workload, specs, steps, seed, rng)
    jobs = []
    taken: dict[tuple[int, int], int] = {}
    for index, (spec, count, arrives) in enumerate(zip(specs, steps, arrivals, strict=True)):
        pipeline_id = f"{spec.name}-{index:04d}"
        clusters = _clusters(spec, workload.pool.gpus, taken)
        registration = Registration(pipeline_id, pipeline_namespace(pipeline_id), clusters)
        departs = arrives + spec.departs_after_s if spec.departs_after_s else math.inf
        jobs.append(Job(pipeline_id, index, spec, seed, count, arrives, departs, registration))
    return tuple(sorted(jobs, key=lambda job: (job.arrives_s, job.index)))


def _steps(spec: JobSpec, rng: np.random.Generator) -> int:
    factor = 1.0 + spec.steps_spread * float(rng.uniform(-1.0, 1.0))
    return max(1, round(spec.steps * factor))


def _arrivals(
    workload: Workload, specs: list[JobSpec], steps: list[int], seed: int, rng: np.random.Generator
) -> list[float]:
    arrivals = workload.arrivals
    drawn = np.zeros(len(specs))
    if arrivals.kind == "staggered":
        drawn = rng.uniform(0.0, max(arrivals.spread_s, 1e-9), len(specs))
    elif arrivals.kind == "poisson":
        work = [_step(spec, seed, index, 0).tight_gpu_s * steps[index] for index, spec in enumerate(specs)]
        gap_s = float(np.mean(work)) / workload.pool.gpus / arrivals.load
        drawn = np.cumsum(rng.exponential(gap_s, len(specs)))
        drawn -= drawn[0]
    return [float(at) if spec.arrives_s is None else spec.arrives_s for at, spec in zip(drawn, specs, strict=True)]


def _clusters(spec: JobSpec, gpus: int, taken: dict[tuple[int, int], int]) -> tuple[Cluster, ...]:
    """The rollout spans its declared part of the pool; gangs sit on aligned blocks, each size taking them in turn.

    Gangs that may move name all other blocks of their size, from the nearest on, and then smaller ones if they may.
    """
    width = spec.rollout.gpus or gpus
    place = _block(width, gpus, "spread", taken, 0)
    clusters = [Cluster(ClusterName.ACTOR_INFER, spec.rollout.tensor_parallel, place, elastic=True)]
    sizes = {cluster_of(gang.phase): gang.gpus for gang in spec.gangs}
    sizes.setdefault(ClusterName.ACTOR_TRAIN, next(iter(sizes.values())))
    block = {size: _block(size, gpus, spec.gang_placement, taken, 1) for size in sorted(set(sizes.values()))}
    for name, size in sorted(sizes.items()):
        others = _other_blocks(block[size], size, gpus) if spec.gangs_move else ()
        for less in _halves(size, spec.gangs_least or size):
            others += _other_blocks(block[size], less, gpus)
        clusters.append(Cluster(name, 1, block[size], others))
    return tuple(clusters)


def _halves(size: int, least: int) -> Iterator[int]:
    while size % 2 == 0 and size // 2 >= least:
        size //= 2
        yield size


def _other_blocks(block: tuple[int, ...], size: int, gpus: int) -> tuple[tuple[int, ...], ...]:
    """The aligned blocks of `size` GPUs but for `block` itself, from the nearest on."""
    starts = sorted(range(0, gpus - size + 1, size), key=lambda s: abs(s - block[0]))
    blocks = (tuple(range(s, s + size)) for s in starts)
    return tuple(other for other in blocks if other != block)


def _block(size: int, gpus: int, placement: str, taken: dict[tuple[int, int], int], kind: int) -> tuple[int, ...]:
    start = 0
    if placement == "spread":
        turn = taken.get((kind, size), 0)
        taken[kind, size] = turn + 1
        start = turn % (gpus // size) * size
    return tuple(range(start, start + size))


@lru_cache(maxsize=4096)
def _step(spec: JobSpec, seed: int, index: int, number: int) -> Step:
    rng = np.random.default_rng([seed, 1, index, number])
    rollout = spec.rollout
    kept, lost = _lengths(rollout.lengths, rollout.trajectories, rollout.group, rollout.environment, rng)
    work = _work(rollout, kept, lost, (seed, 3, index, number))
    gangs = tuple(
        GangWork(phase_of(g.phase), cluster_of(g.phase), g.gpus, g.seconds * float(rng.lognormal(0.0, g.jitter)))
        for g in spec.gangs
    )
    return Step(work, float(kept.sum() / (kept + lost).sum()), gangs)


def _work(rollout: RolloutSpec, kept: Floats, lost: Floats, key: tuple[int, ...]) -> Work:
    speed, environment = decoder(rollout.decode, rollout.tensor_parallel), rollout.environment
    if environment is None:
        return Curve(kept, speed, rollout.prompt_tokens)
    trajectories = [
        _trajectory(environment, int(tokens), int(failed), np.random.default_rng([*key, number]))
        for number, (tokens, failed) in enumerate(zip(kept, lost, strict=True))
    ]
    return MultiTurn(trajectories, speed, rollout.prompt_tokens, environment.result_tokens)


def _trajectory(environment: Environment, kept: int, lost: int, rng: np.random.Generator) -> Trajectory:
    """Equal turns, a sandbox before the first and a call before each other one; all of it twice after a failure."""
    waits: list[float] = []
    turns: list[int] = []
    for tokens in (lost, kept) if lost else (kept,):
        again = len(turns)
        count = min(max(1, round(tokens / environment.tokens_per_turn)), tokens)
        turns += [tokens * (i + 1) // count - tokens * i // count for i in range(count)]
        waits += _drawn(environment.reset_p50_s, environment.reset_p99_s, 1, rng)
        waits += _drawn(environment.latency_p50_s, environment.latency_p99_s, count - 1, rng)
    return Trajectory(np.array(waits), np.array(turns, dtype=np.float64), again)


def _drawn(p50_s: float, p99_s: float, count: int, rng: np.random.Generator) -> list[float]:
    """Lognormal waits; none is no wait."""
    scores = rng.standard_normal(count)
    drawn: list[float] = (p50_s * np.exp(math.log(p99_s / p50_s) / _P99 * scores)).tolist() if p50_s else [0.0] * count
    return drawn


def decoder(decode: Decode, tensor_parallel: int) -> Decoder:
    speed = tensor_parallel * decode.tp_efficiency ** math.log2(tensor_parallel)
    return Decoder(
        gpus=tensor_parallel,
        weights_s=decode.token_ms / 1e3 / speed,
        compute_s=decode.token_ms / 1e3 / decode.knee / speed,
        kv_s=decode.kv_us / 1e6 / speed,
        max_batch=decode.max_batch,
        prefill_s=decode.prefill_us / 1e6 / speed,
        caches=decode.prefix_cache,
    )


def _lengths(
    spec: Lengths, trajectories: int, group: int, environment: Environment | None, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Tokens of each trajectory, and those that it had when it failed."""
    groups = -(-trajectories // group)
    shared = np.repeat(rng.standard_normal(groups), group)[:trajectories]
    own = rng.standard_normal(trajectories)
    score = math.sqrt(spec.group_correlation) * shared + math.sqrt(1.0 - spec.group_correlation) * own
    kept = np.minimum(spec.median * np.exp(spec.sigma * score), spec.cap)
    kept[rng.random(trajectories) < spec.cap_share] = spec.cap
    kept = np.maximum(np.round(kept), 1.0)
    if environment is None or not environment.failure_rate:
        return kept, np.zeros(trajectories)
    failed = rng.random(trajectories) < environment.failure_rate
    return kept, np.round(np.where(failed, rng.random(trajectories) * kept, 0.0))
