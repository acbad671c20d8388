import json
from pathlib import Path

from rlix.pipeline.run_folder import RunFolder, Span, list_checkpoints


def test_an_earlier_run_is_moved_aside_not_overwritten(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        RunFolder.fresh(tmp_path / "job").write_spec(text)
    texts = {(folder / "spec.yaml").read_text() for folder in tmp_path.iterdir()}
    assert texts == {"first", "second", "third"}
    assert (tmp_path / "job" / "spec.yaml").read_text() == "third"


def test_a_span_becomes_one_event_per_device(tmp_path: Path) -> None:
    RunFolder(tmp_path).spans([Span((2, 3), "actor_train", "actor_training", "busy", 1.0, 2.5, step=7)])
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    common = {"type": "span", "cluster": "actor_train", "phase": "actor_training", "kind": "busy"}
    times = {"start": 1.0, "end": 2.5, "step": 7}
    assert rows == [{**common, **times, "device": 2}, {**common, **times, "device": 3}]


def test_only_complete_checkpoints_count_and_old_ones_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("step_5", "step_10", "step_100", "step_110.partial"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert [step for step, _ in list_checkpoints(folder.checkpoints)] == [5, 10, 100]
    assert folder.latest_checkpoint() == (100, folder.checkpoints / "step_100")
    folder.prune_checkpoints(keep=2)
    assert [step for step, _ in list_checkpoints(folder.checkpoints)] == [10, 100]


def test_resuming_drops_the_metrics_of_steps_that_are_done_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(5):
        folder.metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # torn by a crash
    RunFolder.resumed(tmp_path, step=3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
