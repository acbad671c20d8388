"""A Tinker server in one process: real HTTP paths, journal and training module; devices that are always there."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from starlette.testclient import TestClient

from rlix.engine.lora import WEIGHTS_FILE, AdapterConfig
from rlix.engine.train import checkpoint
from rlix.engine.train.materialize import Checkpoint
from rlix.engine.weights.publication import apply
from rlix.pipeline.ends import Ends
from rlix.pipeline.models import write_tiny_model
from rlix.pipeline.requests.adapters import ServedAdapters
from rlix.pipeline.requests.losses import RequestedLoss
from rlix.pipeline.requests.module import AdamStep, requested_on_meta
from rlix.pipeline.requests.turns import Turns
from rlix.pipeline.requests.whole import ServedWhole, published
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.model import TinyModel
from rlix.pipeline.spec.training import OptimizerSpec, TrainingSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.errors import WorkerError
from rlix.protocol.types import Phase
from rlix.serve.tinker.app import Door, Results
from rlix.serve.tinker.base import bases_of, shape_of
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.keys import Keys
from rlix.serve.tinker.live import Means
from rlix.serve.tinker.service import Service
from rlix.serve.tinker.settings import ServerSettings
from rlix.serve.tinker.store import Store
from rlix.serve.tinker.wire import MESSAGES, Datum, Pass, pass_bytes
from tests.pipeline.training_scenarios import built

KEYS = {"alice": "tml-alice-0123", "bob": "tml-bob-012345"}
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
WAIT_S = 300.0


def tiny(folder: Path) -> Path:
    return write_tiny_model(TinyModel(hidden_size=32, layers=1, heads=2), folder, 0)


class Pipeline:
    """In place of the job behind a model. `dies` says before which calls of the engine its workers die."""

    def __init__(self, folder: Path, dies: Callable[[str], bool] = lambda _: False) -> None:
        self.folder, self._dies = folder, dies
        self.ready, self._ended, self.free = threading.Event(), threading.Event(), threading.Event()
        self.tokenizer = load_tokenizer(folder)
        self.ends = Ends(self.tokenizer, folder)
        self.vocabulary, self.context, self.pad_id, self.ranks = len(self.tokenizer), 64, 0, 1
        self.held = self.leases = self.rebuilt = 0
        self.served: dict[str, Path] = {}
        self.asked: list[Trajectory] = []
        self._make()
        self.ready.set()

    def _make(self) -> None:
        self.module = built(requested_on_meta(self.folder), self.folder)
        self.module.configure_optimizer(OptimizerSpec(), TrainingSpec(micro_batch_tokens=40))

    def rebuild(self) -> None:
        assert not self.held, "the gang is given back first"
        self.rebuilt += 1
        self._make()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def request_stop(self) -> None:
        self._ended.set()

    def wait_ended(self) -> None: ...

    def waits_for(self) -> str:
        return "somebody has them"

    def status(self) -> Any:
        return SimpleNamespace(error=None, phase="initialization")

    @contextmanager
    def gang(self, phase: Phase) -> Iterator[None]:
        self.held, self.leases = 1, self.leases + 1
        self.free.clear()
        try:
            yield
        finally:
            self.held = 0
            self.free.set()

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        assert self.held, f"{name} without devices"
        if self._dies(name):
            self.module = None
            raise WorkerError(f"rank 0 died in {name}")
        return getattr(self.module, name)(*args, **named)

    def add(self, name: str, config: AdapterConfig | None, seed: int) -> None:
        self._call("add_adapter", name, config, OptimizerSpec(), 1, seed)

    def drop(self, name: str) -> None:
        if name in self.module.adapters():
            self._call("remove_adapter", name)

    @contextmanager
    def scoring(self, folder: Path | None) -> Iterator[str | None]:
        with ServedAdapters.scoring(self, folder) as name:  # type: ignore[arg-type]
            yield name

    def run_pass(self, name: str, batch: Any, loss: RequestedLoss, *, backward: bool) -> tuple[torch.Tensor, float]:
        answer = self._call("requested_pass", batch, loss, name, backward=backward)
        return answer["log_probs"], float(answer["loss"])

    def take_step(self, name: str, adam: AdamStep) -> dict[str, float]:
        metrics: dict[str, float] = self._call("requested_step", adam, name)
        return metrics

    def score_prompt(self, name: str | None, batch: Any, several: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._call("requested_scores", batch, several, name)
        return found

    def save_training(self, name: str, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        self.module.save_adapter(name, folder, str(self.folder))

    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None:
        self._call("load_adapter", name, folder, OptimizerSpec(), 1, goes_on=optimizer)
        self.module.forget_gradients(name)

    def offer(self, name: str, folder: Path, version: int) -> None:
        assert (folder / WEIGHTS_FILE).is_file()
        self.served[name] = folder

    def withdraw(self, name: str) -> None:
        del self.served[name]

    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]":
        """A token for each position, from the seed alone; the last of the vocabulary is never drawn."""
        for each in trajectories:
            assert not each.adapter or each.adapter in self.served
            self.asked.append(each)
            while each.finish_reason is None:
                at = len(each.token_ids)
                each.token_ids.append(Random(f"{each.seed} {at}").randrange(1, self.vocabulary - 1))
                each.logprobs.append(-1.0 - at)
                each.versions.append(1)
                if each.token_ids[-1] in each.sampling.stop_token_ids:
                    each.finish_reason = "stop"
                elif len(each.token_ids) == each.sampling.max_new_tokens:
                    each.finish_reason = "length"
        done: Future[list[Trajectory]] = Future()
        done.set_result(list(trajectories))
        return done


class Actor:
    """A train engine's calls, in this process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **named: self._pipeline._call(name, *args, **named)

    def load(self, folder: Path) -> None:
        module = self._pipeline.module
        Checkpoint.in_folder(folder, module).refill(0)

    def save(self, folder: Path) -> None:
        checkpoint.save_weights(self._pipeline.module, folder, str(self._pipeline.folder))

    def load_state(self, folder: Path) -> None:
        assert self._pipeline.held
        checkpoint.load_state(self._pipeline.module, folder)

    def save_state(self, folder: Path) -> None:
        checkpoint.save_state(self._pipeline.module, folder)


class WholePipeline(Pipeline):
    """In place of a job of `ServedWhole`, whose code it is where that needs no pool."""

    add, drop = ServedWhole.add, ServedWhole.drop
    save_training, load_training = ServedWhole.save_training, ServedWhole.load_training
    scoring, generate = ServedWhole.scoring, ServedWhole.generate
    offer, withdraw, _take, _named = ServedWhole.offer, ServedWhole.withdraw, ServedWhole._take, ServedWhole._named

    def _make(self) -> None:
        super()._make()
        self.model_path = self._held = self.folder
        self.actor = Actor(self)
        self.rollouts = self
        self._offered: dict[str, Path] = {}
        self._turns: Turns[Path, list[Trajectory]] = Turns(self._serve)

    def run_pass(self, name: str, batch: Any, loss: RequestedLoss, *, backward: bool) -> tuple[torch.Tensor, float]:
        return super().run_pass(None, batch, loss, backward=backward)

    def take_step(self, name: str, adam: AdamStep) -> dict[str, float]:
        self._held = None
        return super().take_step(None, adam)

    def score_prompt(self, name: str | None, batch: Any, several: int) -> dict[str, torch.Tensor]:
        return super().score_prompt(None, batch, several)

    def _serve(self, folder: Path) -> None:
        self.served_folders = [*getattr(self, "served_folders", []), folder]
        fresh = built(requested_on_meta(self.folder), self.folder)
        apply(fresh, published(folder, self.folder, 1, "float32", put=np.array))
        self.published = fresh

    def submit(self, step: int, trajectories: Sequence[Trajectory]) -> "list[Future[Trajectory]]":
        """The most likely tokens, by the weights that are there."""
        asked: list[Future[Trajectory]] = []
        for each in trajectories:
            assert not each.adapter
            for _ in range(each.sampling.max_new_tokens):
                with torch.no_grad():
                    ids = torch.tensor([[*each.prompt_ids, *each.token_ids]])
                    log_p = self.published(input_ids=ids).logits[0, -1].log_softmax(-1)
                each.token_ids.append(int(log_p.argmax()))
                each.logprobs.append(float(log_p.max()))
                each.versions.append(1)
            each.finish_reason = "length"
            asked.append(Future())
            asked[-1].set_result(each)
        return asked


class Server:
    """A server on `home`; leave the block and make another one on it for a restart."""

    def __init__(
        self,
        home: Path,
        *,
        dies: Callable[[str], bool] = lambda _: False,
        now: Callable[[], float] | None = None,
        full: int = 0,
        **settings: Any,
    ) -> None:
        folder = tiny(home / "model")
        given = {"models": {"tiny": {"path": str(folder), "full": full}}, "keys": KEYS, **settings}
        self.settings = ServerSettings.model_validate(given)
        self.wholes: dict[str, WholePipeline] = {}  # by the name of their job
        clock = {} if now is None else {"now": now}
        self.journal = Journal(home / "journal.db", **clock)
        self.store, self.results = (
            Store(
                *(home / "checkpoints", self.journal),
                unnamed=self.settings.samplers_kept,
                most=None if self.settings.max_saved_gb is None else self.settings.max_saved_gb * 1e9,
                **clock,
            ),
            Results(),
        )
        self.pipeline = Pipeline(folder, dies)

        def start(spec: JobSpec, _: Path) -> Any:
            if not spec.name.startswith("tinker-tiny-full"):
                return self.pipeline
            self.wholes[spec.name] = WholePipeline(folder, dies)
            return self.wholes[spec.name]

        means = Means(
            *(self.journal, self.store, home, start, self.results.finished, self.settings.state_every),
            self.settings.teams_with({}),
        )
        self.bases = {b.name: b for b in bases_of("tiny", self.settings.models["tiny"], shape_of(folder), means)}
        self.base: Any = self.bases["tiny"]
        self.service = Service(self.settings, self.journal, self.store, self.bases, **clock)
        keys = Keys(KEYS, b"secret", **clock)
        most = int(self.settings.max_body_mb * 1e6)
        self.http = TestClient(Door(self.service, keys, self.results, most=most, results_kept_s=3600).app())

    def __enter__(self) -> "Server":
        self.http.__enter__()
        for base in self.bases.values():
            base.start()
        return self

    def __exit__(self, *_: object) -> None:
        for base in self.bases.values():
            base.close()
        self.http.__exit__(None, None, None)
        self.journal.close()

    def client(self, user: str = "alice") -> "Client":
        return Client(self.http, KEYS[user])


class Client:
    """What Tinker's client sends, without it."""

    def __init__(self, http: Any, key: str) -> None:
        self._http, self._key = http, key
        self.session = self.model = ""
        self.seq = self.samplers = 0

    def ask(self, method: str, path: str, /, *, status: int = 200, **given: Any) -> Any:
        response = self._http.request(method, f"/api/v1/{path}", headers={"X-API-Key": self._key}, **given)
        assert response.status_code == status, f"{method} {path}: {response.status_code} {response.text}"
        if "protobuf" in response.headers.get("content-type", ""):
            return response.content
        return response.json() if response.content else None

    def post(self, path: str, /, *, status: int = 200, **body: Any) -> Any:
        return self.ask("POST", path, status=status, json=body)

    def result(self, future: Mapping[str, Any]) -> Any:
        while True:
            response = self._http.post(
                "/api/v1/retrieve_future",
                headers={"X-API-Key": self._key},
                json={"request_id": future["request_id"]},
            )
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                break
            assert response.json()["queue_state_reason"]
        return response.content if "protobuf" in response.headers["content-type"] else response.json()

    def create(self, base: str = "tiny", *, seed: int = 3, rank: int = 4, **lora: Any) -> dict[str, Any]:
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"]
        config = {"rank": rank, "seed": seed, "train_mlp": True, "train_attn": True, "train_unembed": True, **lora}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": base, "lora_config": config}
        answer: dict[str, Any] = self.result(self.post("create_model", **body))
        self.model = answer["model_id"]
        return answer

    def number(self) -> int:
        self.seq += 1
        return self.seq

    def run_pass(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        options: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
        seq: int | None = None,
    ) -> dict[str, Any]:
        """The future."""
        given = Pass(self.model, seq or self.number(), tuple(data), loss, options or {}, forward_only)
        headers = {"X-API-Key": self._key, "Content-Type": "application/x-protobuf"}
        response = self._http.post("/api/v1/forward_backward", content=pass_bytes(given), headers=headers)
        assert response.status_code == 200, response.text
        future: dict[str, Any] = response.json()
        return future

    def step(self, *, seq: int | None = None, **adam: float) -> dict[str, Any]:
        body = {"model_id": self.model, "seq_id": seq or self.number(), "adam_params": {**ADAM, **adam}}
        future: dict[str, Any] = self.post("optim_step", **body)
        return future

    def operation(self, kind: str, /, **body: Any) -> Any:
        """The result."""
        return self.result(self.post(kind, model_id=self.model, seq_id=self.number(), **body))

    def train(self, data: Sequence[Datum], steps: int) -> list[float]:
        """The losses."""
        losses = []
        for _ in range(steps):
            passed, stepped = self.run_pass(data), self.step()
            losses.append(loss_of(self.result(passed)))
            assert "metrics" in self.result(stepped)
        return losses

    def sampler(self, **body: Any) -> str:
        self.samplers += 1
        made = self.post(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=self.samplers, **body
        )
        return str(made["sampling_session_id"])

    def sample(self, sampler: str, prompt: Sequence[int], seq: int = 0, **body: Any) -> Any:
        given = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "seq_id": seq, **body}
        return self.result(self.post("asample", sampling_session_id=sampler, **given))


def datum(tokens: Sequence[int], targets: Any = None, **inputs: Any) -> Datum:
    """Of a sequence: every token is learnt but the first, unless `targets` says otherwise."""
    ids = np.asarray(tokens, np.int32)
    if targets is None:
        ids, targets = ids[:-1], ids[1:]
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return Datum(ids, {"target_tokens": np.asarray(targets, np.int64), **arrays})


def output_of(body: bytes) -> Any:
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    return message


def loss_of(body: Any) -> float:
    assert isinstance(body, bytes), body
    return float(output_of(body).metrics["loss:sum"])


def log_probs_of(body: bytes) -> list[np.ndarray]:
    found = []
    for record in output_of(body).loss_fn_outputs:
        field = record.fields["logprobs"]
        flat = np.frombuffer(field.data, np.float32)
        found.append(flat.reshape(-1, *field.trailing_shape))
    return found


def samples_of(body: Any) -> Any:
    assert isinstance(body, bytes), body
    message = MESSAGES["SampleResponse"]()
    message.ParseFromString(body)
    return message


def tokens_of(body: Any) -> list[list[int]]:
    return [np.frombuffer(each.tokens, np.int32).tolist() for each in samples_of(body).sequences]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
