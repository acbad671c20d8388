"""The light jobs of one host, which use its devices only: `python -m benchmarks.faults.on_host NUMBER FOLDER SEED`."""

import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.faults.crew import crew, script
from benchmarks.faults.light import Jobs, LightJobs
from benchmarks.faults.wide import wide

GPUS = 2  # of each host
OVER = "over"  # the file that ends them


def jobs_of(number: int, hosts: int) -> Jobs:
    """A host's; the first has the one over all of them, too."""
    mine: dict[str, tuple[object, int]] = {
        f"crew-{number}": (partial(crew, at_home=True), 1),
        f"script-{number}": (partial(script, at_home=True), GPUS),
    }
    return mine | ({"wide": (wide, hosts)} if number == 1 else {})  # type: ignore[return-value]


if __name__ == "__main__":
    given, home = int(sys.argv[1]), Path(sys.argv[2])
    jobs = LightJobs(home, int(sys.argv[3]), jobs_of(given, 0))
    while not (home / OVER).exists():
        time.sleep(0.2)
    jobs.close()
