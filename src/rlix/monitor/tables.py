"""The tables of a report: the same rows for the terminal and for the HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlix.monitor.accounting import Accounting, AdapterUse, DeviceUse
from rlix.monitor.records import PoolDevice
from rlix.monitor.split import SplitEstimate


@dataclass(frozen=True, slots=True)
class TableData:
    """Cells as text; the first column is left-aligned, the others are numbers. `footer` rows are set apart."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: tuple[tuple[str, ...], ...] = ()
    note: str = ""


_UNTIMED = (
    "\nVirtual GPUs compute on this machine's own cores, so these times say nothing of GPUs, nor whether sharing pays: "
    "that takes a declared_speed."
)


def duration(seconds: float) -> str:
    """ "8.3 s", "4 min 40 s", "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(value: float) -> str:
    """A whole number in groups of three digits."""
    return f"{value:,.0f}"


def job_table(accounting: Accounting) -> TableData:
    rows = tuple(
        (
            job.name,
            job.state,
            count(job.steps),
            duration(job.active_s),
            duration(job.startup_s) if job.startup_s else "–",  # it never came to a step
            count(job.steps_per_hour),
            count(job.tokens_per_s) if job.tokens else "–",  # not every program counts them
            _change(job.reward_first, job.reward_last),
            _change(job.exact_first, job.exact_last),
            count(job.shrinks),
        )
        for job in accounting.jobs
    )
    columns = (
        "job", "state", "steps", "ran", "start-up", "steps/h", "tokens/s", "reward", "exact match", "shrinks",
    )  # fmt: skip
    return TableData(
        "Jobs", columns, rows, note="Reward and exact match: mean of the first and of the last five steps."
    )


def device_table(accounting: Accounting, pool: Sequence[PoolDevice], *, timed: bool = True) -> TableData:
    """`timed`: phases last as long as on GPUs."""
    kinds = {device.id: f"{device.id} ({device.kind})" for device in pool}
    window_s = accounting.window_s
    rows = tuple(_use_row(kinds.get(use.device, str(use.device)), use, window_s) for use in accounting.devices)
    footer = (_use_row("all", accounting.total, window_s * len(accounting.devices)),)
    return TableData(
        "Devices",
        ("device", "busy", "switching", "idle under a lease", "idle, free", "busy", "switching", "idle"),
        rows,
        footer,
        note="Within the time in which any of these jobs ran; what others did on the devices counts as idle. Switching:"
        " loading, offloading and weight updates, beside no work." + ("" if timed else _UNTIMED),
    )


def split_table(accounting: Accounting, contended: Accounting, estimate: SplitEstimate) -> TableData:
    sharing_idle = accounting.share(accounting.total.idle_s)
    parts = " + ".join(str(job.devices) for job in estimate.jobs)
    rows = [
        ("until the last job ends", duration(accounting.window_s), duration(estimate.makespan_s)),
        ("devices idle", percent(sharing_idle), percent(estimate.idle_share)),
        ("devices switching", percent(accounting.share(accounting.total.switching_s)), "0.0 % (assumed)"),
        ("steps/h, all jobs", count(accounting.steps_per_hour), count(estimate.steps_per_hour)),
    ]
    if contended.window_s > 0:
        idle = percent(contended.share(contended.total.idle_s))
        rows.insert(2, ("devices idle while every job runs", idle, percent(estimate.idle_share_stepping)))
    return TableData(
        "Sharing against a fixed split",
        ("", "shared (measured)", f"split {parts} (estimate)"),
        tuple(rows),
        note=(
            "The split is an estimate from the phases measured here: rollouts pack perfectly on fewer devices, "
            "switching is free, host time and start-up stay. It flatters the split; `rlix run --split` measures one."
        ),
    )


def render_text(tables: Sequence[TableData]) -> Group:
    """The tables for a terminal."""
    parts: list[Table | Text] = []
    for data in tables:
        table = Table(title=data.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(data.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in data.rows:
            table.add_row(*row)
        if data.footer:
            table.add_section()
            for row in data.footer:
                table.add_row(*row, style="bold")
        parts.append(table)
        if data.note:
            parts.append(Text(data.note + "\n", style="dim"))
    return Group(*parts)


def _use_row(label: str, use: DeviceUse, total_s: float) -> tuple[str, ...]:
    def share(seconds: float) -> str:
        return percent(seconds / total_s if total_s > 0 else 0.0)

    return (
        label,
        f"{use.busy_s:.1f} s",
        f"{use.switching_s:.1f} s",
        f"{use.held_s:.1f} s",
        f"{use.free_s:.1f} s",
        share(use.busy_s),
        share(use.switching_s),
        share(use.idle_s),
    )


def adapter_tables(adapters: Sequence[AdapterUse]) -> tuple[TableData, TableData]:
    """Of adapters that share a job: what each has learnt, and what it has had of what they share."""
    learnt = tuple(
        (
            use.name,
            use.state,
            count(use.steps),
            _change(use.reward_first, use.reward_last),
            _change(use.exact_first, use.exact_last),
        )
        for use in adapters
    )
    had = tuple(
        (
            use.name,
            count(use.tokens),
            duration(use.gang_s),
            duration(use.gang_wait_s),
            "–" if use.staleness is None else f"{use.staleness:.2f}",
        )
        for use in adapters
    )
    return (
        TableData("Adapters", ("adapter", "state", "steps", "reward", "exact match"), learnt),
        TableData(
            "What adapters have had",
            ("adapter", "tokens", "had the gang", "waited for it", "staleness"),
            had,
            note="With the job's gang: to score, train and publish. Staleness: mean age of tokens in steps.",
        ),
    )


def _change(first: float | None, last: float | None) -> str:
    return "–" if first is None or last is None else f"{first:.2f} → {last:.2f}"
