"""What a user may set about the control plane, read from the environment in this one place."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlix.protocol.errors import SpecError
from rlix.protocol.types import MOST_VIRTUAL_GPUS
from rlix.scheduler.policies import POLICIES

DEFAULT_VIRTUAL_GPUS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are seconds.

    `ray_address` is where Ray is: an address, "auto" (whichever runs on this machine), "local" (always a new one) or,
    where it is empty, with the daemon of this `home`. That one ends when it has had nothing to do for `idle_s`.
    `virtual_gpus` is how many virtual GPUs a machine without real ones gets. `policy` is one of
    `rlix.scheduler.policies.POLICIES`. `host_memory` is how many bytes of each host jobs may use together, None: all.

    A rollout that has not given a bundle back within `shrink_deadline_s` loses its processes, one that has not noted a
    bundle within `grow_timeout_s` (of one that asks more rarely: twice the time between, at most `shrink_deadline_s`)
    loses the bundle. A gang that is given back while somebody still locks its devices
    has `release_grace_s` until its processes are ended. A process that has been stopped (SIGSTOP) for `stopped_s` is
    ended; so is one that runs but has not been heard of for `silent_s`. A pipeline that holds nothing, waits for
    nothing and says nothing for `idle_job_s` is forgotten, and so is one that is not admitted within that time. A
    waiting request whose caller has not asked again for `abandon_after_s` is dropped. After a restart nothing is
    planned for `settle_s`, while holders say what they hold. A quarantined device is looked at again after
    `quarantine_retry_s`, then ever more rarely.
    """

    home: Path
    ray_address: str = ""
    idle_s: float = 30.0
    virtual_gpus: int = DEFAULT_VIRTUAL_GPUS
    policy: str = "rlix"
    host_memory: int | None = None
    shrink_deadline_s: float = 30.0
    grow_timeout_s: float = 10.0
    release_grace_s: float = 2.0
    stopped_s: float = 10.0
    silent_s: float = 120.0
    idle_job_s: float = 300.0
    abandon_after_s: float = 120.0
    settle_s: float = 1.5
    quarantine_retry_s: float = 2.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """Reads RLIX_HOME, RAY_ADDRESS, RLIX_IDLE_S, RLIX_VIRTUAL_GPUS, RLIX_SHRINK_DEADLINE_S, RLIX_POLICY and
        RLIX_HOST_MEMORY_GB.

        Raises:
            SpecError: a variable does not hold a positive number, or too large a one of virtual GPUs, or no policy.
        """
        env = os.environ if env is None else env
        policy = env.get("RLIX_POLICY") or "rlix"
        if policy not in POLICIES:
            raise SpecError(f"environment variable RLIX_POLICY={policy!r} must be one of: {', '.join(POLICIES)}")
        return cls(
            home=Path(env.get("RLIX_HOME") or "~/.rlix").expanduser().absolute(),
            ray_address=env.get("RAY_ADDRESS") or "",
            idle_s=_positive(env, "RLIX_IDLE_S", 30.0),
            virtual_gpus=_virtual_gpus(env, "RLIX_VIRTUAL_GPUS"),
            policy=policy,
            host_memory=_gigabytes(env, "RLIX_HOST_MEMORY_GB"),
            shrink_deadline_s=_positive(env, "RLIX_SHRINK_DEADLINE_S", 30.0),
        )


def _gigabytes(env: Mapping[str, str], name: str) -> int | None:
    return int(_positive(env, name, 0.0, kind="a positive number of gigabytes") * 1e9) if env.get(name) else None


def _virtual_gpus(env: Mapping[str, str], name: str) -> int:
    text = (env.get(name) or str(DEFAULT_VIRTUAL_GPUS)).strip()
    if len(text) > 10 or not text.isdecimal() or not 0 < int(text) <= MOST_VIRTUAL_GPUS:
        raise SpecError(
            f"environment variable {name}={text!r:.80} must be a whole number from 1 to {MOST_VIRTUAL_GPUS}"
        )
    return int(text)


def _positive(
    env: Mapping[str, str], name: str, default: float, *, kind: str = "a positive number of seconds"
) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise SpecError(f"environment variable {name}={text!r:.80} must be {kind}") from None
    if not 0 < value < float("inf"):
        raise SpecError(f"environment variable {name}={text!r:.80} must be {kind}")
    return value
