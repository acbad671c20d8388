"""What a server offers, and to whom: a YAML file."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rlix.pipeline.spec.environment import backend_problems
from rlix.pipeline.spec.executor import executor_problems, name_problems
from rlix.pipeline.spec.job import with_files
from rlix.pipeline.spec.section import Count, Positive, Seconds, Section, Seed
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import problems_of, read_yaml

KEY_PREFIX, DEFAULT_TEAM = "tml-", "default"


def _key(given: object) -> object:
    if isinstance(given, str) and re.fullmatch(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{8,}}", given):
        return given
    raise ValueError(f"must be {KEY_PREFIX} and at least 8 letters, digits, _ or -; what there is is not shown")


Key = Annotated[str, BeforeValidator(_key)]
FULL = ":full"
"""After the name of a base model: all of it is trained, and not an adapter."""
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)]
UserName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$", max_length=64)]


class OfferedModel(Section):
    """A base model that clients may train and sample."""

    path: str | None = None
    """Its folder, or its name on the hub; left out: the name that it is offered under. A folder needs no network."""
    tokenizer: str | None = None
    """What clients load the tokenizer by: a name on the hub, or a folder on *their* machine; left out: `path`.
    `SamplingClient.get_tokenizer` takes the model's name instead."""
    dtype: str = "float32"
    """Of the base model, and in which it computes: `float32` or `bfloat16`. Adapters are in float32."""
    gpus: Count = 1
    """Devices that train it together, for as long as an operation takes."""
    tensor_parallel: Count = 1
    """Devices of a replica that samples."""
    executor: str = "transformers"
    """Of replicas, like the two that follow: as in a job's `rollout`; a file of your own is relative to this one."""
    executor_options: dict[str, Any] = Field(default_factory=dict)
    max_num_seqs: Count = 64
    training_executor: str = "fsdp2"
    """As a job's `training.executor`."""
    adapters: Count = 16
    """Most adapters that replicas hold at a time; those sampled longest ago make room."""
    full: Annotated[int, Field(ge=0)] = 0
    """Clients may train every weight of it, as `NAME:full`: so many at a time, by all users together, each with `gpus`
    for its operations."""
    max_rank: Count = 64
    """Of an adapter."""
    alpha: Positive = 32.0
    """Of every adapter: its part is scaled by alpha / rank."""
    micro_batch_tokens: Count = 16384
    """Most tokens that go through the model together."""
    seed: Seed = 0
    """Of the job behind it."""


@dataclass(frozen=True, slots=True)
class Teams:
    """Of users; one that is in none is in `default`. Weights by team, 1 where nothing is said."""

    by_user: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def of(self, user: str) -> str:
        return self.by_user.get(user, DEFAULT_TEAM)

    def weight(self, place: tuple[str, ...]) -> float:
        """Of a team's place; that of a user, or of a model, weighs as much as any other."""
        return self.weights.get(place[0], 1.0) if len(place) == 1 else 1.0


class ServerSettings(Section):
    models: dict[ModelName, OfferedModel] = Field(min_length=1)
    """By the name that clients ask for."""
    keys: dict[UserName, Key] = Field(default_factory=dict)
    """By user: `tml-` and at least 8 letters, digits, `_` or `-`. Without any, one is made and kept in
    `RLIX_HOME/tinker`. A user sees only what is their own."""
    teams: dict[UserName, tuple[UserName, ...]] = Field(default_factory=dict)
    """Users by team, `{vision: [alice, bob]}`, by whose weights in `RLIX_HOME/queue.yaml` they take turns; who is in
    none is in `default`."""
    max_body_mb: Positive = 64.0
    """Of a request."""
    max_waiting_mb: Positive = 1024.0
    """Of a user's requests, those that wait, or may have to be done again because no state was kept since; the client
    waits with the next one (429), or is told to call `optim_step` where that is what is missing."""
    max_saved_gb: Positive | None = None
    """What a user has saved under a name; more is refused until some is deleted, or its time is over."""
    session_timeout_s: Seconds = 600.0
    """A session whose client says nothing for so long ends: its models leave, what they saved stays."""
    state_every: Count = 8
    """Optimizer steps between two kept states of a model: what is computed again at most after a failure. Of a model
    that is trained whole a state has all weights and moments."""
    samplers_kept: Count = 8
    """Of a model, how many weights that were saved for a sampling client without a name; the newest."""
    results_kept_s: Seconds = 86400.0
    """For clients that ask late."""
    max_models_per_user: Count = 16
    """Alive at a time."""

    @model_validator(mode="after")
    def _distinct_keys(self) -> Self:
        if len(set(self.keys.values())) < len(self.keys):
            raise ValueError("two users have the same key; give each their own")
        return self

    @model_validator(mode="after")
    def _one_team_each(self) -> Self:
        members = [user for team in self.teams.values() for user in team]
        if twice := sorted({user for user in members if members.count(user) > 1}):
            raise ValueError(f"{twice[0]} is in teams twice; each user is in one")
        if self.keys and (unknown := sorted(set(members) - self.keys.keys())):
            raise ValueError(f"{unknown[0]} is in a team and has no key")
        return self

    def teams_with(self, weights: Mapping[str, float]) -> Teams:
        return Teams({user: team for team, users in self.teams.items() for user in users}, weights)


def load_settings(path: Path) -> ServerSettings:
    """Raises SpecError with one line per problem."""
    if not path.is_file():
        raise SpecError(f"{path}: no such file; it says which models are offered: 'models: {{Qwen/Qwen3-8B: {{}}}}'")
    data, origin = read_yaml(path, "a server's settings are 'models:', and perhaps 'keys:'")
    for model in (data.get("models") or {}).values() if isinstance(data.get("models"), dict) else ():
        if isinstance(model, dict) and isinstance(given := model.get("path"), str) and given.startswith((".", "~")):
            model["path"] = str((path.parent / Path(given).expanduser()).resolve())
        for backend in ("executor", "training_executor"):
            if isinstance(model, dict) and backend in model:
                model[backend] = with_files(model[backend], path.parent)
    try:
        settings = ServerSettings.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise origin.error(problems_of(error.errors(), ServerSettings, data)) from None
    for name, model in settings.models.items():
        if model.path is not None and Path(model.path).is_absolute() and not Path(model.path).is_dir():
            raise SpecError(f"{path}: models.{name}.path: {model.path}: no such folder")
        if wrong := [f"{path}: models.{name}.{problem}" for problem in _backend_problems(model)]:
            raise SpecError("\n".join(wrong))
    return settings


def _backend_problems(model: OfferedModel) -> Iterator[str]:
    """What a job would be told of them."""
    executor, options, trainer = model.executor, model.executor_options, model.training_executor
    problems = [*name_problems(executor, trainer), *executor_problems(executor, options, longest_answer=1)]
    for problem in problems or backend_problems(executor, options, trainer):
        field = problem.field.removeprefix("rollout.").replace("training.", "training_")
        yield f"{field}: {problem.message}"
