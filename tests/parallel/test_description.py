"""`convgrad.explain` of sharded calls and networks: what it says is received is what the collectives bring."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import convgrad
from convgrad.errors import DtypeError
from convgrad.parallel import shard_

from .counting import Received
from .processes import Processes, on
from .test_operators import FORMS, convolution, distributed

ops = torch.ops.convgrad


def of_calls(name: str, placements: Any) -> list[tuple[int, int]]:
    """Explained and really received, of the forward pass and of each set of gradients."""
    form, mesh = FORMS[name], init_device_mesh("cpu", (2,))
    warnings.simplefilter("ignore")
    x, w = torch.randn(form.input), torch.randn(form.weight)
    y = convolution(form, x, w)
    xs, ws = (distributed(t, mesh, [p]) for t, p in zip((x, w), placements, strict=True))
    explained: Any = convgrad.explain(xs, ws, None, *form.arguments)
    assert convgrad.explain(xs, weight=ws, **dict(zip(ARGUMENTS, form.arguments, strict=True))) == explained
    with Received() as forward:
        out = ops.convolution(xs, ws, None, *form.arguments)
        out.redistribute(placements=[Replicate() if p.is_partial() else p for p in out.placements])
    found = [(received(explained, "forward"), forward.total)]
    grad = distributed(torch.randn(y.shape), mesh, [Replicate() if p.is_partial() else p for p in out.placements])
    for outputs, call in (
        ("grad_input", lambda: [ops.grad_input(grad, ws, x.shape, *form.arguments)]),
        ("grad_weight", lambda: [ops.grad_weight(grad, xs, w.shape, *form.arguments)]),
        (
            ("grad_input", "grad_weight"),
            lambda: ops.convolution_backward(grad, xs, ws, None, *form.arguments, [True, True, False])[:2],
        ),
    ):
        with Received() as backward:
            for t in call():
                t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
        explained = convgrad.explain(xs, ws, None, *form.arguments, outputs=outputs)  # pyright: ignore
        assert {t.when for t in explained.transfers} <= {"backward"}
        found.append((received(explained, "backward"), backward.total))
    return found


ARGUMENTS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def received(explained: Any, when: str) -> int:
    return sum(t.bytes for t in explained.transfers if t.when == when)


@pytest.mark.parametrize(
    ("name", "placements"),
    [
        ("2-D", (Shard(2), Replicate())),
        ("2-D, strided, asymmetric", (Shard(3), Replicate())),
        ("2-D, transposed, groups, dilated", (Shard(2), Replicate())),
        ("2-D, transposed", (Shard(0), Replicate())),
        ("3-D", (Shard(3), Replicate())),
    ],
)
def test_a_call_receives_what_is_explained(processes: Processes, name: str, placements: Any) -> None:
    for rank in processes(2, of_calls, name, placements):
        assert all(said == got for said, got in rank), rank


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sum()


def of_a_network() -> tuple[list[tuple[int, int]], str]:
    mesh, plan = init_device_mesh("cpu", (2, 2), mesh_dim_names=("depth", "height")), [Shard(2), Shard(3)]
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(4, 4, 3, groups=4, padding=2, dilation=2, bias=False),
        nn.Conv3d(4, 8, 3, stride=2, padding=1),
        nn.ConvTranspose3d(8, 4, 2, stride=2),
        nn.Conv3d(4, 2, 1),
    )
    model, total = shard_(model, mesh, plan), shard_(Square(), mesh, plan)
    x = distributed(torch.randn(2, 1, 8, 8, 4), mesh, plan).requires_grad_()
    explained: Any = convgrad.explain(model, x)
    with Received() as forward:
        y = model(x)
    loss = total(y)
    with Received() as backward:
        loss.backward()
    layers = [layer.explanation for layer in explained]
    pairs = [
        (sum(received(e, when) for e in layers), counted.total)
        for when, counted in (("forward", forward), ("backward", backward))
    ]
    assert [t for e in layers for t in e.transfers] == [t for _, t in explained.transfers]
    assert all(t.bytes == t.least for _, t in explained.transfers)
    one = explained.select("2").layers[0].explanation
    return pairs, f"{one.summary}\n{explained.text(110)}\n{one.to_dict()['transfers'][0]}"


def test_a_network_receives_what_is_explained(processes: Processes) -> None:
    for pairs, _ in (found := processes(4, of_a_network)):
        assert all(said == got for said, got in pairs), pairs
    text = found[0][1]
    assert "this process's part of a call on a mesh of depth 2 x height 2: input [Shard(dim=2), Shard(dim=3)]" in text
    said = " ".join(text.split())
    # Two rows along the depth of 4 x 4 positions, of 4 channels and 2 samples.
    assert "2 forward input halo exchange depth 1,024 B 1,024 B" in said
    assert "2 backward grad_weight all-reduce depth and height 648 B 648 B" in said


@on(2)
def test_what_is_gathered_and_why() -> None:
    """A weight that is sharded along its output channels, for an input that is sharded along its batch."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = (
        distributed(torch.randn(2, 4, 16, 16), mesh, [Shard(0)]),
        distributed(torch.randn(4, 4, 3, 3), mesh, [Shard(0)]),
    )
    explained: Any = convgrad.explain(x, w, padding=1, outputs="forward")
    (transfer,) = explained.transfers
    assert (transfer.tensor, transfer.collective, transfer.over) == ("weight", "all-gather", ("0",))
    assert transfer.bytes == transfer.least == 4 * 4 * 9 * 4 // 2
    assert explained.problem.batch == 1
    plain: Any = convgrad.explain(x, distributed(w.full_tensor(), mesh, [Replicate()]), padding=1, outputs="forward")
    assert plain.transfers == ()
    with pytest.raises(DtypeError, match="got DTensors for input and a plain tensor for weight"):
        convgrad.explain(x, torch.randn(4, 4, 3, 3))
    assert "nothing is exchanged" in " ".join(str(plain).split())
