"""Properties over random shapes and gates (hypothesis): the chunk form is the recurrence, and the future has no say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import torch_chunk
from definition import (
    HARD_ZERO,
    Tensors,
    converted,
    leaves,
    make_inputs,
    momentum_delta_rule,
    offsets_of,
    relative_error,
    run_with_gradients,
)

LOGS = st.sampled_from([0.0, -1e-6, -0.01, -0.5, -3.0, -40.0, -800.0, HARD_ZERO])
FACTORS = st.sampled_from([0.0, 1e-8, 0.3, 1.0])
FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw, packed: bool = False) -> tuple[Tensors, list[int] | None, dict]:
    """float64 inputs with hostile gates at some tokens, boundaries if packed, and options."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)) if packed else None
    shape = {
        "B": 1 if packed else draw(st.integers(1, 3)),
        "T": sum(lengths) if lengths is not None else draw(st.integers(1, 90)),
        "H": (heads := draw(st.integers(1, 2))),
        "HV": heads * draw(st.integers(1, 2)),
        "K": draw(st.integers(1, 20)),
        "V": draw(st.integers(1, 20)),
    }
    sequences = shape["B"] if lengths is None else len(lengths)
    flags = {"with_p": draw(st.booleans()), "with_state": draw(st.booleans())}
    inputs = make_inputs(**shape, N=sequences, **flags, dtype=torch.float64, seed=draw(st.integers(0, 10**6)))
    for name, values in (("log_alpha", LOGS), ("log_mu", LOGS), ("beta", FACTORS), ("eta", FACTORS)):
        share = draw(st.sampled_from([0.0, 0.1, 0.5]))
        chosen = torch.rand(inputs[name].shape, generator=torch.Generator().manual_seed(len(name))) < share
        inputs[name] = inputs[name].masked_fill(chosen, draw(values))
    return (
        inputs,
        None if lengths is None else offsets_of(lengths),
        {"chunk_size": draw(st.sampled_from([1, 2, 5, 16, 33, 64, 256]))},
    )


def check_against_recurrence(inputs: Tensors, offsets: list[int] | None, options: dict) -> None:
    boundaries = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    actual = run_with_gradients(lambda x: torch_chunk(x, **boundaries, **options), leaves(inputs))
    expected = run_with_gradients(lambda x: momentum_delta_rule(**x, offsets=offsets), leaves(inputs))
    assert relative_error(actual.pop("o"), expected["o"]) <= 1e-10
    # An initial state that all but vanished is exact on the scale where it began, so states count on that scale.
    for name, x in actual.items():
        smallest, tolerance = (1.0, 1e-11) if name == "final_state" else (1e-3, 1e-9)
        scale = max(smallest, expected[name].abs().max().item() if x.numel() else 1.0)
        assert ((x - expected[name]).abs() <= tolerance * scale).all(), name


@FEW
@given(cases())
def test_any_dense_batch_is_the_recurrence(case) -> None:
    check_against_recurrence(*case)


@FEW
@given(cases(packed=True))
def test_any_pack_is_the_recurrence(case) -> None:
    check_against_recurrence(*case)


@FEW
@given(cases())
def test_float32_is_finite_for_every_gate_value(case) -> None:
    inputs, _, options = case
    single = leaves(converted(inputs, torch.float32))
    for name, x in run_with_gradients(lambda x: torch_chunk(x, **options), single).items():
        assert x.isfinite().all(), name


@FEW
@given(cases(), st.floats(0, 1))
def test_no_output_depends_on_a_later_token(case, where: float) -> None:
    inputs, _, options = case
    T = inputs["q"].shape[1]
    cut = int(where * (T - 1)) + 1
    changed = dict(inputs)
    for name in ("q", "k", "v", "log_alpha", "log_mu", "beta", "eta"):
        changed[name] = inputs[name].clone()
        changed[name][:, cut:] = changed[name][:, cut:].flip(1) * 0.5
    first, second = torch_chunk(inputs, **options)[0], torch_chunk(changed, **options)[0]
    assert relative_error(second[:, :cut], first[:, :cut]) <= 1e-12


@FEW
@given(cases(), st.integers(0, 90))
def test_cutting_a_sequence_anywhere_changes_nothing(case, where: int) -> None:
    inputs, _, options = case
    cut = min(where, inputs["q"].shape[1])
    expected = torch_chunk(inputs, **options)
    head = {name: x if name == "initial_state" else x[:, :cut] for name, x in inputs.items()}
    first, state = torch_chunk(head, **options)
    tail = {name: state if name == "initial_state" else x[:, cut:] for name, x in inputs.items()}
    second, final = torch_chunk(tail | {"initial_state": state}, **options)
    assert relative_error(torch.cat([first, second], 1), expected[0]) <= 1e-11
    assert ((final - expected[1]).abs() <= 1e-12 * max(1.0, expected[1].abs().max().item())).all()
