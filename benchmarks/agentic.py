"""Two agentic jobs sharing four devices, and the same jobs on a fixed half each: idle share and steps per hour.

    python -m benchmarks.agentic [--steps 15] [--scale 1.0] [--digits] [--json]

The environment is the shipped one, with tool calls of 0.16 s at the median and 2.7 s at the 99th percentile, sandbox
resets of 0.5 s and 4 s, a tenth of the environments failing and half of those hanging until their timeout, all times
multiplied by `--scale`. With `--digits` the second job is `copy_digits`, which has no environment and takes what the
agentic one lends. Both halves run one after the other in the same way, on the same devices, in this one invocation.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sharing import measure
from rlix.pipeline.spec.job import JobSpec, load_job


def agentic_job(name: str, steps: int, scale: float, seed: int) -> JobSpec:
    """The shipped job at another scale of latencies; timeouts scale with them."""
    spec = load_job("agentic_lookup")
    environment = spec.source.environment
    assert environment is not None
    options = {**environment.options, "latency_scale": scale}
    timeouts = {"reset_timeout_s": max(1.0, 20.0 * scale), "step_timeout_s": max(1.0, 10.0 * scale)}
    return spec.model_copy(
        update={
            "name": name,
            "seed": seed,
            "steps": steps,
            "source": spec.source.model_copy(
                update={"environment": environment.model_copy(update={"options": options, **timeouts})}
            ),
        }
    )


def jobs(steps: int, scale: float, digits: bool) -> list[JobSpec]:
    first = agentic_job("agent_a", steps, scale, seed=0)
    second = load_job("copy_digits") if digits else agentic_job("agent_b", steps, scale, seed=1)
    return [first, second]


def row(name: str, summary: dict[str, Any]) -> str:
    each = "  ".join(
        f"{job['name']} {job['steps_per_hour']:7.0f} steps/h, {job['shrinks']} shrinks" for job in summary["jobs"]
    )
    contended = summary["contended"]
    return (
        f"{name:7} idle {summary['idle_share']:6.1%}  idle while all step {contended['idle_share']:6.1%}  "
        f"{summary['steps_per_hour']:7.0f} steps/h in {summary['window_s']:.0f} s  |  {each}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="training steps of each agentic job")
    parser.add_argument("--scale", type=float, default=1.0, help="of all latencies and timeouts")
    parser.add_argument("--digits", action="store_true", help="make the second job one without an environment")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for spec in jobs(args.steps, args.scale, args.digits):
            path = Path(folder) / f"{spec.name}.yaml"
            path.write_text(spec.to_yaml())
            paths.append(str(path))
        results = {"shared": measure(paths, split=False), "split": measure(paths, split=True)}
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, summary in results.items():
        print(row(name, summary))


if __name__ == "__main__":
    main()
