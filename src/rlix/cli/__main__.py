"""`python -m rlix.cli`: the same as `rlix`."""

from rlix.cli.main import app

app()
