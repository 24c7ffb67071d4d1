"""`run_script`: the script notices nothing, its caller learns everything."""

import csv
import io
import pickle
import subprocess
import sys

import pytest

import convgrad
from convgrad.diagnostics import Call, Usage
from convgrad.models import run_script

TRAIN = """
import sys
import torch
from beside import CHANNELS
assert __name__ == "__main__"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(CHANNELS, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, groups=4))
x = torch.randn(2, CHANNELS, 8, 8)
for _ in range(int(sys.argv[1])):
    loss = model(x).square().mean()
    loss.backward()
print("loss", loss.item())
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a script, and returns its path."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed leaves its own

    def write(text, name="script.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def script(write):
    write("CHANNELS = 3\n", "beside.py")
    return write(TRAIN, "train.py")


def lines(script, *args, **options) -> tuple[int, list[dict[str, str]], str]:
    """Exit status, the rows of the CSV, and the text of the report."""
    target, out = script + ".csv", io.StringIO()
    status = run_script(script, args, csv=target, out=out, measure=False, **options)
    with open(target, encoding="utf-8") as file:
        return status, list(csv.DictReader(file)), out.getvalue()


@pytest.mark.parametrize("stock", [False, True], ids=["taken over", "stock"])
def test_a_training_script_is_counted(script, stock, capsys):
    argv, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    with convgrad.use_backend(None if stock else "im2col"):
        status, rows, text = lines(script, "3", stock=stock)
    assert status == 0
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, path, main)
    assert capsys.readouterr().out.startswith("loss ")
    assert {r["calls"] for r in rows} == {"3"}
    outputs = sorted(r["output"] for r in rows)
    if stock:
        assert outputs == ["forward", "forward", "grad_input+grad_weight+grad_bias", "grad_weight+grad_bias"]
        assert {r["backend"] for r in rows} == {"aten Mkldnn"}
        assert "the script's own choice: 12 calls" in text
    else:
        assert outputs == ["forward", "forward", "grad_input", "grad_weight", "grad_weight"]
        assert {r["backend"] for r in rows} == {"im2col"}
    assert sum(float(r["share"]) for r in rows) == pytest.approx(1)
    assert text.count("g4mb2ic4ih6oc4oh4kh3") == (2 if stock else 3)


def test_the_passes_of_a_transposed_layer_are_said_in_its_users_words_too(write):
    path = write(
        "import torch\nlayer = torch.nn.ConvTranspose2d(4, 4, 3, groups=4, bias=False)\n"
        "layer(torch.ones(1, 4, 5, 5, requires_grad=True)).sum().backward()\n"
    )
    with convgrad.use_backend("im2col"):
        _, ours, text = lines(path)
    _, stock, _ = lines(path, stock=True)
    assert {r["output"] for r in ours} == {"grad_input (its output)", "forward (its grad_input)", "grad_weight"}
    assert {r["output"] for r in stock} == {"grad_input (its output)", "forward (its grad_input)+grad_weight"}
    assert "forward (its grad_input)" in text


def test_both_ways_give_the_same_loss(script, capsys):
    losses = []
    for stock in (False, True):
        lines(script, "2", stock=stock)
        losses.append(float(capsys.readouterr().out.split()[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(7)",
        "import sys; sys.exit('no data')",
        "import sys; sys.exit()",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "import asyncio; raise asyncio.CancelledError",
        "import torch; torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 2, 3))",
    ],
)
def test_the_exit_status_and_the_traceback_are_the_interpreters(capsys, body, write):
    path = write(body)
    status = run_script(path, measure=False, out=io.StringIO())
    stock = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert capsys.readouterr().err == stock.stderr
    assert status == (stock.returncode if stock.returncode >= 0 else 128 - stock.returncode)  # ended by a signal


def test_an_exception_is_shown_from_the_script_on_and_the_report_follows(capsys, write):
    path = write("import torch\ntorch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))\n1 / 0\n")
    assert run_script(path, measure=False) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n  File ")
    assert err.splitlines()[1].endswith('script.py", line 3, in <module>')
    assert "runpy" not in err
    assert "1 call," in err.split("ZeroDivisionError")[1]


def test_an_interrupt_within_a_kernel_is_shown_where_the_script_called_it(capsys, write):
    path = write(
        "import torch\nfrom convgrad.engine import observing\ndef interrupt(_): raise KeyboardInterrupt\n"
        "with observing(interrupt): torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))\n"
    )
    assert run_script(path, measure=False) == 130
    err = capsys.readouterr().err
    assert "line 4, in <module>" in err
    assert "plan.py" not in err.split("KeyboardInterrupt")[0]


def test_a_script_that_does_not_parse_or_is_not_there(capsys, write):
    path = write("a = )")
    assert run_script(path, out=io.StringIO()) == 1
    assert capsys.readouterr().err.splitlines()[0] == f'  File "{path}", line 1'
    assert run_script("nowhere.to_be_found", module=True, out=io.StringIO()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("convgrad: ")
    assert "nowhere" in line


def test_the_script_knows_where_it_is_and_may_go_elsewhere(tmp_path, monkeypatch, write):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(
        "import os, sys\nassert os.path.isabs(__file__) and sys.argv[0] == 'script.py' and __package__ is None\n"
        "assert vars(sys.modules['__main__']) is globals() and __loader__.get_data(__file__)\n"
        "def f(x: int): ...\nassert f.__annotations__ == {'x': int}\nos.chdir('elsewhere')"
    )
    monkeypatch.chdir(tmp_path)
    assert run_script("script.py", csv="kernels.csv", out=io.StringIO()) == 0
    assert (tmp_path / "kernels.csv").is_file()
    assert not list(elsewhere.iterdir())


def test_threads_that_compute_at_once_take_no_share_of_the_time(write):
    usage, out = Usage(), io.StringIO()
    usage.add([Call("ic1ih1oc1kh1", "forward", "aten", total=1e6)])
    assert run_script(write("pass"), usage=usage, out=out, measure=False) == 0
    assert "1 call, 1000.000 s in convolutions, threads added up; the script took " in out.getvalue()


def test_where_nobody_hears_the_report_the_status_is_still_the_scripts(tmp_path, write):
    path = write("raise SystemExit(3)")
    closed = io.StringIO()
    closed.close()
    assert run_script(path, out=closed) == 3
    gone = tmp_path / "gone"
    out = io.StringIO()
    assert run_script(path, csv=gone / "kernels.csv", out=out) == 3
    assert "was not written: No such file" in out.getvalue()


def test_who_does_not_wait_for_the_limit_gets_the_rest(tmp_path, monkeypatch, write):
    from convgrad.diagnostics import records

    def limits(*_, measured):
        if measured:
            raise KeyboardInterrupt

    monkeypatch.setattr(records, "limits_of", limits)
    out, table = io.StringIO(), tmp_path / "kernels.csv"
    path = write("import torch\ntorch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))")
    assert run_script(path, out=out, csv=table) == 0
    assert "1 call," in out.getvalue()
    assert table.read_text().count("\n") == 2


def test_threads_that_outlive_the_script_are_counted_and_find_its_modules(write):
    write("import torch\ntorch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))", "beside.py")
    path = write(
        "import threading\n"
        "def late():\n    threading.main_thread().join()\n    import beside\n"
        "threading.Thread(target=late).start()\n"
    )
    code = f"import sys; from convgrad.models import run_script; sys.exit(run_script({path!r}, measure=False))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "convgrad's choice: 1 call," in done.stderr


def test_without_a_convolution_or_a_script(write):
    path = write("pass")
    out = io.StringIO()
    assert run_script(path, out=out) == 0
    assert "no convolution ran" in out.getvalue()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_script("nowhere.py")


def test_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "work.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert run_script("pack.work", ["a", "-b"], module=True, out=io.StringIO()) == 0
    assert capsys.readouterr().out == "__main__ ['a', '-b']\n"


def test_what_a_script_pickles_from_itself(tmp_path, write):
    target = tmp_path / "out.pkl"
    path = write(
        "import pickle, sys\nclass A: pass\n"
        f"with open({str(target)!r}, 'wb') as f: pickle.dump(A(), f)\n"
        f"with open({str(target)!r}, 'rb') as f: assert type(pickle.load(f)) is A\n"
    )
    assert run_script(path, out=io.StringIO()) == 0
    with pytest.raises(AttributeError), open(target, "rb") as f:
        pickle.load(f)


def test_what_a_process_that_it_spawned_gives_back(write):
    before = sys.modules["__mp_main__"]
    path = write(
        "import pickle\nclass A: __module__ = '__mp_main__'\nassert type(pickle.loads(pickle.dumps(A()))) is A"
    )
    assert run_script(path, out=io.StringIO()) == 0
    assert sys.modules["__mp_main__"] is before


@pytest.mark.slow
def test_as_a_process_of_its_own(script):
    code = f"import sys; from convgrad.models import run_script; sys.exit(run_script({script!r}, ['1']))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    assert "of limit" in done.stderr
