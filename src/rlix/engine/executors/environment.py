"""The environment variables of replica processes: all but those of a folder that only the replica itself knows."""

from importlib.util import find_spec

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import DeviceKind


def replica_environment(executor: str, kind: DeviceKind, cpu_threads: int, *, local: bool) -> dict[str, str]:
    """What a replica's process needs set before it imports anything. `local`: the model is on this machine's disk.

    Raises:
        RlixError: the executor's library is not installed.
    """
    if executor != "vllm":
        return {}  # the same as every other worker of a job, so that all are forked from one server
    if find_spec("vllm") is None:
        raise RlixError('executor="vllm" needs vLLM, which is not installed: pip install rlix[vllm]')
    environment = {"HF_HUB_OFFLINE": "1"} if local else {}
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's own, not the user's
        # The engine runs inside the replica: one process less to start, and none to outlive a replica that is killed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # tensor-parallel workers
    }
    if kind is DeviceKind.CPU:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # virtual GPUs share the cores
            "OMP_NUM_THREADS": str(cpu_threads),
            "TORCHDYNAMO_DISABLE": "1",  # compiling costs seconds at the first request and gains nothing here
        }
    return environment
