"""A 3-D U-Net whose volume is split over several processes, trained as if on a single device.

    torchrun --nproc-per-node 4 examples/sharded_unet.py

Every process has a quarter of the volume and of every activation. On GPUs add ``--device cuda``; nothing else changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from convgrad.parallel import shard_


class UNet(nn.Module):
    """An ordinary network: nothing in it refers to shards."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.encode = nn.Sequential(nn.Conv3d(1, c, 3, padding=1, bias=False), nn.BatchNorm3d(c), nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(c, 2 * c, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * c), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * c, c, 2, stride=2)
        self.head = nn.Conv3d(2 * c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.encode(x)
        return self.head(torch.cat([fine, self.up(self.down(fine))], 1))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", type=int, default=32, help="edge of the volume")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    count = dist.get_world_size()
    rows = next(n for n in range(int(count**0.5), 0, -1) if count % n == 0)
    mesh = init_device_mesh(options.device, (count // rows, rows), mesh_dim_names=("depth", "height"))
    plan = [Shard(2), Shard(3)]

    torch.manual_seed(0)  # the same data in every process; a large volume is read shard by shard: DTensor.from_local
    model = shard_(UNet().to(options.device), mesh, plan)
    criterion = shard_(nn.MSELoss(), mesh, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    clean = torch.randn(1, 1, *[options.size // 4] * 3, device=options.device)
    clean = nn.functional.interpolate(clean, scale_factor=4, mode="trilinear")
    losses = []
    for step in range(options.steps):
        noisy = clean + 0.3 * torch.randn_like(clean)
        loss = criterion(model(noisy), clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.placements == (Replicate(), Replicate())
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
