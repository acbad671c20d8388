"""The `rlix` command."""
