"""Layers as networks have them: sizes that no small problem has."""

from __future__ import annotations

from ..problem import ConvProblem

__all__ = ["real_layers"]

_LAYERS = """
mb1ic3ih224oc32kh3sh2ph1n"MobileNetV2 stem"
mb1g32ic32ih112oc32kh3ph1n"MobileNetV2"
mb1g96ic96ih112oc96kh3sh2ph1n"MobileNetV2"
mb1g144ic144ih56oc144kh3sh2ph1n"MobileNetV2"
mb2g960ic960ih7oc960kh3ph1n"MobileNetV2"
mb1ic96ih56oc24kh1n"MobileNetV2"
mb1ic320ih7oc1280kh1n"MobileNetV2 head"
mb1g240ic240ih28oc240kh5sh2ph2n"EfficientNet"
mb1g672ic672ih14oc672kh5ph2n"EfficientNet"
mb1g1152ic1152ih7oc1152kh5ph2n"EfficientNet"
mb1ic3ih224oc96kh4sh4n"ConvNeXt stem"
mb1g96ic96ih56oc96kh7ph3n"ConvNeXt"
mb1g768ic768ih7oc768kh7ph3n"ConvNeXt"
mb1ic96ih28oc192kh2sh2n"ConvNeXt"
mb1g64ic64ih32oc64kh31ph15n"RepLKNet"
mb1ic3ih224oc64kh7sh2ph3n"ResNet stem"
mb1ic64ih56oc64kh3ph1n"ResNet"
mb1ic128ih28oc128kh3ph1n"ResNet"
mb1ic256ih14oc512kh1sh2n"ResNet"
mb1ic256ih14oc256kh3ph1n"ResNet"
mb1ic512ih7oc512kh3ph1n"ResNet"
mb1g32ic128ih56oc128kh3ph1n"ResNeXt"
mb1g8ic8ih64oc8kh3ph1n"64x64"
mb1g64ic64ih64oc64kh3ph1n"64x64"
mb1ic8ih64oc8kh3ph1n"64x64"
mb1ic64ih64oc64kh3ph1n"64x64"
mb1ic32ih32oc32kh3ph2dh1n"DeepLab"
mb1g512ic512ih32oc512kh3ph12dh11n"DeepLab"
mb1ic128ih16oc64oh32kh4sh2ph1n"DCGAN" transposed
mb2000g35ic35ih5oc35kh3ph1n"70,000 planes"
mb2200ic32ih3oc32kh3ph1n"70,400 planes"
mb1g1536ic1536iw64oc1536ow64kw4pw3n"Mamba"
mb1ic512iw199oc512kw3sw2n"wav2vec 2.0"
mb1g64ic64iw512oc64kw31pw15n"Conformer"
mb1ic64id8oc64kd3pd1n"R3D"
mb1g64ic64id14oc64kd3pd1n"X3D"
"""


def real_layers() -> list[ConvProblem]:
    """Layers of known networks in float32, as PyTorch's own layout has them and in channels_last."""
    problems = []
    for line in _LAYERS.split("\n")[1:-1]:
        problem = ConvProblem.parse(line)
        problems.append(problem)
        if problem.ndim > 1:
            problems.append(ConvProblem.parse(f"{line} channels_last"))
    return problems
