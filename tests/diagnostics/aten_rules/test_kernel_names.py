"""Names of ATen's functions, against the operators and the derivatives.yaml that this PyTorch ships."""

import re
from pathlib import Path

import pytest
import torch
import torchgen

import convgrad
from convgrad.backends import im2col
from convgrad.diagnostics.aten_rules import BACKENDS, kernel_of, named
from convgrad.diagnostics.aten_rules.kernel_names import KERNELS, SCRATCH


def test_every_backend_has_its_pair() -> None:
    for name in BACKENDS:
        assert name in kernel_of(name).backends
        assert (kernel_of(name).backward == "") == (name in ("Winograd3x3Depthwise", "Xnnpack2d"))


def test_what_is_called_callable_is() -> None:
    for kernel in KERNELS:
        by_name = f"call today, backward: torch.ops.aten.{kernel.backward}\n"
        assert (by_name in f"{kernel}\n") == (bool(kernel.backward) and hasattr(torch.ops.aten, kernel.backward))
        for old in kernel.old_names:
            if old.endswith(("_input", "_weight", "_weights", "_bias", "_backward")):
                assert not hasattr(torch.ops.aten, old) or old == kernel.backward


def test_pairs_are_those_of_derivatives_yaml() -> None:
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    text = path.read_text(encoding="utf-8")
    checked = 0
    for kernel in KERNELS:
        entry = re.search(rf"^- name: {re.escape(kernel.forward)}\(.*?\n(?=^- |^#|\Z)", text, re.MULTILINE | re.DOTALL)
        if entry is None:
            continue
        recorded = set(re.findall(r"\b(\w*conv\w*_backward(?:_overrideable)?)(?:_symint)?\(", entry.group(0)))
        assert kernel.autograd in recorded, (kernel.forward, recorded)
        checked += 1
    assert checked >= 15


#: Names old and new, of the sources, and in any letters, by the pair that they stand for.
NAMES = {
    ("convolution", "convolution_backward"): "conv2d Conv2d torch.nn.functional.conv3d F.conv_transpose1d "
    "conv2d_backward ConvolutionBackward0 torch.ops.aten.convolution.default convolution_backward_symint "
    "torch.nn.grad.conv2d_weight",
    ("_slow_conv2d_forward", "_slow_conv2d_backward"): "thnn_conv2d thnn_conv2d_backward slow_conv2d_backward_out_cuda "
    "convgrad.direct.thnn_conv2d",
    ("slow_conv3d_forward", "slow_conv3d_backward"): "slow_conv3d slow_conv3d_forward_out_cpu",
    ("slow_conv_dilated2d", "slow_conv_dilated2d_backward"): "slow_conv_dilated2d slow_conv_dilated2d_backward",
    ("_conv_depthwise2d", "conv_depthwise2d_backward"): "thnn_conv_depthwise2d_backward conv_depthwise2d_cuda_out",
    ("cudnn_convolution", "cudnn_convolution_backward"): "cudnn_convolution_backward_input CUDNN",
    ("cudnn_convolution_transpose", "cudnn_convolution_transpose_backward"):
        "aten::cudnn_convolution_transpose_backward_weight",
    ("miopen_convolution", "miopen_convolution_backward"): "miopen_convolution_backward_bias",
    ("miopen_depthwise_convolution", "miopen_depthwise_convolution_backward"):
        "miopen_depthwise_convolution_backward_weight",
    ("mkldnn_convolution", "mkldnn_convolution_backward"): "mkldnn_convolution_backward "
    "mkldnn_convolution_backward_weights",
    ("_nnpack_spatial_convolution", "slow_conv_dilated2d_backward"): "NnpackSpatial",
    ("mkldnn_convolution_transpose", "mkldnn_convolution_transpose_backward"): "MkldnnTranspose",
    ("slow_conv_transpose2d", "slow_conv_transpose2d_backward"): "at::native::slow_conv_transpose2d_out_cuda",
}  # fmt: skip


@pytest.mark.parametrize(("pair", "name"), [(pair, name) for pair, names in NAMES.items() for name in names.split()])
def test_names_old_and_new_and_of_the_sources_and_in_any_letters(pair: tuple[str, str], name: str) -> None:
    assert (kernel_of(name).forward, kernel_of(name).backward) == pair


def test_text_says_what_to_call_today() -> None:
    text = str(kernel_of("cudnn_convolution_backward_input"))
    assert "torch.ops.aten.convolution_backward" in text
    assert "finput" in str(kernel_of("thnn_conv2d"))
    assert "fgrad_input" in str(kernel_of("slow_conv3d"))
    assert "columns" in str(kernel_of("slow_conv_transpose2d"))
    assert "inference only" in str(kernel_of("Xnnpack2d"))


@pytest.mark.parametrize("name", SCRATCH)
def test_scratch_tensors(name: str) -> None:
    """Each is allocated by what says so, and what to call today computes what PyTorch computes."""
    users = [k.forward for k in KERNELS if any(name in t for t in (*k.forward_temporaries, *k.backward_temporaries))]
    scratch = named(name.upper())
    text = str(scratch)
    assert users
    assert all(user in text or kernel_of(user).backward in text for user in users)
    problem = convgrad.ConvProblem.parse("mb2ic3ih5oc4kh3ph1")
    input, weight, bias = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4)
    grad_output = torch.randn(2, 4, 5, 5)
    call, _, where = scratch.today.partition(", where ")
    names = {**locals(), "convgrad": convgrad, "torch": torch, "im2col": im2col, "ones": torch.empty(2 * 5 * 5)}
    if "columns = " in where:
        names["columns"] = eval(where.partition("columns = ")[2], names)
    expected = {
        "forward": torch.conv2d(input, weight, bias if name == "ones" else None, padding=1),
        "grad_input": torch.nn.grad.conv2d_input(input.shape, weight, grad_output, padding=1),
        "grad_weight": torch.nn.grad.conv2d_weight(input, weight.shape, grad_output, padding=1),
    }
    function = call.partition("(")[0].rpartition(".")[2]
    torch.testing.assert_close(eval(call, names), expected[function], rtol=1e-4, atol=1e-4)


def test_unknown_name() -> None:
    with pytest.raises(KeyError, match="did you mean 'cudnn_convolution'"):
        kernel_of("cudnn_convolutoin")
