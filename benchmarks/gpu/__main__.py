"""Run every section on the GPUs that are there, report each as it ends, and print a short table last.

    PYTHONPATH=src python -m benchmarks.gpu [SECTION ...] [--device cuda|cpu] [--json FILE]

Sections are independent: one whose libraries are missing is skipped with the reason, and one that fails says so and
the others still run (exit status 1). Without a GPU the exit status is 2; `--device cpu` tries the code with small
sizes, whose numbers mean nothing.
"""

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.common import Row

SECTIONS = {
    "dense": "a trainer and a replica on one GPU through Ray: moves, what they leave there, new weights",
    "examples": "the programs of examples/engines",
    "exactness": "answers in other batches and training steps taken again, to the bit",
    "vllm_engine": "vLLM: sleep, new weights, tensor parallelism where there are two GPUs, FP8",
    "jobs": "jobs on one GPU by turns, and what they learn",
    "collective": "a rank killed in a collective",
    "moe": "a mixture of experts, as the dense model",
    "residency": "moves of an engine's bytes between device and host",
    "weight_sync": "publishing weights and pulling them into a replica",
    "fsdp": "one rank of FSDP2 against the plain module",
    "generation": "the transformers executor against model.generate",
}


def run(name: str, device: torch.device) -> tuple[list[Row], str]:
    """The section's rows and "ok", or no rows and why."""
    print(f"== {name}: {SECTIONS[name]}", flush=True)
    start = time.perf_counter()
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.gpu.{name}").measure(device)
    except Exception as error:  # noqa: BLE001 - the other sections must still run
        if isinstance(error, ImportError) and not (error.name or "").startswith(("benchmarks.", "rlix.")):
            print(f"skipped: {error}")
            return [], f"skipped: {error}"
        traceback.print_exc()
        return [], f"failed: {type(error).__name__}: {error}"
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for row in rows:
        print(row.line())
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    return rows, "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that PyTorch can use: nothing to measure (--device cpu only tries the code)", file=sys.stderr)
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cpu":
        torch.set_num_threads(1)
    ended = {name: run(name, device) for name in options.sections or SECTIONS}
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (small sizes, no measurement)"
    if options.json:
        rows = [{"section": name, **row.as_json()} for name, (found, _) in ended.items() for row in found]
        status = {name: state for name, (_, state) in ended.items()}
        found_json = {"machine": machine, "torch": torch.__version__, "sections": status, "rows": rows}
        options.json.write_text(json.dumps(found_json, indent=2) + "\n")
    print(f"\n{machine}, torch {torch.__version__}")
    print(f"{'section':<12} {'what':<38} {'value':>14} {'against':>28} {'ratio':>7}  goal")
    for name, (found, state) in ended.items():
        for row in found:
            print(f"{name:<12} {row.line()}")
        if not found:
            print(f"{name:<12} {state}")
    return int(any(state.startswith("failed") for _, state in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main())
