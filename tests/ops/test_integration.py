"""The ops inside torch: compile, autocast, inference mode, meta tensors, global defaults, recordings, versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from conformance import public_function, torch_chunk
from definition import FIRST_ORDER, Tensors, leaves, make_inputs, relative_error, run_with_gradients
from mdn.layers import ShortConvolution
from mdn.ops import (
    chunk_momentum_delta_rule,
    fused_recurrent_momentum_delta_rule,
    momentum_delta_step,
    recurrent_momentum_delta_rule,
)
from mdn.ops.cpu.program import record
from mdn.ops.fused import swiglu


def in_another_process(code: str, *arguments: str) -> None:
    """For what may end the process."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


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


# ------------------------------------------------------------------------------------------------- torch's global state

DEFAULTS = """
import sys
import torch
from definition import leaves, make_inputs
from mdn import ops
from mdn.ops.fused import linear

backend, default = sys.argv[1:]
pack = ops.SequenceBoundaries.from_lengths([1, 29, 10])
rows = make_inputs(B=1, T=40, K=32, V=32)
packed = make_inputs(B=1, T=40, N=3, K=32, V=32)
x, weight = torch.randn(2, 20), torch.randn(30, 20)


def results():
    found = []
    for inputs, cu_seqlens in ((rows, None), (packed, pack)):
        given, other = leaves(inputs), leaves(inputs)
        o, state = ops.chunk_momentum_delta_rule(
            **given, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend
        )
        q, k, v, g, beta = (other[name] for name in ("q", "k", "v", "log_alpha", "beta"))
        first = ops.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=other["initial_state"][0], cu_seqlens=cu_seqlens, backend=backend,
            use_qk_l2norm_in_kernel=True,
        ).o
        (o.square().sum() + state.square().sum() + first.square().sum()).backward()
        found += [o, state, first, *(x.grad for leaf in (given, other) for x in leaf.values() if x.grad is not None)]
    with torch.no_grad():
        found.append(linear(x, weight))
    return found


expected = results()
ops.chunking._scans.clear()
if default == "meta":
    torch.set_default_device("meta")
else:
    torch.set_default_dtype(getattr(torch, default))
assert all(torch.equal(x, y) for x, y in zip(results(), expected, strict=True))
"""


@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_default_dtype_and_device_of_torch_change_nothing(backend: str, default: str) -> None:
    in_another_process(DEFAULTS, backend, default)


# ----------------------------------------------------------------------------------------------------------- recordings


@pytest.mark.native
@torch.no_grad()
@pytest.mark.parametrize("rule", ["general", "simple_gla", "gated_delta_rule", "comba", "kda"])
def test_a_recorded_chunk_is_replayed_on_other_inputs(rule: str) -> None:
    first, second = (make_inputs(rule, T=20, seed=seed) for seed in (0, 1))

    def compute(v: Tensor) -> Tensor:
        return 2 * public_function(rule, "chunk")(**first | {"v": v}, check_gates=False)[0]

    y, program = record(compute, first["v"])
    assert torch.equal(y, compute(first["v"]))
    if rule == "kda":  # whether a state is damaged is read from it, which cannot be replayed
        assert program is None
        return
    assert program is not None
    assert relative_error(program.replay(second["v"]), compute(second["v"])) <= 2e-6
    assert relative_error(program.replay(first["v"]), y) <= 2e-6


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("rule", ["general", *FIRST_ORDER])
def test_a_backward_pass_that_needs_a_state_from_before_a_step_is_refused(rule: str, backend: str) -> None:
    token = {name: x[:, 0] for name, x in make_inputs(rule, T=1, with_state=False).items()}
    state = make_inputs(rule, T=1)["initial_state"]
    weight = torch.ones_like(state, requires_grad=True)
    product = (weight * state).sum()
    with torch.no_grad():
        public_function(rule, "step")(**token, state=state.detach(), backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_states_of_a_pair_count_as_changed_once(dtype: torch.dtype) -> None:
    """Gates in float64 have to be converted at every step."""
    inputs = make_inputs(T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}
    token["beta"] = token["beta"].to(dtype)
    pair = [x.clone() for x in inputs["initial_state"]]
    versions = [x._version for x in pair]
    momentum_delta_step(**token, p=None, state=tuple(pair), backend="cpu")
    assert [x._version for x in pair] == [version + 1 for version in versions]


def momentum_state(q: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    inputs = make_inputs(T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name not in ("q", "initial_state")}
    state = inputs["initial_state"]
    return lambda q: momentum_delta_step(q, **token, state=state, check_gates=False), state


def first_order_state(rule: str, q: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    inputs = make_inputs(rule, T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name not in ("q", "initial_state")}
    state = inputs["initial_state"]
    return lambda q: public_function(rule, "step")(q, **token, state=state, check_gates=False), state


def convolution_state(width: int, q: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    convolution, state = ShortConvolution(q.shape[-1], width), torch.zeros(len(q), q.shape[-1], width - 1)
    return lambda q: convolution.step(q[:, 0], state), state


@pytest.mark.native
@pytest.mark.parametrize(
    "step_of",
    [
        momentum_state,
        partial(first_order_state, "gated_delta_rule"),
        partial(first_order_state, "gla"),
        partial(convolution_state, 4),
        partial(convolution_state, 6),
    ],
    ids=["momentum", "gated_delta_rule", "gla", "convolution", "wide convolution"],
)
def test_a_replayed_step_counts_its_state_as_changed(step_of: Callable[[Tensor], Any]) -> None:
    q = make_inputs(T=1)["q"][:, 0]
    step, state = step_of(q)
    with torch.no_grad():
        step(q)
        program = record(step, q)[1]
    assert program is not None
    product = (torch.ones_like(state, requires_grad=True) * state).sum()
    program.replay(q)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# --------------------------------------------------------------------------------------------------- tensor subclasses

SUBCLASSES = """
import sys
from functools import partial

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from conformance import public_function
from definition import make_inputs
from mdn.ops import fused

kind, rules, least = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
computed = 0
if kind == "DTensor":
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    wrapped, plain = lambda x: distribute_tensor(x, mesh, [Replicate()]), lambda x: x.to_local()
elif kind == "TwoTensor":
    wrapped, plain = lambda x: TwoTensor(x, x.clone()), lambda x: x.a
else:
    wrapped, plain = FakeTensorMode().from_tensor, lambda x: x


def compare(function, inputs, chosen=None):
    global computed
    given = {name: x.contiguous() for name, x in inputs.items()}
    others = {name: wrapped(x.clone()) if chosen in (None, name) else x.clone() for name, x in given.items()}
    try:
        found = function(**others)
    except (NotImplementedError, RuntimeError, AssertionError) as error:  # what torch says about the subclass
        reasons = ("sharding strategy", "mixed torch.Tensor and DTensor", "convert all Tensors to FakeTensors")
        assert kind != "TwoTensor" and any(reason in str(error) for reason in reasons), error
        return
    expected = function(**given)
    found, expected = (x if isinstance(x, torch.Tensor) else x[0] for x in (found, expected))
    assert found.shape == expected.shape
    computed += 1
    # A plain state that is changed by a TwoTensor is changed twice.
    if kind != "FakeTensor" and (chosen in (None, "state", "state_indices") or "state" not in inputs):
        torch.testing.assert_close(plain(found) if type(found) is not torch.Tensor else found, expected)


with torch.no_grad():
    for rule in rules:
        inputs = make_inputs(rule, T=20)
        token = {name: x[:, 0] for name, x in make_inputs(rule, T=1, with_state=False).items()}
        token |= {"state": inputs["initial_state"], "state_indices": torch.tensor([1, 0])}
        for form, given in (("chunk", inputs), ("step", token)):
            compare(public_function(rule, form), given)
            for chosen in given:
                compare(partial(public_function(rule, form), check_gates=False), given, chosen)
    x, weight = torch.randn(3, 8), torch.randn(8)
    compare(lambda x, weight: fused.rms_norm(x, weight, 1e-6), {"x": x, "weight": weight})
    compare(fused.swiglu, {"gate": x, "up": x})
    compare(fused.cross_entropy_sum, {"logits": x, "labels": torch.tensor([0, 1, 2])})
    for chosen in (None, "x", "weight"):
        compare(fused.linear, {"x": x, "weight": torch.randn(5, 8)}, chosen)
assert computed >= least, computed
"""


@pytest.mark.native
@pytest.mark.parametrize(("kind", "computed"), [("DTensor", 12), ("FakeTensor", 20), ("TwoTensor", 150)])
def test_native_code_does_not_look_for_the_memory_of_a_subclass(kind: str, computed: int) -> None:
    """``computed``: so many of the calls are, and are compared; the others torch refuses by what it says below."""
    rules = ["general", "vector", *(rule for rule in FIRST_ORDER if rule != "linear_attn")]
    in_another_process(SUBCLASSES, kind, ",".join(rules), str(computed))


@pytest.mark.native
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@torch.no_grad()
def test_a_tracer_sees_torch_operations_where_native_code_would_have_run() -> None:
    inputs = {name: x[:, 0] for name, x in make_inputs("gated_delta_rule", T=1, with_state=False).items()}

    def compute(q: Tensor, state: Tensor) -> Tensor:
        o = public_function("gated_delta_rule", "step")(**inputs | {"q": q}, state=state, check_gates=False)
        return swiglu(o, o)

    q, state = inputs["q"], make_inputs("gated_delta_rule", T=1)["initial_state"]
    expected = compute(2 * q, state.clone())
    for traced in (
        make_fx(compute)(q, state.clone()),
        torch.jit.trace(compute, (q, state.clone()), check_trace=False),
    ):
        assert relative_error(traced(2 * q, state.clone()), expected) <= 2e-6
