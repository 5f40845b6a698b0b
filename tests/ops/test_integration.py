"""The op inside torch: compile, autocast, inference mode and meta tensors."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from conformance import torch_chunk
from definition import Tensors, leaves, make_inputs, relative_error, run_with_gradients
from mdn.ops import (
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)


def squared(inputs: Tensors, **options) -> tuple[Tensor, Tensor]:
    """Ordinary torch around the op, so that a compiler has something of its own to do."""
    o, state = torch_chunk(inputs | {"q": 2 * inputs["q"]}, **options)
    return o.square(), state


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compiles_into_one_graph_with_gradients(packed: bool, backend: str) -> None:
    inputs = make_inputs(B=1, T=40, N=3 if packed else 1, with_p=packed)
    options = {"cu_seqlens": torch.tensor([0, 1, 30, 40])} if packed else {}
    options["backend"] = backend
    compiled = torch.compile(squared, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(lambda x: compiled(x, **options), leaves(inputs))
    expected = run_with_gradients(lambda x: squared(x, **options), leaves(inputs))
    assert torch.equal(actual["o"], expected["o"])
    assert torch.equal(actual["final_state"], expected["final_state"])
    for name, x in actual.items():
        assert relative_error(x, expected[name]) <= 1e-6, name


def test_the_rule_compiles_with_inductor() -> None:
    inputs = leaves(make_inputs(B=1, T=20))
    compiled = torch.compile(torch_chunk, fullgraph=True)
    actual, expected = run_with_gradients(compiled, inputs), run_with_gradients(torch_chunk, inputs)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) <= 1e-6, name


def test_a_compiled_graph_serves_every_length() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(squared, fullgraph=True, backend=counter, dynamic=True)
    for T in (20, 33, 70):
        inputs = make_inputs(T=T)
        assert torch.equal(compiled(inputs)[0], squared(inputs)[0])
    assert counter.frame_count == 1


def test_the_definition_and_the_lean_form_compile_too() -> None:
    inputs = make_inputs(T=3)
    for form in (recurrent_momentum_delta_rule, fused_recurrent_momentum_delta_rule):
        found = torch.compile(form, fullgraph=True, backend="aot_eager")(**inputs)[0]
        assert relative_error(found, form(**inputs)[0]) <= 2e-6


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_step_compiles_and_updates_its_state(backend: str) -> None:
    inputs = make_inputs(T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}

    def step(state: Tensor) -> Tensor:
        return momentum_delta_step(**token, p=None, state=state, backend=backend) + 1

    eager, compiled = inputs["initial_state"].clone(), inputs["initial_state"].clone()
    expected = step(eager)
    actual = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(actual, expected)
    assert torch.equal(compiled, eager)


NAMES = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta", "direct")
TORCHS_OWN_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same shape in another order of memory."""
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x[:1].expand(x.shape) if layout == "expanded" else x


def test_the_registered_rule_passes_torchs_own_checks() -> None:
    inputs = leaves(make_inputs("lookahead", B=1, T=9, with_p=True))
    settings = (None, 0.25, 4, True, False, True, True, True, "torch")
    arguments = (*(inputs[name] for name in (*NAMES, "initial_state")), *settings)
    results = torch.library.opcheck(torch.ops.mdn.momentum_delta_rule.default, arguments)
    assert results == dict.fromkeys(TORCHS_OWN_CHECKS, "SUCCESS")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_the_registered_backward_pass_passes_torchs_own_checks(layout: str) -> None:
    inputs = make_inputs("lookahead", B=3, T=9, with_p=True)
    tensors = [laid_out(inputs[name], layout) for name in NAMES] + [inputs["initial_state"]]
    settings = (None, 0.25, 4, True, False, True)
    o, state, residual = torch.ops.mdn.momentum_delta_rule.default(*tensors, *settings, True, True, "torch")
    arguments = (laid_out(o, layout), state, *tensors, residual, *settings, "torch")
    results = torch.library.opcheck(torch.ops.mdn.momentum_delta_rule_backward.default, arguments)
    assert results == dict.fromkeys(TORCHS_OWN_CHECKS, "SUCCESS")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "empty", "slots", "without momentum"])
def test_the_registered_step_passes_torchs_own_checks(layout: str, backend: str) -> None:
    inputs = make_inputs("general", B=3, T=1, HV=4, with_p=True)
    rows = 0 if layout == "empty" else 3
    token = [laid_out(inputs[name][:rows, 0], layout) for name in NAMES]
    S, M = inputs["initial_state"][:, :rows].clone()
    slots = torch.tensor([2, 0, 1]) if layout == "slots" else None
    state = (S, None if layout == "without momentum" else M, slots)
    arguments = (*token, *state, 0.25, True, False, False, backend)
    results = torch.library.opcheck(torch.ops.mdn.momentum_delta_step.default, arguments)
    assert results == dict.fromkeys(TORCHS_OWN_CHECKS, "SUCCESS")


@pytest.mark.parametrize(
    "form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule, recurrent_momentum_delta_rule]
)
@pytest.mark.parametrize("T", [3, 30])
def test_autocast_leaves_the_arithmetic_alone(form, T: int) -> None:
    inputs = make_inputs(T=T)
    backend = {} if form is recurrent_momentum_delta_rule else {"backend": "torch"}
    expected = form(**inputs, output_final_state=True, **backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = form(**inputs, output_final_state=True, **backend)
    for result, reference in zip(actual, expected):
        assert torch.equal(result, reference)


def test_gradients_under_autocast_with_low_precision_projections() -> None:
    """As in a model: bfloat16 vectors out of a linear layer, float32 gates."""
    inputs = make_inputs(T=30)
    projection = torch.nn.Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = projection(inputs["q"]), projection(inputs["k"]), inputs["v"].bfloat16()
        o, state = torch_chunk(inputs | {"q": q, "k": k, "v": v})
        assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        o.float().square().sum().backward()
    assert projection.weight.grad is not None
    assert projection.weight.grad.isfinite().all()


def test_a_step_under_autocast_keeps_its_state_float32() -> None:
    inputs = make_inputs(T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    plain, cast = inputs["initial_state"].clone(), inputs["initial_state"].clone()
    expected = momentum_delta_step(**token, p=None, state=plain, backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = momentum_delta_step(**token, p=None, state=cast, backend="torch")
    assert torch.equal(actual, expected)
    assert torch.equal(cast, plain)


@pytest.mark.parametrize("form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
@pytest.mark.parametrize("T", [5, 70])
def test_inference_mode_changes_nothing(form, T: int) -> None:
    inputs = make_inputs(B=1, T=T)
    expected = form(**inputs, output_final_state=True, backend="torch")
    with torch.inference_mode():
        copies = {name: x.clone() for name, x in inputs.items()}
        actual = form(**copies, cu_seqlens=torch.tensor([0, T]), output_final_state=True, backend="torch")
    for result, reference in zip(actual, expected):
        assert relative_error(result, reference) <= 2e-6


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_meta_device_gives_shapes_and_gradients_of_the_right_shape(backend: str) -> None:
    inputs = leaves({name: x.to("meta") for name, x in make_inputs(T=70, HV=4, dtype=torch.bfloat16).items()})
    o, state = chunk_momentum_delta_rule(**inputs, output_final_state=True, backend=backend)
    assert (o.shape, o.dtype, o.device.type) == ((2, 70, 4, 24), torch.bfloat16, "meta")
    assert (state.shape, state.dtype) == ((2, 2, 4, 16, 24), torch.float32)
    o.sum().backward()
    for name, x in inputs.items():
        assert x.grad.shape == x.shape, name
