"""GPU-seconds by the log of a job's leases."""

from rlix.pipeline.usage import Usage


def test_gpu_seconds_count_from_grant_to_release() -> None:
    usage = Usage(now=10.0)
    usage.granted(1, devices=2, now=11.0)
    usage.granted(2, devices=4, now=12.0)
    assert usage.gpu_s(13.0) == 2 * 2 + 4 * 1
    usage.released(1, devices=2, now=13.0)
    usage.released(9, devices=1, now=13.0)  # granted, and given up before it was active
    assert usage.gpu_s(15.0) == 2 * 2 + 4 * 3
    usage.released(2, devices=3, now=15.0)
    assert usage.gpu_s(16.0) == 2 * 2 + 4 * 3 + 1
    usage.released(2, devices=1, now=16.0)
    assert usage.gpu_s(20.0) == 2 * 2 + 4 * 3 + 1
