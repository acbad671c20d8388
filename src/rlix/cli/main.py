"""The `rlix` command: what it takes and how it ends.

Exit codes: 0 done, 1 a job failed, 2 the user's mistake (one message, no traceback), 130 stopped by Ctrl-C.
"""

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

import rlix
from rlix.cli import lora, queue_admin
from rlix.cli.answers import ExportAnswer, print_answer
from rlix.cli.mistakes import one_message_per_mistake
from rlix.cli.queue_commands import Given, Json, add_commands
from rlix.cli.simulate import simulate
from rlix.cli.view import make_console
from rlix.node.run_folder import checkpoints_of
from rlix.protocol.errors import SpecError
from rlix.protocol.types import MOST_VIRTUAL_GPUS

Live = Annotated[bool, typer.Option("--live/--no-live", help="Live view, or plain lines of log.")]

app = typer.Typer(
    name="rlix",
    help="Many reinforcement-learning post-training jobs on one pool of GPUs, each as if it had the pool to itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlix {rlix.__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does, on stderr.")] = False,
) -> None:
    """Set up logging; the commands do the rest."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@app.command()
def run(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Job files, or names of jobs RLix ships with.")],
    runs_dir: Annotated[Path, typer.Option(help="Where run folders and the report go.")] = Path("runs"),
    gpus: Annotated[
        int | None, typer.Option(min=1, max=MOST_VIRTUAL_GPUS, help="Virtual GPUs (default: the machine's, or 8).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from each job's latest checkpoint; one that has none begins anew.")
    ] = False,
    split: Annotated[
        bool, typer.Option("--split", help="Give each job a fixed equal part of the devices, to compare with sharing.")
    ] = False,
    as_json: Json = False,
    live: Live = True,
    private: Annotated[
        bool, typer.Option("--private", help="Use a control plane that ends with this run and is not shared.")
    ] = False,
    memory_check: Annotated[
        bool, typer.Option(help="On GPUs, refuse jobs that by the estimate of `rlix check` do not fit.")
    ] = True,
    given: Given = None,
    trl: Annotated[
        bool, typer.Option("--trl", help="SPEC is a TRL script; what follows `--` is for the script.")
    ] = False,
) -> None:
    """Run jobs side by side on one pool of devices, and report.

    Where `rlix serve` keeps a queue they are submitted to it and watched, unless --private, --runs-dir, --gpus,
    --resume or --split is given. Otherwise they join the control plane that runs here, or one is started that others
    may join. Without its terminal, the run goes on.
    """
    with one_message_per_mistake():
        if trl:
            from rlix.cli.script import run_script

            run_script(specs, runs_dir, gpus)
        from rlix.pipeline.spec.job import load_jobs

        jobs = load_jobs(specs, None if gpus is None else range(gpus), given or ())  # before what takes long to import
        from rlix.cli.run import RunOptions, run_jobs
        from rlix.cli.run_queued import run_queued, served

        options = RunOptions(
            jobs=tuple(jobs),
            runs_dir=runs_dir,
            devices=gpus,
            resume=resume,
            split=split,
            as_json=as_json,
            live=live,
            private=private,
            memory_check=memory_check,
        )
        # What the queue decides, or knows nothing of, is asked of no queue.
        alone = private or resume or split or gpus is not None or runs_dir != Path("runs")
        code = run_queued(specs, tuple(given or ()), as_json=as_json) if not alone and served() else run_jobs(options)
    raise typer.Exit(code)


@app.command()
def check(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Job files, or names of jobs RLix ships with.")],
    memory: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="GiB of memory of a device (default: of the machine's GPUs).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of the pool.")] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="Folder with the model's config.json, where the job's model is not at hand.")
    ] = None,
    given: Given = None,
    as_json: Json = False,
) -> None:
    """Check jobs without starting anything, and say how much memory each phase will take on a device."""
    from rlix.cli.check import check_specs

    with one_message_per_mistake():
        check_specs(specs, given or (), memory_gib=memory, devices=gpus, model_config=model_config, as_json=as_json)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders of jobs that ran together.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Where the page goes (default: report.html in or beside the folders).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write report.html about finished (or still running) jobs and print its tables."""
    from rlix.monitor.report import build_report, summary, write_report
    from rlix.monitor.tables import render_text

    with one_message_per_mistake():
        built = build_report(run_dirs)
        target = output or (run_dirs[0] if len(run_dirs) == 1 else run_dirs[0].parent) / "report.html"
        try:
            write_report(built, target)
        except OSError as error:
            raise SpecError(f"--output {target}: cannot be written ({error.strerror}); choose another path") from error
    if as_json:
        typer.echo(json.dumps({**summary(built), "report": str(target)}, indent=2))
        return
    console = make_console()
    console.print(render_text(built.tables))
    console.print(f"report: {target}", highlight=False, soft_wrap=True)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A job's run folder, such as runs/my_job.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    step: Annotated[
        str | None, typer.Option(metavar="N|best", help="Of which checkpoint (default: the newest).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 (default: as rollouts held the weights).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's policy as a Hugging Face folder: configuration, weights (safetensors) and tokenizer."""
    with one_message_per_mistake():
        if step is not None and step != "best" and not step.isdecimal():
            raise SpecError(f"--step {step}: must be the number of a step, or best")
        if dtype not in (None, "float32", "bfloat16"):
            raise SpecError(f"--dtype {dtype}: must be float32 or bfloat16")
        checkpoints_of(run_dir)  # before what takes long to import
        wanted: int | Literal["best"] | None = "best" if step == "best" else None if step is None else int(step)
        with make_console(stderr=True).status("loading PyTorch, and writing the model ..."):
            from rlix.pipeline.jobs.export import export as write

            _, source = write(run_dir, out, step=wanted, dtype=dtype)
    if as_json:
        print_answer(ExportAnswer(run_dir=str(run_dir), checkpoint=source.name, folder=str(out)))
        return
    make_console().print(f"{source.name} of {run_dir}: {out}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def status(as_json: Json = False) -> None:
    """Show the jobs that run here, and who holds which device."""
    from rlix.cli.jobs import show_status

    with one_message_per_mistake():
        code = show_status(as_json=as_json)
    raise typer.Exit(code)


@app.command()
def doctor(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="[PATH...]", help="What all hosts must have.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Examine the hosts of the pool: versions, names, addresses, what they share and whether they reach each other."""
    from rlix.cli.doctor import examine

    with one_message_per_mistake():
        code = examine(runs_dir, paths or [], as_json=as_json)
    raise typer.Exit(code)


@app.command()
def watch(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB...]", help="Names or ids; all, if left out.")
    ] = None,
    live: Live = True,
    as_json: Json = False,
) -> None:
    """Follow running jobs, whoever started them, and report at their end. Ctrl-C leaves; the jobs go on."""
    from rlix.cli.jobs import watch_jobs

    with one_message_per_mistake():
        code = watch_jobs(jobs or [], live=live, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def stop(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB...]", help="Names or ids of jobs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every job that runs here.")] = False,
    now: Annotated[bool, typer.Option("--now", help="End them at once, without a checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Have running jobs write a checkpoint and end."""
    from rlix.cli.jobs import stop_jobs

    with one_message_per_mistake():
        code = stop_jobs(jobs or [], everything=everything, now=now, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def down(as_json: Json = False) -> None:
    """Stop every job that runs here, then end the control plane."""
    from rlix.cli.jobs import take_down

    with one_message_per_mistake():
        code = take_down(as_json=as_json)
    raise typer.Exit(code)


@app.command()
def free(
    device: Annotated[int, typer.Argument(help="Id of a device that `rlix status` shows as quarantined.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Give a quarantined device back to the pool, on your word that nobody's memory is on it any more.

    RLix looks at quarantined devices again by itself, and frees them when their locks are free. This is for the case
    that a person knows better: a process that cannot be killed, a lock file on a machine that does not answer.
    """
    from rlix.cli.free import free_device

    with one_message_per_mistake():
        code = free_device(device, sure=yes, ask=typer.confirm, as_json=as_json)
    raise typer.Exit(code)


Host = Annotated[str, typer.Argument(metavar="NODE", help="Host name, address, or the beginning of its node id.")]


@app.command()
def drain(node: Host, as_json: Json = False) -> None:
    """Take a host out of service, before maintenance: its devices leave the pool as they become free.

    Nothing that runs there is ended: rollouts give their bundles back, gangs finish their phase. `rlix status` says
    when nobody holds a device of it any more.
    """
    from rlix.cli.hosts import cordon

    with one_message_per_mistake():
        code = cordon(node, wanted=True, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def uncordon(node: Host, as_json: Json = False) -> None:
    """Bring a host back into service that was drained."""
    from rlix.cli.hosts import cordon

    with one_message_per_mistake():
        code = cordon(node, wanted=False, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def schema(
    answers: Annotated[bool, typer.Option("--answers", help="Of what commands print with --json instead.")] = False,
) -> None:
    """Print the JSON schema of job files, for editors."""
    if answers:
        from rlix.cli.answers import schema_of_answers

        described = schema_of_answers()
    else:
        from rlix.pipeline.spec.job import JobSpec

        described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobSpec.model_json_schema()}
    typer.echo(json.dumps(described, indent=1))


@app.command()
def deploy(
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="Which; without it they are listed.")] = None,
) -> None:
    """Print a file that ships with RLix for the systems that it runs beside: a dashboard, say."""
    from rlix.cli.deploy import FILES, shipped

    with one_message_per_mistake():
        if file is not None:
            typer.echo(shipped(file), nl=False)
            return
        for name, (path, what) in FILES.items():
            typer.echo(f"{name:12} {path:18} {what}")


app.command()(simulate)
add_commands(app)
app.add_typer(lora.app, name="lora")
app.add_typer(queue_admin.app, name="queue")


@app.command()
def profile(
    name: Annotated[str, typer.Argument(metavar="FLOW|SPEC", help="A flow, as path/to/file.py:name, or a job.")],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Measure on up to this many devices (default: of a flow 4, of a job all).")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks; repeatable. Default: 1, 2, 4 up to --gpus.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Items, of a job prompts; repeatable. Default: a step's down to 1/16, of a job 1/4."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls or steps of each.")] = 3,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds for one call of a part (default 600), for one trial of a job (3600)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what the parts of a flow or of a job cost on this kind of machine."""
    from rlix.cli.flows import is_flow, profile_flow

    with one_message_per_mistake():
        if is_flow(name):
            profile_flow(name, gpus or 4, width or (), batch or (), repeats, timeout, as_json=as_json)
        else:
            from rlix.cli.plans import profile_job_file

            profile_job_file(name, gpus, width or (), batch or (), repeats, timeout, as_json=as_json)


@app.command()
def plan(
    name: Annotated[str, typer.Argument(metavar="FLOW|SPEC", help="A flow, as path/to/file.py:name, or a job.")],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Devices to run on (default: of a flow 4, of a job as `rlix run` has).")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GiB of memory of a device (default: of a flow no limit, of a job this machine's GPUs')."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="auto, collocated, disaggregated or hybrid (default: as a job says, or auto).")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the plan as a page here.")] = None,
    as_json: Json = False,
) -> None:
    """Show how a flow or a job runs fastest, and say what the runner-up would take."""
    from rlix.cli.flows import is_flow, plan_flow

    with one_message_per_mistake():
        if memory is not None and not 0 < memory < float("inf"):
            raise SpecError(f"--memory {memory:g}: must be above 0")
        if is_flow(name):
            plan_flow(name, gpus or 4, memory, mode or "auto", html_file, as_json=as_json)
        else:
            from rlix.cli.plans import plan_job_file

            plan_job_file(name, gpus, memory, mode, html_file, as_json=as_json)
