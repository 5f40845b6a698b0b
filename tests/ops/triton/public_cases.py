"""The GPU path through public functions, under Triton's interpreter with `auto` forced to Triton; prints JSON.

TRITON_INTERPRET=1 MDN_BACKEND=triton python public_cases.py GROUP ...
"""

from __future__ import annotations

import json
import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ["MDN_BACKEND"] = "triton"

import torch
from triton.runtime import interpreter

import mdn.ops
from mdn.bench.gpu.interpreter import repair
from mdn.layers import MomentumDeltaNet
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops.triton.host import intercept_launches, run_launch


def inputs(time=20, layout="contiguous", dtype=torch.float32):
    """q, k, v and gates; transposed, expanded and empty tensors are as legal as contiguous ones."""
    generator = torch.Generator().manual_seed(0)

    def rows(heads, width):
        if layout == "transposed":
            return torch.randn(1, heads, time, width, generator=generator).transpose(1, 2).to(dtype)
        if layout == "expanded":
            return torch.randn(1, 1, heads, width, generator=generator).expand(1, time, heads, width).to(dtype)
        return torch.randn(1, time, heads, width, generator=generator).to(dtype)

    gates = {name: torch.rand(1, time, 2, generator=generator) for name in ("beta", "eta")}
    gates |= {name: -torch.rand(1, time, 2, generator=generator) for name in ("log_alpha", "log_mu")}
    return {"q": rows(1, 16), "k": rows(1, 16), "v": rows(2, 16), **gates}


def backends_agree(call):
    """The largest difference between what `auto` (Triton) and torch compute."""
    found = call()
    os.environ["MDN_BACKEND"] = "torch"
    try:
        expected = call()
    finally:
        os.environ["MDN_BACKEND"] = "triton"
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel())


def ops():
    """Every op that has a Triton backend, `auto` forced to it."""
    for layout in ("contiguous", "transposed", "expanded"):
        given = inputs(layout=layout)

        def call(given=given):
            leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
            o, state = mdn.ops.chunk_momentum_delta_rule(**leaves, output_final_state=True)
            return [o.detach(), state.detach(), *torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()))]

        yield f"chunk, {layout}", backends_agree(call)

    def recurrent():
        return [mdn.ops.fused_recurrent_momentum_delta_rule(**inputs(time=3), output_final_state=True)[0]]

    yield "fused recurrent, three tokens", backends_agree(recurrent)

    def step():
        state = torch.ones(2, 1, 2, 16, 16)
        token = {name: x[:, 0] for name, x in inputs(time=1).items()}
        return [mdn.ops.momentum_delta_step(**token, state=state), state]

    yield "decode step", backends_agree(step)
    empty = mdn.ops.chunk_momentum_delta_rule(**inputs(time=0))[0]
    yield "no tokens", float(empty.numel())


def layer():
    torch.manual_seed(0)
    mixer = MomentumDeltaNet(hidden_size=32, num_heads=2, head_dim=16)
    x = torch.randn(1, 20, 32)

    def call():
        leaf = x.clone().requires_grad_()
        result = mixer(leaf)
        out = result[0] if isinstance(result, tuple) else result
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *mixer.parameters()], allow_unused=False)]

    yield "layer, forward and backward", backends_agree(call)


def model():
    torch.manual_seed(0)
    config = MomentumDeltaNetConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16)
    network = MomentumDeltaNetForCausalLM(config).eval()
    tokens = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def loss():
        network.zero_grad()
        value = network(tokens, attention_mask=mask, labels=tokens).loss
        value.backward()
        return [value.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]

    def packed():
        cu_seqlens = torch.tensor([0, 3, 7])
        return [network(tokens[:1], cu_seqlens=cu_seqlens).logits.detach()]

    def written():
        return [network.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False).float()]

    yield "padded batch, forward and backward", backends_agree(loss)
    yield "pack", backends_agree(packed)
    yield "generate with padding", backends_agree(written)


def program_order():
    """The same bits whatever the order in which programs run."""
    given = inputs(time=40)

    def run(handler):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        with intercept_launches(handler):
            o, state = mdn.ops.chunk_momentum_delta_rule(**leaves, chunk_size=16, output_final_state=True)
            return [o, state, *torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()))]

    def reordered(order):
        def handler(launch):
            ids = order(list(range(launch.grid[0])))
            original = interpreter.InterpreterBuilder.set_grid_idx

            def set_grid_idx(self, x, y, z):
                return original(self, ids[x], y, z)

            interpreter.InterpreterBuilder.set_grid_idx = set_grid_idx
            try:
                run_launch(launch)
            finally:
                interpreter.InterpreterBuilder.set_grid_idx = original

        return handler

    expected = run(run_launch)
    orders = {"reversed": lambda ids: ids[::-1], "shuffled": lambda ids: random.Random(0).sample(ids, len(ids))}
    for name, order in orders.items():
        found = run(reordered(order))
        yield name, float(sum(not torch.equal(a, b) for a, b in zip(found, expected)))


def custom_ops():
    """`torch.library.opcheck` of all custom ops; 0 if nothing is reported."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for layout, time in (("contiguous", 20), ("transposed", 20), ("expanded", 20), ("empty", 0)):
        given = {name: x.requires_grad_() for name, x in inputs(time, layout).items()}
        gates = [given[name] for name in ("log_alpha", "log_mu", "beta", "eta")]
        tensors = (given["q"], given["k"], given["v"], None, *gates, given["eta"], None)
        forward = torch.ops.mdn.momentum_delta_rule.default
        arguments = (*tensors, None, 0.25, 16, True, True, False, True, False, "triton")
        report = torch.library.opcheck(forward, arguments, test_utils=checks, raise_exception=False)
        yield f"forward, {layout}", float(sum(value != "SUCCESS" for value in report.values()))
        with torch.no_grad():
            detached = [None if x is None else x.detach() for x in tensors]
            o, state, residual = forward(*detached, *arguments[10:])
            backward = torch.ops.mdn.momentum_delta_rule_backward.default
            arguments = (o, state, *detached, residual, None, 0.25, 16, True, True, False, "triton")
            report = torch.library.opcheck(backward, arguments, test_utils=checks[::2], raise_exception=False)
        yield f"backward, {layout}", float(sum(value != "SUCCESS" for value in report.values()))


def float16_range():
    """A loss scale of 2^17 takes gradients of states past 65,504; those of the inputs stay in range and right."""
    given = inputs(time=40, dtype=torch.float16)
    for name in ("log_alpha", "log_mu"):
        given[name] = torch.zeros_like(given[name])
    given["eta"] = 1e-3 * given["eta"]
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    _, state = mdn.ops.chunk_momentum_delta_rule(**leaves, chunk_size=16, output_final_state=True)
    names = [name for name in given if name != "q"]
    gradients = torch.autograd.grad(state, [leaves[name] for name in names], torch.full_like(state, 2.0**17))
    wide = {name: x.double().requires_grad_() for name, x in given.items()}
    _, exact = mdn.ops.recurrent_momentum_delta_rule(**wide, output_final_state=True)
    expected = torch.autograd.grad(exact, [wide[name] for name in names], torch.full_like(exact, 2.0**17))
    for name, found, right in zip(names, gradients, expected):
        assert found.dtype != torch.float16 or right.abs().max() < 65_504
        yield name, float((found.double() - right).abs().max() / right.abs().max())


GROUPS = (ops, layer, model, program_order, custom_ops, float16_range)

if __name__ == "__main__":
    torch.set_num_threads(1)
    repair()
    print(json.dumps({group.__name__: dict(group()) for group in GROUPS if group.__name__ in sys.argv[1:]}))
