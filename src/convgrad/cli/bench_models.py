"""The benchmark's layers: those of the models of transformers, and problems of models that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .._compat import channels_last_of
from ..diagnostics import Machine
from ..problem import ConvProblem
from .app import fail
from .models import MODELS, explained, takes_images

#: Layers of models that transformers does not define, in float32.
WRITTEN = {
    "x3d_m": """
mb1ic3id16ih112iw112oc24od16oh56ow56kd1kh3kw3sd1sh2sw2pd0ph1pw1n"stem"
mb1g24ic24id16ih56iw56oc24kd5kh1kw1pd2ph0pw0n"stem, in time"
mb1g54ic54id16ih56iw56oc54kd3kh3kw3pd1ph1pw1n"stage 2"
mb1g108ic108id16ih56iw56oc108od16oh28ow28kd3kh3kw3sd1sh2sw2pd1ph1pw1n"stage 3, first"
mb1g108ic108id16ih28iw28oc108kd3kh3kw3pd1ph1pw1n"stage 3"
mb1g216ic216id16ih14iw14oc216kd3kh3kw3pd1ph1pw1n"stage 4"
mb1g432ic432id16ih7iw7oc432kd3kh3kw3pd1ph1pw1n"stage 5"
mb1ic24id16ih56iw56oc54kd1kh1kw1n"stage 2, widen"
mb1ic216id16ih14iw14oc96kd1kh1kw1n"stage 4, narrow"
""",
    "unet_3d": """
mb1ic1id32oc32kd3pd1n"first"
mb1ic32id32oc32kd3pd1n"level 1"
mb1ic64id16oc64kd3pd1n"level 2"
mb1ic128id8oc128kd3pd1n"level 3"
mb1ic256id4oc256kd3pd1n"level 4"
mb1ic128id8oc64od16kd2sd2n"up" transposed
mb1ic64id16oc32od32kd2sd2n"up" transposed
mb1ic96id32oc32kd3pd1n"after the skip"
mb1ic32id32oc3kd1n"head"
""",
    "replknet_31b": """
mb1g128ic128ih56oc128kh5ph2n"stage 1, small kernel"
mb1g256ic256ih28oc256kh29ph14n"stage 2"
mb1g512ic512ih14oc512kh27ph13n"stage 3"
mb1g1024ic1024ih7oc1024kh13ph6n"stage 4"
mb1ic128ih56oc512kh1n"stage 1, widen"
""",
    "dcgan": """
mb16ic100ih1oc512oh4kh4n"generator 1" transposed
mb16ic512ih4oc256oh8kh4sh2ph1n"generator 2" transposed
mb16ic256ih8oc128oh16kh4sh2ph1n"generator 3" transposed
mb16ic128ih16oc64oh32kh4sh2ph1n"generator 4" transposed
mb16ic64ih32oc3oh64kh4sh2ph1n"generator 5" transposed
mb16ic3ih64oc64oh32kh4sh2ph1n"discriminator 1"
mb16ic64ih32oc128oh16kh4sh2ph1n"discriminator 2"
mb16ic128ih16oc256oh8kh4sh2ph1n"discriminator 3"
""",
}


def models_named(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """The models that are meant, the user's own last; all that are known where none is named."""
    known = list(known)
    own = [name for name in names if ":" in name]
    unknown = [name for name in names if name not in known and name not in own]
    if unknown:
        raise fail(f"there is no model {unknown[0]!r}", f"one of {', '.join(known)}, or module:factory")
    return [*(name for name in known if name in names or not names), *dict.fromkeys(own)]


def layers_of(name: str, batch: int, size: int, channels_last: bool) -> list[ConvProblem]:
    """Each distinct convolution of a model once, in order; none where the layout is no other one."""
    if name in WRITTEN:
        found = [ConvProblem.parse(line) for line in WRITTEN[name].strip().splitlines()]
        return [p.replace(memory_format=channels_last_of(p.ndim)) for p in found] if channels_last else found
    if channels_last and not takes_images(name):
        return []
    input = "" if ":" in name else MODELS[name].sample(batch, size, "meta")
    found = explained(name, Machine.here(), torch.float32, channels_last, input)
    return [layer.problem for layer in found if layer.kind != "Linear"]
