from pathlib import Path

from rlix.engine.time_limits import folder_bytes, loading_s


def test_more_weights_may_take_longer(tmp_path: Path) -> None:
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(140 * 10**9)  # a file with a size, and nothing in it
    (tmp_path / "config.json").write_text("{}")
    assert folder_bytes(tmp_path) == 140 * 10**9
    assert folder_bytes(None) == folder_bytes(tmp_path / "a hub name") == 0
    assert loading_s(0) == 300
    assert loading_s(folder_bytes(tmp_path)) == 300 + 2800
