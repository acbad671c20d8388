"""What sharing gives, in under three minutes: three jobs in equal parts of six virtual GPUs, then sharing them.

    python -m benchmarks.demo [--runs-dir runs/demo] [--write]

The jobs of `examples/demo` are real, and so is what they learn; their phases last as long as on GPUs of the speed that
they declare (docs/rehearsal.md). Both runs are `rlix run`, as a user would type it. Time counts from a run's first
rollout, so that the start of processes, which takes as long in both, is left out. Not on a machine with GPUs: real ones
have a speed of their own. `--write` keeps what was measured in
benchmarks/results/demo.json, and writes README's table and docs/demo.svg from that.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlix.monitor.accounting import account
from rlix.monitor.records import RunRecord, Span, load_run
from rlix.node.devices import device_keys

ROOT = Path(__file__).parents[1]
SPECS = [ROOT / "examples" / "demo" / f"{name}.yaml" for name in ("reasoner", "agent", "sorter")]
RECORD = ROOT / "benchmarks" / "results" / "demo.json"
PICTURE = ROOT / "docs" / "demo.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- demo: begin -->", "<!-- demo: end -->"
GPUS = 6
MODES = {"split": "in equal parts", "shared": "shared"}
LEARNT = ("loss", "grad_norm", "reward", "length", "tokens")  # of each step, by which two runs are compared
COLOURS = {"reasoner": ("#a9c7ea", "#2a6ebb"), "agent": ("#f6cf9b", "#d1760a"), "sorter": ("#bfe0bd", "#3a8f3a")}
WIDTH, ROW, LEFT, TOP = 900, 16, 120, 56


def run(mode: str, folder: Path) -> list[RunRecord]:
    command = [sys.executable, "-m", "rlix.cli", "run", "--private", *map(str, SPECS), "--runs-dir", str(folder)]
    command += ["--split"] * (mode == "split")
    print(f"\n== three jobs on {GPUS} virtual GPUs, {MODES[mode]}", flush=True)
    code = subprocess.run(command, env={**os.environ, "RLIX_VIRTUAL_GPUS": str(GPUS)}, check=False).returncode
    if code:
        raise SystemExit(code)
    return [load_run(folder / spec.stem) for spec in SPECS]


def measured(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Of one run, in seconds from its first rollout."""
    begin = min(span.start for record in records for span in record.spans if span.phase == "rollout")
    ends = {record.name: record.metrics[-1]["time"] - begin for record in records}
    end = begin + max(ends.values())
    use = account(records, ((begin, end),))
    late_s = sum(row.get("late_s", 0.0) for record in records for row in record.metrics)
    late_s += sum(record.metrics[-1].get("decode_late_s", 0.0) for record in records)
    return {
        "end_s": {name: round(value, 1) for name, value in ends.items()},
        "idle": round(use.share(use.total.idle_s), 3),
        "late": round(late_s / sum(row["step_s"] for record in records for row in record.metrics), 4),
        "spans": [row for record in records for row in spans(record.name, record.spans, begin) if row[3] < end - begin],
    }


def spans(name: str, given: Sequence[Span], begin: float) -> list[list[Any]]:
    """[device, job, what, start, end] of a job's devices; what hardly interrupts the same work is part of it."""
    found: list[list[Any]] = []
    for span in sorted(given, key=lambda span: (span.device, span.start)):
        what = "move" if span.kind != "busy" else "rollout" if span.phase == "rollout" else "train"
        start, end = round(span.start - begin, 2), round(span.end - begin, 2)
        if end <= 0:
            continue
        last = found[-1] if found else None
        if last is not None and last[:3] == [span.device, name, what] and start - last[4] < 0.05:
            last[4] = max(last[4], end)
        else:
            found.append([span.device, name, what, max(0.0, start), end])
    return found


def equal_steps(several: Sequence[Sequence[RunRecord]]) -> tuple[int, int]:
    """How many of the steps learnt the same, to the bit, and how many there are."""
    pairs = [rows for records in zip(*several, strict=True) for rows in zip(*(r.metrics for r in records), strict=True)]
    return sum(all(one.get(key) == other.get(key) for key in LEARNT) for one, other in pairs), len(pairs)


def table(found: Mapping[str, Any]) -> str:
    """In Markdown."""
    split, shared = found["split"], found["shared"]
    rows = [
        f"| `{name}` has ended after | {split['end_s'][name]:.0f} s | {shared['end_s'][name]:.0f} s |"
        for name in COLOURS
    ]
    all_split, all_shared = (max(one["end_s"].values()) for one in (split, shared))
    rows += [
        f"| **all three have ended after** | **{all_split:.0f} s** | **{all_shared:.0f} s** |",
        f"| devices idle until then | {split['idle']:.0%} | {shared['idle']:.0%} |",
        f"| steps that learnt the same, to the bit | | {found['equal'][0]} of {found['equal'][1]} |",
    ]
    return "\n".join([f"| three jobs, {GPUS} GPUs | in equal parts of 2 | shared |", "|---|--:|--:|", *rows])


def picture(found: Mapping[str, Any]) -> str:
    """Both runs as rows of devices on one axis of time: an SVG."""
    longest = max(max(found[mode]["end_s"].values()) for mode in MODES)
    scale = (WIDTH - LEFT - 20) / longest
    height = TOP + len(MODES) * (GPUS * ROW + 44) - 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, (light, dark)) in enumerate(COLOURS.items()):
        x = LEFT + number * 220
        parts += [
            f'<rect x="{x}" y="14" width="14" height="12" fill="{light}"/>',
            f'<rect x="{x + 14}" y="14" width="14" height="12" fill="{dark}"/>',
            f'<text x="{x + 34}" y="24">{name}: rollout, training</text>',
        ]
    for index, (mode, title) in enumerate(MODES.items()):
        top = TOP + index * (GPUS * ROW + 44)
        end, idle = max(found[mode]["end_s"].values()), found[mode]["idle"]
        parts.append(f'<text x="{LEFT}" y="{top - 6}" font-weight="bold">{title}: {end:.0f} s, {idle:.0%} idle</text>')
        for device in range(GPUS):
            y = top + device * ROW
            parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="#555555">GPU {device}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y + 1}" width="{end * scale:.1f}" height="{ROW - 2}" fill="#f2f2f2"/>')
        for device, name, what, start, stop in found[mode]["spans"]:
            colour = {"rollout": COLOURS[name][0], "train": COLOURS[name][1], "move": "#999999"}[what]
            x, wide = LEFT + start * scale, max(0.4, (min(stop, end) - start) * scale)
            y = top + device * ROW + 1
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 2}" fill="{colour}"/>')
    y = height - 14
    for second in range(0, math.ceil(longest), 10):
        parts.append(
            f'<text x="{LEFT + second * scale:.1f}" y="{y}" text-anchor="middle" fill="#555555">{second} s</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def block(found: Mapping[str, Any]) -> str:
    """Of README, between its markers."""
    when = f"Measured on {found['date']} on {found['cores']} cores; {late(found)}."
    image = f"![The same three jobs on six devices, in equal parts and shared]({PICTURE.relative_to(ROOT)})"
    return "\n".join([BEGIN, table(found), "", when, "", image, END])


def late(found: Mapping[str, Any]) -> str:
    return f"work was later than declared by {max(found[mode]['late'] for mode in MODES):.1%} of the steps' time"


def in_readme(text: str, found: Mapping[str, Any]) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + block(found) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs", "demo"), help="where both runs' folders go")
    parser.add_argument("--write", action="store_true", help="write README's table and picture from these runs")
    args = parser.parse_args()
    if device_keys():
        parser.error("this machine has GPUs, which are as fast as they are; here try: rlix run sort_digits copy_digits")
    several = {mode: run(mode, args.runs_dir / mode) for mode in MODES}
    found: dict[str, Any] = {mode: measured(records) for mode, records in several.items()}
    found |= {"date": time.strftime("%-d %B %Y", time.gmtime()), "cores": os.cpu_count()}
    found["equal"] = equal_steps(list(several.values()))
    drawn = args.runs_dir / "demo.svg"
    drawn.write_text(picture(found))
    print(f"\n{table(found)}\n\n{late(found)}; above a few percent, it is this machine that was measured")
    print(f"picture: {drawn}\nreports: " + ", ".join(str(args.runs_dir / mode / "report.html") for mode in MODES))
    if args.write:
        RECORD.write_text(json.dumps(found) + "\n")
        PICTURE.write_text(picture(found))
        README.write_text(in_readme(README.read_text(), found))


if __name__ == "__main__":
    main()
