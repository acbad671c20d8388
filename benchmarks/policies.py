"""All policies on all shipped workloads, by simulation: the numbers of benchmarks/results/policies.md.

    python -m benchmarks.policies --seeds 10 --jobs 2        # runs what is missing, then writes the tables

Finished runs are kept in build/policies.jsonl, one line each, so that an interrupted run goes on where it stopped;
delete that file after changing a policy, the planner or the simulator.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, median
from typing import Any

from rlix.sim.gangs_alone import gangs_alone
from rlix.sim.jobs import draw_jobs
from rlix.sim.results import POLICIES, simulate_one
from rlix.sim.workload import Workload, load_workload, shipped_names

ROOT = Path(__file__).parent.parent
SLOW = ("day",)  # shows the size that can be simulated; not part of the comparison
MOVING = ("mixed", "one-gang-block")  # also run with gangs that may move: those where gangs queue most
NARROWING = ("saturated", "small-jobs", "small-jobs-half")  # and on fewer GPUs: those where gangs stop most rollouts
Row = dict[str, Any]
Runs = dict[tuple[str, str, int], Row]


def workload_named(workload: str) -> Workload:
    if workload.endswith("-narrowing"):
        return load_workload(workload.removesuffix("-narrowing")).narrowing()
    name = workload.removesuffix("-moving")
    return load_workload(name) if name == workload else load_workload(name).moving()


def run_one(workload: str, policy: str, seed: int) -> Row:
    start = time.perf_counter()
    row = simulate_one(workload_named(workload), policy, seed, check_every=20)
    return {**row.to_json(), "wall_s": round(time.perf_counter() - start, 2)}


def read(path: Path) -> Runs:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["workload"], row["policy"], row["seed"]): row for row in rows}


def complete(path: Path, workloads: list[str], policies: list[str], seeds: int, jobs: int) -> Runs:
    runs = read(path)
    missing = [
        (workload, policy, seed)
        for seed in range(seeds)
        for workload in workloads
        for policy in policies
        if (workload, policy, seed) not in runs
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool, path.open("a") as file:
        futures = {pool.submit(run_one, *key): key for key in missing}
        for number, future in enumerate(as_completed(futures), 1):
            row = future.result()
            runs[futures[future]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number}/{len(missing)} {' '.join(map(str, futures[future]))} in {row['wall_s']} s", flush=True)
    return runs


def ratios(runs: Runs, workload: str, key: str, over: str, under: str) -> list[float]:
    """`key` of policy `over` divided by that of `under`, seed by seed."""
    seeds = sorted({seed for name, _, seed in runs if name == workload})
    pairs = [(runs.get((workload, over, s)), runs.get((workload, under, s))) for s in seeds]
    return [a[key] / b[key] for a, b in pairs if a and b and b[key]]


def worst_against_static(runs: Runs, workload: str) -> list[float]:
    """Per seed, the largest ratio of a job's time to its time under static."""
    seeds = sorted({seed for name, _, seed in runs if name == workload})
    pairs = [(runs.get((workload, "rlix", s)), runs.get((workload, "static", s))) for s in seeds]
    return [max(a["job_s"][j] / b["job_s"][j] for j in a["job_s"] if j in b["job_s"]) for a, b in pairs if a and b]


def gangs_alone_against_static(runs: Runs, workload: str) -> list[float]:
    """Per seed, the same ratio if nobody ever waited for rollout GPUs."""
    loaded = workload_named(workload)
    static = [
        (seed, row["job_s"]) for (name, policy, seed), row in runs.items() if (name, policy) == (workload, "static")
    ]
    alone = [(gangs_alone(loaded, draw_jobs(loaded, seed)), job_s) for seed, job_s in static]
    return [max(mine[job] / seconds for job, seconds in job_s.items()) for mine, job_s in alone]


def most_over_slots(runs: Runs, workload: str) -> list[float]:
    """Per seed: the makespan under slots over the bound for policies that keep the declared devices."""
    pairs = [
        (runs[workload, "slots", seed]["makespan_s"], row["bound_s"])
        for (name, policy, seed), row in runs.items()
        if (name, policy) == (workload, "rlix") and (workload, "slots", seed) in runs
    ]
    return [slots_s / bound_s for slots_s, bound_s in pairs]


def seeds_line(runs: Runs, policies: list[str]) -> Iterator[str]:
    counts = [f"{name} {len({seed for _, which, seed in runs if which == name})}" for name in policies]
    yield "Seeds: " + ", ".join(counts) + "."


def shares_table(runs: Runs, workloads: list[str], policies: list[str]) -> Iterator[str]:
    columns = ("makespan / bound", "tight share", "useful share", "idle share", "steps/h/GPU", "mean job, s")
    yield "| workload | policy | " + " | ".join((*columns, "slowdown mean / p95 / max", "switches")) + " |"
    yield "|---|---|" + "--:|" * (len(columns) + 2)
    for workload in workloads:
        for policy in policies:
            rows = [row for (name, which, _), row in sorted(runs.items()) if (name, which) == (workload, policy)]
            if rows:
                yield f"| {workload} | {policy} | " + " | ".join(_cells(rows)) + " |"


def _cells(rows: list[Row]) -> Iterator[str]:
    def of(key: str) -> float:
        return float(mean(row[key] for row in rows))

    for key, form in (
        ("makespan_over_bound", ".2f"),
        ("tight_share", ".3f"),
        ("useful_share", ".3f"),
        ("idle_share", ".3f"),
        ("steps_per_hour_per_gpu", ".2f"),
        ("mean_job_s", ".0f"),
    ):
        yield format(of(key), form)
    yield f"{of('slowdown_mean'):.2f} / {of('slowdown_p95'):.2f} / {of('slowdown_max'):.2f}"
    yield f"{of('switches'):.0f}"


def targets_table(runs: Runs, workloads: list[str]) -> Iterator[str]:
    """`rlix` against the others, ratios within one seed, then their mean; the worst of any seed for job over static."""
    yield (
        "| workload | steps/h ÷ published | mean job ÷ published | switches ÷ published | steps/h ÷ slots "
        "| (bound) | steps/h ÷ exclusive | worst job ÷ static | (gangs alone) | idle share | (of it surplus) |"
    )
    yield "|---|" + "--:|" * 10
    against: dict[str, list[float]] = {"slots": [], "exclusive": []}
    for workload in workloads:
        steps = {other: ratios(runs, workload, "steps_per_hour_per_gpu", "rlix", other) for other in POLICIES}
        columns = [
            steps["published"],
            ratios(runs, workload, "mean_job_s", "rlix", "published"),
            ratios(runs, workload, "switches", "rlix", "published"),
            steps["slots"],
            most_over_slots(runs, workload),
            steps["exclusive"],
        ]
        for other in against:  # the median is that of the workloads as they ship
            against[other] += [mean(steps[other])] if steps[other] and workload in shipped_names() else []
        worst, alone = worst_against_static(runs, workload), gangs_alone_against_static(runs, workload)
        mine = [row for (name, policy, _), row in runs.items() if (name, policy) == (workload, "rlix")]
        cells = [f"{mean(values):.2f}" if values else "" for values in columns]
        cells += [f"{max(values):.2f}" if values else "" for values in (worst, alone)]
        cells += [f"{mean(row[key] for row in mine):.3f}" if mine else "" for key in ("idle_share", "surplus_share")]
        yield f"| {workload} | " + " | ".join(cells) + " |"
    medians = {name: f"{median(values):.2f}" if values else "" for name, values in against.items()}
    yield f"| **median** | | | | {medians['slots']} | | {medians['exclusive']} | | | | |"


def write(path: Path, lines: Iterable[str]) -> None:
    """Replace what lies between the markers in the document."""
    start, end = "<!-- tables: begin -->", "<!-- tables: end -->"
    text = path.read_text() if path.exists() else f"{start}\n{end}\n"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    path.write_text(before + start + "\n" + "\n".join(lines) + "\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--workload", action="append", help="default: all shipped ones but the simulated day")
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "policies.jsonl")
    parser.add_argument("--document", type=Path, default=ROOT / "benchmarks" / "results" / "policies.md")
    args = parser.parse_args()
    moving = [*(f"{name}-moving" for name in MOVING), *(f"{name}-narrowing" for name in NARROWING)]
    workloads = args.workload or [*(name for name in shipped_names() if name not in SLOW), *moving]
    policies = args.policy or list(POLICIES)
    runs = complete(args.results, workloads, policies, args.seeds, args.jobs)
    lines = [
        *targets_table(runs, workloads),
        "",
        *seeds_line(runs, policies),
        "",
        *shares_table(runs, workloads, policies),
    ]
    write(args.document, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
