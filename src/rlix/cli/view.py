"""What `rlix run` shows while jobs run: pure functions from status to text or to something Rich can draw."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlix.cli.text import clock
from rlix.monitor.waits import device_list, pipeline_names, process_list, words
from rlix.protocol.messages import ControlStatus, LeaseState, LeaseStatus

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

JOB_STYLES = ("dodger_blue2", "dark_orange", "dark_cyan", "medium_orchid", "yellow4", "indian_red")
STATE_STYLES = {"finished": "green", "failed": "bold red", "stopped": "yellow"}
RUN_STYLES = {**STATE_STYLES, "paused": "yellow"}
MAX_DEVICE_ROWS = 24
PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at everything. `mean_utilisation`: the share of devices under an active lease, on average over earlier
    looks too; None: this is the only one."""

    jobs: tuple["JobStatus", ...]
    control: ControlStatus
    elapsed_s: float
    mean_utilisation: float | None
    notice: str = ""
    stalls: tuple[str, ...] = ()


def make_console(*, stderr: bool = False) -> Console:
    """A console; what is no terminal has no width to fit, so there tables get all they need."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def utilisation(control: ControlStatus) -> float:
    """The share of devices that an active lease holds (0 for an empty pool)."""
    held = {
        device for status in control.leases if status.state is not LeaseState.PENDING for device in status.lease.devices
    }
    return len(held) / len(control.devices) if control.devices else 0.0


def names_of(snapshot: Snapshot) -> dict[str, str]:
    """What to call each job and program, by its id."""
    return pipeline_names(snapshot.control, {job.pipeline_id: job.name for job in snapshot.jobs})


def holdings(control: ControlStatus) -> dict[str, tuple[int, ...]]:
    """The devices each pipeline holds, by pipeline id; what it waits for is not held yet."""
    held: dict[str, set[int]] = defaultdict(set)
    for status in control.leases:
        if status.state is not LeaseState.PENDING:
            held[status.lease.pipeline_id].update(status.lease.devices)
    return {pipeline_id: tuple(sorted(devices)) for pipeline_id, devices in held.items()}


def job_line(job: "JobStatus", devices: tuple[int, ...], elapsed_s: float, name: str | None = None) -> str:
    """One line of log about one job. `name`: what to call it, where its own name is not enough."""
    parts = [f"{clock(elapsed_s)} {name or job.name}: {job.state}"]
    if job.progress:
        parts.append(f"step {job.progress}")
    if job.phase and job.phase != job.state:
        parts.append(words(job.phase))
    if job.reward is not None:
        parts.append(f"reward {job.reward:.3f}")
    if job.exact is not None:
        parts.append(f"exact {job.exact:.3f}")
    if job.evaluation is not None:
        parts.append(f"evaluation {job.evaluation:.3f}")
    if job.tokens_per_s is not None:
        parts.append(f"{job.tokens_per_s:,.0f} tokens/s")
    for run in job.runs:
        ended = f" {run.phase}" if run.phase in RUN_STYLES else ""
        parts.append(f"{run.name} {run.progress}{ended}")
    if devices:
        parts.append(f"devices {device_list(devices)}")
    if job.error:
        parts.append(plain(job.error).splitlines()[-1])
    return ", ".join(parts)


def plain(text: str) -> str:
    """The text without colour codes (Ray's tracebacks have them) and blank lines at its ends."""
    return Text.from_ansi(text.strip()).plain or "no message"


def alarms(control: ControlStatus) -> tuple[str, ...]:
    """What a person should look at: a journal that cannot be written, devices that nobody gets."""
    found = [control.trouble] if control.trouble else []
    for status in control.leases:
        if status.state is LeaseState.QUARANTINED:
            devices = status.lease.devices
            what = f"device{'s' if len(devices) > 1 else ''} {device_list(tuple(sorted(devices)))} in quarantine"
            found.append(f"{what}, held by {_kept_by(control, status)}: {status.reason}; see `rlix free --help`")
    return tuple(found)


def failed_runs(jobs: tuple["JobStatus", ...]) -> tuple[str, ...]:
    """Why runs ended whose jobs go on with the others."""
    going = [(job, run) for job in jobs if job.state not in STATE_STYLES for run in job.runs if run.error]
    return tuple(f"{job.name}: run {run.name} failed: {plain(run.error or '').splitlines()[-1]}" for job, run in going)


def _kept_by(control: ControlStatus, status: LeaseStatus) -> str:
    pids = process_list(control, status, limit=None)
    name = pipeline_names(control).get(status.lease.pipeline_id, status.lease.pipeline_id)
    return f"{name} ({words(status.lease.phase.name.lower())}{f', process {pids}' if pids else ''})"


def render(snapshot: Snapshot) -> Group:
    """The live view: a headline, the jobs, the devices, what is wrong, who waits long."""
    mean = snapshot.mean_utilisation
    average = "" if mean is None else f", {100 * mean:.0f} % on average"
    headline = Text.assemble(
        ("RLix ", "bold"),
        f"{clock(snapshot.elapsed_s)}   ",
        (f"{100 * utilisation(snapshot.control):.0f} %", "bold"),
        f" of {len(snapshot.control.devices)} devices in use{average}",
    )
    jobs = [_job_table(snapshot)] if snapshot.jobs else []
    parts: list[Text | Table] = [headline, *jobs, _device_table(snapshot)]
    parts += [Text(alarm, style="bold red") for alarm in (*alarms(snapshot.control), *failed_runs(snapshot.jobs))]
    parts += [Text(stall, style="yellow") for stall in snapshot.stalls]
    if snapshot.notice:
        parts.append(Text(snapshot.notice, style="yellow"))
    return Group(*parts)


def _job_table(snapshot: Snapshot) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    evaluated = any(one.evaluation is not None for job in snapshot.jobs for one in (job, *job.runs))
    many = any(job.runs for job in snapshot.jobs)  # adapters, of which more is said than how far they are
    of_many = ("to come", "in flight", "age")
    shown = ("job", "step", *(() if many else ("",)), "phase", "reward", "exact")
    shown += (*(("evaluation",) if evaluated else ()), "tokens/s", *(of_many if many else ()), "devices")
    for column in shown:
        numeric = column in {"step", "reward", "exact", "evaluation", "tokens/s", *of_many}
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column != "phase")
    held, called = holdings(snapshot.control), names_of(snapshot)
    for index, job in enumerate(snapshot.jobs):
        phase = _line(job.state if job.state in STATE_STYLES else words(job.phase), STATE_STYLES.get(job.state, ""))
        rows = [(job, called[job.pipeline_id], phase, device_list(held.get(job.pipeline_id, ())))]
        rows += [(r, f"  {r.name}", _line(words(r.phase), RUN_STYLES.get(r.phase, "")), "") for r in job.runs]
        for one, name, doing, devices in rows:
            share = (one.share.to_come, one.share.in_flight) if one.share else (None, None)
            table.add_row(
                Text(name, style=_style(index)),
                one.progress,
                *(() if many else (ProgressBar(total=max(1, one.steps), completed=one.step, width=16),)),
                doing,
                _number(one.reward, ".3f"),
                _number(one.exact, ".3f"),
                *((_number(one.evaluation, ".3f"),) if evaluated else ()),
                _number(one.tokens_per_s, ",.0f"),
                *((*(_number(count, ",") for count in share), _number(one.staleness, ".1f")) if many else ()),
                devices,
            )
    return table


def _line(text: str, style: str = "") -> Text:
    """Of a column that may wrap, and so the first to be cut where there is not room for all: names are needed."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _device_table(snapshot: Snapshot) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    several_nodes = len({device.node_id for device in snapshot.control.devices}) > 1
    nodes = ("node",) if several_nodes else ()
    for column in ("device", *nodes, "held by", "phase", "since", "process", "next"):
        table.add_column(column, no_wrap=column not in ("phase", "next"))
    styles = {job.pipeline_id: _style(index) for index, job in enumerate(snapshot.jobs)}
    names = {pipeline_id: (name, styles.get(pipeline_id, "")) for pipeline_id, name in names_of(snapshot).items()}
    homes = {(p.pipeline_id, c.name): c.devices for p in snapshot.control.pipelines for c in p.clusters}
    by_device: dict[int, list[LeaseStatus]] = defaultdict(list)
    for status in snapshot.control.leases:
        for held in status.lease.devices:
            by_device[held].append(status)
    for device in snapshot.control.devices[:MAX_DEVICE_ROWS]:
        statuses = by_device[device.id]
        holder = next((s for s in statuses if s.state is not LeaseState.PENDING), None)
        successor = next((s for s in statuses if s.state is LeaseState.PENDING), None)
        table.add_row(
            f"{device.id} ({device.kind})",
            *((device.node_ip,) if several_nodes else ()),
            _job_name(holder, names),
            _phase(holder, homes),
            _since(snapshot.control, holder),
            process_list(snapshot.control, holder, limit=1) if holder else "",
            Text.assemble(_job_name(successor, names), " ", _phase(successor, homes), no_wrap=True, overflow="ellipsis")
            if successor
            else "",
        )
    rest = len(snapshot.control.devices) - MAX_DEVICE_ROWS
    if rest > 0:
        table.add_row(f"and {rest} more")
    return table


def _job_name(status: LeaseStatus | None, names: dict[str, tuple[str, str]]) -> Text:
    if status is None:
        return Text("free", style="dim")
    name, style = names.get(status.lease.pipeline_id, (status.lease.pipeline_id, ""))
    return Text(name, style=style)


def _phase(status: LeaseStatus | None, homes: Mapping[tuple[str, str], tuple[int, ...]]) -> Text:
    """`homes`: where each cluster was placed."""
    if status is None:
        return Text("")
    lease = status.lease
    text, home = words(lease.phase.name.lower()), homes.get((lease.pipeline_id, lease.cluster), lease.devices)
    if not set(lease.devices) <= set(home):  # a gang only: bundles are parts of their cluster
        text += f", moved from {device_list(home)}"
    if status.state is LeaseState.QUARANTINED:
        return _line(f"{text}, quarantined", "bold red")
    return _line(f"{text}, giving way" if status.state is LeaseState.DRAINING else text)


def _since(control: ControlStatus, status: LeaseStatus | None) -> str:
    at = None if status is None else control.granted_at.get(status.lease.epoch)
    return "" if at is None else time.strftime("%H:%M:%S", time.localtime(at))


def _style(index: int) -> str:
    return JOB_STYLES[index % len(JOB_STYLES)]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
