"""The policy as a train module whose passes and steps are asked for one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rlix.engine import lora
from rlix.nn import returns, undoes
from rlix.pipeline.algorithms.tensors import Terms
from rlix.pipeline.requests.losses import RequestedLoss
from rlix.pipeline.training.policy import PolicyModule, policy_on_meta

_ROW = "row"


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The numbers of one step of AdamW. `max_grad_norm` 0: no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


class RequestedModule(PolicyModule):
    """Gradients add up from pass to pass until a step takes them.

    Those of an adapter wait beside it, in host memory, while others compute; those of a model that is trained whole
    stay where they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[str, list[Tensor]] = {}

    @returns("gather")
    def requested_pass(
        self, batch: Mapping[str, Tensor], loss: RequestedLoss, adapter: str | None, *, backward: bool
    ) -> dict[str, Any]:
        """Log-probabilities of the targets, and this rank's part of the loss; with `backward` its gradients are added.

        `batch`: `input_ids` [rows, length], `mask` [rows, length - 1], `targets` [rows, length - 1] or
        [rows, length - 1, targets], and the inputs of the loss.
        """
        targets = batch["targets"]
        result = torch.zeros(targets.shape)
        rows = {**batch, _ROW: torch.arange(len(targets))}

        def loss_of(part: Mapping[str, Tensor]) -> Terms:
            scores = self.scores(part).log_probs
            there = part["mask"].any(dim=1).cpu()  # a part without tokens stands in for work that other ranks have
            result[part[_ROW].cpu()[there], : scores.shape[1]] = scores.detach().float().cpu()[there]
            return loss.of(scores, part, 1.0 / self.dp_size), {}

        if backward:
            with self.using(adapter):
                self._take_up(adapter)
                total = self.accumulate(rows, loss_of)["loss"]
                self._put_down(adapter)
        else:
            with self.using(adapter), torch.no_grad():
                self.eval()
                total = sum(float(loss_of(self.here(part))[0]) for part in self.micro_batches(rows)) / self.dp_size
        return {"log_probs": result, "loss": total}

    @returns("sum")
    def requested_step(self, adam: AdamStep, adapter: str | None) -> dict[str, float]:
        """One optimizer step on the gradients so far. Returns this rank's part of its metrics."""
        optimizer = self.optimizer if adapter is None else self.adapter_optimizers[adapter]
        with self.using(adapter):
            self._take_up(adapter)
            for group in optimizer.param_groups:
                group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
                group["weight_decay"] = adam.weight_decay
            return self.update({}, adam.max_grad_norm or float("inf"), optimizer)

    @torch.no_grad()
    def requested_scores(self, batch: Mapping[str, Tensor], several: int, adapter: str | None) -> dict[str, Tensor]:
        """Log-probabilities of the targets, and of the `several` most likely tokens at each position, with these.

        [rows, length - 1] or [.., targets]; [rows, length - 1, several] twice.
        """
        mask = batch["mask"].bool()
        found = torch.zeros(batch["targets"].shape)
        ids = torch.zeros(*mask.shape, several, dtype=torch.long)
        best = torch.zeros(*mask.shape, several)
        rows = {**batch, _ROW: torch.arange(len(mask))}
        with self.using(adapter):
            self.eval()
            for part in self.micro_batches(rows):
                here = self.here(part)
                logits = self._model(input_ids=here["input_ids"][:, :-1], use_cache=False).logits
                row, length = here[_ROW].cpu(), logits.shape[1]
                for place, each in zip(row.tolist(), logits, strict=True):
                    log_p = each.float().log_softmax(-1)
                    if several:
                        top = log_p.topk(several)
                        ids[place, :length], best[place, :length] = top.indices.cpu(), top.values.cpu()
                    wanted = batch["targets"][place, :length].to(log_p.device)
                    chosen = log_p.gather(1, wanted if wanted.dim() == 2 else wanted.unsqueeze(1)).cpu()
                    found[place, :length] = chosen if wanted.dim() == 2 else chosen.squeeze(1)
        return {"log_probs": found, "ids": ids, "best": best}

    @undoes("add_adapter")
    def remove_adapter(self, name: str) -> None:
        super().remove_adapter(name)
        self._waiting.pop(name, None)

    def forget_gradients(self, adapter: str | None) -> None:
        """Of what was loaded anew."""
        if adapter is None:
            self.zero_grad(set_to_none=True)
        else:
            self._waiting.pop(adapter, None)

    def begin_anew(self) -> None:
        """The model that is trained whole has no gradients, and its optimizer has seen none."""
        self.forget_gradients(None)
        self.optimizer.state.clear()

    def _take_up(self, adapter: str | None) -> None:
        if adapter is not None:
            grads = self._waiting.pop(adapter, [])
            for parameter, grad in zip(lora.parameters(self, adapter).values(), grads, strict=False):
                parameter.grad = grad.to(parameter.device)

    def _put_down(self, adapter: str | None) -> None:
        if adapter is not None:
            own = lora.parameters(self, adapter).values()
            self._waiting[adapter] = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            self._waiting[adapter] = [grad.detach().cpu() for grad in self._waiting[adapter]]


def requested_on_meta(path: Path) -> RequestedModule:
    """The policy of a local Hugging Face causal LM folder, without weights."""
    return cast(RequestedModule, policy_on_meta(path, RequestedModule))
