"""Operands of a taken over convolution, who computed it, and a process group."""

import contextlib

import torch

OURS = "im2col"  # a backend of ours that is there on every machine
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def stock_kernel() -> str:
    return torch._C._dispatch_dump_table("aten::convolution")


def computed(trace) -> list[str]:
    return [r.outputs for r in trace if r.backend == OURS]


def operands(groups=2, d=2, dtype=torch.float32, requires_grad=False):
    x = torch.randn(2, 4, *(6, 5, 4)[:d], dtype=dtype, requires_grad=requires_grad)
    w = torch.randn(6, 4 // groups, *(3,) * d, dtype=dtype, requires_grad=requires_grad)
    b = torch.randn(6, dtype=dtype, requires_grad=requires_grad)
    return x, w, b


@contextlib.contextmanager
def world_of_one(folder):
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
