"""Where prompts and rewards come from: built-in tasks, and files of the user's."""

from typing import TYPE_CHECKING

from rlix.pipeline.sources.tasks.base import Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlix.pipeline.spec.job import JobSpec

__all__ = ["Prompt", "Task", "build_task"]


def build_task(spec: "JobSpec", tokenizer: "PreTrainedTokenizerBase") -> Task:
    """The task a job describes. Raises SpecError when its data does not hold what the spec says."""
    if spec.task is not None:
        from rlix.pipeline.sources.tasks import digits

        make = {"sort_digits": digits.sort_digits, "copy_digits": digits.copy_digits}[spec.task.name]
        return make(tokenizer, spec.task.digits)
    from rlix.pipeline.sources.data import DataTask, load_rows

    assert spec.data is not None
    assert spec.reward is not None
    return DataTask(spec.data, load_rows(spec.data), spec.reward, tokenizer)
