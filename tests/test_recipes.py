"""The recipes of docs/recipes.md run as they are written, each from the page's first block on.

A recipe names the package that it needs. Where lightning, timm or ultralytics is not installed (they bring a trainer's
worth of packages, and torchvision), a stand-in takes its place that calls back in the same order.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
BLOCK = re.compile(r"^```python(?: (requires|file)=([\w.]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
(FIRST,) = (code for kind, _, code in BLOCKS if not kind)


def lightning() -> ModuleType:
    class Trainer:
        def __init__(self, **options):
            self.steps = options["max_steps"]

        def fit(self, module, loader):
            optimizer = module.configure_optimizers()
            for i, batch in zip(range(self.steps), loader, strict=False):
                module.training_step(batch, i).backward()
                optimizer.step()

    made = ModuleType("lightning")
    made.LightningModule, made.Trainer = nn.Module, Trainer
    return made


def timm() -> ModuleType:
    made = ModuleType("timm")
    made.create_model = lambda name, num_classes: nn.Sequential(
        nn.Conv2d(3, 24, 5, padding=2, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes)
    )
    return made


def ultralytics() -> ModuleType:
    class YOLO:
        def __init__(self, description):
            self.callbacks = {}

        def add_callback(self, event, function):
            self.callbacks[event] = function

        def train(self, **options):
            self.model = nn.Sequential(
                nn.Conv2d(3, 24, 5, padding=2, groups=3), nn.SiLU()
            )  # built again, as YOLO's trainer does
            self.callbacks["on_train_start"](SimpleNamespace(model=self.model))
            self.model(torch.randn(1, 3, 16, 16)).sum().backward()

    made = ModuleType("ultralytics")
    made.YOLO = YOLO
    return made


STANDINS = {"lightning": lightning, "timm": timm, "ultralytics": ultralytics}


def model_of(names: dict) -> nn.Module:
    """The model that a recipe trained."""
    return names["yolo"].model if "yolo" in names else names.get("model") or names["Classifier"]().model


@pytest.mark.parametrize(("needs", "code"), [(needs, code) for kind, needs, code in BLOCKS if kind == "requires"])
@pytest.mark.filterwarnings("default")  # of packages that are not ours
def test_a_recipe_trains_layers_of_convgrad(needs, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec(needs) is None:
        if needs not in STANDINS:
            pytest.skip(f"{needs} is not installed")
        monkeypatch.setitem(sys.modules, needs, STANDINS[needs]())
    elif needs == "ultralytics":
        pytest.skip("it would fetch pictures to train on")
    names: dict = {"__name__": "recipe"}
    exec(FIRST + code, names)
    assert any(type(m).__module__.startswith("convgrad.") for m in model_of(names).modules())


((NAME, SCRIPT),) = [(name, code) for kind, name, code in BLOCKS if kind == "file"]


def test_the_script_of_torchrun_trains(monkeypatch, capsys):
    """As the only process; tests of `convgrad run` train so in two."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    exec(SCRIPT, {"__name__": "__main__"})
    assert capsys.readouterr().out == "trained by 0\n"


@pytest.mark.slow
def test_the_script_of_torchrun_trains_in_two_processes(tmp_path):
    (tmp_path / NAME).write_text(SCRIPT, encoding="utf-8")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", NAME]
    for _ in range(6):
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        if "terminate called without an active exception" not in done.stderr:
            break  # with which gloo may end a process, also of the script without convgrad
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("trained by [01]", done.stdout)) == ["trained by 0", "trained by 1"]
