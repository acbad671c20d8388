"""The doors: an HTTP API in front of the pool, and the queue behind it."""
