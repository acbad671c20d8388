"""GPUs are named by UUID, as CUDA_VISIBLE_DEVICES leaves them; no GPU is needed to say which those are."""

from pathlib import Path

import pytest

from rlix.node.devices import Gpu, device_keys, gpus_in, memory_in, visible
from rlix.protocol.errors import RlixError

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-11110000-0000-0000-0000-000000000000)
  MIG 3g.20gb     Device  1: (UUID: MIG-22220000-0000-0000-0000-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa2222-0000-0000-0000-000000000000)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb0000-0000-0000-0000-000000000000)
"""
MIG1, MIG2 = "MIG-11110000-0000-0000-0000-000000000000", "MIG-22220000-0000-0000-0000-000000000000"
SECOND, THIRD = "GPU-aaaa2222-0000-0000-0000-000000000000", "GPU-bbbb0000-0000-0000-0000-000000000000"


def test_the_listing_is_read() -> None:
    first, second, third = gpus_in(LISTING)
    assert first == Gpu("GPU-aaaa1111-0000-0000-0000-000000000000", (MIG1, MIG2))
    assert (second, third) == (Gpu(SECOND), Gpu(THIRD))
    assert gpus_in("No devices found.") == ()


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        (None, (MIG1, MIG2, SECOND, THIRD)),
        ("", ()),
        ("-1", ()),
        ("2,1", (THIRD, SECOND)),
        (" 1 , 2 ", (SECOND, THIRD)),
        ("2,-1,1", (THIRD,)),
        (THIRD, (THIRD,)),
        ("GPU-b,GPU-aaaa2", (THIRD, SECOND)),
        (f"{MIG2},{SECOND}", (MIG2, SECOND)),
        ("0", (MIG1,)),
    ],
)
def test_a_setting_chooses_gpus_in_its_order(setting: str | None, keys: tuple[str, ...]) -> None:
    assert visible(gpus_in(LISTING), setting) == keys


def test_four_and_five_of_eight() -> None:
    gpus = tuple(Gpu(f"GPU-{i}") for i in range(8))
    assert visible(gpus, "4,5") == ("GPU-4", "GPU-5")


@pytest.mark.parametrize("setting", ["3", "0,7", "GPU-aaaa", "GPU-x", "two", "1,1", f"1,{SECOND}"])
def test_a_setting_that_makes_no_sense_is_an_error_that_lists_the_gpus(setting: str) -> None:
    with pytest.raises(RlixError, match=f"CUDA_VISIBLE_DEVICES={setting}.*its GPUs: 0: GPU-aaaa1111"):
        visible(gpus_in(LISTING), setting)


def test_a_machine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert device_keys() == ()  # no nvidia-smi: no GPUs
    tool = tmp_path / "nvidia-smi"
    (tmp_path / "listing").write_text(LISTING)
    tool.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {tmp_path}/listing\n')
    tool.chmod(0o755)
    assert device_keys() == (SECOND,)
    tool.write_text("#!/bin/sh\necho NVML: Driver mismatch; exit 9\n")
    with pytest.raises(RlixError, match="Driver mismatch"):
        device_keys()


def test_free_memory_is_read_for_each_gpu() -> None:
    assert memory_in("100, 400\n300, 400\n", ["GPU-a", "GPU-b"]) == (
        (100 * 2**20, 400 * 2**20),
        (300 * 2**20, 400 * 2**20),
    )
    for answer in ("100, 400\n", "[N/A], [N/A]\n1, 2\n", ""):
        with pytest.raises(RlixError, match="GPU-a, GPU-b"):
            memory_in(answer, ["GPU-a", "GPU-b"])
