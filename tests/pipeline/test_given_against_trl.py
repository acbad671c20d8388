"""Supervised fine-tuning and DPO against TRL's own code, on one process with the built-in model."""

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from rlix.pipeline.algorithms import Scores
from rlix.pipeline.algorithms.choice import build_algorithm
from rlix.pipeline.batch import PolicyBatch
from rlix.pipeline.spec.algorithm import AlgorithmSpec
from rlix.pipeline.tokenizer import load_tokenizer
from tests.pipeline.plain_samples import samples_of
from tests.pipeline.test_against_trl import close, folder, gradients, row  # noqa: F401
from tests.pipeline.training_scenarios import plain

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)  # which TRL would import, for seconds and for nothing
    import trl

    KINDS = {"sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer)}

ROWS = {"prompt": ["12>", "345>", "6>"], "good": ["34", "5", "777"], "bad": ["4", "12", "7"]}


def trainer(name: str, folder: Path, **options: Any) -> Any:  # noqa: F811
    """With its first batch: of dpo all that was chosen, then all that was rejected."""
    columns = {"sft": {"completion": "good"}, "dpo": {"chosen": "good", "rejected": "bad"}}[name]
    table = {"prompt": ROWS["prompt"], **{column: ROWS[given] for column, given in columns.items()}}
    config, kind = KINDS[name]
    args = config(
        output_dir=str(folder / name),
        per_device_train_batch_size=len(ROWS["prompt"]),
        report_to="none",
        use_cpu=True,
        bf16=False,
        **options,
    )
    torch.manual_seed(0)
    rows = datasets.Dataset.from_dict(table)
    made = kind(model=str(folder), args=args, train_dataset=rows, processing_class=load_tokenizer(folder))
    return made, next(iter(made.get_train_dataloader()))


def loss_of(name: str, model: Any, reference: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Ours, of rows of which those of a pair are next to each other."""
    algorithm = build_algorithm(AlgorithmSpec(name=name), 9)
    now = plain.token_log_probs(model, ids, 1.0)
    batch = PolicyBatch(input_ids=ids, mask=mask.float(), old_log_probs=now.detach())
    if reference is not None:
        batch["reference_log_probs"] = plain.token_log_probs(reference, ids, 1.0).detach()
    found = algorithm.estimate(
        samples_of([1.0, 0.0] * (len(ids) // 2) if name == "dpo" else [1.0] * len(ids), 2), batch
    )
    batch["advantages"] = found.advantages
    batch.pop("reference_log_probs", None)
    scores = Scores(now, torch.zeros_like(now))
    return algorithm.loss(scores, batch, algorithm.denominator(batch["mask"]))[0], dict(found.metrics)


def test_supervised_fine_tuning(folder: Path) -> None:  # noqa: F811
    made, batch = trainer("sft", folder, completion_only_loss=True)
    mask = batch["labels"][:, 1:] != -100
    assert 0 < mask.sum() < mask.numel()
    loss, _ = loss_of("sft", made.model, None, batch["input_ids"], mask)
    expected = made.compute_loss(made.model, batch)
    found = close(loss, expected), close(gradients(made.model, loss), gradients(made.model, expected))
    row("`sft`", "TRL SFT", *found)


def test_direct_preference_optimisation(folder: Path) -> None:  # noqa: F811
    made, batch = trainer("dpo", folder, beta=0.1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    pairs = torch.stack([torch.arange(3), torch.arange(3, 6)], dim=1).flatten()
    mask = batch["completion_mask"][:, 1:].bool()
    loss, metrics = loss_of("dpo", made.model, made.ref_model, batch["input_ids"][pairs], mask[pairs])
    expected = made.compute_loss(made.model, batch)
    found = (
        close(torch.tensor(metrics["dpo_loss"]), expected.detach()),
        close(gradients(made.model, loss), gradients(made.model, expected)),
    )
    assert metrics["dpo_loss"] != pytest.approx(0.6931, abs=1e-3)
    row("`dpo`", "TRL DPO", *found)
