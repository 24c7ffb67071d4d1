"""Where the compiled CPU kernels say that they are faster than PyTorch's, and why they cannot."""

from __future__ import annotations

import pytest
import torch

from convgrad.backends import _native_library as library
from convgrad.problem import ConvProblem, Output

from .native_cases import BACKEND, CPU, on_threads

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


def test_reasons_name_what_is_missing() -> None:
    p = ConvProblem(1, 4, 4, 4, (5,), (3,), (1,), ((1, 1),), (1,), (5,))
    outputs: tuple[Output, ...] = ("forward",)
    assert BACKEND.reasons_against(p, outputs, CPU) == []
    assert "on cuda" in BACKEND.reasons_against(p, outputs, torch.device("cuda"))[0]
    assert BACKEND.reasons_against(p.replace(groups=2), outputs, CPU) == []
    dense = p.replace(groups=1, in_channels=17)
    assert "17 input and 4 output channels" in BACKEND.reasons_against(dense, outputs, CPU)[0]
    assert "int64" in BACKEND.reasons_against(p.replace(dtype=torch.int64), outputs, CPU)[0]


def test_pytorch_keeps_what_it_does_as_fast() -> None:
    image = ConvProblem(32, 96, 96, 96, (56, 56), (3, 3), (1, 1), ((1, 1),) * 2, (1, 1), (56, 56))
    last = image.replace(memory_format=torch.channels_last)
    assert BACKEND.expected_speedup(last, ("forward",), CPU) < 1 < BACKEND.expected_speedup(image, ("forward",), CPU)
    assert BACKEND.expected_speedup(last, ("grad_input", "grad_weight"), CPU) > 1
    volume = ConvProblem.parse("mb2g8ic8id9ih9iw9oc8kd3kh3kw3 channels_last")
    dilated = ConvProblem.parse("mb2g8ic8id9ih9iw9oc8kd3kh3kw3dd1dh1dw1 channels_last")
    assert (
        BACKEND.expected_speedup(volume, ("forward",), CPU) < 1 < BACKEND.expected_speedup(dilated, ("forward",), CPU)
    )
    assert BACKEND.expected_speedup(image.replace(dtype=torch.float64), ("forward",), CPU) > 1


def test_pytorch_keeps_small_images_and_strides_in_groups_of_8() -> None:
    def taken(text: str, *outputs: Output) -> bool:
        return BACKEND.expected_speedup(ConvProblem.parse(text), outputs, CPU) > 1

    both: tuple[Output, ...] = ("grad_input", "grad_weight")
    resnext = "mb16g32ic128ih56oc128kh3ph1"
    assert all(taken(resnext + layout, *both) for layout in ("", " channels_last"))
    assert all(taken(resnext, output) for output in ("forward", "grad_input", "grad_weight"))
    assert not taken("mb16g32ic512ih14oc512kh3ph1", *both)
    assert not taken("mb16g32ic512ih28oc512kh3sh2ph1 channels_last", "forward")
    assert all(taken("mb16g64ic256ih28oc256kh3sh2ph1" + layout, *both) for layout in ("", " channels_last"))
    assert taken("mb16g128ic512ih14oc512kh3ph1 channels_last", "grad_weight")
    assert all(taken("mb16g14ic224ih28oc224kh3ph1" + layout, *both) for layout in ("", " channels_last"))
    assert not taken("mb16ic4ih28oc4kh3ph1", "forward")


def test_the_weight_gradient_of_the_smallest_images_needs_four_threads() -> None:
    asked = [
        ConvProblem.parse(f"mb32g768ic768ih{size}oc768kh3ph1{layout}")
        for layout in ("", " channels_last")
        for size in (2, 3, 5, 7)
    ]
    taken = {}
    for threads in (1, 2, 4):
        with on_threads(threads):
            taken[threads] = [BACKEND.expected_speedup(p, ("grad_weight",), CPU) > 1 for p in asked]
    few = [True, False, True, True, False, False, False, True]
    assert taken == {1: few, 2: few, 4: [True] * 8}


def test_tens_of_thousands_of_single_pixels_a_thread_are_left_to_pytorch() -> None:
    def taken(text: str) -> list[bool]:
        p = ConvProblem.parse(text)
        sweep: tuple[Output, ...] = ("grad_input", "grad_weight")
        return [BACKEND.expected_speedup(p, o, CPU) > 1 for o in (("forward",), ("grad_input",), sweep)]

    with on_threads(1):
        assert taken("mb4g960ic960ih4oc960kh3") == [True, True, True]  # the end of a MobileNet on 64x64 images
        assert taken("mb4g960ic960ih3oc960kh3") == [True, True, True]
        assert taken("mb32g960ic960ih3oc960kh3") == [False, False, True]
        assert taken("mb32g960ic960ih4oc960kh3") == [True, True, True]
    with on_threads(2):
        assert taken("mb32g960ic960ih3oc960kh3") == [True, True, True]


def test_channels_last_is_taken_for_wide_kernels_small_images_and_what_no_cache_holds() -> None:
    def taken(text: str) -> list[bool]:
        p = ConvProblem.parse(text + " channels_last")
        return [BACKEND.expected_speedup(p, (output,), CPU) > 1 for output in ("forward", "grad_input")]

    for threads in (1, 2):
        with on_threads(threads):
            assert taken("mb32g96ic96ih56oc96kh7ph3") == [True, True]
            assert taken("mb32g576ic576ih14oc576kh3ph1") == [True, True]
            assert taken("mb32g192ic192ih28oc192kh3ph1") == [True, True]
            assert taken("mb4g192ic192ih28oc192kh3ph1") == [threads > 1] * 2
            assert taken("mb32g144ic144ih56oc144kh3ph1") == [False, True]
            assert taken("mb32g32ic32ih112oc32kh3ph1") == [False, False]
            assert taken("mb4g96ic96ih56oc96kh5ph2") == [True, False]
            assert taken("mb32g672ic672ih14oc672kh5ph2") == [True, False]
            assert taken("mb32g960ic960ih7oc960kh5ph2") == [False, False]
            assert taken("mb32g480ic480ih14oc480kh5sh2ph2") == [False, False]
            assert taken("mb1g96ic96ih7oc96kh7ph3") == [False, False]
            causal = "mb8g768ic768ih1iw2048oc768oh1ow2048kh1kw4ph0pw3dw0"  # for which PyTorch's must pad a copy
            assert taken(causal) == [True, True]
