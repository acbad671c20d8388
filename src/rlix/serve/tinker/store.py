"""Weights that clients save under a name: folders that PEFT or transformers loads, which stay as they are."""

import hashlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlix.node.durable import sync, sync_folder
from rlix.pipeline.requests.whole import STATE
from rlix.pipeline.training.adapters import PROGRESS_FILE, STATE_FILE
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.answers import answer
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.records import Checkpoint, Model, Sampler

SCHEME = "tinker://"
KINDS = {
    "save_weights": ("weights", "training"),
    "save_weights_for_sampler": ("sampler_weights", "sampler"),
    "save_weights_external": ("external_weights", "external"),
}
"""By operation: the folder in a path, and what the client calls such a checkpoint."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHORTEST_TTL_S, _LONGEST_TTL_S = 3600, 10**9


class Store:
    """Checkpoints on this machine's disk; the journal knows which there are. For any thread.

    Args:
        unnamed: how many weights without a name are kept of a model, the newest.
        most: bytes of all that a user saves under a name, or copies.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        *,
        unnamed: int = 8,
        most: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._journal, self._unnamed, self._most, self._now = folder, journal, unnamed, most, now

    def save(
        self, model: Model, operation: str, given: Mapping[str, Any], write: Callable[[Path], object]
    ) -> tuple[str, bytes]:
        """What is answered. Raises SpecError: the name is none, or taken."""
        segment, kind = KINDS[operation]
        expires = self._expiry(given.get("ttl_seconds"))
        if given.get("age_encryption_recipients"):
            raise SpecError("age_encryption_recipients: nothing is encrypted here; leave it out")
        if kind == "sampler" and given.get("path") is None:
            return self._sampler(model, given, write)
        name = given.get("path")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SpecError(
                f"name {name!r}: letters, digits, '.', '_' and '-', at most 128, and a letter or digit first"
            )
        path = f"{SCHEME}{model.id}/{segment}/{name}"
        known, seq = self._journal.checkpoint(path), given.get("seq_id")
        if known is not None and known.about.get("seq") == seq:
            return answer(type=operation, path=path)  # it was saved when the server ended, and not noted yet
        if known is not None and not given.get("overwrite"):
            raise SpecError(f"{path} is there already, and saved weights stay as they are: choose another name")
        self._check_room(model.owner)
        # Never twice the same folder: who has read one knows what is in it.
        folder = self._folder / _plain(model.id) / segment / f"{name}@{int(seq or 0)}"
        write_whole(folder, write, optimizer=kind == "training")
        size = sum(file.stat().st_size for file in folder.rglob("*"))
        about = {"user_metadata": given.get("user_metadata"), "base": model.base, "rank": model.rank, **_config(model)}
        about["seq"] = seq
        self._journal.put_checkpoint(
            Checkpoint(path, model.id, model.owner, kind, str(folder), self._now(), expires, size, about)
        )
        if known is not None:
            shutil.rmtree(known.folder, ignore_errors=True)
        return answer(type=operation, path=path)

    def _sampler(self, model: Model, given: Mapping[str, Any], write: Callable[[Path], object]) -> tuple[str, bytes]:
        """Weights without a name, for one sampling client: as they are now, or the newest that were saved so."""
        id = f"{model.session}:sample:{given.get('sampling_session_seq_id')}"
        follows = given.get("kind") == "inflight"
        # By their place among the model's operations, so that the oldest are known.
        kept = self._folder / _plain(model.id) / ("newest" if follows else "samplers")
        folder = kept / f"{int(given.get('seq_id') or 0):012}"
        write_whole(folder, write, optimizer=False)
        if follows:
            self._journal.follow(model.id, str(folder))
        for old in sorted(kept.iterdir())[: -2 if follows else -self._unnamed]:  # one may be being read
            shutil.rmtree(old, ignore_errors=True)
        self._journal.put_sampler(
            Sampler(id, model.session, model.owner, model.base, "", model.id if follows else "", str(folder))
        )
        return answer(type="save_weights_for_sampler", path=None, sampling_session_id=id)

    def find(self, owner: str, path: object) -> Checkpoint:
        """Raises SpecError: there is none of the owner's."""
        found = self._journal.checkpoint(path) if isinstance(path, str) else None
        if found is None or found.owner != owner or (found.expires is not None and found.expires < self._now()):
            raise SpecError(f"there are no weights {path!r}: they were not saved, were deleted, or their time is over")
        return found

    def readable(self, owner: str, path: object, model: Model) -> Path:
        """The folder of weights that a model can go on from. Raises SpecError."""
        found = self.find(owner, path)
        if found.about["base"] != model.base or found.about["rank"] != model.rank:
            raise SpecError(
                f"{path} is of {found.about['base']} with rank {found.about['rank']}, and this model of {model.base} "
                f"with rank {model.rank}"
            )
        if found.kind != "training":
            raise SpecError(f"{path} holds weights for a sampler; training goes on from what save_state saved")
        return Path(found.folder)

    def copy(self, source: Path, folder: Path, *, optimizer: bool) -> None:
        write_whole(folder, lambda place: shutil.copytree(source, place), optimizer=optimizer)

    def copy_of(self, checkpoint: Checkpoint, owner: str, ttl_s: object, key: str) -> str:
        """Another path to the same weights, which stays when the first is deleted; with the same `key` the same one."""
        expires = self._expiry(ttl_s)
        head, _, name = checkpoint.path.rpartition("/")
        own = hashlib.blake2b((key or uuid.uuid4().hex).encode(), digest_size=6).hexdigest()
        path = f"{head}/{name}.copy-{own}"
        folder = Path(checkpoint.folder).with_name(f"{name}.copy-{own}")
        if self._journal.checkpoint(path) is not None:
            return path
        self._check_room(owner)
        self.copy(Path(checkpoint.folder), folder, optimizer=checkpoint.kind == "training")
        about = dict(checkpoint.about)
        self._journal.put_checkpoint(
            Checkpoint(
                *(path, checkpoint.model, owner, checkpoint.kind, str(folder), self._now(), expires),
                *(checkpoint.bytes, about),
            )
        )
        return path

    def delete(self, checkpoint: Checkpoint) -> None:
        self._journal.drop_checkpoint(checkpoint.path)
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def keep_until(self, checkpoint: Checkpoint, ttl_s: object) -> None:
        expires = self._expiry(ttl_s)
        self._journal.put_checkpoint(
            Checkpoint(
                *(checkpoint.path, checkpoint.model, checkpoint.owner, checkpoint.kind, checkpoint.folder),
                *(checkpoint.created, expires, checkpoint.bytes, checkpoint.about),
            )
        )

    def expire(self) -> None:
        """Delete those whose time is over."""
        for checkpoint in self._journal.checkpoints():
            if checkpoint.expires is not None and checkpoint.expires < self._now():
                self.delete(checkpoint)

    def forget_samplers(self, model: str) -> None:
        """Weights without a name, of a model that nobody can sample any more."""
        for name in ("samplers", "newest"):
            shutil.rmtree(self._folder / _plain(model) / name, ignore_errors=True)

    def _check_room(self, owner: str) -> None:
        used = sum(each.bytes for each in self._journal.checkpoints(owner))
        if self._most is not None and used >= self._most:
            raise SpecError(
                f"{owner}'s saved weights take {used / 1e9:.1f} GB, and {self._most / 1e9:g} GB is all that they may "
                "(`max_saved_gb` of the server): delete some first, or give them a time to live"
            )

    def _expiry(self, ttl_s: object) -> float | None:
        if ttl_s is None:
            return None
        if not isinstance(ttl_s, int) or not _SHORTEST_TTL_S <= ttl_s <= _LONGEST_TTL_S:
            raise SpecError(f"ttl_seconds must be from {_SHORTEST_TTL_S} to {_LONGEST_TTL_S}, or None for ever")
        return self._now() + ttl_s


def write_whole(folder: Path, write: Callable[[Path], object], *, optimizer: bool = True) -> None:
    """A folder has its name only when all of it is on the disk; without `optimizer` it is the weights alone."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    write(partial)
    if not optimizer:
        for name in (STATE_FILE, PROGRESS_FILE):
            (partial / name).unlink(missing_ok=True)
        shutil.rmtree(partial / STATE, ignore_errors=True)
    sync_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def _plain(id: str) -> str:
    return id.replace(":", "_")


def _config(model: Model) -> dict[str, Any]:
    return {key: model.config[key] for key in ("alpha", "targets", "train_mlp", "train_attn") if key in model.config}
