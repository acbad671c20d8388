import pytest
import torch

import rlix.nn
from rlix.nn import BaseTrainModule, global_norm


class Net(BaseTrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
        self.b = torch.nn.Linear(3, 2)

    @rlix.nn.returns("mean")
    def step(self) -> None: ...


def test_a_module_works_alone_as_in_one_process() -> None:
    net = Net()
    assert (net.rank, net.dp_rank, net.dp_size, net.device) == (0, 0, 1, torch.device("cpu"))
    assert net.dp_sum(3).item() == net.dp_mean(3.0).item() == net.dp_max(torch.tensor(3)).item() == 3.0
    assert rlix.nn.reduction_of(Net.step) == "mean"
    assert rlix.nn.reduction_of(Net.forward) is None


def test_its_arguments_are_remembered_under_meta() -> None:
    class Sized(BaseTrainModule):
        def __init__(self, width: int, *, depth: int = 1) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    with torch.device("meta"):
        module = Sized(3, depth=2)
    assert module.rlix_init == ((3,), {"depth": 2})
    assert Net().rlix_init == ((), {})


def test_global_mean() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0]])
    assert Net().global_mean(values, mask).item() == 2.0
    assert Net().global_mean(values).item() == 26.5
    halves = [Net().global_mean(values[i], mask[i], total=3.0) for i in (0, 1)]  # two micro-batches of one batch
    assert sum(halves).item() == 2.0
    sum(halves).backward()
    assert torch.allclose(values.grad, mask / 3)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clip_grad_norm_equals_torchs(max_norm: float) -> None:
    torch.manual_seed(0)
    net = Net()
    net.b(net.a(torch.randn(5, 4))).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    reference = Net()
    for p, grad in zip(reference.parameters(), expected, strict=True):
        p.grad = grad.clone()
    norm = net.clip_grad_norm(max_norm)
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm))
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)


def test_norm_of_nothing_is_zero() -> None:
    assert global_norm([]).item() == 0.0


def test_a_subclass_keeps_the_loss_of_the_model_it_extends() -> None:
    from tests.engine.training_models import policy

    assert policy().loss_type == "ForCausalLM"
