"""Packs: how boundaries may be given, and that every form of the rule takes them. Results: test_conformance.py."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from conformance import Case, check, public_function, torch_chunk
from definition import leaves, make_inputs, momentum_delta_rule, relative_error
from mdn.ops import SequenceBoundaries, blockwise_momentum_delta_rule, fused_recurrent_momentum_delta_rule


def test_a_pack_of_many_short_sequences_larger_than_one_slab_of_work() -> None:
    check(Case(lengths=tuple(1 + n % 17 for n in range(40)), H=4, HV=4, K=8, V=8), "torch")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_may_be_a_tensor_or_the_shared_object(dtype: torch.dtype) -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    tensor = torch.tensor([0, 11, 30], dtype=dtype)
    expected = torch_chunk(inputs, cu_seqlens=SequenceBoundaries.from_lengths([11, 19]))
    for actual, reference in zip(torch_chunk(inputs, cu_seqlens=tensor), expected):
        assert torch.equal(actual, reference)


def test_boundaries_written_to_between_calls_are_read_again() -> None:
    inputs = make_inputs(B=1, T=30, N=2)
    boundaries = torch.tensor([0, 11, 30])
    torch_chunk(inputs, cu_seqlens=boundaries)
    boundaries[1] = 17
    expected = torch_chunk(inputs, cu_seqlens=torch.tensor([0, 17, 30]))
    for actual, reference in zip(torch_chunk(inputs, cu_seqlens=boundaries), expected):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize(
    ("form", "block_size"), [(fused_recurrent_momentum_delta_rule, 1), (blockwise_momentum_delta_rule, 3)]
)
def test_the_other_forms_take_packs_and_count_blocks_from_the_start_of_each_sequence(form, block_size: int) -> None:
    offsets = [0, 5, 5, 6, 20]
    inputs = make_inputs(B=1, T=20, N=4, dtype=torch.float64)
    options = {"block_size": block_size} if block_size > 1 else {}
    found = form(**inputs, cu_seqlens=torch.tensor(offsets), output_final_state=True, **options)
    for actual, expected in zip(found, momentum_delta_rule(**inputs, offsets=offsets, block_size=block_size)):
        assert relative_error(actual, expected) <= 1e-13


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["tensor", "lengths"])
@pytest.mark.parametrize("rule", ["momentum", "vector"])
def test_a_pack_seen_in_inference_mode_can_be_trained_on_afterwards(rule: str, kind: str, backend: str) -> None:
    inputs = make_inputs(rule, B=1, T=23, N=2)
    pack = torch.tensor([0, 20, 23]) if kind == "tensor" else SequenceBoundaries.from_lengths([20, 3])
    with torch.inference_mode():
        expected = public_function(rule, "chunk")(**inputs, cu_seqlens=pack, backend=backend).o
    trained = leaves(inputs)
    o = public_function(rule, "chunk")(**trained, cu_seqlens=pack, backend=backend).o
    o.sum().backward()
    assert torch.equal(o, expected)
    assert all(x.grad.isfinite().all() for x in trained.values())


@pytest.mark.parametrize("rule", ["momentum", "vector", "kda", "gated_delta_rule"])
def test_a_tensor_of_boundaries_stays_a_plain_tensor(rule: str) -> None:
    """Whatever is remembered about it must not hinder saving and copying it."""
    tensor = torch.tensor([0, 11, 30])
    public_function(rule, "chunk")(**make_inputs(rule, B=1, T=30, N=2), cu_seqlens=tensor)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    file = io.BytesIO()
    torch.save({"cu_seqlens": tensor}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["cu_seqlens"], tensor)


@pytest.mark.parametrize("rule", ["momentum", "vector", "kda", "gated_delta_rule"])
def test_boundaries_on_another_device_are_moved_to_that_of_q(rule: str) -> None:
    """``from_lengths`` makes them on the CPU, wherever q is."""
    function, inputs = public_function(rule, "chunk"), make_inputs(rule, B=1, T=30, N=2)
    there = {name: x.to("meta") for name, x in inputs.items()}
    for pack in (SequenceBoundaries.from_lengths([11, 19]), torch.tensor([0, 11, 30])):
        assert function(**there, cu_seqlens=pack).o.device.type == "meta"
    expected = function(**inputs, cu_seqlens=torch.tensor([0, 11, 30])).o
    from_there = SequenceBoundaries.from_lengths([11, 19], "meta")
    assert torch.equal(function(**inputs, cu_seqlens=from_there).o, expected)
    trained = leaves(inputs)
    function(**trained, cu_seqlens=from_there).o.sum().backward()
    assert trained["q"].grad.isfinite().all()
    with pytest.raises(ValueError, match="cu_seqlens must hold numbers, got a tensor on the meta device"):
        function(**inputs, cu_seqlens=torch.tensor([0, 11, 30], device="meta"))
