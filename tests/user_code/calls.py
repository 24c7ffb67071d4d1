"""Code as users write it, for the type checker alone: `make lint` checks it, nothing runs it."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import convgrad

x1, x2, x3 = torch.randn(2, 4, 9), torch.randn(2, 4, 9, 9), torch.randn(2, 4, 9, 9, 9)
w1, w2, w3 = torch.randn(6, 4, 3), torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3, 3)
b = torch.randn(6)

# ---- functions: every argument, by position and by name ----------------------------------------------

assert_type(convgrad.conv1d(x1, w1, b, 1, "causal", 1, 1, layout="NLC"), Tensor)
assert_type(convgrad.conv2d(x2, w2, b, (1, 2), ((1, 0), (2, 1)), [1, 1], groups=1), Tensor)
assert_type(convgrad.conv3d(x3, w3, None, stride=2, padding=(1, 0, 2, 1, 0, 0), dilation=1), Tensor)
assert_type(convgrad.conv_transpose1d(x1, w1, b, 2, 1, 1, 1, 1, layout="NLC"), Tensor)
assert_type(convgrad.conv_transpose2d(x2, w2, b, 2, (1, -1), output_padding=(1, 0), groups=1, dilation=1), Tensor)
assert_type(convgrad.conv_transpose3d(x3, w3, bias=b, stride=(2, 2, 2), padding=((1, 0), (1, 0), (0, 0))), Tensor)
assert_type(convgrad.convolution(x2, w2, b, 1, "same", 1, False, 0, 1), Tensor)
assert_type(convgrad.feedback_convolution(x1, w1, w1, b, 1, "same", 1, False, 0, 1, layout="NLC"), Tensor)

assert_type(convgrad.conv1d_input(x1.shape, w1, x1, 1, "causal", 1, 1), Tensor)
assert_type(convgrad.conv2d_input((2, 4, 9, 9), w2, x2, stride=1, padding="same", dilation=1, groups=1), Tensor)
assert_type(convgrad.conv3d_input([2, 4, 9, 9, 9], w3, x3, (1, 1, 1)), Tensor)
assert_type(convgrad.conv1d_weight(x1, w1.shape, x1, 1, 0, 1, 1), Tensor)
assert_type(convgrad.conv2d_weight(x2, (6, 4, 3, 3), x2, padding=((1, 0), (2, 1))), Tensor)
assert_type(convgrad.conv3d_weight(x3, w3.shape, x3), Tensor)
assert_type(convgrad.conv_transpose1d_input(x1.shape, w1, x1, 1, 0, 0, 1, 1), Tensor)
assert_type(convgrad.conv_transpose2d_input(x2.shape, w2, x2, output_padding=(0, 1)), Tensor)
assert_type(convgrad.conv_transpose3d_input(x3.shape, w3, x3), Tensor)
assert_type(convgrad.conv_transpose1d_weight(x1, w1.shape, x1, 1, 0, 0, 1, 1), Tensor)
assert_type(convgrad.conv_transpose2d_weight(x2, w2.shape, x2, groups=2, dilation=1), Tensor)
assert_type(convgrad.conv_transpose3d_weight(x3, w3.shape, x3), Tensor)

assert_type(convgrad.grad_input(x2.shape, w2, x2, 1, 0, 1, transposed=False, output_padding=0, groups=1), Tensor)
assert_type(convgrad.grad_weight(x2, w2.shape, x2, 1, (1, 0, 2, 1), 1, False, 0, 1, per_sample=True), Tensor)
assert_type(convgrad.grad_bias(x2, per_sample=True), Tensor)
assert_type(convgrad.per_sample_norms(x2, w2.shape, x2, 1, "valid", 1, False, 0, 1, bias=True), Tensor)
assert_type(
    convgrad.convolution_backward(x2, x2, w2, [6], 1, 0, 1, False, 0, 1, output_mask=(True, False, True)),
    tuple[Tensor | None, Tensor | None, Tensor | None],
)

assert_type(convgrad.causal_conv1d(x1, w1[:, 0], b, layout="NLC", seq_idx=None, activation="silu"), Tensor)
assert_type(convgrad.causal_conv1d(x1, w1[:, 0], initial_state=x1, return_state=True), tuple[Tensor, Tensor])
assert_type(convgrad.causal_conv1d_update(x1, x1, w1[:, 0], b, "swish", None, None, layout="NCL"), Tensor)

# ---- layers: every argument; each as the base of a class ------------------------------------------------

convgrad.nn.Conv1d(4, 6, 3, 1, "causal", 1, 1, True, "zeros", "cpu", torch.float32, backend="aten", layout="NLC")
convgrad.nn.Conv2d(4, 6, (3, 1), stride=(1, 2), padding=((1, 0), (2, 1)), groups=2, bias=False, backend="native")
convgrad.nn.Conv3d(4, 6, 3, padding="same", padding_mode="circular", device=torch.device("cpu"), dtype=torch.float64)
convgrad.nn.ConvTranspose1d(4, 6, 3, 1, 0, 0, 1, True, 1, "zeros", "cpu", torch.float32, backend=None, layout="NLC")
convgrad.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=(1, 0, 2, 1), output_padding=(1, 0), dilation=(1, 2))
convgrad.nn.ConvTranspose3d(4, 6, 3, bias=False, backend="aten")
convgrad.nn.Linear(4, 6, bias=False, device="cpu", dtype=torch.float64)
convgrad.nn.BatchNorm1d(4, eps=1e-5, momentum=None, affine=True, track_running_stats=False)
convgrad.nn.BatchNorm2d(4, 1e-5, 0.1)
convgrad.nn.BatchNorm3d(4, device="cpu")
convgrad.nn.InstanceNorm1d(4, affine=True)
convgrad.nn.InstanceNorm2d(4, 1e-5)
convgrad.nn.InstanceNorm3d(4)

convgrad.nn.FeedbackConv1d(4, 6, 3, padding="causal", rule="uSF", layout="NLC")
convgrad.nn.FeedbackConv2d(4, 6, 3, 1, 1, rule="mirror", backend="aten").mirror_(samples=8, lr=0.1, weight_decay=1.0)
convgrad.nn.FeedbackConvTranspose3d(4, 6, 3, rule="kolen-pollack").angle()

convgrad.nn.BinaryConv2d(4, 6, 3, padding=1, scale=False, backend="native")
convgrad.nn.XnorConvTranspose1d(4, 6, 3, scale=True, scale_input=True)
convgrad.nn.TernaryLinear(4, 6, False, threshold=0.5)
convgrad.nn.Conv2dShift(4, 6, 3, 1, 1, 1, 2, False, "replicate", True, True, weight_bits=4, rounding="stochastic")
convgrad.nn.Conv3dShiftQ(4, 6, 3, padding_mode="circular_split", act_fraction_bits=None, shift_range=(-14, 0))
convgrad.nn.LinearShift(4, 6, check_grad=True, freeze_sign=True, act_integer_bits=8).quantized_weight()
convgrad.nn.convert_(torch.nn.Sequential(), convgrad.nn.Binary(scale=False), skip=["0"])
convgrad.nn.convert_feedback_(torch.nn.Sequential(), rule="mirror", skip="0")
convgrad.nn.clip_(convgrad.nn.parametrize_(torch.nn.Conv2d(4, 6, 3), convgrad.nn.ShiftQ(weight_bits=4)))
assert_type(convgrad.nn.export_shift(convgrad.nn.Conv1dShiftQ(1, 1, 3)), convgrad.nn.ShiftIntegers)

# ---- everything else that `convgrad` names --------------------------------------------------------------

report = convgrad.accelerate_(torch.nn.Sequential(), "auto", example_inputs=x2, only_gains=False, dry_run=True)
report.restore()
with convgrad.takeover(), convgrad.use_backend("native", grad_weight="aten"), convgrad.trace() as trace:
    convgrad.measure(True, share=0.1)
trace.records.clear()
assert_type(convgrad.ConvProblem.of(x2, w2, padding=((1, 0), (1, 0))), convgrad.ConvProblem)
str(convgrad.explain("ic4ih9oc6kh3", device="h100", outputs="forward", measure=False))
str(convgrad.explain(convgrad.grad_weight, x2, w2.shape, x2))
convgrad.register("mine", forward=convgrad.conv2d, args=["input", "weight"], dtypes=torch.float32, devices="cpu")
convgrad.unregister("mine")
convgrad.set_default_backend(None)
assert_type(sorted(convgrad.list_backends()), list[str])
assert_type(convgrad.include_path(), str)
convgrad.direct.slow_conv2d(x2, w2, 3, None, 1, 1)
convgrad.testing.check_backend("im2col", ["ic4ih9oc6kh3"], seconds=1.0).raise_if_failed()
convgrad.report.profile_model(torch.nn.Sequential(), x2)
assert_type(convgrad.__version__, str)
errors: tuple[type[convgrad.ConvgradError], ...] = (
    convgrad.ShapeError,
    convgrad.DtypeError,
    convgrad.BackendError,
    convgrad.UnsupportedError,
)
