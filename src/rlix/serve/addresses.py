"""Where the queue's service and whoever speaks to it find each other."""

ADDRESS_FILE = "serve.json"
"""In RLIX_HOME: where the service of this machine answers."""
TOKEN_FILE = "queue.token"
"""In RLIX_HOME: the token of the user who runs the service; only that user can read it."""
PORT = 7459
