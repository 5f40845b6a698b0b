"""The GPU path through public functions, under Triton's interpreter with `auto` forced to Triton; prints JSON.

TRITON_INTERPRET=1 MDN_BACKEND=triton python public_cases.py GROUP ...
"""

from __future__ import annotations

import json
import os
import random
import sys
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"
os.environ["MDN_BACKEND"] = "triton"

import torch
from triton.runtime import interpreter

import mdn.ops
from mdn.bench.gpu.interpreter import repair
from mdn.layers import MomentumDeltaNet
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops.triton.host import intercept_launches, run_launch

HEADS, VALUE_HEADS, WIDTH = 2, 2, 16


def leaves(time=20, layout="contiguous", dtype=torch.float32, general=False):
    """q, k, v and gates as they lie in memory; `arranged` makes [B, T, heads, ...] of them without copying.
    ``general``: also p and a direct write."""
    generator = torch.Generator().manual_seed(0)

    def stored(draw, heads, *width):
        shapes = {"transposed": (1, heads, time, *width), "expanded": (1, 1, heads, *width)}
        return draw(shapes.get(layout, (1, time, heads, *width)), generator=generator)

    vectors = {name: stored(torch.randn, HEADS, WIDTH).to(dtype) for name in ("q", "k", *(("p",) if general else ()))}
    vectors["v"] = stored(torch.randn, VALUE_HEADS, WIDTH).to(dtype)
    gates = {name: stored(torch.rand, VALUE_HEADS) for name in ("beta", "eta", *(("direct",) if general else ()))}
    gates |= {name: -stored(torch.rand, VALUE_HEADS) for name in ("log_alpha", "log_mu")}
    return {name: x.requires_grad_() for name, x in (vectors | gates).items()}


def arranged(stored, time=20, layout="contiguous"):
    """Transposed and expanded tensors are as legal as contiguous ones."""
    if layout == "transposed":
        return {name: x.transpose(1, 2) for name, x in stored.items()}
    if layout == "expanded":
        return {name: x.expand(-1, time, *x.shape[2:]) for name, x in stored.items()}
    return stored


def inputs(time=20, layout="contiguous", dtype=torch.float32, general=False):
    """Without gradients."""
    return arranged({name: x.detach() for name, x in leaves(time, layout, dtype, general).items()}, time, layout)


def initial_states(sequences):
    shape = (2, sequences, VALUE_HEADS, WIDTH, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def largest_difference(found, expected):
    """Infinity where a number is NaN: Python's max would drop it."""
    assert [x.shape for x in found] == [x.shape for x in expected]
    differences = torch.cat([(a - b).abs().double().flatten() for a, b in zip(found, expected)])
    return float(differences.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def backends_agree(call):
    """The largest difference between what `auto` (Triton) and torch compute; infinity if Triton did not run in the one
    case or ran in the other."""
    launched = {"triton": 0, "torch": 0}

    def counting(launch):
        launched[os.environ["MDN_BACKEND"]] += 1
        run_launch(launch)

    with intercept_launches(counting):
        found = call()
        os.environ["MDN_BACKEND"] = "torch"
        try:
            expected = call()
        finally:
            os.environ["MDN_BACKEND"] = "triton"
    if launched["triton"] == 0 or launched["torch"] > 0:
        return float("inf")
    return largest_difference(found, expected)


def chunk(layout="contiguous", time=20, general=False, **options):
    """Outputs, final state and the gradients of what lies in memory. ``general``: everything that a call can be given,
    with an initial state for each sequence."""
    stored = leaves(time, layout, general=general)
    given = arranged(stored, time, layout)
    if general:
        sequences = len(options.get("cu_seqlens", (0, time))) - 1
        stored["initial_state"] = given["initial_state"] = initial_states(sequences).requires_grad_()
        options |= {"lookahead": True}
    o, state = mdn.ops.chunk_momentum_delta_rule(**given, output_final_state=True, **options)
    return [o.detach(), state.detach(), *torch.autograd.grad(o.sum() + state.sum(), list(stored.values()))]


def tokens(rows, layout="contiguous", general=False):
    """One token of every row: [B, heads, ...]."""
    return {name: x[0] for name, x in inputs(rows, layout, general=general).items()}


def step(layout="contiguous", rows=3, general=False, **options):
    """Outputs and the state that was updated. ``general``: with p, a direct write and slots of a larger state."""
    state = torch.ones(2, rows + 2 * general, VALUE_HEADS, WIDTH, WIDTH)
    if general:
        table = torch.tensor([[slot, 0] for slot in range(rows, 0, -1)])
        options |= {"lookahead": True, "state_indices": table[:, 0]}
    return [mdn.ops.momentum_delta_step(**tokens(rows, layout, general), state=state, **options), state]


def ops():
    """Every op that has a Triton backend, `auto` forced to it."""
    for layout in ("contiguous", "transposed", "expanded"):
        yield f"chunk, {layout}", backends_agree(partial(chunk, layout))
        yield f"decode step, {layout}", backends_agree(partial(step, layout))
    pack = torch.tensor([0, 3, 3, 20])
    yield "pack", backends_agree(partial(chunk, cu_seqlens=pack))
    yield "general pack, transposed", backends_agree(partial(chunk, "transposed", general=True, cu_seqlens=pack))
    yield "general decode step with slots, expanded", backends_agree(partial(step, "expanded", general=True))

    def recurrent():
        return list(mdn.ops.fused_recurrent_momentum_delta_rule(**inputs(time=3), output_final_state=True))

    yield "fused recurrent, three tokens", backends_agree(recurrent)
    empty = mdn.ops.chunk_momentum_delta_rule(**inputs(time=0))[0]
    yield "no tokens", float(empty.numel())


def differing():
    """What `backends_agree` says of backends that differ in the last number, and of a backend beside itself."""

    def spoilt(number):
        o, state = step()
        if os.environ["MDN_BACKEND"] == "triton":
            state[-1, -1, -1, -1, -1] = number
        return [o, state]

    yield "another number", backends_agree(partial(spoilt, 100.0))
    yield "NaN", backends_agree(partial(spoilt, float("nan")))
    yield "Triton twice", backends_agree(partial(step, backend="triton"))
    yield "torch twice", backends_agree(partial(step, backend="torch"))


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

    def written():  # the third step of decoding is the first that may replay a recorded one
        return [network.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False).float()]

    yield "padded batch, forward and backward", backends_agree(loss)
    yield "pack", backends_agree(packed)
    yield "generate with padding", backends_agree(written)


def program_order():
    """The number of results that change when programs run in another order."""

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

    orders = {"reversed": lambda ids: ids[::-1], "shuffled": lambda ids: random.Random(0).sample(ids, len(ids))}
    pack = torch.tensor([0, 3, 3, 24])
    calls = {
        "chunk": partial(chunk, time=24, chunk_size=16),
        "pack": partial(chunk, time=24, chunk_size=16, cu_seqlens=pack),
        "decode step": step,
    }
    for name, call in calls.items():
        expected = call()
        for order, function in orders.items():
            with intercept_launches(reordered(function)):
                found = call()
            yield f"{name}, {order}", sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def custom_ops():
    """The complaints of `torch.library.opcheck` about all custom ops."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")

    def complaints(op, arguments):
        report = torch.library.opcheck(op.default, arguments, test_utils=checks, raise_exception=False)
        return sum(value != "SUCCESS" for value in report.values())

    def in_order(given):
        names = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta", "direct")
        return [given.get(name) for name in names]

    forward, backward = torch.ops.mdn.momentum_delta_rule, torch.ops.mdn.momentum_delta_rule_backward
    cases = [(layout, False) for layout in ("contiguous", "transposed", "expanded", "empty")]
    for layout, general in [*cases, ("transposed", True), ("empty", True)]:
        size = 0 if layout == "empty" else 20
        kind = f"{'general, ' if general else ''}{layout}"
        cu_seqlens = torch.tensor([0, size // 4, size]) if general else None
        state = initial_states(2) if general else None
        tensors = [*in_order(inputs(size, layout, general=general)), state]
        differentiable = [None if x is None else x.detach().requires_grad_() for x in tensors]
        settings = (cu_seqlens, 0.25, 16, True, not general, general)  # with look-ahead p is not multiplied by alpha
        yield f"forward, {kind}", complaints(forward, (*differentiable, *settings, True, False, "triton"))
        o, final_state, residual = forward(*tensors, *settings, True, False, "triton")
        yield f"backward, {kind}", complaints(backward, (o, final_state, *tensors, residual, *settings, "triton"))
        rows = min(size, 3)
        S, M = torch.ones(2, rows, VALUE_HEADS, WIDTH, WIDTH)
        slots = torch.stack([torch.arange(rows)] * 2, dim=1)[:, 0] if general else None  # a column: not contiguous
        arguments = (*in_order(tokens(rows, layout, general)), S, M, slots, 0.25, True, not general, general, "triton")
        yield f"step, {kind}", complaints(torch.ops.mdn.momentum_delta_step, arguments)


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
        yield name, largest_difference([found.double()], [right]) / float(right.abs().max())


GROUPS = (ops, differing, layer, model, program_order, custom_ops, float16_range)

if __name__ == "__main__":
    torch.set_num_threads(1)
    repair()
    print(json.dumps({group.__name__: dict(group()) for group in GROUPS if group.__name__ in sys.argv[1:]}))
