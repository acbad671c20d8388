"""The HTML page of a simulation: one table and, per policy, what the GPUs did over time. Self-contained."""

from collections.abc import Sequence
from statistics import mean

from jinja2 import Environment

from rlix.sim.ledger import Use
from rlix.sim.results import Row

_COLOURS = {
    Use.GANG: "#3b5b92",
    Use.DECODE: "#4f9d69",
    Use.LOAD: "#e0b04a",
    Use.DRAIN: "#c8703f",
    Use.PARKED: "#c9c9c9",
    Use.FREE: "#f0f0f0",
}
_WIDTH, _HEIGHT, _SAMPLES = 860, 110, 400
_COLUMNS = (
    ("makespan_over_bound", "makespan / bound", "{:.2f}", "until the last job ends, over the least that is possible"),
    ("tight_share", "tight share", "{:.3f}", "of the pool, work done, at each rollout's best width, until a job ends"),
    ("useful_share", "useful share", "{:.3f}", "of the pool, work done, in the best of batches, until a job ends"),
    ("idle_share", "idle share", "{:.3f}", "of the pool, idle while some job has rollout work"),
    ("steps_per_hour_per_gpu", "steps / h / GPU", "{:.2f}", "of all jobs, until the last ends"),
    ("mean_job_s", "mean job, s", "{:.0f}", "from a job's arrival to its end"),
    ("slowdown_mean", "slowdown", "{:.2f}", "a job's time over what it takes alone on the pool at the least"),
    ("slowdown_max", "worst", "{:.2f}", "the slowdown of the slowest job"),
    ("switches", "switches", "{:.0f}", "how often weights were loaded for a rollout"),
    ("plan_ms_p99", "plan p99, ms", "{:.2f}", "time of the scheduler's own decisions, on this machine"),
)
_IN_WORDS = {
    "static": "equal parts",
    "slots": "parts as large as the largest gang, for which jobs queue",
    "exclusive": "one job after another on the whole pool",
}
_TEMPLATE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>rlix simulate: {{ title }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}i{display:inline-block;width:.8em;height:.8em;
margin:0 .3em 0 1em}svg{width:100%;height:auto;background:#fafafa}</style>
<h1>{{ title }}</h1><p>{{ description }}</p>
<table><tr><th>policy</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for line in lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p>Means over {{ seeds }} seed(s). {% for name, colour in legend %}<i style="background:{{ colour }}"></i>{{ name }}
{% endfor %}</p>
{% for plot in plots %}<h3>{{ plot.name }}, seed {{ plot.seed }}</h3>
<svg viewBox="0 0 {{ width }} {{ height }}" preserveAspectRatio="none" role="img" aria-label="GPUs by use over time">
{% for area in plot.areas %}<path d="{{ area.path }}" fill="{{ area.colour }}"><title>{{ area.name }}</title></path>
{% endfor %}</svg><p>0 to {{ plot.end }} s, all {{ plot.gpus }} GPUs</p>{% endfor %}</html>
"""


def averages(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Per policy, in order of appearance: the mean of each column over the seeds, as text."""
    names = list(dict.fromkeys(row.policy for row in rows))
    lines = []
    for name in names:
        mine = [row for row in rows if row.policy == name]
        lines.append((name, [form.format(mean(getattr(row, key) for row in mine)) for key, _, form, _ in _COLUMNS]))
    return lines


def column_names() -> list[str]:
    return [title for _, title, _, _ in _COLUMNS]


def meanings() -> list[tuple[str, str]]:
    """What each column says."""
    return [(title, meaning) for _, title, _, meaning in _COLUMNS]


def verdict(rows: Sequence[Row]) -> str:
    """Whether sharing wins over doing without it: ratios of steps per hour of all jobs, each within one seed, then
    averaged; "" where the rows do not hold both."""
    rates = {(row.policy, row.seed): row.steps_per_hour_per_gpu for row in rows}
    said = []
    for name, words in _IN_WORDS.items():
        pairs = [(rates.get(("rlix", seed)), rates.get((name, seed))) for seed in sorted({row.seed for row in rows})]
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        if ratios:
            said.append(f"{mean(ratios):.2f} x those of {words} ({name})")
    return f"sharing (rlix) does, in steps per hour of all jobs, {', '.join(said)}" if said else ""


def render(title: str, description: str, rows: Sequence[Row]) -> str:
    first = {row.policy: row for row in reversed(rows) if row.series}
    plots = [
        {"name": name, "seed": row.seed, "areas": _areas(row), "end": f"{row.makespan_s:.0f}", "gpus": row.gpus}
        for name, row in sorted(first.items(), key=lambda item: item[1].makespan_s)
    ]
    return (
        Environment(autoescape=True)
        .from_string(_TEMPLATE)
        .render(
            title=title,
            description=description,
            columns=column_names(),
            lines=[[name, *cells] for name, cells in averages(rows)],
            seeds=len({row.seed for row in rows}),
            legend=[(use.name.lower(), colour) for use, colour in _COLOURS.items()],
            plots=plots,
            width=_WIDTH,
            height=_HEIGHT,
        )
    )


def _areas(row: Row) -> list[dict[str, str]]:
    """Stacked areas, the mean of each sample's window."""
    window = row.makespan_s / _SAMPLES
    totals = [[0.0] * len(Use) for _ in range(_SAMPLES)]
    ends = [time for time, _ in row.series[1:]] + [row.makespan_s]
    for (start, counts), end in zip(row.series, ends, strict=True):
        at = start
        while at < end - 1e-9:
            sample = min(int(at / window), _SAMPLES - 1)
            until = end if sample == _SAMPLES - 1 else min(end, (sample + 1) * window)
            if until <= at:
                break
            for use, count in enumerate(counts):
                totals[sample][use] += count * (until - at)
            at = until
    floor = [0.0] * _SAMPLES
    areas = []
    for use, colour in _COLOURS.items():
        top = [low + sample[use] / (window * row.gpus) for low, sample in zip(floor, totals, strict=True)]
        points = [(i, share) for i, share in enumerate(top)] + [(i, floor[i]) for i in reversed(range(_SAMPLES))]
        scaled = [f"{i * _WIDTH / (_SAMPLES - 1):.1f},{_HEIGHT * (1 - share):.1f}" for i, share in points]
        areas.append({"path": "M" + "L".join(scaled) + "Z", "colour": colour, "name": use.name.lower()})
        floor = top
    return areas
