"""`accelerating` does to the models that a script trains what `accelerate_` would, and touches no other."""

import pytest
import torch
from torch import nn

from convgrad import nn as ours
from convgrad.models import accelerating


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(32, 32, 7, groups=32), nn.BatchNorm2d(32), nn.ReLU())


X = torch.ones(1, 32, 9, 9)


def test_a_model_is_accelerated_before_its_first_training_step_and_once():
    trained, judged, frozen = model(), model(), model().requires_grad_(False)
    with accelerating() as said:
        with torch.no_grad():
            judged(X), trained(X)
        assert said == []
        for _ in range(2):
            trained(X).sum().backward()
            frozen(X)
            nn.functional.mse_loss(X, X)
            nn.MSELoss()(trained(X), X[..., :3, :3])
            nn.Linear(9, 2)(X)
        assert [line.partition(",")[0] for line in said[:1]] == ["Sequential: 1 of 1 convolutions replaced"]
        assert {line.partition(":")[0] for line in said[1:]} == {"Linear"}
    assert isinstance(trained[0], ours.Conv2d)
    assert type(judged[0]) is type(frozen[0]) is nn.Conv2d
    last = model()
    last(X)
    assert type(last[0]) is nn.Conv2d


def test_parts_that_the_script_calls_by_themselves():
    whole = nn.Sequential(model(), model())
    with accelerating() as said:
        whole[1](whole[0](X.repeat(1, 1, 2, 2)))
        whole(X.repeat(1, 1, 2, 2))
    assert [line.split(":")[0] for line in said] == ["Sequential"] * 3
    assert "(1 already)" in said[2] or "(2 already)" in said[2]


def test_a_model_that_refuses_does_not_stop_the_script():
    class Refuses(nn.Sequential):
        def named_modules(self, *_, **__):
            raise OSError("no")

    with accelerating() as said:
        assert Refuses(nn.Conv2d(32, 2, 3))(X).shape == (1, 2, 7, 7)
    assert said[0] == "Refuses: not accelerated: no"


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_compiled_once():
    graphs = []
    compiled = torch.compile(model(), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with accelerating() as said:
        compiled(X)
        compiled(X)
    assert len(graphs) == 1
    assert said[0].startswith("OptimizedModule: 1 of 1 convolutions replaced")
