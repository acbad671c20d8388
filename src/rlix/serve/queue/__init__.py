"""The queue as a service: what is kept of it, and what turns decisions into jobs that run."""
