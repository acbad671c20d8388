"""Plays a taskset of verifiers 0.4 for a job with `source: {openai: external}` (docs/agents.md).

It has a Python environment of its own, which need not have RLix: `pip install verifiers uv`.

    python examples/verifiers_player.py ~/.rlix/endpoints/my_job.json my-taskset --at-once 16 --held-out 100
"""

import argparse
import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

ANSWER_S = 120.0  # longest that the endpoint may take; it says within a minute that there is no episode
numbers = itertools.count()


async def play(endpoint: dict[str, str], taskset: str, at_once: int, held_out: int) -> None:
    """Until the job ends; of the taskset's first `held_out` tasks evaluations are made, of the others training."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # whose programs uv starts on this machine
    env = load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    tasks = list(env.taskset)
    rows = {"train": tasks[held_out:], "evaluation": tasks[:held_out]}
    job = httpx.AsyncClient(base_url=endpoint["base_url"], headers=with_key(endpoint["api_key"]), timeout=ANSWER_S)
    async with job, env.serving():
        model = (await job.get("models")).raise_for_status().json()["data"][0]["id"]
        asked = {"rows": {split: len(of_split) for split, of_split in rows.items() if of_split}}

        async def player(split: str) -> None:
            while True:
                found = await job.post("episodes", json={"split": split, **asked})
                if found.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # the job trains
                    continue
                episode = found.raise_for_status().json()
                reward = await played(env, rows[split][episode["row"]], model, endpoint["base_url"], episode["api_key"])
                await job.post("reward", json=reward, headers=with_key(episode["api_key"]))

        await asyncio.gather(*(player(split) for split in asked["rows"] for _ in range(at_once)))


async def played(env: Any, task: vf.Task, model: str, base_url: str, api_key: str) -> dict[str, Any]:
    """The episode's reward, or what went wrong."""
    name = f"EPISODE_{next(numbers)}"  # verifiers takes keys from variables
    os.environ[name] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
        episode = await env.run_episode(task, vf.ModelContext(model=model, client=client))
    finally:
        del os.environ[name]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"error": "; ".join(error.message for error in errors) or "the episode did not end"}
    return {"reward": sum(trace.reward for trace in episode.traces)}


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint", type=Path, help="RLIX_HOME/endpoints/<job>.json")
    parser.add_argument("taskset", help="an installed one, or a module of PYTHONPATH")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=0)
    given = parser.parse_args()
    try:
        asyncio.run(play(json.loads(given.endpoint.read_text()), given.taskset, given.at_once, given.held_out))
    except httpx.HTTPError as error:
        raise SystemExit(f"the job has ended, or its endpoint fails: {error}") from None
