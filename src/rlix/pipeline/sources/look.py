"""What shows of a job's rows with its model's tokenizer, before anything starts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig

from rlix.pipeline.ends import Ends
from rlix.pipeline.hub import cached_model
from rlix.pipeline.models import describe_tiny
from rlix.pipeline.sources.conversations import Conversations
from rlix.pipeline.sources.data import DataTask
from rlix.pipeline.sources.tables import load_tables
from rlix.pipeline.spec.columns import data_fields
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.model import ModelSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.pipeline.training.parameter_groups import check_patterns
from rlix.pipeline.training.policy import policy_on_meta
from rlix.protocol.errors import SpecError


def look_at_rows(spec: JobSpec) -> Iterator[str]:
    """Says what a start would find wrong with the tokenizer of the job's model, and with rows that it makes tokens of.

    What is not on this machine (a model or a table on the hub) is not looked at.
    """
    with _described(spec.model) as folder:
        if folder is None:
            return
        if spec.optimizer.groups:
            try:
                check_patterns([name for name, _ in policy_on_meta(folder).named_parameters()], spec.optimizer)
            except SpecError as error:
                yield str(error)
        try:
            tokenizer = load_tokenizer(folder)
        except SpecError as error:
            yield f"model.path: {error}"
            return
        try:
            ends = Ends(tokenizer, folder, spec.rollout.stop, spec.rollout.stop_token_ids)
        except SpecError as error:
            yield str(error)
            return
        context = spec.rollout.longest(int(AutoConfig.from_pretrained(folder).max_position_embeddings))
    new = spec.rollout.max_new_tokens
    sources = [("", spec.source, new)]
    for at, own in (spec.evaluation.by_field if spec.evaluation else {}).items():
        if own.source is not None:
            sources.append((f"{at}.", own.source, own.max_new_tokens or new))
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it says of a file is said below
    warmup = None if spec.warmup is None else spec.warmup.conversations
    for section, given in (("source", spec.source.conversations), ("warmup", warmup)):
        if given is not None and Path(given.path).exists():
            at, pairs = f"{section}.conversations", section == "source" and spec.rollout.samples_per_prompt > 1
            try:
                Conversations(given, spec.source.chat, tokenizer, ends, context, pairs=pairs, at=at)
            except SpecError as error:
                yield from (f"{'' if line.startswith(at) else at + ': '}{line}" for line in str(error).splitlines())
    for where, source, most in sources:
        data = source.data
        if data is None or not all(Path(table.path).exists() for _, table in data_fields(data)):
            continue
        longest = min(context - most, data.max_prompt_tokens or context)
        try:
            rows = load_tables(data)
            DataTask(data, rows, source.rewards, tokenizer, longest, chat=source.chat, longest_answer=most)
        except SpecError as error:
            lines = str(error).splitlines()
            yield from (f"{where}{'' if line.startswith('source.') else 'source.data: '}{line}" for line in lines)


@contextmanager
def _described(model: ModelSpec) -> Iterator[Path | None]:
    """A folder with a model's configuration and tokenizer; None where it is not on this machine."""
    if model.kind == "tiny":
        with TemporaryDirectory(prefix="rlix-look-") as folder:
            yield describe_tiny(model, Path(folder))
    else:
        given = Path(model.path)
        yield given if given.is_dir() else cached_model(model.path)
