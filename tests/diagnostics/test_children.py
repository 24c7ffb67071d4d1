"""The processes that a watched script starts are counted, whichever way it starts them and however they end."""

import csv
import io
import multiprocessing
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from convgrad.models import Usage, run_script

CONV = "torch.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 3))"
PROCESS = f"""
import multiprocessing, os, sys, torch
def work():
    {CONV}
if __name__ == "__main__":
    work()
    contexts = map(multiprocessing.get_context, sys.argv[1:])
    some = [context.Process(target=work) for context in contexts]
    [p.start() for p in some]
    [p.join() for p in some]
    assert [p.exitcode for p in some] == [0] * len(some)
"""
LOADER = f"""
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return {CONV}[0]
for _ in torch.utils.data.DataLoader(Data(), num_workers=2): pass
"""
FORK = f"""
import os, sys, torch
{CONV}
child = os.fork()
{CONV}
if child: os.waitpid(child, 0)
sys.exit(5)
"""
#: One interpreter after the other: a plain one, one that ends at once, and one that imports convgrad first.
INTERPRETERS = f"""
import subprocess, sys
for first, last in ("sys", "1"), ("sys", "import os; os._exit(0)"), ("convgrad", "1"):
    code = f"import {{first}}, sys, torch; assert sys.customized; {CONV}; {{last}}"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
RANK = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    loss = model(torch.randn(2, 3, 9, 9)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path):
    """Runs the text of a script in an interpreter of its own; returns its exit status, rows and report."""

    def run(text, *args, options=""):
        (tmp_path / "script.py").write_text(text)
        table = tmp_path / "kernels.csv"
        script = options or "'script.py', sys.argv[1:]"
        call = f"run_script({script}, csv={str(table)!r}, measure=False)"
        # A file, because a process that is spawned looks for the code of the first one.
        start = (
            f"import sys\nfrom convgrad.models import run_script\nif __name__ == '__main__':\n    sys.exit({call})\n"
        )
        (tmp_path / "start.py").write_text(start)
        command = [sys.executable, "start.py", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
        calls: Counter[str] = Counter()
        for row in csv.DictReader(io.StringIO(table.read_text())):
            calls[row["output"]] += int(row["calls"])
        return done.returncode, calls, done.stderr

    return run


def test_multiprocessing(run):
    methods = multiprocessing.get_all_start_methods()
    status, calls, said = run(PROCESS, *methods)
    assert status == 0, said
    assert calls == {"forward": 1 + len(methods)}
    assert f"{len(methods)} child processes added up" in said
    assert "signal" not in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_the_script_forks_ends_where_the_script_does_and_reports_nothing_itself(run):
    status, calls, said = run(FORK)
    assert status == 5
    assert calls == {"forward": 3}
    assert said.count("convgrad's choice: 3 calls") == said.count("choice") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_file_of_a_step_is_named_once_though_a_process_is_forked_after_it(tmp_path):
    step = f"optimizer = torch.optim.SGD([torch.ones(1)], 0.1)\nfor _ in range(3): {CONV}; optimizer.step()\n"
    (tmp_path / "script.py").write_text(f"import torch\n{step}{PROCESS}")
    call = "run_script('script.py', ['fork'], measure=False, trace='step.json')"
    command = [sys.executable, "-c", f"from convgrad.models import run_script; {call}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
    assert "1 child process added up" in done.stderr
    assert done.stderr.count("the third training step") == 1, done.stderr


def test_new_interpreters_which_have_a_sitecustomize(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "script.py").write_text(INTERPRETERS)
    usage, said = Usage(), io.StringIO()
    assert run_script(str(tmp_path / "script.py"), usage=usage, out=said, measure=False) == 0
    assert sum(row.calls for row in usage.rows) == 3
    assert "1 child process ended by a signal" in said.getvalue()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="a build without torch.distributed")
@pytest.mark.parametrize("accelerate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_torchrun_with_two_processes(run, accelerate, tmp_path):
    start = "'torch.distributed.run', ['--nproc-per-node', '2', 'script.py'], module=True"
    trace = tmp_path / "step.json" if accelerate else None
    status, calls, said = run(RANK, options=f"{start}, accelerate={accelerate}, trace={trace and str(trace)!r}")
    assert status == 0, said
    assert calls["forward"] == 12
    assert "2 child processes added up" in said
    assert ("DistributedDataParallel: " in said and " normalizations" in said) is accelerate
    written = [tmp_path / f"step.rank{rank}.json" for rank in (0, 1)] if accelerate else []
    assert sorted(tmp_path.glob("step*")) == written
    assert all(f"third training step, for Perfetto or chrome://tracing: {path}" in said for path in written)


def test_the_environment_is_as_before(tmp_path):
    before, path = dict(os.environ), list(sys.path)
    (tmp_path / "script.py").write_text("pass")
    assert run_script(str(tmp_path / "script.py"), out=io.StringIO()) == 0
    assert (dict(os.environ), sys.path) == (before, path)


def test_the_page_of_a_script_adds_up_its_processes(tmp_path):
    (tmp_path / "script.py").write_text(LOADER)
    code = (
        "from convgrad.report import profile_script\nif __name__ == '__main__':\n"
        "    profile, status = profile_script('script.py', seconds=0.1)\n    print(status, profile.finding)"
    )
    (tmp_path / "start.py").write_text(code)
    done = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0 ")
    assert "in 4 calls of convolutions, by convgrad's choice of kernels, 2 child processes added up." in done.stdout
