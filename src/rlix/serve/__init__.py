"""The doors: an HTTP API in front of the pool with the queue behind it, and Tinker's API."""
