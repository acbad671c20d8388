"""Simulator and trainer of examples/embodied.py: what they go on from is all there is to them."""

import copy
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "embodied.py"


def walk(sim: Any, actions: "np.ndarray[Any, Any]") -> list[Any]:
    return [(*sim.step(action)[:3], sim.observation.tobytes(), sim.total) for action in actions]


def test_a_simulation_goes_on_elsewhere_equal_to_the_bit() -> None:
    example = runpy.run_path(str(EXAMPLE))
    simulation, actions = example["Simulation"], np.random.default_rng(0).normal(size=(300, 1)).astype(np.float32)
    unbroken = walk(simulation().begin(3), actions)
    first, other = simulation().begin(3), simulation().begin(7)
    before = walk(first, actions[:137])
    walk(other, actions[:20])
    assert before + walk(other.resume(first.state()), actions[137:]) == unbroken
    assert sum(ended for _, ended, *_ in unbroken) > 5


def test_a_trainer_goes_on_elsewhere_equal_to_the_bit() -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["Learn"].update.__globals__["EPOCHS"] = 1
    random, length = torch.Generator().manual_seed(0), example["LENGTH"]
    path: dict[str, Any] = {
        name: torch.randn(length, *more, generator=random)
        for name, more in {"inputs": (4,), "actions": (1,), "old": (), "advantage": (), "target": ()}.items()
    }
    path |= {"seen": torch.randn(length + 1, 4, generator=random).double(), "state": None, "returns": []}
    trainer, other = example["Learn"](), example["Learn"]()
    trainer.update([path])
    state = copy.deepcopy(trainer.save())
    trainer.update([path])
    other.restore(state)
    other.update([path])
    assert all(map(torch.equal, trainer.policy.state_dict().values(), other.policy.state_dict().values()))
