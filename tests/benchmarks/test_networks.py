"""The networks that `time_steps.py` can be given: that each computes what it is called with."""

import networks
import pytest
import torch
from torch import nn

FACTORIES = [
    name for name, f in vars(networks).items() if getattr(f, "__module__", "") == "networks" and name[0].islower()
]


@pytest.mark.parametrize("name", FACTORIES)
def test_a_network_computes_what_it_is_called_with(name: str) -> None:
    with torch.device("meta"):
        net, x = getattr(networks, name)()
    assert isinstance(net, nn.Module)
    assert net(x).requires_grad
    assert net(x).shape[0] == x.shape[0]
