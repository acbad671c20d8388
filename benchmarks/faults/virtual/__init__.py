"""Lives of a pool in one process, whose clock jumps: the real scheduler service among machines and jobs that fail."""
