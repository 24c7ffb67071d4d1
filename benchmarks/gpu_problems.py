"""What `gpu` measures: the problems, their layouts, and what is computed of them."""

from __future__ import annotations

import torch

from convgrad._compat import channels_last_of
from convgrad.problem import ConvProblem, Output

#: Where the depthwise layers of these models are, with batches that a training step on one card has. One of each kind
#: comes first, so that a run that is cut off has something of everything.
PROBLEMS = """
g144ic144oc144mb32ih56kh3ph1n"mobilenet 56"
g1536ic1536oc1536mb8iw2048ow2048kw4pw3n"mamba N8"
g96ic96oc96mb64ih56kh7ph3n"convnext 56"
g1536ic1536oc1536mb1iw8192ow8192kw4pw3n"mamba N1 long"
g240ic240oc240mb32ih28kh5ph2n"efficientnet 28 k5"
g54ic54oc54mb8id16ih56iw56kd3kh3kw3pd1ph1pw1n"x3d 56"
g384ic384oc384mb32ih32kh31ph15n"replknet 32 k31"
g1024ic1024oc1024mb32ih7kh13ph6n"replknet 7 k13"
g96ic96oc96mb32ih112kh3sh2ph1n"mobilenet 112 s2"
g32ic32oc32mb32ih112kh3ph1n"mobilenet 112"
g192ic192oc192mb32ih28kh3ph1n"mobilenet 28"
g576ic576oc576mb32ih14kh3ph1n"mobilenet 14"
g960ic960oc960mb32ih7kh3ph1n"mobilenet 7"
g144ic144oc144mb32ih56kh5sh2ph2n"efficientnet 56 k5 s2"
g672ic672oc672mb32ih14kh5ph2n"efficientnet 14 k5"
g192ic192oc192mb64ih28kh7ph3n"convnext 28"
g384ic384oc384mb64ih14kh7ph3n"convnext 14"
g768ic768oc768mb64ih7kh7ph3n"convnext 7"
g108ic108oc108mb8id16ih28iw28kd3kh3kw3pd1ph1pw1n"x3d 28"
g108ic108oc108mb8id16ih56iw56kd3kh3kw3pd1ph1pw1sd1sh2sw2n"x3d 56 s2"
""".strip().splitlines()
#: For ``--dry-run``: every kind of problem, as small as it can be.
TINY = """
g2ic2oc2mb1ih6kh3ph1n"mobilenet tiny"
g2ic2oc2mb1ih6kh3sh2ph1n"mobilenet tiny s2"
g2ic2oc2mb1ih7kh7ph3n"convnext tiny"
g1ic1oc1mb1ih5kh31ph15n"replknet tiny k31"
g1ic1oc1mb1ih3kh13ph6n"replknet tiny k13"
g2ic2oc2mb1iw16ow16kw4pw3n"mamba tiny"
g2ic2oc2mb1id3ih4iw4kd3kh3kw3pd1ph1pw1n"x3d tiny"
""".strip().splitlines()
#: Checked beside the suite's own problems, which have few wide kernels: strides, dilation, 1-D and 3-D.
WIDE = """
g2ic2oc2mb2ih16iw16kh9kw31ph4pw15
g3ic3oc3mb3ih16kh13ph6 bfloat16
g5ic5oc5mb5ih7kh13ph6 float16 channels_last
g3ic3oc6mb3ih13iw40kh5kw13sh2sw3dh0dw1ph2pw6 bfloat16
g4ic4oc4mb2iw200ow200kw63pw31
""".strip().splitlines()
#: Of the suite's own, every kind once: vectors of 1 to 8 columns or channels, strides, dilation, 1-D and 3-D.
NARROW = """
g8ic8oc8mb2ih8iw16kh3kw3ph1pw1
g8ic8oc8mb2ih8iw16kh3kw3ph1pw1 bfloat16
g16ic16oc16mb2ih7iw9kh3kw3ph1pw1 channels_last bfloat16
g6ic6oc6mb2ih7iw7kh5kw5ph2pw2 channels_last
g8ic8oc8mb3ih7iw7kh7kw7ph3pw3
g8ic8oc8mb3ih8iw16kh7kw7ph3pw3
g8ic8oc8mb2ih9iw12kh3kw3ph1pw1sh2sw2 float16
g4ic4oc8mb2ih9iw8kh3kw2sh1sw2ph1pw1dh1dw0
g4ic4oc4mb2ih13iw9kh3kw3ph2pw2dh1dw1 channels_last float16
g4ic4oc4mb2iw64ow64kw4pw3 bfloat16
g4ic4oc4mb2id4ih5iw8kd3kh3kw3pd1ph1pw1
g8ic8oc8mb1id4ih6iw5kd3kh3kw3pd1ph1pw1sd2sh2sw2 channels_last
""".strip().splitlines()
#: What rules propose, first where public reports say most: video and image patches, volumes in 16 bits, groups
#: in channels_last, transposed convolutions; sequences as Mamba's; depthwise images.
PROPOSED = """
mb4096ic3id2ih14iw14oc1152kd2kh14kw14sd2sh14sw14n"video patches" bfloat16
mb64ic3ih224oc768kh16sh16n"image patches" bfloat16
mb2ic64id16ih56iw56oc64kd3kh3kw3pd1ph1pw1n"volume" bfloat16
g32mb32ic256ih56oc256kh3ph1n"ResNeXt" bfloat16 channels_last
mb8ic64ih128oc32oh256kh2sh2n"U-Net" bfloat16 transposed
g1536ic1536oc1536mb8ih1iw2048oh1ow2048kh1kw4ph0pw3n"mamba NLC" bfloat16 channels_last
g1536ic1536oc1536mb8iw2048ow2048kw4pw3n"mamba" float16
g144ic144oc144mb32ih56kh3ph1n"mobilenet 56" bfloat16
g144ic144oc144mb32ih56kh3ph1n"mobilenet 56" bfloat16 channels_last
g96ic96oc96mb64ih56kh7ph3n"convnext 56" float16 channels_last
g384ic384oc384mb32ih32kh31ph15n"replknet 32 k31" bfloat16
g384ic384oc384mb32ih32kh31ph15n"replknet 32 k31" channels_last
g768ic768oc768mb4iw2048ow2048kw2048pw2047n"long filter" bfloat16
""".strip().splitlines()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHAT = ("forward", "grad_input", "grad_weight", "backward")
SWEEP: tuple[Output, ...] = ("grad_input", "grad_weight")
LAYOUTS = ("NCHW", "channels_last")
#: Whose host time is measured: kernels so short that a card waits for the processor.
HOST = """
g8ic8oc8mb1ih14kh3ph1n"depthwise"
g8ic8oc8mb1iw256ow256kw4pw3n"sequence"
mb1ic8ih14oc8kh3ph1n"dense"
""".strip().splitlines()
#: For `steps`, each with its batch: of torchvision, or of `networks`.
MODELS = (
    ("convnext_tiny", 64), ("mobilenet_v2", 64), ("mobilenet_v2", 256), ("mamba", 8), ("video_patches", 4096),
    ("efficientnet_b0", 64),
)  # fmt: skip
#: How a step is run.
MODES = ("eager", "CUDA graph", "compiled")


def layouts(problem: ConvProblem) -> dict[str, ConvProblem]:
    """The problem in each layout that is measured; a sequence has no memory format: see `gpu_calls.operands`."""
    return {"NCHW": problem, "channels_last": problem.replace(memory_format=channels_last_of(problem.ndim))}
