"""The momentum rule with a decay for every key dimension contains the others, and is a full member of the package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from definition import HARD_ZERO, MOMENTUM_GATES, Tensors, converted, leaves, make_inputs, relative_error
from definition import run_with_gradients as with_gradients
from mdn.ops import (
    chunk_kda,
    chunk_momentum_delta_rule,
    chunk_vector_momentum_delta_rule,
    explain_backend,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_momentum_delta_rule,
    recurrent_vector_momentum_delta_rule,
    vector_momentum_delta_step,
)

EXACT = 1e-13


def inputs_of(gates: str, rule: str = "vector", **sizes) -> Tensors:
    """float64 inputs of the vector rule without a state."""
    return make_inputs(rule, **{"T": 90, "H": 1, "HV": 2, "K": 12} | sizes, gates=gates, dtype=torch.float64)


def vector_rule(inputs: Tensors, **options) -> tuple[Tensor, Tensor]:
    return chunk_vector_momentum_delta_rule(**inputs, output_final_state=True, **options)


def of_one_channel(inputs: Tensors) -> Tensors:
    """The same with every key dimension decaying as the first one does."""
    return inputs | {"log_alpha": inputs["log_alpha"][..., :1].expand_as(inputs["log_alpha"])}


def first_order(inputs: Tensors, **gates: Tensor) -> dict:
    """The arguments of a first-order rule that starts from S."""
    shared = {name: inputs[name] for name in ("q", "k", "v")}
    return shared | gates | {"initial_state": inputs["initial_state"][0], "use_qk_l2norm_in_kernel": True}


def assert_same(found: tuple, reference: tuple) -> None:
    for actual, expected in zip(found, reference):
        assert relative_error(actual, expected) <= EXACT


every_kind_of_gates = pytest.mark.parametrize("gates", MOMENTUM_GATES)


@every_kind_of_gates
def test_a_direct_write_without_steps_is_kda_whatever_the_momentum_does(gates: str) -> None:
    inputs = inputs_of(gates)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    o, state = vector_rule(inputs)
    kda = first_order(inputs, g=inputs["log_alpha"], beta=inputs["direct"])
    assert_same((o, state[0]), recurrent_kda(**kda, output_final_state=True))
    assert_same((o, state[0]), chunk_kda(**kda, output_final_state=True, backend="torch"))


@every_kind_of_gates
def test_without_momentum_it_is_kda(gates: str) -> None:
    inputs = inputs_of(gates)
    inputs |= {"log_mu": torch.full_like(inputs["log_mu"], HARD_ZERO), "eta": torch.ones_like(inputs["eta"])}
    del inputs["direct"]
    o, state = vector_rule(inputs)
    kda = first_order(inputs, g=inputs["log_alpha"], beta=inputs["beta"])
    assert_same((o, state[0]), recurrent_kda(**kda, output_final_state=True))


@every_kind_of_gates
def test_with_one_decay_for_all_dimensions_it_is_the_momentum_rule(gates: str) -> None:
    inputs = of_one_channel(inputs_of(gates))
    scalar = inputs | {"log_alpha": inputs["log_alpha"][..., 0]}
    assert_same(vector_rule(inputs), recurrent_momentum_delta_rule(**scalar, output_final_state=True))
    del inputs["direct"], scalar["direct"]
    assert_same(vector_rule(inputs), chunk_momentum_delta_rule(**scalar, output_final_state=True))


@pytest.mark.parametrize("gates", ["layer", "mixed"])
def test_with_one_decay_and_no_momentum_it_is_gated_deltanet_and_without_decay_deltanet(gates: str) -> None:
    inputs = of_one_channel(inputs_of(gates))
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    o, state = vector_rule(inputs)
    gated = first_order(inputs, g=inputs["log_alpha"][..., 0], beta=inputs["direct"])
    assert_same((o, state[0]), recurrent_gated_delta_rule(**gated, output_final_state=True))
    o, state = vector_rule(inputs | {"log_alpha": torch.zeros_like(inputs["log_alpha"])})
    plain = first_order(inputs, beta=inputs["direct"])
    assert_same((o, state[0]), recurrent_delta_rule(**plain, output_final_state=True))


@every_kind_of_gates
def test_nesterovs_step_is_a_choice_of_the_two_steps(gates: str) -> None:
    """S_t = diag(alpha) S - b (mu M_t - eta k r^T), written out."""
    inputs = inputs_of(gates, B=1, T=40, HV=1)
    k = inputs["k"] / (inputs["k"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q = inputs["q"] / (inputs["q"].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    alpha, mu, b, eta = inputs["log_alpha"].exp(), inputs["log_mu"].exp(), inputs["beta"], inputs["eta"]
    S, M = inputs["initial_state"][:, 0, 0]
    outputs = []
    for t in range(40):
        decayed = alpha[0, t, 0].unsqueeze(-1) * S
        gradient = -torch.outer(k[0, t, 0], inputs["v"][0, t, 0] - decayed.T @ k[0, t, 0])
        M = mu[0, t, 0] * M + eta[0, t, 0] * gradient
        S = decayed - b[0, t, 0] * (mu[0, t, 0] * M + eta[0, t, 0] * gradient)
        outputs.append(S.T @ q[0, t, 0] * 12**-0.5)
    o, state = vector_rule(inputs | {"beta": mu * b, "direct": b * eta})
    assert relative_error(o[0, :, 0], torch.stack(outputs)) <= EXACT
    assert relative_error(state[:, 0, 0], torch.stack([S, M])) <= EXACT


@pytest.mark.parametrize("mu_channels", [False, True], ids=["one mu per head", "mu per channel"])
def test_the_layers_bounds_keep_every_eigenvalue_of_a_step_in_the_unit_disc(mu_channels: bool) -> None:
    """For gates up to the bounds, with and without a direct write: one mu per head has the proof of equation (30), mu
    per channel has only this check."""
    B, K = 400, 6
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def to_the_edge(x: Tensor) -> Tensor:
        """Half of the values at 0 or 1, where a bound is attained."""
        return torch.where(uniform(*x.shape) < 0.5, x.round(), x)

    eta = 2 * to_the_edge(uniform(B, 1, 1))
    sine = torch.atan(eta * torch.exp(8 * uniform(B, 1, 1) - 4)).sin().square()
    decay = to_the_edge(uniform(B, 1, 1, K))
    step, nu = sine * to_the_edge(uniform(B, 1, 1)), to_the_edge(uniform(B, 1, 1))
    k = torch.randn(B, 1, 1, K, generator=generator, dtype=torch.float64)
    identity = torch.eye(2 * K, dtype=torch.float64).expand(B, 1, 2 * K, 2 * K)
    _, (S, M) = recurrent_vector_momentum_delta_rule(
        q=k,
        k=k,
        v=k.new_zeros(B, 1, 1, 2 * K),
        log_alpha=(decay * (1 - sine).unsqueeze(-1)).log(),
        log_mu=to_the_edge(uniform(B, 1, 1, K) if mu_channels else uniform(B, 1, 1)).log(),
        beta=nu * step,
        eta=eta,
        direct=(1 - nu) * step * eta,
        initial_state=(identity[:, :, :K], identity[:, :, K:]),
        output_final_state=True,
    )
    eigenvalues = torch.linalg.eigvals(torch.cat([S, M], dim=2))  # of the map of [S; M], 2K x 2K
    assert eigenvalues.imag.abs().max() > 0.1
    assert eigenvalues.abs().max() <= 1 + 1e-7  # a double eigenvalue 1 is known to half of the digits


def test_gradients_pass_torchs_numerical_check() -> None:
    names = ("q", "k", "v", "log_alpha", "log_mu", "beta", "eta", "direct", "initial_state")
    made = leaves(make_inputs("vector", B=1, T=5, H=1, K=3, V=2, dtype=torch.float64))

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return vector_rule(dict(zip(names, tensors)), chunk_size=4, check_gates=False)

    assert torch.autograd.gradcheck(rule, tuple(made[name] for name in names))


def test_only_the_inputs_are_kept_for_the_backward_pass() -> None:
    inputs = leaves(make_inputs("vector", T=70))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        vector_rule(inputs)
    addresses = {x.data_ptr() for x in inputs.values()}
    assert kept
    assert all(x.numel() == 0 or x.data_ptr() in addresses for x in kept)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_it_compiles_into_one_graph_with_gradients(packed: bool) -> None:
    torch._dynamo.reset()
    inputs = leaves(make_inputs("vector", B=1, T=40, N=3 if packed else 1))
    options = {"cu_seqlens": torch.tensor([0, 1, 30, 40])} if packed else {}

    def squared(x: Tensors) -> tuple[Tensor, Tensor]:
        o, state = vector_rule(x, **options)
        return o.square(), state

    actual = with_gradients(torch.compile(squared, fullgraph=True, backend="aot_eager"), inputs)
    for name, expected in with_gradients(squared, inputs).items():
        assert relative_error(actual[name], expected) <= 1e-6, name


def test_the_step_compiles_and_updates_its_state() -> None:
    torch._dynamo.reset()
    inputs = make_inputs("vector", T=1)
    token = {name: x[:, 0] for name, x in inputs.items() if name != "initial_state"}

    def step(state: Tensor) -> Tensor:
        return vector_momentum_delta_step(**token, state=state) + 1

    eager, compiled = inputs["initial_state"].clone(), inputs["initial_state"].clone()
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(compiled), step(eager))
    assert torch.equal(compiled, eager)


def test_the_meta_device_gives_shapes() -> None:
    inputs = leaves({name: x.to("meta") for name, x in make_inputs("vector", T=70, HV=4).items()})
    o, state = vector_rule(inputs)
    assert (o.shape, state.shape) == ((2, 70, 4, 24), (2, 2, 4, 16, 24))
    o.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs.values())


@pytest.mark.parametrize("backend", ["cpu", "triton", "fla"])
def test_other_backends_are_refused_by_name_with_the_reason(backend: str) -> None:
    inputs = make_inputs("vector", T=3)
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot be used here: .*(key dimension|first-order)"):
        vector_rule(inputs, backend=backend)
    assert "not usable" in explain_backend(inputs["q"], backend, rule="vector_momentum")
    assert explain_backend(inputs["q"], rule="vector_momentum").startswith("auto -> torch")


def test_gates_of_the_wrong_shape_are_refused_by_both_rules() -> None:
    vector, scalar = make_inputs("vector", T=3), make_inputs("general", T=3)
    with pytest.raises(ValueError, match=r"log_alpha must have shape \[2, 3, 2\], one per value head, got"):
        chunk_momentum_delta_rule(**vector)
    with pytest.raises(ValueError, match=r"log_alpha must have shape \[2, 3, 2, 16\], one per value head and key"):
        vector_rule(scalar)
    with pytest.raises(ValueError, match=r"log_mu must have shape \[2, 3, 2, 16\]"):
        vector_rule(vector | {"log_mu": vector["log_alpha"][..., :5]})
    with pytest.raises(ValueError, match="log_alpha must be <= 0"):
        vector_rule(vector | {"log_alpha": -vector["log_alpha"]})


def test_half_precision_is_rounded_once() -> None:
    inputs = make_inputs("vector", T=70, dtype=torch.bfloat16)
    o, state = vector_rule(inputs)
    wide, exact = vector_rule(converted(inputs, torch.float32))
    assert o.dtype == torch.bfloat16
    assert relative_error(o, wide) <= 2**-8
    assert relative_error(state, exact) <= 1e-6
