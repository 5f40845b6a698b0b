"""The op inside torch: compile, autocast, inference mode, meta tensors, views, and memory that nobody cleared."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from mdn.ops import (
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)
from mdn.ops.momentum.workspace import workspace_for
from momentum_cases import Inputs, leaves, make_inputs, relative_error, run_with_gradients, torch_chunk


def squared(inputs: Inputs, **options) -> tuple[Tensor, Tensor]:
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
    found = run_with_gradients(lambda x: compiled(x, **options), leaves(inputs))
    wanted = run_with_gradients(lambda x: squared(x, **options), leaves(inputs))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    for name, gradient in found[2].items():
        assert relative_error(gradient, wanted[2][name]) <= 1e-6, name


def test_compiles_with_inductor() -> None:
    inputs = leaves(make_inputs(B=1, T=20))
    compiled = torch.compile(torch_chunk, fullgraph=True)
    found, wanted = run_with_gradients(compiled, inputs), run_with_gradients(torch_chunk, inputs)
    assert relative_error(found[0], wanted[0]) <= 1e-6
    for name, gradient in found[2].items():
        assert relative_error(gradient, wanted[2][name]) <= 1e-6, name


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
    wanted = step(eager)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(found, wanted)
    assert torch.equal(compiled, eager)


def test_the_registered_ops_pass_torchs_own_checks() -> None:
    inputs = leaves(make_inputs(B=1, T=9, with_p=True))
    names = ("q", "k", "v", "p", "log_alpha", "log_mu", "beta", "eta", "initial_state")
    settings = (None, 0.25, 4, True, True, True, True, "torch")
    arguments = (*(inputs[name] for name in names), *settings)
    results = torch.library.opcheck(torch.ops.mdn.momentum_delta_rule.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule, recurrent_momentum_delta_rule]
)
@pytest.mark.parametrize("T", [3, 30])
def test_autocast_leaves_the_arithmetic_alone(form, T: int) -> None:
    inputs = make_inputs(T=T)
    backend = {} if form is recurrent_momentum_delta_rule else {"backend": "torch"}
    wanted = form(**inputs, output_final_state=True, **backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = form(**inputs, output_final_state=True, **backend)
    for result, want in zip(found, wanted):
        assert torch.equal(result, want)


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
    wanted = momentum_delta_step(**token, p=None, state=plain, backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = momentum_delta_step(**token, p=None, state=cast, backend="torch")
    assert torch.equal(found, wanted)
    assert torch.equal(cast, plain)


@pytest.mark.parametrize("form", [chunk_momentum_delta_rule, fused_recurrent_momentum_delta_rule])
@pytest.mark.parametrize("T", [5, 70])
def test_inference_mode(form, T: int) -> None:
    inputs = make_inputs(B=1, T=T)
    wanted = form(**inputs, output_final_state=True, backend="torch")
    with torch.inference_mode():
        copies = {name: x.clone() for name, x in inputs.items()}
        found = form(**copies, cu_seqlens=torch.tensor([0, T]), output_final_state=True, backend="torch")
    for result, want in zip(found, wanted):
        assert relative_error(result, want) <= 2e-6


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_meta_device_gives_shapes_and_gradients_of_the_right_shape(backend: str) -> None:
    inputs = leaves({name: x.to("meta") for name, x in make_inputs(T=70, HV=4, dtype=torch.bfloat16).items()})
    o, state = chunk_momentum_delta_rule(**inputs, output_final_state=True, backend=backend)
    assert (o.shape, o.dtype, o.device.type) == ((2, 70, 4, 24), torch.bfloat16, "meta")
    assert (state.shape, state.dtype) == ((2, 2, 4, 16, 24), torch.float32)
    o.sum().backward()
    for name, x in inputs.items():
        assert x.grad.shape == x.shape, name


def strided(x: Tensor) -> Tensor:
    """The same values with gaps between them and the first two dimensions swapped in memory."""
    wide = torch.full((x.shape[1], x.shape[0], *x.shape[2:], 2), float("nan"), dtype=x.dtype)
    wide[..., 0] = x.transpose(0, 1)
    return wide[..., 0].transpose(0, 1)


@pytest.mark.parametrize("form", [torch_chunk, lambda x: recurrent_momentum_delta_rule(**x, output_final_state=True)])
def test_non_contiguous_inputs_and_gradients(form) -> None:
    inputs = make_inputs(T=70, with_p=True)
    views = {name: strided(x) for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in views.values())
    o, state = form({name: x.requires_grad_() for name, x in views.items()})
    plain = leaves(inputs)
    wanted_o, wanted_state = form(plain)
    assert torch.equal(o, wanted_o)
    assert torch.equal(state, wanted_state)
    cotangent = torch.randn(o.shape[::-1], generator=torch.Generator().manual_seed(2)).permute(3, 2, 1, 0)
    found = torch.autograd.grad(o, list(views.values()), cotangent)
    for gradient, want in zip(found, torch.autograd.grad(wanted_o, list(plain.values()), cotangent)):
        assert relative_error(gradient, want) <= 1e-6


def test_broadcast_inputs_and_gradients() -> None:
    """Expanded tensors have stride 0; sum() sends back an expanded gradient."""
    inputs = make_inputs(T=40)
    inputs["beta"] = inputs["beta"][:, :1].expand(-1, 40, -1)
    inputs["k"] = inputs["k"][:1].expand(2, -1, -1, -1)
    found, wanted = leaves(inputs), leaves({name: x.contiguous() for name, x in inputs.items()})
    for x in (found, wanted):
        torch_chunk(x)[0].sum().backward()
    for name in inputs:
        assert torch.equal(found[name].grad, wanted[name].grad), name


@pytest.fixture
def poisoned_memory():
    """torch fills what `empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    kept, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    workspace_for(torch.device("cpu"), torch.float32).forget()
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2, 2).new_empty(5).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = kept
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("lengths", [[70], [1, 0, 63, 6], [0, 0]])
@pytest.mark.usefixtures("poisoned_memory")
def test_nothing_is_read_from_memory_that_was_not_written(lengths: list[int], backend: str) -> None:
    offsets = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    inputs = leaves(make_inputs(B=1, T=int(offsets[-1]), N=len(lengths), HV=4, with_p=True))

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        return chunk_momentum_delta_rule(**x, cu_seqlens=offsets, output_final_state=True, backend=backend)

    o, state, gradients = run_with_gradients(run, inputs)
    for name, x in {"o": o, "final_state": state, **gradients}.items():
        assert x.isfinite().all(), name


@pytest.mark.usefixtures("poisoned_memory")
def test_the_step_reads_nothing_unwritten() -> None:
    inputs = make_inputs(T=3)
    o, state = fused_recurrent_momentum_delta_rule(**inputs, output_final_state=True, backend="torch")
    assert o.isfinite().all()
    assert state.isfinite().all()


def test_calls_repeat_bit_for_bit() -> None:
    inputs = make_inputs(T=130)
    first, second = (run_with_gradients(torch_chunk, leaves(inputs)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name
