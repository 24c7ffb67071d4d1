"""A model whose layers may be computed together, beside stock PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import convgrad


def pair(stock: nn.Module) -> tuple[Any, Any, Any]:
    for norm in (m for m in stock.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    ours = copy.deepcopy(stock)
    return ours, stock, convgrad.accelerate_(ours, only_gains=False)


def agree(
    ours: Any, stock: Any, x: Tensor | None = None, call: Callable[..., Any] = lambda model, x: model(x), **near: Any
) -> None:
    """The results of two models, all gradients and buffers."""
    x = torch.randn(2, 3, 9, 7) if x is None else x
    results = []
    for model in (ours, stock):
        model.zero_grad()
        a = x.clone().requires_grad_()
        y = call(model, a)
        y.square().sum().backward()
        results.append((y, a.grad, *(p.grad for p in model.parameters()), *model.buffers()))
    torch.testing.assert_close(*results, **(near or {"rtol": 1e-4, "atol": 1e-4}))
