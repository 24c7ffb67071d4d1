"""The problems that a backend is checked on if no others are given, and layers of known networks.

The first are small, so that thousands of checks take seconds, and chosen for where kernels go wrong: one image, one
channel, sizes that are no multiple of a vector or a tile, borders wider than the image, strides that leave rows unread,
kernels of even size, crops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem
from ..sizes import output_length

_ONE = """
mb1ic1iw1oc1kw1; mb1ic3iw13oc5kw3; mb3ic4iw16oc8kw3pw1; mb2ic5iw17oc3kw4pw2; mb1ic2iw20oc4kw5sw2pw2;
mb2ic3iw19oc2kw3sw3pw1; mb2ic2iw23oc3kw3dw2pw2; mb2g2ic4iw11oc6kw2pw1; mb1g6ic6iw33oc6kw4ow33pw3;
mb2g16ic16iw37oc16kw3pw1; mb2g4ic4iw9oc12kw3pw1sw2; mb2g3ic6iw15oc3kw5pw2dw1; mb1ic3iw2oc3kw5pw2;
mb2ic2iw12oc2kw3ow9pw-1; mb1ic4iw9oc4kw4sw2pw1 transposed; mb2g4ic4iw7oc4ow15kw4sw2pw1 transposed
"""

_TWO = """
mb1ic1ih1oc1kh1; mb1ic3ih5iw7oc4kh3kw3ph1pw1; mb2ic8ih6iw9oc8kh1kw1; mb2ic6ih9iw8oc5kh1kw1sh2sw2;
mb3ic4ih8iw16oc8kh3kw3ph1pw1; mb2ic3ih13iw11oc2kh3kw3sh2sw2ph1pw1; mb1ic2ih12iw15oc3kh3kw3sh3sw3;
mb2ic2ih11iw10oc4kh4kw4sh2sw2ph1pw1; mb2ic3ih9iw12oc3kh2kw2; mb1ic2ih14iw13oc2kh3kw3ph2pw2dh1dw1;
mb2ic3ih10iw17oc2kh5kw3sh1sw2ph2pw0; mb1ic2ih9iw9oc2kh3kw2sh2sw3ph0pw1dh1dw0; mb1ic2ih3iw4oc3kh5kw5ph2pw2;
mb2ic2ih2iw3oc2kh3kw3ph3pw3; mb2g2ic4ih7iw10oc6kh3kw3ph1pw1; mb1g3ic6ih8iw5oc3kh3kw3sh2sw2ph1pw1;
mb1g8ic8ih9iw13oc8kh3kw3ph1pw1; mb2g32ic32ih7iw7oc32kh3kw3ph1pw1; mb2g5ic5ih11iw19oc5kh3kw3sh2sw2ph1pw1;
mb1g16ic16ih14iw14oc16kh5kw5ph2pw2; mb2g7ic7ih12iw9oc7kh7kw7ph3pw3; mb1g4ic4ih6iw21oc4kh3kw3ph2pw2dh1dw1;
mb2g3ic3ih10iw7oc6kh3kw3ph1pw1; mb1g4ic4ih9iw11oc12kh3kw3sh2sw2ph1pw1dh1dw1; mb1g2ic2ih17iw15oc2kh13kw13ph6pw6;
mb2g6ic6ih8oc6kh4oh8ph1; mb1g3ic3ih9iw10oc3kh2oh9ow10kw3ph0pw2; mb2ic2ih9iw8oc3kh3oh6ow6kw3ph-1pw0;
mb1g4ic4ih13iw12oc4kh3kw3sh4sw4; mb1ic3ih6iw5oc4kh3kw3 transposed;
mb2ic4ih5iw4oc3oh10ow8kh4kw4sh2sw2ph1pw1 transposed; mb1g6ic6ih7iw6oc6oh14ow12kh4kw4sh2sw2ph1pw1 transposed;
mb2g2ic4ih4iw5oc2oh9ow11kh3kw3sh2sw2ph0pw0 transposed; mb1ic16ih1iw1oc8kh1kw1; mb4ic7ih4iw4oc33kh3kw3ph1pw1;
mb2ic3ih7iw9oc4kh1kw5ph0pw2; mb1ic4ih9iw6oc3kh4kw1sh2sw1ph1pw0
"""

_THREE = """
mb1ic2id3ih4iw5oc3kd1kh1kw1; mb1ic2id5ih6iw7oc3kd3kh3kw3pd1ph1pw1; mb2ic3id4oc2kd3pd1sd2;
mb1ic2id6ih5iw9oc2kd2kh3kw4sd2sh1sw3ph1; mb1g4ic4id4ih7iw9oc4kd3kh3kw3pd1ph1pw1; mb2g3ic3id5oc6kd3sd2pd1;
mb1g2ic4id5ih6iw6oc2kd3kh3kw3pd2ph2pw2dd1dh1dw1; mb1g2ic2id7ih9iw8oc2kd5kh5kw5pd2ph2pw2;
mb1ic2id3ih3iw4oc2kd3kh3kw3sd2sh2sw2pd1ph1pw1 transposed
"""


def changed(p: ConvProblem, **changes: Any) -> ConvProblem | None:
    """Return the problem with other values and the output size that follows from them; None if they make none."""
    names = ("input_size", "kernel_size", "stride", "padding", "dilation")
    dims = zip(*(changes.get(name, getattr(p, name)) for name in names), strict=True)
    out = tuple([output_length(n, k, s, low, high, d) for n, k, s, (low, high), d in dims])
    try:
        return p.replace(output_size=out, **{"name": "", **changes}).canonical()
    except ValueError:  # sizes that do not belong together, or that no memory holds
        return None


_VARIANTS = (torch.float64, torch.bfloat16, torch.float16)


def default_problems() -> Iterator[ConvProblem]:
    """Yield problems for a check: each shape in float32, in channels_last, and in another dtype in turn.

    Equivalent to:
        >>> {p.ndim for p in default_problems()}
        {1, 2, 3}
    """
    for table in (_ONE, _TWO, _THREE):
        for i, line in enumerate(table.split(";")):
            both = list(_in_layouts(line))
            yield from both
            like = both[-1 if i // len(_VARIANTS) % 2 else 0]
            yield like.replace(dtype=_VARIANTS[i % len(_VARIANTS)])


def _in_layouts(line: str) -> Iterator[ConvProblem]:
    """Yield the problem as it is and, if it has another layout, in channels_last."""
    yield (p := ConvProblem.parse(line))
    if p.ndim > 1:
        yield p.replace(memory_format=channels_last_of(p.ndim))


# ---- layers of known networks, of sizes that no small problem has ---------------------------------

_LAYERS = """
mb1ic3ih224oc32kh3sh2ph1n"MobileNetV2 stem"; mb1g32ic32ih112oc32kh3ph1n"MobileNetV2";
mb1g96ic96ih112oc96kh3sh2ph1n"MobileNetV2"; mb1g144ic144ih56oc144kh3sh2ph1n"MobileNetV2";
mb2g960ic960ih7oc960kh3ph1n"MobileNetV2"; mb1ic96ih56oc24kh1n"MobileNetV2"; mb1ic320ih7oc1280kh1n"MobileNetV2 head";
mb1g240ic240ih28oc240kh5sh2ph2n"EfficientNet"; mb1g672ic672ih14oc672kh5ph2n"EfficientNet";
mb1g1152ic1152ih7oc1152kh5ph2n"EfficientNet"; mb1ic3ih224oc96kh4sh4n"ConvNeXt stem";
mb1g96ic96ih56oc96kh7ph3n"ConvNeXt"; mb1g768ic768ih7oc768kh7ph3n"ConvNeXt"; mb1ic96ih28oc192kh2sh2n"ConvNeXt";
mb1g64ic64ih32oc64kh31ph15n"RepLKNet"; mb1ic3ih224oc64kh7sh2ph3n"ResNet stem"; mb1ic64ih56oc64kh3ph1n"ResNet";
mb1ic128ih28oc128kh3ph1n"ResNet"; mb1ic256ih14oc512kh1sh2n"ResNet"; mb1ic256ih14oc256kh3ph1n"ResNet";
mb1ic512ih7oc512kh3ph1n"ResNet"; mb1g32ic128ih56oc128kh3ph1n"ResNeXt"; mb1g8ic8ih64oc8kh3ph1n"64x64";
mb1g64ic64ih64oc64kh3ph1n"64x64"; mb1ic8ih64oc8kh3ph1n"64x64"; mb1ic64ih64oc64kh3ph1n"64x64";
mb1ic32ih32oc32kh3ph2dh1n"DeepLab"; mb1g512ic512ih32oc512kh3ph12dh11n"DeepLab";
mb1ic128ih16oc64oh32kh4sh2ph1n"DCGAN" transposed; mb2000g35ic35ih5oc35kh3ph1n"70,000 planes";
mb2200ic32ih3oc32kh3ph1n"70,400 planes"; mb1g1536ic1536iw64oc1536ow64kw4pw3n"Mamba";
mb1ic512iw199oc512kw3sw2n"wav2vec 2.0"; mb1g64ic64iw512oc64kw31pw15n"Conformer"; mb1ic64id8oc64kd3pd1n"R3D";
mb1g64ic64id14oc64kd3pd1n"X3D"
"""


def real_layers() -> list[ConvProblem]:
    """Return layers of known networks in float32, contiguous and in channels_last."""
    return [p for line in _LAYERS.split(";") for p in _in_layouts(line)]
