"""The model against PyTorch itself, on this machine: the same backend, the same layout, the same refusals."""

import random
from collections import Counter
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch

from convgrad.diagnostics import Machine
from convgrad.diagnostics.aten_rules import BACKENDS, TensorSpec, determine_backend_memory_format, select_conv_backend
from convgrad.diagnostics.aten_rules.call import suggested
from convgrad.errors import ShapeError

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32,
          torch.complex64)  # fmt: skip


class Case(NamedTuple):
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def odd_layout(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape with strides that PyTorch may have to think about; one byte of memory a storage."""
    how = rng.choice(["contiguous", "channels_last", "permuted", "expanded", "strange", "sliced", "ones"])
    t = torch.empty(shape, dtype=dtype, device="meta")
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if how == "channels_last" and last is not None:
        t = t.to(memory_format=last)
    elif how in ("permuted", "ones"):
        order = rng.sample(range(len(shape)), len(shape))
        t = torch.empty([shape[i] for i in order], dtype=dtype, device="meta").permute(
            [order.index(i) for i in range(len(shape))]
        )
    elif how == "sliced":
        grown = [s + rng.choice([0, 0, 1, 3]) for s in shape]
        t = torch.empty(grown, dtype=dtype, device="meta")
        if last is not None and rng.random() < 0.5:
            t = t.to(memory_format=last)
        for d, s in enumerate(shape):
            t = t.narrow(d, 0, s)
    strides = list(t.stride())
    if how == "expanded":
        strides[rng.randrange(len(shape))] = 0
    elif how == "ones":  # size-1 dimensions with any stride
        strides = [rng.choice([0, 1, st, 7]) if s == 1 else st for s, st in zip(shape, strides, strict=True)]
    elif how == "strange":
        strides = [rng.choice([0, 1, 2, st, shape[1]]) for st in strides]
    needed = sum((s - 1) * st for s, st in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    return torch.empty(max(needed, 0), dtype=dtype).as_strided(shape, strides)


def random_case(rng: random.Random) -> Case:
    d = rng.choice([1, 2, 2, 2, 3])
    groups = rng.choice([1, 1, 1, 2, 3, 8])
    no_channels = rng.random() < 0.03
    transposed = not no_channels and rng.random() < 0.3
    per_in, per_out = rng.choice([1, 1, 2, 5, 16]), rng.choice([1, 1, 2, 3])
    batch = rng.choice([0, 1, 1, 1, 2, 15, 16, 17]) if rng.random() < 0.9 else 3
    kernel = [rng.choice([1, 1, 2, 3, 3, 4, 5, 17]) for _ in range(d)]
    stride = [rng.choice([1, 1, 1, 2, 3]) for _ in range(d)]
    dilation = [rng.choice([1, 1, 1, 2]) for _ in range(d)]
    padding = [rng.choice([0, 0, 1, 3, 17]) for _ in range(d)]
    out_padding = [rng.choice([0, 0, 1, 2]) if transposed else 0 for _ in range(d)]
    least = [
        0 if transposed else max(1, dil * (k - 1) + 1 - 2 * p)
        for k, dil, p in zip(kernel, dilation, padding, strict=True)
    ]
    size = [max(m, 1) + rng.choice([0, 0, 1, 6, 12, 30] if d < 3 else [0, 1, 4]) for m in least]
    c_in, c_out = groups * per_in, groups * per_out
    if no_channels:
        c_in = per_in = 0
    dtype = rng.choice(DTYPES)
    weight_shape = [c_in, per_out, *kernel] if transposed else [c_out, per_in, *kernel]
    input = odd_layout(rng, [batch, c_in, *size], dtype)
    weight = odd_layout(rng, weight_shape, dtype)
    bias = torch.empty(c_out, dtype=dtype) if rng.random() < 0.4 else None
    for t in (input, weight, bias):
        if t is not None and t.is_floating_point() and rng.random() < 0.3:
            t.requires_grad_()
    return Case(input, weight, bias, stride, padding, dilation, transposed, out_padding, groups)


def settings(*, mkldnn: bool, nnpack: bool, threads: int) -> AbstractContextManager[None]:
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(mkldnn)  # mkldnn.flags() warns about TF32 on every CPU build
    return torch.backends.nnpack.flags(enabled=nnpack)


SETTINGS = [
    {"mkldnn": True, "nnpack": True, "threads": 2},
    {"mkldnn": True, "nnpack": True, "threads": 1},
    {"mkldnn": False, "nnpack": True, "threads": 2},
    {"mkldnn": False, "nnpack": False, "threads": 1},
]


@pytest.mark.parametrize("flags", SETTINGS, ids=lambda f: "-".join(f"{k}={int(v)}" for k, v in f.items()))
def test_select_and_layout_agree_with_pytorch(flags: dict[str, int]) -> None:
    rng = random.Random(str(flags))
    seen: Counter[str] = Counter()
    with settings(**flags):
        while seen.total() < 1000:
            case = random_case(rng)
            with torch.set_grad_enabled(rng.random() < 0.8):
                try:
                    ours = select_conv_backend(*case)
                except ShapeError:  # of a transposed call: no output, or too large an output_padding
                    assert case.transposed
                    continue
                theirs = torch._C._select_conv_backend(*case)
            assert ours.value == int(theirs), f"{ours}\nPyTorch: {theirs!r}\n{case}"
            seen[ours.backend] += 1
            # PyTorch asks for the layout of the 2-D view of a 1-D call.
            x, w = case.input, case.weight
            if x.dim() == 3:
                x, w = x.detach().contiguous().unsqueeze(2), w.unsqueeze(2)
            for name in (ours.backend, rng.choice(BACKENDS)):
                if name.startswith("Cudnn") and torch.version.cuda:  # answers for the CPU too, where ours has no cuDNN
                    continue
                members = torch._C._ConvBackend.__members__.values()
                backend = next((b for b in members if int(b) == BACKENDS.index(name)), None)
                if backend is None:  # MkldnnTranspose cannot be named from Python; its rule is Mkldnn's
                    continue
                fmt = torch._C._conv_determine_backend_memory_format(x, w, backend)
                decision = determine_backend_memory_format(x, w, name)
                assert decision.memory_format == fmt, f"{decision}\nPyTorch: {fmt}\n{case}"
    assert len(seen) >= 7, seen


def test_suggest_memory_format_agrees_with_pytorch() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        d = rng.choice([2, 2, 3])
        t = odd_layout(rng, [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(d + 2)], torch.float32)
        meta = TensorSpec.of(t).meta
        assert (meta.shape, meta.stride()) == (t.shape, t.stride())
        # With a contiguous weight, oneDNN's layout is what the C++ suggest_memory_format says of the input.
        weight = torch.empty([2] * (d + 2))
        theirs = torch._C._conv_determine_backend_memory_format(t, weight, torch._C._ConvBackend.Mkldnn)
        assert suggested(meta) == theirs, meta


def test_onednn_tensors() -> None:
    x, w = torch.randn(2, 4, 8, 8).to_mkldnn(), torch.randn(4, 4, 3, 3)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    ours = select_conv_backend(*args)
    assert ours.value == int(torch._C._select_conv_backend(*args)) == BACKENDS.index("Mkldnn")
    fmt = torch._C._conv_determine_backend_memory_format(x, w, torch._C._ConvBackend.Mkldnn)
    assert determine_backend_memory_format(x, w, ours).memory_format == fmt


def test_numbers_are_pytorchs() -> None:
    for name, member in torch._C._ConvBackend.__members__.items():
        assert BACKENDS[int(member)] == name.rstrip(",")


BROKEN = {
    "stride length": {"stride": [1, 1, 1]},
    "padding length": {"padding": [1, 1, 1]},
    "dilation length": {"dilation": [1, 1, 1]},
    "negative padding": {"padding": [-1, 0]},
    "negative output_padding": {"output_padding": [-1, 0], "transposed": True},
    "stride 0": {"stride": [0, 1]},
    "negative dilation": {"dilation": [-1, 1]},
    "rank": {"input": torch.empty(2, 4, 9)},
    "weight smaller than groups": {"groups": 5},
    "weight not divisible": {"groups": 4, "weight": torch.empty(6, 1, 3, 3)},
    "channels": {"input": torch.empty(2, 5, 9, 9)},
    "bias size": {"bias": torch.empty(3)},
    "bias rank": {"bias": torch.empty(4, 1)},
    "kernel too large": {"input": torch.empty(2, 4, 2, 9)},
    "transposed channels": {"transposed": True, "input": torch.empty(2, 5, 9, 9)},
    "transposed bias": {"transposed": True, "bias": torch.empty(3)},
    "huge padding": {"padding": [2**62, 1]},
    "empty size": {"input": torch.empty(2, 4, 0, 9), "padding": [2, 2]},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_what_pytorch_refuses_is_refused(change: dict) -> None:
    image, weight = torch.empty(2, 4, 9, 9), torch.empty(4, 4, 3, 3)
    case = Case(image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)._replace(**change)
    with pytest.raises(RuntimeError):
        torch.convolution(*case)
    with pytest.raises(ShapeError):
        select_conv_backend(*case)


def test_here_reads_the_settings_in_force() -> None:
    with settings(mkldnn=False, nnpack=False, threads=1):
        m = Machine.here()
        assert (m.mkldnn_enabled, m.nnpack_enabled, m.threads) == (False, False, 1)
    assert Machine.here("meta").device_type == "meta"
    x = torch.empty(2, 4, 9, 9, device="meta")
    assert select_conv_backend(x, torch.empty(4, 4, 3, 3, device="meta")).backend == "Overrideable"
