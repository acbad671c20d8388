from pathlib import Path

import pytest
import ray
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from rlix.control.init import init, new_pool_size
from rlix.control.settings import Settings
from rlix.protocol.errors import SpecError


def test_the_environment_is_read_and_defaults_hold() -> None:
    assert Settings.from_env({"RLIX_HOME": "/x"}) == Settings(home=Path("/x"))
    got = Settings.from_env({"RLIX_VIRTUAL_GPUS": "4", "RLIX_SHRINK_DEADLINE_S": "2.5", "RAY_ADDRESS": "local"})
    assert (got.virtual_gpus, got.shrink_deadline_s, got.ray_address) == (4, 2.5, "local")
    assert Settings.from_env({"RLIX_IDLE_S": "5", "RLIX_HOME": "/x"}) == Settings(home=Path("/x"), idle_s=5.0)
    assert got.home == Path.home() / ".rlix"
    assert Settings.from_env({"RLIX_POLICY": "proportional"}).policy == "proportional"


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="RLIX_POLICY='fair' must be one of: rlix, proportional"):
        Settings.from_env({"RLIX_POLICY": "fair"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("RLIX_VIRTUAL_GPUS", "0"), ("RLIX_VIRTUAL_GPUS", "many"), ("RLIX_VIRTUAL_GPUS", "1.5"),
     ("RLIX_SHRINK_DEADLINE_S", "-1"), ("RLIX_SHRINK_DEADLINE_S", "nan"), ("RLIX_SHRINK_DEADLINE_S", "inf")],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"environment variable {name}='{value}' must be a (positive|whole) number"):
        Settings.from_env({name: value})


@pytest.mark.parametrize("value", ["16385", "9" * 100_000])
def test_a_pool_of_virtual_gpus_has_a_bound(value: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^environment variable RLIX_VIRTUAL_GPUS=.* from 1 to 16384$") as error:
        Settings.from_env({"RLIX_VIRTUAL_GPUS": value})
    assert len(str(error.value)) < 200
    assert Settings.from_env({"RLIX_VIRTUAL_GPUS": "16384"}).virtual_gpus == 16384
    with pytest.raises(SpecError, match=r"^rlix\.init: virtual_gpus must be from 1 to 16384, got 16385$"):
        init(virtual_gpus=16385, settings=Settings(home=tmp_path, ray_address="local"))


def test_where_gpus_are_hidden_from_ray_there_are_no_virtual_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES shows no GPU"):
        init(address="local", settings=Settings(home=tmp_path, ray_address="local"))


@pytest.mark.parametrize("shown", ["0,77", "GPU-none"])
def test_hidden_or_shown_gpus_are_those_of_the_machine(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"0,77": 1, "GPU-none": 0}[shown]
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    wrong = shown.rpartition(",")[2]
    with pytest.raises(SpecError, match=f"CUDA_VISIBLE_DEVICES={shown} names {wrong}, .* has not .*unset it"):
        new_pool_size(Settings(home=Path()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 2)
    assert new_pool_size(Settings(home=Path())) == 1
