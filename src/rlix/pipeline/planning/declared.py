"""What the parts of a job cost on GPUs whose speed is declared: computed, without a run."""

import random
from collections import Counter
from collections.abc import Sequence
from math import ceil, exp
from statistics import NormalDist, fmean

from rlix.engine.declared import DeclaredSpeed
from rlix.flow.planner import Point
from rlix.flow.profiler.profile import PartProfile, Profile
from rlix.pipeline.planning.graph import parts_of, widths_of
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.plan import PlanSpec
from rlix.protocol.types import ClusterName
from rlix.scheduler.queueing import ends_in_turn

MACHINE = "the declared speed"
_EVERY = 32  # widths up to here are computed, of larger ones powers of two and the largest


def declared_profile(spec: JobSpec, devices: int, *, off_policy: bool) -> Profile:
    """Tables from the job's `declared_speed` and the lengths that its `plan` says."""
    parts = {name: _part(spec, name, devices, off_policy) for name in parts_of(spec)}
    return Profile(spec.name, MACHINE, parts)


def _part(spec: JobSpec, name: str, devices: int, off_policy: bool) -> PartProfile:
    speed, total = spec.speed, spec.trajectories_per_step
    lengths, prompt = answer_lengths(spec), prompt_tokens(spec)
    widths = [n for n in widths_of(spec, name, devices) if n <= _EVERY or n & (n - 1) == 0 or n == devices]
    if name == ClusterName.ACTOR_INFER:  # new weights come into replicas that stay, all weights into those that return
        # Nothing waits for new weights while the trainer, which published them, leaves its devices.
        sync_s = speed.sync_s if off_policy else max(0.0, speed.sync_s - speed.move_s)
        seconds = [rollout_s(speed, lengths, prompt, n, spec.rollout.max_num_seqs) + sync_s for n in widths]
        leaves = _leaves(spec, off_policy)
        load_s, offload_s = max(0.0, leaves * speed.expand_s - sync_s), leaves * speed.shrink_s
    else:  # an engine comes and goes with every phase, whoever else uses its devices
        unit, (scored, trained) = spec.clusters_in_use[name].unit, passes(spec, name, off_policy)
        token_s = (scored * speed.scored_token_ms + trained * speed.trained_token_ms) / 1e3
        moves_s = 2 * (scored + (trained > 0)) * speed.move_s
        rows = [ceil(total / (n * unit)) for n in widths]
        seconds = [count * (prompt + fmean(lengths)) * token_s + moves_s for count in rows]
        load_s = offload_s = 0.0
    points = tuple(Point(n, total, max(s, 1e-6)) for n, s in zip(widths, seconds, strict=True))
    return PartProfile(points, load_s, offload_s)


def rollout_s(speed: DeclaredSpeed, lengths: Sequence[float], prompt_tokens: float, replicas: int, slots: int) -> float:
    """Of trajectories that generate so many tokens each, begun in this order, on replicas that decode at most `slots`
    at a time: until the last has ended, with those in work spread evenly over the replicas."""
    alive, now = len(lengths), 0.0
    seconds = ceil(alive / replicas) * prompt_tokens * speed.prefill_us / 1e6
    for end, ended in Counter(ends_in_turn(lengths, replicas * slots)).items():
        seconds += (end - now) * speed.decode_s(min(slots, ceil(alive / replicas)), 0)
        alive, now = alive - ended, end
    return seconds


def _leaves(spec: JobSpec, off_policy: bool) -> int:
    """How often in a step rollouts leave devices that the other clusters use, too: ahead, they are back between any two
    phases, for there is always something to generate."""
    if not off_policy:
        return 1
    of_others = [passes(spec, name, off_policy) for name in parts_of(spec) if name != ClusterName.ACTOR_INFER]
    return sum(scored + (trained > 0) for scored, trained in of_others)


def passes(spec: JobSpec, name: str, off_policy: bool) -> tuple[int, int]:
    """How often a cluster that trains or scores goes over a step's samples: phases that score, and epochs."""
    needs, epochs = spec.algorithm.needs(off_policy=off_policy), spec.algorithm.epochs
    if name == ClusterName.REFERENCE:
        return 1, 0
    if name == ClusterName.CRITIC:
        return int(needs.critic is not None), epochs
    without_adapter = spec.lora is not None and needs.reference and needs.teacher is None  # which is the reference then
    return int(needs.old_log_probs) + int(without_adapter), epochs


def prompt_tokens(spec: JobSpec) -> float:
    plan = spec.plan or PlanSpec()
    return plan.prompt_tokens or float(spec.source.longest_prompt or 0)


def answer_lengths(spec: JobSpec) -> Sequence[float]:
    """Of each trajectory of a step: quantiles of the distribution that the plan says, in no order."""
    plan, most, total = spec.plan or PlanSpec(), spec.rollout.max_new_tokens, spec.trajectories_per_step
    turns = spec.source.environment is not None or spec.source.openai is not None
    median, longest = plan.answer_tokens or float(most), float("inf") if turns else float(most)
    if not plan.answer_spread:
        return [min(median, longest)] * total
    normal = NormalDist()
    drawn = [median * exp(plan.answer_spread * normal.inv_cdf((i + 0.5) / total)) for i in range(total)]
    random.Random(0).shuffle(drawn)
    return [min(longest, max(1.0, round(length))) for length in drawn]
