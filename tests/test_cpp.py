"""The header, from C++: the example is built and trained with."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

import convgrad

EXAMPLE = Path(__file__).parents[1] / "examples" / "cpp_extension"


def of_the_build(test: Any) -> Any:
    """A test of what ninja and a compiler build in a minute."""
    absent = shutil.which("ninja") is None or all(shutil.which(c) is None for c in ("c++", "g++", "clang++"))
    return pytest.mark.slow(pytest.mark.skipif(absent, reason="no C++ compiler, or no ninja")(test))


#: Both overloads, called as a user calls them.
CALLS = """
auto gradients(const at::Tensor& g, const at::Tensor& x, const at::Tensor& w) {
  auto with_sizes = convgrad::convolution_backward(
      g, x, w, c10::OptionalIntArrayRef(std::nullopt), {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1, {true, true, false});
  return convgrad::convolution_backward(g, x, w, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1, {true, true, false});
}
"""


def test_the_header_is_there() -> None:
    assert (Path(convgrad.include_path()) / "convgrad.h").is_file()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "first",
    ["ATen/core/Tensor.h",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("ATen/ATen.h", "torch/torch.h", "torch/extension.h"))],
)  # fmt: skip
def test_the_header_compiles_after_those_of_pytorch(first: str, tmp_path: Path) -> None:
    """at::convolution_backward, which an unqualified call would find too, is declared only in ATen's operators."""
    folders = [convgrad.include_path(), *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    source = tmp_path / "source.cpp"
    operator = "" if first.startswith("torch") else "#include <ATen/ops/convolution_backward.h>\n"
    source.write_text(f"#include <{first}>\n{operator}#include <convgrad.h>\n{CALLS}")
    standard = "c++20" if torch.__version__ >= (2, 15) else "c++17"  # that PyTorch's headers need
    command = ["c++", f"-std={standard}", "-fsyntax-only", *(f"-I{folder}" for folder in folders), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.fixture(scope="module")
def example() -> Any:
    """The example's modules; the build takes a minute."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import train

        train.load()
        yield train
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("train", None)
        sys.modules.pop("extension", None)


@pytest.fixture(scope="module")
def extension(example: Any) -> ModuleType:
    return example.load()


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch.utils.cpp_extension")


@of_the_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients(extension: ModuleType, dtype: torch.dtype, stride: int) -> None:
    x = torch.randn(2, 6, 9, 11, dtype=dtype, requires_grad=True)
    w = torch.randn(6, 1, 5, 5, dtype=dtype, requires_grad=True)
    y, expected = extension.depthwise(x, w, stride), F.conv2d(x, w, stride=stride, padding=2, groups=6)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(extension.reference(x, w, stride), expected)
    g = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(expected, (x, w), g))


@of_the_build
def test_derivatives_of_the_gradients(extension: ModuleType) -> None:
    """The header's operators are differentiable themselves, so a backward written with them is too."""
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: extension.depthwise(x, w, 2), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: extension.depthwise(x, w, 2), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: extension.reference(x, w, 2), (x, w))


@of_the_build
def test_only_the_gradients_asked_for(extension: ModuleType) -> None:
    x, w = torch.randn(2, 6, 9, 11), torch.randn(6, 1, 5, 5, requires_grad=True)
    with convgrad.trace() as seen:
        extension.depthwise(x, w, 1).sum().backward()
    assert [r.outputs for r in seen] == ["grad_weight"]


@of_the_build
def test_bad_sizes_are_one_clear_error(extension: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="weight of size"):
        extension.reference(torch.randn(1, 3, 5, 5), torch.randn(4, 1, 3, 3), 1)


CATCHES = """
#include <torch/extension.h>
#include <convgrad.h>

std::string caught(const at::Tensor& x, const at::Tensor& w, bool backward) {
  try {
    if (backward) {
      convgrad::convolution_backward(x, x, w, {1}, {0}, {1}, false, {0}, 1, {true, true, false});
    } else {
      convgrad::convolution(x, w, std::nullopt, {1}, {0}, {1}, false, {0}, 1);
    }
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "no error";
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("caught", &caught);
  m.def("without_gil", &caught, pybind11::call_guard<pybind11::gil_scoped_release>());
}
"""


@of_the_build
def test_errors_are_those_that_the_header_promises(tmp_path: Path) -> None:
    """They were pybind11::error_already_set, whose what() holds a traceback of Python."""
    module = cpp_extension.load_inline(
        "catches", [CATCHES], extra_include_paths=[convgrad.include_path()], build_directory=str(tmp_path),
        extra_cflags=["-O0"],
    )  # fmt: skip
    x, w = torch.ones(1, 3, 5), torch.ones(2, 4, 2)
    sizes = (
        "Given groups=1, weight of size [2, 4, 2], expected input[1, 3, 5] to have 4 channels, "
        "but got 3 channels instead"
    )
    for caught in (module.caught, module.without_gil):
        assert caught(x, w, False) == caught(x, w, True) == caught(x.clone().requires_grad_(), w, False) == sizes
        dtypes = "Input type (torch.FloatTensor) and weight type (torch.DoubleTensor) should be the same"
        assert caught(torch.ones(1, 4, 5), w.double(), False) == dtypes
        with convgrad.use_backend("aten:cudnn"):
            assert caught(torch.ones(1, 4, 5), w, False).startswith("backend 'aten:cudnn' cannot compute forward of")
        assert caught(torch.ones(1, 4, 5), w, False) == "no error"


@of_the_build
def test_training(example: Any) -> None:
    """Both ways train, and alike."""
    example.register()
    models = [example.network(way) for way in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    losses = [example.train(model) for model in models]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))


@of_the_build
def test_before_the_import(extension: ModuleType) -> None:
    """The built library without the Python package: the error says what to do."""
    program = (
        "import importlib.util, torch\n"
        f"spec = importlib.util.spec_from_file_location({extension.__name__!r}, {extension.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "try:\n"
        "    module.reference(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), 1)\n"
        "except RuntimeError as e:\n"
        "    print(str(e).splitlines()[0])\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == (
        "the operator convgrad::convolution is not registered: import convgrad in Python before the first call from C++"
    )
