"""Many adapters in one job: each learns what it would learn alone, whatever becomes of the others."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlix.engine.lora import AdapterConfig
from rlix.engine.weights.buckets import Manifest
from rlix.engine.weights.publication import PublishedWeights
from rlix.pipeline.algorithms import Algorithm
from rlix.pipeline.base import Pipeline
from rlix.pipeline.engines import Engines
from rlix.pipeline.jobs import coordinator
from rlix.pipeline.jobs.export import merge_adapter
from rlix.pipeline.jobs.resume import note_runs, with_changed_runs
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.multi_lora import MultiLora
from rlix.pipeline.rollout.adapters import Served
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.rollout.shares import FairQueue, Share
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.lora import RunSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.pipeline.trainer import Trainer
from rlix.pipeline.turns import Ticket, next_turn
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import Device, DeviceKind, Registration
from rlix.protocol.types import Phase
from tests.pipeline.in_process import Engine, Generator, LocalEngines, built_here

WAIT_S = 300.0
ROLLOUT = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 5}
BASE: dict[str, Any] = {
    "name": "many",
    "pipeline": "multi_lora",
    "seed": 5,
    "steps": 2,
    "source": {"task": {"name": "sort_digits", "options": {"digits": 4}}},
    "model": {"kind": "tiny", "hidden_size": 32, "layers": 1, "heads": 2},
    "rollout": ROLLOUT,
    "optimizer": {"learning_rate": 1e-2},
    "clusters": {"actor_train": {"gpus": 1}},
}
RUNS: dict[str, Any] = {
    "small": {"lora": {"rank": 2, "targets": ["q_proj"]}, "steps": 3},
    "dropped": {"lora": {"rank": 8, "dropout": 0.3}, "seed": 9, "algorithm": {"name": "rloo"}},
    "ahead": {
        "schedule": {"name": "ahead", "options": {"max_staleness": 1}},
        "source": {"task": {"name": "copy_digits", "options": {"digits": 3}}},
        "lora": {"rank": 4, "targets": ["up_proj", "v_proj"]},
        "algorithm": {"name": "grpo", "minibatches": 2, "options": {"kl_coefficient": 0.1}},
        "rollout": {"prompts_per_step": 4},
    },
}
NO_TIMES = ("time", "step_s", "rollout_s", "rollout_wait_s", "reward_s", "train_s", "tokens_per_s")
NO_TIMES += ("gang_s", "gang_wait_s", "evaluation_s", "eval/rollout_s", "eval/tokens_per_s")


def job(runs: Mapping[str, Any], **more: Any) -> JobSpec:
    return JobSpec.model_validate({**BASE, **more, "runs": dict(runs)})


class AdapterGenerator(Generator):
    """As its parent, with the versions of each adapter."""

    versions: dict[str, int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bases: list[tuple[str, Any]] = []

    def publish(self, weights: Any) -> None:
        self.bases.append((weights.publication, weights.buckets))
        self.versions = {adapter.name: adapter.weights.version for adapter in weights.adapters}

    def expect_gpu_s(self, left: float) -> None: ...

    def share(self, adapter: str) -> Share:
        return Share(4, 1)

    def _answered(self, trajectory: Trajectory) -> Trajectory:
        answered = super()._answered(trajectory)
        answered.versions = [self.versions[trajectory.adapter]] * len(answered.token_ids)
        return answered


class AdapterEngine(Engine):
    processes: Mapping[int, str] = {0: "worker"}
    idle_s = 0.0

    def read(self, name: str, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    def publish(self, version: int) -> Any:
        return PublishedWeights(version, Manifest(()), (self.processes[0],))

    def acquire(self, lease: object) -> None: ...

    def release(self, epoch: int) -> None: ...


class Client:
    """Grants everything at once."""

    def __init__(self) -> None:
        self.leases = 0

    def registration(self) -> Registration:
        return Registration("ft_1", "test", ())

    def devices(self) -> dict[int, Any]:
        return {0: Device(0, "n0", "127.0.0.1", 0, DeviceKind.CPU)}

    def fence(self, lease: object) -> None: ...

    def lease_log(self, after: int) -> tuple[()]:
        return ()

    @contextmanager
    def phase(self, cluster: str, phase: Phase, *, stop: threading.Event, **_where: object) -> Iterator[Any]:
        if stop.is_set():
            raise InterruptedError("stopped")
        self.leases += 1
        yield SimpleNamespace(devices=(0,), epoch=self.leases, cluster=cluster)


class AdapterEngines(LocalEngines):
    def start(self) -> None:
        super().start()
        self.served = Served(self.rollouts, store=lambda adapter: adapter)

    def build(self, name: Any, module: Any, path: Path, optimizer: Any) -> Any:
        return AdapterEngine(built_here(module, path, optimizer, self._job.spec), path)


class Here:
    """In place of engines in other processes."""

    generator = AdapterGenerator

    def make_engines(self: Any) -> Engines:
        return AdapterEngines(self, (8, 64))

    def _write_lease_events(self) -> None: ...


class Many(Here, MultiLora):
    """What its runs have on their first steps is `on_step`'s business."""

    def __init__(self, spec: JobSpec, folder: Path, *, resume: bool = False) -> None:
        client: Any = Client()
        super().__init__("lora_1", JobConfig(spec, folder, resume), client)
        self.on_step: dict[tuple[str, int], Any] = {}

    def stepped(self, run: Any, metrics: Mapping[str, float]) -> None:
        super().stepped(run, metrics)
        self.on_step.pop((run.adapter, run.status().step), lambda: None)()


class Alone(Here, Trainer):
    """A job with one adapter."""


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in NO_TIMES} for line in lines]


def curves(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    return {name: rows(folder / "runs" / name) for name in names}


@pytest.fixture(scope="module")
def each_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for name, run in RUNS.items():
        folder = tmp_path_factory.mktemp("alone") / name
        assert Many(job({name: run}), folder).run().state == "finished"
        found |= curves(folder, [name])
    return found


def test_runs_learn_together_what_each_learns_alone_and_peft_loads_them(
    tmp_path: Path, each_alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Many(job(RUNS), tmp_path / "job")
    summary = many.run()
    assert (summary.state, many.status().step) == ("finished", 7)
    assert many.status().share == Share(12, 3)
    assert {run.source.around.job for run in many.runs.values()} == {f"many/{name}" for name in RUNS}
    assert {run.name: run.staleness for run in many.status().runs} == {"small": 0.0, "dropped": 0.0, "ahead": 1.0}
    assert [len(found) for found in each_alone.values()] == [3, 2, 2]
    every = rows(tmp_path / "job")
    assert sum(row["tokens"] for row in every) == sum(row["tokens"] for found in each_alone.values() for row in found)
    assert curves(tmp_path / "job", list(RUNS)) == each_alone
    written = [json.loads(line) for line in (tmp_path / "job/runs/ahead/metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["train_s"] < row["gang_s"] < row["step_s"] for row in written), "it scores and publishes, too"
    assert many.engines.actor.module.adapters() == ()
    folder = tmp_path / "job" / "runs" / "small" / "checkpoints" / "step_3" / "adapter"
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert any(parameter.abs().sum() > 0 for name, parameter in loaded.named_parameters() if "lora_B" in name)
    merge_adapter(folder, tmp_path / "merged")
    with monkeypatch.context() as patch, pytest.raises(SpecError, match="exists already"):
        patch.setattr("rlix.pipeline.jobs.export.AutoModelForCausalLM", None)  # a model is not loaded for nothing
        merge_adapter(folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(4, 12)[None]
    assert torch.allclose(merged(ids).logits, loaded(ids).logits, atol=1e-5)
    assert load_tokenizer(tmp_path / "merged").encode("417>") == load_tokenizer(Path(base)).encode("417>")


def test_a_job_that_is_run_anew_keeps_its_place(tmp_path: Path) -> None:
    for _ in range(2):
        small = {"small": {**RUNS["small"], "steps": 1}}
        many = Many(job(small, warmup={"steps": 1, "batch_size": 2}), tmp_path / "job")
        assert many.run().run_dir == str(tmp_path / "job")
        assert many.engines.base_path == tmp_path / "job" / "reference", "the runs are on the model that is warmed up"
    assert many.folder.earlier is not None, "what it did stands where it was asked to, the run before it aside"
    assert many.status().moved_to is None


def test_runs_join_pause_and_go_on_while_others_train(tmp_path: Path, each_alone: dict[str, Any]) -> None:
    many = Many(job({name: RUNS[name] for name in ("small", "dropped")}), tmp_path / "job")
    ended: list[Any] = []
    paused = threading.Event()
    many.on_step["small", 1] = lambda: (many.add("ahead", RunSpec.model_validate(RUNS["ahead"])), many.pause("dropped"))
    many.on_step["small", 3] = paused.set
    thread = threading.Thread(target=lambda: ended.append(many.run()))
    thread.start()
    assert paused.wait(WAIT_S)
    many._threads["dropped"].join(WAIT_S)
    assert "dropped" not in many.engines.actor.module.adapters()
    dropped = {run.name: run for run in many.status().runs}["dropped"]  # which may have been through before
    assert dropped.phase == {"stopped": "paused", "finished": "finished"}[dropped.state]
    with pytest.raises(SpecError, match="no run 'none'"):
        many.pause("none")
    many.resume("dropped")
    thread.join(WAIT_S)
    assert ended[0].state == "finished"
    assert curves(tmp_path / "job", list(RUNS)) == each_alone


def test_a_run_may_be_an_agents_and_another_its_neighbours(tmp_path: Path, rlix_home: Path) -> None:
    """Each has an endpoint of its own, and is evaluated as it says."""
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    source = {
        "openai": f"{Path(__file__).parent}/own_parts.py:talks",
        "chat": {"template": str(tmp_path / "chat.jinja"), "history": "keep"},
    }
    runs = {
        "agent": {"source": source, "evaluation": {"every": 1, "prompts": 1}},
        "other": {"source": source, "seed": 9, "schedule": {"name": "ahead", "options": {"in_flight": "finish"}}},
    }
    model = {**BASE["model"], "alphabet": "0123456789<>uas"}
    together = Many(job(runs, model=model), tmp_path / "job")
    assert together.run().state == "finished"
    assert Many(job({"agent": runs["agent"]}, model=model), tmp_path / "alone").run().state == "finished"
    assert curves(tmp_path / "job", ["agent"]) == curves(tmp_path / "alone", ["agent"])
    for name, found in curves(tmp_path / "job", list(runs)).items():
        assert [(row["reward"] > 0, row["agent_failed"], "eval/reward" in row) for row in found] == [
            (True, 0.0, name == "agent")
        ] * 2


def test_what_becomes_of_one_run_is_its_own(tmp_path: Path, each_alone: dict[str, Any]) -> None:
    parts = f"{Path(__file__).parent}/own_parts.py"
    broken = {"source": {"task": f"{parts}:RefusesStepOne"}}
    torn = {"algorithm": {"name": f"{parts}:BreaksInStepOne", "options": {"sharpness": 1.0}}}
    many = Many(job({"small": RUNS["small"], "broken": broken, "torn": torn}), tmp_path / "job")
    others = {0: "another"}  # as after a call that hung
    many.on_step["small", 1] = lambda: setattr(many.engines.actor, "processes", others)
    with pytest.raises(RlixError, match=r"2 of 3 runs failed, .* broken: .*no prompts today.*; torn: .*no loss today"):
        many.run()
    assert curves(tmp_path / "job", ["small"])["small"] == each_alone["small"]
    publications, stored = zip(*many.engines.served.rollouts.bases, strict=True)
    assert len(set(publications)) == 1, "replicas that have the model keep it"
    assert list(dict.fromkeys(stored)) == [("worker",), ("another",)], "and others find it"
    states = {"small": "finished", "broken": "failed", "torn": "failed"}
    assert {run.name: run.state for run in many.status().runs} == states
    kept = {run: sorted(p.name for p in tmp_path.glob(f"job/runs/{run}/checkpoints/*")) for run in ("broken", "torn")}
    assert kept == {"broken": ["step_1"], "torn": []}, "of a step that trained no checkpoint is right"
    # What was broken is mended and the job goes on: what is done is not done again.
    again = Many(job({"small": RUNS["small"], "broken": {"steps": 1}}), tmp_path / "job", resume=True)
    assert again.run().state == "finished"
    assert curves(tmp_path / "job", ["small"])["small"] == each_alone["small"]


def test_a_run_whose_code_hangs_in_the_jobs_process_ends_the_job_which_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()
    denominator = Algorithm.denominator

    def saving(folder: Path) -> SimpleNamespace:
        folder.mkdir()
        (folder / "state.json").write_text('{"world_size": 0}')
        return SimpleNamespace(done=lambda: False, wait=waited.append, folder=folder)

    def hang(algorithm: Algorithm, mask: torch.Tensor) -> float:
        if threading.current_thread().name == "run-stuck":
            many.checkpoints.begin(7, lambda folder: [saving(folder / "actor")])
            many.engines.actor.idle_s = 1e9
            entered.set()
            released.wait(WAIT_S)
        return denominator(algorithm, mask)

    monkeypatch.setattr(Algorithm, "denominator", hang)
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.01)
    many = Many(job({"stuck": {}, "small": RUNS["small"]}, training={"timeout_s": 0.2}), tmp_path / "job")
    actor = object.__new__(coordinator.PipelineActor)
    actor._pipeline, left, waited = many, list[str](), list[float]()
    many.client.unregister = left.append  # type: ignore[method-assign]
    with pytest.raises(
        WaitTimeoutError, match=r"many: run 'stuck' holds actor_train for .*timeout_s: 0\.2.*, in hang$"
    ):
        actor._run()
    assert left == ["its run ended"]
    many.wait_ended()
    status = many.status()
    assert (status.state, str(status.error).endswith(", in hang")) == ("failed", True)
    assert waited, "a checkpoint that was under way counts"
    assert (tmp_path / "job/checkpoints/step_7").is_dir()
    released.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "run"]:
        thread.join(WAIT_S)
    late = many.status()
    assert (late.state, late.phase, late.error) == ("failed", "failed", status.error), "the code has come back too late"
    ends = [json.loads(line) for line in (tmp_path / "job/events.jsonl").read_text().splitlines()]
    assert [end["detail"] for end in ends if end.get("event") in ("failed", "finished", "stopped")] == [status.error]


def test_what_joined_and_what_was_removed_is_so_after_a_restart(tmp_path: Path) -> None:
    one: dict[str, Any] = {"steps": 1, "lora": {"rank": 2, "targets": ["q_proj"]}}
    given = job({"kept": {**one, "steps": 3}, "left": {**one, "steps": 50}})
    many = Many(given, tmp_path / "job")

    def change() -> None:
        many.remove("left")
        many._threads["left"].join(WAIT_S)
        with pytest.raises(SpecError, match="does not train"):
            many.pause("left")
        with pytest.raises(SpecError, match=r"runs\.joined\.algorithm.*critic"):
            many.add("joined", RunSpec.model_validate({"algorithm": {"name": "ppo"}}))
        many.add("joined", RunSpec.model_validate(one))
        many.request_stop()

    changed = threading.Thread(target=change)  # it waits for a run, which waits for those that train
    many.on_step["kept", 1] = changed.start
    assert many.run().state == "stopped"
    changed.join(WAIT_S)
    assert not changed.is_alive()
    again = Many(given, tmp_path / "job", resume=True)
    assert again.run().state == "finished"
    assert {run.name: run.state for run in again.status().runs} == {"kept": "finished", "joined": "finished"}
    with pytest.raises(SpecError, match="does not train"):
        again.pause("kept")


def test_a_run_ends_when_the_job_is_stopped_before_it_tells_the_run(tmp_path: Path) -> None:
    class Late(Many):
        """Whose runs hear of its end from the gang that it does not wait for any more."""

        def _all_runs(self) -> list[Any]:
            told = not (self.stop_requested.is_set() and any(thread.is_alive() for thread in self._threads.values()))
            return super()._all_runs() if told else []

        @contextmanager
        def _held(self, phase: Phase) -> Iterator[None]:
            if self.stop_requested.is_set():
                raise InterruptedError("stopped")
            with super()._held(phase):
                yield

    late = Late(job({"kept": {"steps": 50, "lora": {"rank": 2, "targets": ["q_proj"]}}}), tmp_path / "job")
    late.on_step["kept", 1] = late.stop_requested.set
    assert late.run().state == "stopped"


def test_a_job_with_one_adapter(tmp_path: Path) -> None:
    client: Any = Client()
    own = {"lora": {"rank": 3}, "warmup": {"steps": 2}, "algorithm": {"options": {"kl_coefficient": 0.1}}}
    first: Pipeline = Alone(
        "ft_1", JobConfig(JobSpec.model_validate({**BASE, "pipeline": None, **own}), tmp_path / "one"), client
    )
    assert first.run().state == "finished"
    assert rows(tmp_path / "one")[1]["kl"] > 0  # to the model without the adapter
    saved = tmp_path / "one" / "checkpoints" / "step_2" / "adapter"
    assert AdapterConfig.of_folder(saved).rank == 3
    outside = JobSpec.model_validate({**BASE, "pipeline": None, "lora": {"path": str(saved)}})
    second = Alone("ft_2", JobConfig(outside, tmp_path / "two"), client)
    assert second.run().state == "finished"
    ended = tmp_path / "two" / "checkpoints" / "step_2" / "adapter"
    assert AdapterConfig.of_folder(ended).rank == 3
    # Only the values are taken: its schedule begins anew.
    assert json.loads((ended / "optimizer.json").read_text())["scheduler"]["last_epoch"] == 2


def test_what_does_not_fit_together_is_said_before_the_start(tmp_path: Path) -> None:
    for runs, message in (
        ({"a": {"rollout": {"prompts_per_step": 0}}}, r"runs\.a\.rollout\.prompts_per_step"),
        ({}, "runs: is missing"),
        ({"a b": {}}, r"runs\.a b.*\n.*should match pattern"),
        ({"a": {"algorithm": {"name": "ppo"}}}, r"runs\.a\.algorithm.*critic"),
        ({"a": {"algorithm": {"name": "distill", "options": {"teacher": "/t"}}}}, r"runs\.a\.algorithm.*teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            job(runs)
    with pytest.raises(ValueError, match="add 'pipeline: multi_lora'"):
        job({"a": {}}, pipeline=None)
    note_runs(tmp_path, {}, {"a"})
    with pytest.raises(SpecError, match="all its runs were removed"):
        with_changed_runs(job({"a": {}}), tmp_path)
    runs = job({"a": None, "b": {"lora": {"path": "/c"}}}, lora={"rank": 4}).run_specs
    assert [(run.lora.rank, run.lora.path) for run in runs.values() if run.lora] == [(4, None), (16, "/c")]


# ---- sharing ---------------------------------------------------------------------------------------------------------


@given(needs=st.lists(st.integers(0, 40), min_size=1, max_size=6), slots=st.integers(1, 30))
def test_slots_are_shared_by_need_and_nobody_starves(needs: list[int], slots: int) -> None:
    queue, held = FairQueue(), dict.fromkeys(map(str, range(len(needs))), 0)
    for owner, need in enumerate(needs):
        for number in range(need):
            queue.append(str(owner), f"{owner}/{number}")
    for _ in range(slots):
        if queue:
            held[queue.popleft(held).split("/")[0]] += 1
    given_slots = list(held.values())
    assert sum(given_slots) == min(slots, sum(needs))  # nothing lies idle
    most = max(given_slots)
    for need, got in zip(needs, given_slots, strict=True):
        assert got <= need
        assert got == need or got >= most - 1  # who wants more has as much as anybody


def test_an_aborted_trajectory_is_first_of_its_own() -> None:
    queue = FairQueue()
    for id in ("a1", "a2", "b1"):
        queue.append(id[0], id)
    queue.appendleft("a", "a0")
    queue.discard({"a1"})
    assert [queue.popleft({"a": 1}), queue.popleft({"a": 1, "b": 1}), queue.popleft({})] == ["b1", "a0", "a2"]
    assert not queue


TICKETS = st.lists(st.builds(Ticket, st.sampled_from("abcd"), st.sampled_from(Phase)), max_size=6)


@given(waiting=TICKETS, trained=st.sets(st.sampled_from("abcd")), last=st.sampled_from("abcd") | st.none())
def test_a_lease_serves_whoever_is_ready_and_ends(waiting: list[Ticket], trained: set[str], last: str | None) -> None:
    chosen = next_turn(waiting, trained, last)
    ready = [ticket for ticket in waiting if ticket.run not in trained]
    assert (chosen is None) == (not ready)
    if chosen is not None:
        assert chosen in ready
        assert chosen.run == last or all(t.run != last for t in ready)


@settings(max_examples=40)
@given(scored=st.lists(st.integers(0, 2), min_size=2, max_size=4), choices=st.data())
def test_nobody_trains_twice_while_another_run_waits(scored: list[int], choices: st.DataObject) -> None:
    """Whoever asks when; `scored` are the turns that each run takes before it trains."""
    waiting: list[Ticket] = []
    left, overtaken = list(scored), [Counter[str]() for _ in scored]
    trained, last = set[str](), None
    for _ in range(50):
        ask = [run for run in range(len(scored)) if all(ticket.run != str(run) for ticket in waiting)]
        for run in choices.draw(st.lists(st.sampled_from(ask), unique=True)) if ask else ():
            waiting.append(Ticket(str(run), Phase.OLD_LOG_PROBS if left[run] else Phase.ACTOR_TRAINING))
            overtaken[run].clear()
        ticket = next_turn(waiting, trained, last)
        if ticket is None:
            trained, last = set(), None  # the lease ends, and another one begins
            continue
        waiting.remove(ticket)
        last, run = ticket.run, int(ticket.run)
        left[run] = left[run] - 1 if left[run] else scored[run]
        if ticket.phase is Phase.ACTOR_TRAINING:
            trained.add(last)
            for other in waiting:
                overtaken[int(other.run)][last] += 1
                assert overtaken[int(other.run)][last] <= 1
