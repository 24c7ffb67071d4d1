"""What a report says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from convgrad.backends.im2col import Im2colBackend
from convgrad.problem import ConvProblem
from convgrad.testing import check_backend

from .broken import Broken, wrong_if


def test_a_report_names_the_first_failure_and_how_to_repeat_it() -> None:
    report = check_backend(Broken(wrong_if(lambda p: p.batch == 1)), ["mb2ic2iw5oc2kw3", "mb1ic2iw5oc2kw3 f64"], seed=5)
    assert not report.ok
    assert report.first_failure is not None
    problem = "g1mb1ic2iw5oc2ow3kw3sw1pw0dw0 float64"
    call = f'convgrad.testing.check_problem("broken", "{problem}", "forward", seed=5, properties=["exact"])'
    assert report.first_failure.command == call  # no command knows it
    assert call in str(report)
    library = dataclasses.replace(report.first_failure, backend="aten")
    assert library.command == f"convgrad check '{problem}' --backend aten --output forward --property exact --seed 5"
    assert "1 of 6 elements differ, the first at (0, 0, 0)" in str(report)
    with pytest.raises(AssertionError, match="repeat: convgrad"):
        report.raise_if_failed()


def test_nothing_checked_is_not_a_success() -> None:
    report = check_backend(Im2colBackend(), [ConvProblem.parse("ic2iw5oc2kw3").replace(dtype=torch.float8_e4m3fn)])
    assert not report.ok
    assert "nothing could be checked" in str(report)
    assert "without scales" in str(report)
    assert not check_backend(Im2colBackend(), ["mb0ic2iw5oc2kw3"]).ok
