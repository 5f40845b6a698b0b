"""The one object that says where sequences begin and end: three ways to make it, the facts it gives, pad and unpad."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mdn.layers import MomentumDeltaNet, ShortConvolution, make_layout
from mdn.ops import SequenceBoundaries


def test_cumulative_lengths_give_every_fact_about_a_pack() -> None:
    boundaries = SequenceBoundaries.from_cu_seqlens(torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32))
    assert boundaries.offsets == (0, 3, 3, 4, 9)
    assert boundaries.lengths == (3, 0, 1, 5)
    assert (boundaries.num_sequences, boundaries.total, boundaries.max_length) == (4, 9, 5)
    assert boundaries.cu_seqlens.dtype == torch.int64
    assert boundaries.sequence_ids.tolist() == [0, 0, 0, 2, 3, 3, 3, 3, 3]
    assert boundaries.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_the_same_tensor_gives_the_same_object_until_it_is_written_to() -> None:
    tensor = torch.tensor([0, 2, 5])
    first = SequenceBoundaries.from_cu_seqlens(tensor)
    assert SequenceBoundaries.from_cu_seqlens(tensor) is first
    assert SequenceBoundaries.from_cu_seqlens(first) is first
    tensor[1] = 4
    assert SequenceBoundaries.from_cu_seqlens(tensor).offsets == (0, 4, 5)


def test_the_object_can_be_pickled_and_copied() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]])
    boundaries = SequenceBoundaries.from_attention_mask(mask)
    x = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))
    _ = boundaries.sequence_ids, boundaries.stretched(2)
    for same in (pickle.loads(pickle.dumps(boundaries)), copy.copy(boundaries), copy.deepcopy(boundaries)):
        assert same.offsets == boundaries.offsets
        assert torch.equal(same.cu_seqlens, boundaries.cu_seqlens)
        assert torch.equal(same.pad(same.unpad(x)), x * mask.unsqueeze(-1))
        assert SequenceBoundaries.from_cu_seqlens(same.cu_seqlens) is same
    without_mask = pickle.loads(pickle.dumps(SequenceBoundaries.from_lengths([3, 0])))
    assert without_mask.offsets == (0, 3, 3)
    with pytest.raises(ValueError, match="made from an attention mask"):
        without_mask.unpad(x)


def test_the_object_moves_to_another_device_once_and_keeps_its_numbers() -> None:
    boundaries = SequenceBoundaries.from_attention_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert boundaries.to("cpu") is boundaries
    moved = boundaries.to("meta")
    assert boundaries.to("meta") is moved
    assert (moved.offsets, moved.cu_seqlens.device.type) == (boundaries.offsets, "meta")
    assert moved.unpad(torch.ones(2, 3, device="meta")).shape == (1, 5)
    assert torch.equal(SequenceBoundaries.from_lengths([2, 3], "meta").to("cpu").cu_seqlens, torch.tensor([0, 2, 5]))


@torch.inference_mode()
def made_in_inference_mode(how: str) -> SequenceBoundaries:
    if how == "mask":
        boundaries = SequenceBoundaries.from_attention_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
        boundaries.unpad(torch.ones(2, 5))
    elif how == "lengths":
        boundaries = SequenceBoundaries.from_lengths([4, 2])
    elif how == "tensor":
        boundaries = SequenceBoundaries.from_cu_seqlens(torch.tensor([0, 4, 6]))
    elif how == "positions":
        boundaries = SequenceBoundaries.from_position_ids(torch.tensor([[0, 1, 2, 3, 0, 1]]))
    else:
        boundaries = pickle.loads(pickle.dumps(SequenceBoundaries.from_lengths([4, 2])))
    _ = boundaries.sequence_ids, boundaries.positions, boundaries.stretched(2)
    return boundaries


@pytest.mark.parametrize("how", ["mask", "lengths", "tensor", "positions", "pickle"])
def test_what_is_made_in_inference_mode_serves_training(how: str) -> None:
    boundaries = made_in_inference_mode(how)
    stretched = boundaries.stretched(2)
    tensors = [boundaries.cu_seqlens, stretched.cu_seqlens, boundaries.sequence_ids, boundaries.positions]
    for x in tensors:
        torch.ones(20, requires_grad=True).index_select(0, x).sum().backward()  # autograd saves the index
    if how == "mask":
        boundaries.pad(boundaries.unpad(torch.ones(2, 5, requires_grad=True))).sum().backward()


def test_what_is_made_without_numbers_is_not_kept() -> None:
    def made() -> list[torch.Tensor]:
        moved, read = elsewhere.to("cpu"), SequenceBoundaries.from_cu_seqlens(buffer)
        stretched = boundaries.stretched(2)
        return [boundaries.sequence_ids, boundaries.positions, *(x.cu_seqlens for x in (stretched, moved, read))]

    boundaries, elsewhere = (SequenceBoundaries.from_lengths([3, 2], device) for device in ("cpu", "meta"))
    buffer = torch.tensor([0, 3, 5])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert {type(x) for x in made()} == {FakeTensor}
    make_fx(lambda x: x + boundaries.positions)(torch.zeros(5))
    found = made()
    assert {type(x) for x in found} == {torch.Tensor}
    assert [x.tolist() for x in found] == [[0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [0, 6, 10], [0, 3, 5], [0, 3, 5]]
    assert all(x is y for x, y in zip(made(), found, strict=True))  # these are kept


def test_a_mask_without_rows_has_no_sequences() -> None:
    boundaries = SequenceBoundaries.from_attention_mask(torch.ones(0, 4))
    assert (boundaries.lengths, boundaries.max_length, boundaries.total) == ((), 0, 0)
    assert boundaries.pad(boundaries.unpad(torch.ones(0, 4, 2))).shape == (0, 4, 2)


def test_a_mask_may_have_its_ones_anywhere() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    boundaries = SequenceBoundaries.from_attention_mask(mask)
    assert boundaries.lengths == (2, 3, 0, 3)
    x = torch.arange(16.0).reshape(4, 4, 1)
    packed = boundaries.unpad(x)
    assert packed.flatten().tolist() == [2, 3, 4, 5, 6, 12, 14, 15]
    assert torch.equal(boundaries.pad(packed), x * mask.unsqueeze(-1))


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used before"])
@pytest.mark.parametrize("layer", [MomentumDeltaNet(hidden_size=16, num_heads=2), ShortConvolution(16, 4)])
def test_layers_compile_into_one_graph_with_boundaries(layer: torch.nn.Module, used: bool) -> None:
    x = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0))

    def compute(x: torch.Tensor, boundaries: SequenceBoundaries) -> torch.Tensor:
        if isinstance(layer, ShortConvolution):
            layout = make_layout((1, 20), cu_seqlens=boundaries)
            return layer(x, layout)[0] * layout.positions(x.device)[..., None]
        return layer(x, cu_seqlens=boundaries)[0]

    expected = compute(x, SequenceBoundaries.from_lengths([3, 0, 17]))
    boundaries = SequenceBoundaries.from_lengths([3, 0, 17])
    if used:
        compute(x, boundaries)
    torch._dynamo.reset()
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # what the first call has made is there at the second one
        torch.testing.assert_close(compiled(x, boundaries), expected)
    torch.testing.assert_close(compute(x, boundaries), expected)


def test_padding_and_unpadding_pass_gradients() -> None:
    boundaries = SequenceBoundaries.from_attention_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    x = torch.randn(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: boundaries.pad(boundaries.unpad(x).square()), x)


def test_positions_that_restart_begin_a_new_sequence() -> None:
    for positions in (torch.tensor([[0, 1, 2, 0, 0, 1]]), torch.tensor([0, 1, 2, 0, 0, 1])):
        assert SequenceBoundaries.from_position_ids(positions).offsets == (0, 3, 4, 6)
    for one in ([[5, 6, 7]], [[0, 1, 4, 9]], [[3]]):
        assert SequenceBoundaries.from_position_ids(torch.tensor(one)).offsets == (0, len(one[0]))
    assert SequenceBoundaries.from_position_ids(torch.tensor([[0, 1, 4, 2, 9]])).offsets == (0, 3, 5)
    unsigned = torch.tensor([[0, 1, 2, 0, 1]], dtype=torch.uint8)
    assert SequenceBoundaries.from_position_ids(unsigned).offsets == (0, 3, 5)


def test_bad_masks_positions_and_layouts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\], got \[3\]"):
        SequenceBoundaries.from_attention_mask(torch.ones(3))
    with pytest.raises(ValueError, match=r"position_ids of a pack must have shape \[1, T\], got \[2, 3\]"):
        SequenceBoundaries.from_position_ids(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="unpad and pad need boundaries that were made from an attention mask"):
        SequenceBoundaries.from_lengths([2]).unpad(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"x must begin with \[1, 2\] as the attention mask does, got \[2, 2\]"):
        SequenceBoundaries.from_attention_mask(torch.ones(1, 2)).unpad(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"lengths must be >= 0, but entry 1 is -2"):
        SequenceBoundaries.from_lengths([5, -2, 9])
    with pytest.raises(ValueError, match=r"lengths must have at least one entry, got \[\]"):
        SequenceBoundaries.from_lengths([])
    with pytest.raises(ValueError, match="cu_seqlens must hold numbers, got a tensor on the meta device"):
        SequenceBoundaries.from_cu_seqlens(torch.tensor([0, 2], device="meta"))
