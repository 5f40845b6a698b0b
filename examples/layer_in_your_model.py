"""The MDN layer inside a hand-written PyTorch model: a byte-level language model in about forty lines.

    python examples/layer_in_your_model.py --steps 200

The layer maps [B, T, D] to [B, T, D] and is causal; nothing else is required of the model around it.
"""

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers import MomentumDeltaNet


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer = MomentumDeltaNet(hidden_size=width, head_dim=16, num_heads=4, expand_v=1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    model = ByteModel()
    # Gate parameters (decays, biases of the gates) are named by the layer: they should not be decayed.
    gates = {name for name, _ in model.named_parameters() if name.split(".")[-1] in MomentumDeltaNet.no_weight_decay}
    groups = [
        {"params": [p for name, p in model.named_parameters() if name not in gates], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name in gates], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 129, (16,))
        rows = torch.stack([text[start : start + 129] for start in starts])  # [16, 129]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step:4}  loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
