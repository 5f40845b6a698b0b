"""Continuous batching by hand: requests come and go, their states live in a pool of slots, one call decodes them all.

    python examples/decode_with_slots.py

This is what a serving engine does. Prompts of different lengths are processed as one pack; their final states are put
into free slots; every step decodes the active requests with `state_indices`, in place, without moving a state.
"""

import torch

from mdn.ops import chunk_momentum_delta_rule, momentum_delta_step, recurrent_momentum_delta_rule

H, K, V, SLOTS = 2, 16, 16, 8


def tokens(count: int) -> dict[str, torch.Tensor]:
    """Random inputs of the rule for `count` tokens: vectors [count, H, D], gates [count, H]."""
    vectors = {name: torch.randn(count, H, size) for name, size in (("q", K), ("k", K), ("v", V))}
    logs = {name: -torch.rand(count, H) for name in ("log_alpha", "log_mu")}
    return vectors | logs | {"beta": torch.rand(count, H) / 2, "eta": torch.rand(count, H)}


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def main() -> None:
    torch.manual_seed(0)
    pool = torch.zeros(2, SLOTS, H, K, V)  # S and M of every slot
    lengths = [5, 1, 17]
    prompts = [tokens(length) for length in lengths]

    # 1. Prefill all prompts in one packed call.
    pack = {name: x.unsqueeze(0) for name, x in joined(prompts).items()}
    cu_seqlens = torch.tensor([0, 5, 6, 23])
    _, states = chunk_momentum_delta_rule(**pack, cu_seqlens=cu_seqlens, output_final_state=True)

    # 2. Any free slots will do.
    slots = torch.tensor([6, 0, 3])
    pool[:, slots] = states

    # 3. Decode. The request in slot 0 ends after two tokens; the others go on.
    active, outputs = [0, 1, 2], {request: [] for request in range(3)}
    histories = prompts.copy()
    for step in range(4):
        if step == 2:
            active.remove(1)
        new = [tokens(1) for _ in active]
        o = momentum_delta_step(**joined(new), state=pool, state_indices=slots[active])  # [active, H, V]
        for row, request in enumerate(active):
            histories[request] = joined([histories[request], new[row]])
            outputs[request].append(o[row])

    # 4. The same tokens through the definition, one request at a time.
    for request, history in enumerate(histories):
        exact, _ = recurrent_momentum_delta_rule(**{name: x.double().unsqueeze(0) for name, x in history.items()})
        decoded = torch.stack(outputs[request])
        error = (decoded - exact[0, -len(decoded) :]).abs().max() / exact.abs().max()
        print(f"request {request}: slot {slots[request]}, {len(decoded)} tokens decoded, error {error:.0e}")


if __name__ == "__main__":
    main()
