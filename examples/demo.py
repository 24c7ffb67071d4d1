"""Train one network twice, with stock PyTorch and with convgrad, and compare: losses, accuracy, time, backends.

The network is made of depthwise-separable blocks (a depthwise convolution that looks around, a pointwise one that mixes
channels), the images are scikit-learn's handwritten digits enlarged to 64 x 64. Both trainings start from the
same weights and see the same batches in the same order; a step of one and a step of the other alternate.

    make demo                          or  python examples/demo.py --threads 2 --epochs 4
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from digits import BATCH, TESTS, Digits, network
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad
from convgrad.diagnostics import without_figures
from convgrad.engine.measure import Comparison, compare, conditions, keep_memory

WARM_UP = 5  # steps that are not timed: they allocate and plan
CHECK_EVERY = 16  # steps
ROUNDING = 2.0**-24  # the largest relative error of one float32 operation

console = Console(width=None if sys.stdout.isatty() else 132, highlight=False)


# ---- training -------------------------------------------------------------------------------------


@dataclass
class Training:
    """One network on its way through the training set."""

    name: str
    net: nn.Sequential
    steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=self.steps)

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        loss = F.cross_entropy(self.net(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def accuracy(self, data: Digits) -> float:
        self.net.eval()
        right = self.net(data.test_images).argmax(1) == data.test_labels
        return right.float().mean().item()


def train(data: Digits, epochs: int) -> tuple[Training, Training, Agreement]:
    """Both trainings, step by step in alternation; now and then both libraries compute the same convolutions."""
    batches = list(data.batches(epochs))
    stock = Training("PyTorch", network(nn.Conv2d), len(batches))
    ours = Training("convgrad", network(convgrad.nn.Conv2d), len(batches))
    agreement = Agreement()
    columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("training both", total=len(batches))
        for i, batch in enumerate(batches):
            for training in (stock, ours) if i % 2 else (ours, stock):
                training.step(*batch)
            if i % CHECK_EVERY == 0:
                agreement.check(stock.net, *batch)
            losses = f"step {i + 1:3d}  loss: PyTorch {stock.losses[-1]:.4f}, convgrad {ours.losses[-1]:.4f}"
            progress.update(bar, advance=1, description=losses)
    return stock, ours, agreement


# ---- do they agree? -------------------------------------------------------------------------------


class Agreement:
    """Every convolution of a network computed by PyTorch and by convgrad, with the tensors of its training.

    A float32 sum of n terms is off by at most about sqrt(n) roundings of the sum of their absolute values (Higham and
    Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), the difference of two such sums by twice
    that. A wrong formula, or a missed border, is thousands of times above.

    Layer by layer, for as a whole two networks that are both right differ by more: a ReLU whose input is as small as
    its rounding is on in one of them and off in the other, and the gradients of all layers before it hear of that.
    """

    def __init__(self) -> None:
        self.twin = network(nn.Conv2d)
        self.checks = 0
        self.difference = 0.0  # of a result, in parts of its norm
        self.share = 0.0  # of a difference in what rounding explains

    def check(self, net: nn.Sequential, images: Tensor, labels: Tensor) -> None:
        self.twin.load_state_dict(net.state_dict())
        seen: list[tuple[nn.Conv2d, Tensor, Tensor]] = []

        def remember(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(layer, nn.Conv2d)
            output.retain_grad()
            seen.append((layer, args[0], output))

        hooks = [m.register_forward_hook(remember) for m in self.twin if isinstance(m, nn.Conv2d)]
        F.cross_entropy(self.twin(images), labels).backward()
        for hook in hooks:
            hook.remove()
        for layer, x, output in seen:
            assert output.grad is not None
            self.compare(layer, x.detach(), output.grad)
        self.checks += 1

    def compare(self, layer: nn.Conv2d, x: Tensor, grad_output: Tensor) -> None:
        tensors = (x, layer.weight.detach(), grad_output)
        theirs, ours = results(torch.conv2d, layer, *tensors), results(convgrad.conv2d, layer, *tensors)
        absolute = results(torch.conv2d, layer, *(t.abs() for t in tensors))
        terms = layer.weight[0].numel()  # of the sums of forward, grad_input, grad_weight
        numbers = (terms, terms * layer.out_channels // x.shape[1], grad_output[:, 0].numel())
        for n, a, b, size in zip(numbers, theirs, ours, absolute, strict=True):
            difference = (a - b).norm()
            self.difference = max(self.difference, (difference / a.norm()).item())
            self.share = max(self.share, (difference / size.norm()).item() / (2 * ROUNDING * math.sqrt(n)))

    @property
    def holds(self) -> bool:
        return self.checks > 0 and self.share <= 1


def results(
    function: Callable[..., Tensor], layer: nn.Conv2d, x: Tensor, weight: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, grad_input and grad_weight of a layer computed with a function."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = function(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return output.detach(), *torch.autograd.grad(output, (x, weight), grad_output)


# ---- who computed what, and how fast? -------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layer's forward, or its backward; ``parts`` are the (outputs, backend, reason) that ran."""

    layer: str
    parts: tuple[tuple[str, str, str], ...]
    times: Comparison


def layer_rows(net: nn.Sequential, images: Tensor) -> Iterator[Row]:
    """For each convolution: what one training step runs, and its time beside torch.nn's with the same tensors."""
    tensors: list[tuple[nn.Conv2d, Tensor]] = []

    def remember(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        tensors.append((layer, args[0].detach()))

    convs = [m for m in net if isinstance(m, nn.Conv2d)]
    hooks = [m.register_forward_pre_hook(remember) for m in convs]
    net(images)
    for hook in hooks:
        hook.remove()
    for i, (layer, x) in enumerate(tensors):
        kind = "depthwise" if layer.groups > 1 else "pointwise" if layer.kernel_size == (1, 1) else "dense"
        kernel, stride = layer.kernel_size[0], layer.stride[0]
        name = f"{kind} {kernel}x{kernel}" + (f" s{stride}" if stride > 1 else "")
        name += f"  {layer.out_channels} x {'x'.join(map(str, x.shape[2:]))}"
        yield from _rows_of(name, layer, x, needs_input_grad=i > 0)


def _rows_of(name: str, layer: nn.Conv2d, x: Tensor, needs_input_grad: bool) -> Iterator[Row]:
    """The layer and one of torch.nn with its weights, as training calls them: forward, then autograd's backward."""
    sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
    stock = nn.Conv2d(*sizes, layer.dilation, layer.groups, bias=layer.bias is not None)
    stock.load_state_dict(layer.state_dict())
    x = x.requires_grad_(needs_input_grad)
    given = [x] if needs_input_grad else []
    with convgrad.trace() as trace:
        y = layer(x)
        last = len(trace.records)
        grad_output = torch.randn_like(y)
        torch.autograd.grad(y, [*given, *layer.parameters()], grad_output)
    both = {"convgrad": (layer, layer(x)), "PyTorch": (stock, stock(x))}
    forward = {who: partial(module, x) for who, (module, _) in both.items()}
    backward = {
        who: partial(torch.autograd.grad, y, [*given, *module.parameters()], grad_output, retain_graph=True)
        for who, (module, y) in both.items()
    }
    for calls, records in ((forward, trace.records[:last]), (backward, trace.records[last:])):
        times = compare(calls, "PyTorch", seconds=0.2)
        yield Row(name, tuple((r.outputs, r.backend, r.reason) for r in records), times)


# ---- what is shown --------------------------------------------------------------------------------


def show_losses(stock: Training, ours: Training, agreement: Agreement) -> None:
    differences = [abs(a - b) for a, b in zip(stock.losses, ours.losses, strict=True)]
    table = Table(title="Loss of the two trainings", title_justify="left")
    for heading in ("step", "PyTorch", "convgrad", "difference"):
        table.add_column(heading, justify="right")
    last = len(differences) - 1
    for i in sorted({0, 10, *range(40, last, 40), last}):
        table.add_row(str(i + 1), f"{stock.losses[i]:.6f}", f"{ours.losses[i]:.6f}", f"{differences[i]:.1e}")
    console.print(table)
    verdict = "[green]they agree[/]" if agreement.holds else "[bold red]THEY DO NOT AGREE[/]"
    console.print(
        "They drift apart because every step magnifies the rounding of those before.\n"
        f"In {agreement.checks} of the steps both computed every convolution from the same tensors: output, grad_input "
        f"and grad_weight differ by at most {agreement.difference:.1e} of their size, and at most "
        f"{agreement.share:.0%} of what rounding alone can cause: {verdict}.\n"
    )


def show_result(stock: Training, ours: Training, data: Digits) -> bool:
    samples = {t.name: t.seconds[WARM_UP:] for t in (ours, stock)}
    times = Comparison("PyTorch", samples)
    table = Table(title="Result", title_justify="left")
    for heading in ("", "test accuracy", "ms per training step", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    accuracies = {t.name: t.accuracy(data) for t in (stock, ours)}
    for name, accuracy in accuracies.items():
        speed = "1" if name == times.baseline else str(times.speedup(name))
        table.add_row(name, f"{accuracy:.1%}", f"{times.seconds(name) * 1e3:.1f}", speed)
    console.print(table)
    console.print(f"{len(samples['PyTorch'])} steps of each: medians, and the 95 % interval of the ratio.\n")
    return min(accuracies.values()) >= 0.97


def show_layers(rows: list[Row]) -> None:
    table = Table(title="Who computed what, and its time against PyTorch's", title_justify="left")
    for heading in ("layer  (channels x image)", "output", "backend"):
        table.add_column(heading, overflow="fold")
    for heading in ("ms", "PyTorch", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    layer, reasons = "", dict[str, None]()
    for row in rows:
        speed = row.times.speedup("convgrad")
        style = "" if not speed.differs else "green" if speed.value > 1 else "red"
        shown = Text(f"{speed.value:.2f}x" if speed.differs else "same", style=style)
        times = [f"{row.times.seconds(n) * 1e3:.2f}" for n in ("convgrad", "PyTorch")]
        for i, (outputs, backend, reason) in enumerate(row.parts):
            # Two gradients from two backends are two lines and one time: PyTorch computes them in one call.
            said = [row.layer if row.layer != layer else "", outputs, backend]
            table.add_row(*said, *([*times, shown] if not i else []))
            layer = row.layer
            reasons[f"{backend}: {without_figures(reason)}"] = None
    console.print(table)
    console.print("\n".join(reasons))
    slower = [r for r in rows if r.times.speedup("convgrad").high < 1]
    verdict = f"slower than PyTorch in {len(slower)} of {len(rows)} rows" if slower else "slower in no row"
    console.print(
        f"convgrad is {verdict}. A row is the forward or the backward of a layer as training calls it, in alternation "
        "with torch.nn's; 'same': the 95 % interval of the ratio contains 1. Backend 'aten' is PyTorch's own kernel.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's own choice")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    keep_memory()  # for both: see convgrad.engine.measure
    start = time.perf_counter()
    data = Digits.load()
    console.print(
        f"\n{len(data.labels)} images of digits to train on, {TESTS} to test; {args.epochs} epochs by stock PyTorch "
        "and by convgrad, step by step in alternation, from the same weights.\n"
    )
    stock, ours, agreement = train(data, args.epochs)
    show_losses(stock, ours, agreement)
    accurate = show_result(stock, ours, data)
    ours.net.train()
    with console.status("timing each layer"):
        rows = list(layer_rows(ours.net, data.images[:BATCH]))
    show_layers(rows)
    console.print(f"{conditions()}. The whole demo took {time.perf_counter() - start:.0f} s.")
    if not agreement.holds:
        console.print("[bold red]Outputs or gradients differ by more than rounding explains: please report this.[/]")
    if not accurate:
        console.print("[bold red]A test accuracy is below 97 %.[/]")
    return 0 if agreement.holds and accurate else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("\nstopped; nothing was written")
        sys.exit(130)
