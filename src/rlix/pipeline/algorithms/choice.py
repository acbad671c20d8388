"""From the algorithm that a job names to the object."""

from rlix.pipeline.algorithms.base import Algorithm, Setting
from rlix.pipeline.algorithms.given import Dpo, Sft
from rlix.pipeline.algorithms.groups import Cispo, ClipCov, Dapo, DrGrpo, Grpo, Gspo, Rloo
from rlix.pipeline.algorithms.returns import Distill, Ppo, ReinforcePlusPlus
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.spec.named import import_class

CLASSES: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "gspo": Gspo,
    "cispo": Cispo,
    "clip_cov": ClipCov,
    "distill": Distill,
    "sft": Sft,
    "dpo": Dpo,
    "reinforce_pp": ReinforcePlusPlus,
    "ppo": Ppo,
}


def build_algorithm(spec: AlgorithmSpec, longest: int) -> Algorithm:
    """Of a job in which a sample has at most `longest` tokens of the policy's.

    Raises SpecError when what the job names is no algorithm.
    """
    found: type[Algorithm] = CLASSES.get(spec.name) or import_class("algorithm", spec.name)
    return found(spec.parse(), Setting(longest, spec))
