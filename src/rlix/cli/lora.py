"""`rlix lora`: the runs of a multi_lora job while it trains, and what becomes of an adapter afterwards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlix.cli.answers import LoraAnswer, say
from rlix.cli.mistakes import one_message_per_mistake
from rlix.cli.queue_commands import Json
from rlix.protocol.errors import SpecError

if TYPE_CHECKING:
    from rlix.pipeline.spec.lora import RunSpec

Job = Annotated[str, typer.Argument(help="Name or id of a multi_lora job that runs here.")]
Run = Annotated[str, typer.Argument(help="Name of the run.")]

app = typer.Typer(help="The adapters of a multi_lora job: have them join, pause, go on, leave.", no_args_is_help=True)


@app.command()
def add(
    job: Job,
    run: Run,
    spec: Annotated[Path, typer.Argument(help="YAML file with what an entry of the job's `runs` has.")],
    as_json: Json = False,
) -> None:
    """Begin a further run, beside those that are there."""
    with one_message_per_mistake():
        from rlix.pipeline.spec.job import load_run

        _change(job, "add", run, load_run(spec), as_json=as_json)


@app.command()
def pause(job: Job, run: Run, as_json: Json = False) -> None:
    """Have a run write a checkpoint and leave the devices until it is resumed."""
    with one_message_per_mistake():
        _change(job, "pause", run, as_json=as_json)


@app.command()
def resume(job: Job, run: Run, as_json: Json = False) -> None:
    """Have a paused run go on."""
    with one_message_per_mistake():
        _change(job, "resume", run, as_json=as_json)


@app.command()
def remove(job: Job, run: Run, as_json: Json = False) -> None:
    """End a run with a checkpoint; its folder stays."""
    with one_message_per_mistake():
        _change(job, "remove", run, as_json=as_json)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of a PEFT adapter, such as checkpoints/step_N/adapter.")],
    output: Annotated[Path, typer.Argument(help="Where the model with the adapter in it goes.")],
    as_json: Json = False,
) -> None:
    """Write the model that an adapter is on with the adapter merged into it, as plain transformers loads it."""
    with one_message_per_mistake():
        from rlix.pipeline.jobs.export import merge_adapter

        merge_adapter(adapter, output)
    say(LoraAnswer(said=f"model: {output}", folder=str(output)), as_json=as_json)


def _change(
    job: str,
    verb: Literal["add", "pause", "resume", "remove"],
    run: str,
    spec: "RunSpec | None" = None,
    *,
    as_json: bool,
) -> None:
    from rlix.cli.jobs import select
    from rlix.cli.pool import running_pool
    from rlix.control.settings import Settings
    from rlix.pipeline.jobs.handle import find_jobs

    with running_pool(Settings.from_env()) as pool:
        if pool is None:
            raise SpecError("nothing runs here: no job to change a run of")
        (found,) = select(find_jobs(pool.orchestrator), [job])
        found.change_run(verb, run, spec)  # type: ignore[union-attr]
    done = {"add": "begins", "pause": "pauses after this step", "resume": "goes on", "remove": "ends"}[verb]
    say(LoraAnswer(job=job, run=run, said=f"{job}: run {run} {done}"), as_json=as_json)
