"""Stand-ins for the operators of GPU libraries: they record how they are called and compute on the CPU."""

from typing import Any, NamedTuple

import pytest
import torch

from convgrad.backends.aten_libraries import AtenCudnnBackend, AtenMiopenBackend


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


#: The schemas' parameters after (self, weight).
PARAMETERS = {
    "cudnn_convolution": "padding stride dilation groups benchmark deterministic allow_tf32",
    "cudnn_convolution_transpose": "padding output_padding stride dilation groups benchmark deterministic allow_tf32",
    "miopen_convolution": "bias padding stride dilation groups benchmark deterministic",
    "miopen_convolution_transpose": "bias padding output_padding stride dilation groups benchmark deterministic",
    "miopen_depthwise_convolution": "bias padding stride dilation groups benchmark deterministic",
}


def install(patch: pytest.MonkeyPatch) -> list[Call]:
    """Put the libraries "here", on the CPU; the list fills with the calls of their operators."""
    calls: list[Call] = []
    for name, parameters in PARAMETERS.items():
        patch.setattr(torch, name, _standin(name, parameters.split(), calls))
    for library in (AtenCudnnBackend, AtenMiopenBackend):
        patch.setattr(library, "absent", lambda self, device: [])
    patch.setattr(AtenMiopenBackend, "dtypes", (*AtenMiopenBackend.dtypes, torch.float64))  # to compare exactly
    return calls


def _standin(name: str, parameters: list[str], calls: list[Call]) -> Any:
    def operator(self: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        got = dict(zip(parameters, arguments, strict=True))
        calls.append(Call(name, got))
        d = self.dim() - 2
        assert d in (2, 3), "PyTorch gives these operators no 1-D convolution"
        for key in ("padding", "stride", "dilation"):
            assert len(got[key]) == d
        rest = (got["stride"], got["padding"], got["dilation"])
        if "output_padding" in got:
            assert all(0 <= op < s for op, s in zip(got["output_padding"], got["stride"], strict=True))
            return torch.convolution(self, weight, got.get("bias"), *rest, True, got["output_padding"], got["groups"])
        return torch.convolution(self, weight, got.get("bias"), *rest, False, [0] * d, got["groups"])

    return operator
