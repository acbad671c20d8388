"""Sessions, models, samplers and results: what the server does for a user, whatever carries the requests."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlix.pipeline.seeds import stream_seed
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.spec_file import nearest
from rlix.serve.tinker.answers import answer
from rlix.serve.tinker.base import Base
from rlix.serve.tinker.given import number, section
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.operations import LOAD
from rlix.serve.tinker.records import Model, Operation, Sampler, Session, State
from rlix.serve.tinker.settings import FULL, ServerSettings
from rlix.serve.tinker.store import Store


class UnknownError(SpecError):
    """There is no such thing, or it is somebody else's."""


class BusyError(RlixError):
    """More was asked than is taken for now; the client asks again after a while."""


class Service:
    """For any thread. All methods raise SpecError for what cannot be done, UnknownError for what is not there.

    Args:
        bases: the offered models by name.
        now: gives unix seconds.
    """

    def __init__(
        self,
        settings: ServerSettings,
        journal: Journal,
        store: Store,
        bases: Mapping[str, Base],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self.journal, self.store, self.bases, self._now = settings, journal, store, bases, now
        self._heard: dict[str, float] = {}  # when a session's client said something last
        self._lock = threading.Lock()

    # ---- sessions --------------------------------------------------------------------------------------------

    def create_session(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        body = {key: given.get(key) for key in ("tags", "user_metadata", "sdk_version", "project_id", "display_name")}
        session = Session(secrets.token_hex(12), user, self._now(), "", body)
        self.journal.add_session(session)
        self._heard[session.id] = self._now()
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        self.session(user, given.get("session_id"), alive=True)
        return {"type": "session_heartbeat"}

    def session(self, user: str, id: object, *, alive: bool = False) -> Session:
        found = self.journal.session(id) if isinstance(id, str) else None
        if found is None or found.owner != user:
            raise UnknownError(f"there is no session {id!r}")
        if alive and found.ended:
            raise UnknownError(f"session {id} has ended: {found.ended}; make another ServiceClient")
        self._heard[found.id] = self._now()
        return found

    def finish_session(self, user: str, id: str, given: Mapping[str, Any]) -> None:
        self.session(user, id)
        reason = section(given, "reason").get("type", "success")
        self._end(id, f"its client finished it: {reason}")

    def end_silent_sessions(self) -> None:
        """Those whose client has said nothing for too long. After a restart all have as long as at first."""
        limit = self._settings.session_timeout_s
        for session in self.journal.sessions(alive=True):
            if self._now() - self._heard.setdefault(session.id, self._now()) > limit:
                self._end(session.id, f"its client said nothing for {limit:g} s")

    def _end(self, id: str, why: str) -> None:
        self.journal.end_session(id, why)
        for model in self.journal.models(session=id):
            if (base := self.bases.get(model.base)) is not None:
                base.leave(model.id)
            self.store.forget_samplers(model.id)

    # ---- models ----------------------------------------------------------------------------------------------

    def create_model(self, user: str, given: Mapping[str, Any]) -> str:
        """The id of the operation."""
        session = self.session(user, given.get("session_id"), alive=True)
        lora = section(given, "lora_config")
        optimizer = section(given, "optimizer_config").get("type", "adamw")
        if optimizer != "adamw":
            raise SpecError(f"optimizer {optimizer!r} is refused: it is AdamW here")
        base = self._base(given.get("base_model"))
        if lora.get("rank") == 0 and not base.whole:
            base = self._whole(base)
        return self._add(user, session, base, given, lora, "")

    def load_as_new(self, user: str, given: Mapping[str, Any]) -> str:
        """A model that begins as saved weights are. The id of the operation."""
        session = self.session(user, given.get("session_id"), alive=True)
        found = self.store.find(user, given.get("path"))
        if found.kind != "training":
            raise SpecError(f"{found.path} holds weights for a sampler; training goes on from what save_state saved")
        if given.get("base_model") not in (None, found.about["base"]):
            raise SpecError(f"{found.path} is of {found.about['base']}, not of {given['base_model']}")
        lora = {key: found.about[key] for key in ("rank", "train_mlp", "train_attn") if key in found.about}
        return self._add(user, session, self._base(found.about["base"]), given, lora, found.folder)

    def _add(
        self,
        user: str,
        session: Session,
        base: Base,
        given: Mapping[str, Any],
        lora: Mapping[str, Any],
        source: str,
    ) -> str:
        id = f"{session.id}:train:{number(given, 'model_seq_id', 0)}"
        body = json.dumps(dict(given), sort_keys=True).encode()
        with self._lock:  # asked twice at once, it is one
            if self.journal.model(id) is not None:
                kind = "create_model" if not source else LOAD
                return self.journal.ask(Operation(f"{id}:0", id, 0, kind, body)).id
            alive = [model for model in self.journal.models(user) if not model.unloaded]
            if len(alive) >= (most := self._settings.max_models_per_user):
                raise SpecError(f"{user} has {most} models, and no more are allowed: finish a session with one of them")
            base.admit(sum(not each.unloaded for each in self.journal.models() if each.base == base.name))
            config, rank = self._config(id, base, lora)
            folder = ""
            if source:
                folder = str(base.state_folder(id, 0))
                self.store.copy(Path(source), base.state_folder(id, 0), optimizer=bool(given.get("optimizer")))
            kind = LOAD if source else "create_model"
            media, result = answer(type=kind, model_id=id, path=given.get("path"))
            first = Operation(f"{id}:0", id, 0, kind, body, State.DONE, media, result)
            now, metadata = self._now(), given.get("user_metadata") or {}
            self.journal.add_model(
                Model(
                    *(id, session.id, user, base.name, rank, config, now, now),
                    *(0, 0, folder, "", metadata),
                ),
                first,
            )
        base.train(id)  # so that it is there when it is asked for
        return first.id

    def _config(self, id: str, base: Base, lora: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """What is trained of it, and the rank of the adapter; 0: all of it."""
        seed = lora.get("seed")
        drawn = {"seed": stream_seed("tinker", id) if seed is None else number(lora, "seed", -(2**63))}
        if base.whole:
            return drawn, 0
        rank, most = lora.get("rank", 32), base.offered.max_rank
        if not isinstance(rank, int) or not 0 < rank <= most:
            raise SpecError(f"rank is {rank!r}; on {base.name} it must be from 1 to {most}")
        attention, mlp = lora.get("train_attn", True), lora.get("train_mlp", True)
        targets = (base.shape.attention if attention else ()) + (base.shape.mlp if mlp else ())
        if not targets:
            raise SpecError("the head has no adapter here: set train_attn or train_mlp, or both")
        trained = {"train_attn": bool(attention), "train_mlp": bool(mlp)}
        return {"alpha": base.offered.alpha, "targets": sorted(targets), **trained, **drawn}, rank

    def _whole(self, base: Base) -> Base:
        if (whole := self.bases.get(f"{base.name}{FULL}")) is not None:
            return whole
        raise SpecError(
            f"rank 0 is refused: not every weight of {base.name} can be trained here (`full` of the server's "
            f"settings); take 1 to {base.offered.max_rank}"
        )

    def _base(self, name: object) -> Base:
        if not isinstance(name, str) or name not in self.bases:
            near = nearest(str(name), self.bases)
            raise SpecError(f"base model {name!r} is not offered here{near}; there are {', '.join(self.bases)}")
        return self.bases[name]

    def model(self, user: str, id: object, *, alive: bool = False) -> Model:
        found = self.journal.model(id) if isinstance(id, str) else None
        if found is None or found.owner != user:
            raise UnknownError(f"there is no model {id!r}")
        if alive and found.unloaded:
            raise UnknownError(f"model {id} cannot be trained any more: {found.unloaded}")
        return found

    def info(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        model = self.model(user, given.get("model_id"))
        base = self._base(model.base)
        data = {
            "arch": base.shape.architecture,
            "model_name": model.base,
            "tokenizer_id": base.offered.tokenizer or base.offered.path or model.base,
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "is_lora": bool(model.rank),
            "lora_rank": model.rank or None,
            "model_name": model.base,
        }

    def unload(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        model = self.model(user, given.get("model_id"))
        self.journal.unload(model.id, "its client unloaded it")
        self._base(model.base).leave(model.id)
        return {"type": "unload_model", "model_id": model.id}

    def ask(self, user: str, kind: str, model_id: object, seq: int, body: bytes) -> str:
        """Have something done to a model, after everything with a lower number. The id of the operation."""
        model = self.model(user, model_id, alive=True)
        self.session(user, model.session, alive=True)
        asked = Operation(f"{model.id}:{seq}", model.id, seq, kind, body)
        self._check_room(user, asked)
        found = self.journal.ask(asked)
        if found.state is State.QUEUED:
            self._base(model.base).train(model.id)
        return found.id

    def _check_room(self, user: str, asked: Operation) -> None:
        """Raises BusyError: there will be room. SpecError: there will not, unless the client does something."""
        most = int(self._settings.max_waiting_mb * 1e6)
        held, waits = self.journal.held(user)
        if held + len(asked.body) <= most or self.journal.outcome(asked.id) is not None:
            return
        if waits:
            raise BusyError(f"{user}'s requests that wait take {held:,} bytes, and {most:,} are taken")
        raise SpecError(
            f"{user}'s passes since the last optimizer step take {held:,} bytes, and {most:,} are taken "
            "(`max_waiting_mb` of the server): call optim_step, or send less at once"
        )

    def load(self, user: str, given: Mapping[str, Any], body: bytes) -> str:
        if given.get("session_id") is not None:
            return self.load_as_new(user, given)
        return self.ask(user, LOAD, given.get("model_id"), number(given, "seq_id", 1), body)

    # ---- samplers --------------------------------------------------------------------------------------------

    def create_sampler(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        session = self.session(user, given.get("session_id"), alive=True)
        id = f"{session.id}:sample:{given.get('sampling_session_seq_id')}"
        path, base = given.get("model_path"), given.get("base_model")
        folder = ""
        if path is not None:
            found = self.store.find(user, path)
            if base not in (None, found.about["base"]):
                raise SpecError(f"{path} is of {found.about['base']}, not of {base}")
            base, folder = found.about["base"], found.folder
        self.journal.put_sampler(Sampler(id, session.id, user, self._base(base).name, path or "", "", folder))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def sampler(self, user: str, id: object) -> Sampler:
        found = self.journal.sampler(id) if isinstance(id, str) else None
        if found is None or found.owner != user:
            raise UnknownError(f"there is no sampler {id!r}")
        return found

    def join_sampler(self, user: str, given: Mapping[str, Any]) -> dict[str, Any]:
        sampler = self.sampler(user, given.get("sampling_session_id"))
        return {"type": "join_sampling_session", "client_counter": self.journal.clone(sampler.id)}

    def sample(self, user: str, given: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        sampler = self.sampler(user, given.get("sampling_session_id"))
        self.session(user, sampler.session, alive=True)
        seq = number(given, "seq_id", 0)
        asked = Operation(f"{sampler.id}:{seq}", sampler.id, seq, "sample", body)
        known = self.journal.outcome(asked.id) is not None
        self._check_room(user, asked)
        asked = self.journal.ask(asked)
        if not known:
            self._base(sampler.base).sample(asked)
        count = given.get("num_samples", 1)
        ids = [f"{asked.id}/{index}" for index in range(count if isinstance(count, int) and 0 < count <= 1024 else 0)]
        return {"request_id": asked.id, "sample_sequence_ids": ids}

    # ---- results ---------------------------------------------------------------------------------------------

    def result(self, user: str, id: object) -> Operation:
        """What was asked, with its result if it has one. Raises UnknownError."""
        found = self.journal.outcome(id) if isinstance(id, str) else None
        if found is None or user != self._owner(found.target):
            raise UnknownError(f"there is no request {id!r}: its result was kept for a while and is gone, or never was")
        return found

    def why(self, operation: Operation) -> str:
        model, sampler = self.journal.model(operation.target), self.journal.sampler(operation.target)
        base = self.bases.get(model.base if model is not None else sampler.base if sampler is not None else "")
        return "its base model is not offered any more" if base is None else base.why(operation.target)

    def _owner(self, target: str) -> str | None:
        found = self.journal.model(target) or self.journal.sampler(target)
        return None if found is None else found.owner

    def capabilities(self) -> dict[str, Any]:
        models = [
            {
                "model_name": base.name,
                "max_context_length": base.shape.context,
                "trainable": True,
                "sampleable": True,
            }
            for base in self.bases.values()
        ]
        return {"supported_models": models}
