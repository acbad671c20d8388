"""The simulator of examples/embodied.py: what it goes on from is all there is to it."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")

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
