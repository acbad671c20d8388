"""Where prompts and rewards come from: built-in tasks, and a user's own."""

from rlix.pipeline.sources.tasks.base import Prompt, Task

__all__ = ["Prompt", "Task"]
