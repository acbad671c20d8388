"""Environments of the `verifiers` package as a job's agent: `source: {openai: {name: verifiers, options: ...}}`."""

import asyncio
import signal
from importlib.metadata import version
from typing import Any
from unittest import mock

from openai import AsyncOpenAI

from rlix.integrations.openai.source import Call
from rlix.pipeline.sources.loop import LoopThread
from rlix.pipeline.sources.place import EVALUATION, TRAIN
from rlix.pipeline.spec.named import load_module
from rlix.protocol.errors import RlixError, SpecError

_THE_POLICYS_FAULT = "EmptyModelResponseError"  # an answer of nothing is an answer, and has its reward


class VerifiersAgent:
    """Plays rows of the environment's training set, epoch after epoch, or those that it holds out for an evaluation;
    its rubric gives the reward.

    Environments run on a loop of their own: one that blocks holds up the others, not the endpoint.

    Args:
        environment: what `verifiers.load_environment` finds, which is called with `options`.

    Raises:
        SpecError: there is no such environment, or it has no rows to train on, or the package has another interface.
    """

    def __init__(self, environment: str, **options: Any) -> None:
        load: Any = getattr(load_module("verifiers"), "load_environment", None)
        if load is None:
            raise SpecError(
                f"source.openai.name: verifiers {version('verifiers')} has no 'load_environment'; install "
                "'verifiers<0.2', or have its environment played from outside, with 'openai: external'"
            )
        try:
            # It would take over the pipeline's signals, which works on the main thread only.
            with mock.patch.object(signal, "signal"):
                self._environment: Any = load(environment, **options)
            self._rows: dict[str, Any] = {TRAIN: self._environment.get_dataset()}
        except Exception as error:  # a user's environment may raise anything while it is loaded
            raise SpecError(
                f"source.openai.options.environment: {environment!r} cannot be loaded ({error}); install it, or put "
                "its folder on PYTHONPATH"
            ) from error
        self._loop = LoopThread()
        self._client: AsyncOpenAI | None = None

    def rows_of(self, split: str) -> int:
        """How many there are. Raises SpecError when none are held out: the package would give those to train on."""
        if split == EVALUATION and split not in self._rows:
            held_out = self._environment.build_eval_dataset()
            if held_out is None:
                raise SpecError(
                    "evaluation.source: is missing: the environment holds no rows out (it has no eval_dataset); name "
                    "another source"
                )
            self._rows[split] = held_out
        return len(self._rows[split])

    async def __call__(self, call: Call) -> float:
        return await asyncio.wrap_future(self._loop.submit(self._played(call)))

    async def _played(self, call: Call) -> float:
        if self._client is None:  # one for all: it takes 50 ms to make
            self._client = AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, timeout=None)
        client = self._client.with_options(api_key=call.api_key)
        rows = self._rows[call.place.split]
        row = rows[call.place.row(len(rows))]
        done = await self._environment.run_rollout(row, client, call.model, {})
        failed = done.get("error")
        if failed and failed["error"] != _THE_POLICYS_FAULT:
            raise RlixError(f"the environment failed: {failed['error_chain_str']}")
        return float(done["reward"])
