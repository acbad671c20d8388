"""Ranks that each compute on a stretch of every sequence, against one that computes on all of it."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed import multi_threaded_pg as threads
from transformers import BertConfig, BertModel

from rlix.engine.train.sequence import Stretch, spread
from tests.engine.test_architectures import KINDS, made

SLIDING = ("mistral", "gemma2", "gemma3_text", "gpt_oss")
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 4, 3, 0, 0]])  # a length that two ranks do not divide


@pytest.fixture
def two_ranks() -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """Runs a function on two ranks, which are threads of this process, and returns what each returned."""
    isolated = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolated(True)
    threads._install_threaded_pg()

    def ranked(rank: int, function: Callable[[], Any], store: dist.Store) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        try:
            return function()
        except Exception as error:
            threads.ProcessLocalGroup.exception_handle(error)  # or the other waits for this one
            raise
        finally:
            dist.destroy_process_group()

    def run(function: Callable[[], Any]) -> list[Any]:
        threads.ProcessLocalGroup.reset()
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ranked, rank, function, store) for rank in range(2)]
        answers.sort(key=lambda answer: isinstance(answer.exception(), SystemExit))  # of one that waited for the other
        return [answer.result() for answer in answers]

    try:
        yield run
    finally:
        threads._uninstall_threaded_pg()
        isolated(False)


def spread_out(model: Any) -> Any:
    model = copy.deepcopy(model)
    assert dist.group.WORLD is not None
    spread(model, dist.group.WORLD)
    return model


def loss_and_gradients(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(**inputs, use_cache=False)  # with a cache transformers takes packed sequences for one
    loss = output.logits.log_softmax(-1).square().mean() if "labels" not in inputs else output.loss
    loss.backward()
    return output.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@given(size=st.integers(1, 5), rows=st.integers(1, 3), length=st.integers(1, 17))
def test_stretches_are_all_of_a_sequence_padded(size: int, rows: int, length: int) -> None:
    whole = torch.arange(rows * length).view(rows, length)
    parts = [Stretch(None, rank, size).cut(whole, fill=-1) for rank in range(size)]
    joined = torch.cat(parts, 1)
    assert len({part.shape for part in parts}) == 1 and joined.shape[1] - length < size
    assert torch.equal(joined[:, :length], whole) and (joined[:, length:] == -1).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SLIDING])
def test_logits_and_gradients_are_those_of_one_rank(kind: str, two_ranks: Any) -> None:
    """Alone, padded on the right and with labels; and several sequences packed in one row."""
    packed = {
        "input_ids": TOKENS.view(1, -1),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 2, 3]]),
    }
    padded = {"input_ids": TOKENS, "labels": TOKENS.where(TOKENS > 0, -100), "attention_mask": (TOKENS > 0).long()}
    model = made(kind)
    for inputs in (packed, padded):
        model.zero_grad()
        answers = two_ranks(lambda inputs=inputs: loss_and_gradients(spread_out(model), **inputs))
        logits, gradients = loss_and_gradients(model, **inputs)
        if inputs is padded:  # what comes after the end is nobody's business
            logits = logits[TOKENS > 0]
        for found, _ in answers:
            torch.testing.assert_close(found[TOKENS > 0] if inputs is padded else found, logits, rtol=1e-4, atol=1e-5)
        for name, expected in gradients.items():
            mean = sum(of_rank[name] for _, of_rank in answers if name in of_rank) / 2  # as FSDP averages them
            torch.testing.assert_close(
                mean, expected, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("kind", SLIDING)
def test_layers_that_do_not_see_all_positions_are_refused(kind: str, two_ranks: Any) -> None:
    model = made(kind)
    with pytest.raises(ValueError, match="layers that are no full attention"):
        two_ranks(lambda: spread_out(model))


def test_what_cannot_be_computed_in_parts_says_so(two_ranks: Any) -> None:
    model = made("qwen2")

    def called(**inputs: torch.Tensor) -> Any:
        return two_ranks(lambda: spread_out(model)(input_ids=TOKENS, **inputs))

    with pytest.raises(ValueError, match="cannot be called with attention_mask; sequences are padded on the right"):
        called(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2))
    with pytest.raises(ValueError, match="must divide the 3 attention heads"):
        two_ranks(lambda: spread(BertModel(BertConfig(hidden_size=48, num_attention_heads=3)), dist.group.WORLD))
    with pytest.raises(ValueError, match="Linear holds no transformers model"):
        two_ranks(lambda: spread(torch.nn.Linear(2, 2), dist.group.WORLD))
