"""accelerate cannot cut a sequence over devices: every rank would restart its states and train on wrong gradients."""

import pytest
import torch
from accelerate import Accelerator, big_modeling
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

from mdn.layers import MIXERS
from small_models import HYBRIDS, small_config, small_model, tokens

RECURRENT = sorted(set(MIXERS) - {"attention"})


@pytest.fixture
def accelerator():
    """One process; giving its state a parallelism config is what a start with several processes does."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", [*RECURRENT, *HYBRIDS])
def test_accelerates_own_guard_recognises_every_recurrent_mixer(name):
    with torch.device("meta"):
        model = small_model(name)
    with pytest.raises(ValueError, match="recurrent_linear_attention"):
        big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)
    with pytest.raises(ValueError, match="recurrent_linear_attention"):
        big_modeling._attach_context_parallel_hooks(model)


@pytest.mark.parametrize("field", ["sp_size", "cp_size"])
@pytest.mark.parametrize("name", ["momentum_deltanet", "gated_deltanet", "hybrid", "attention"])
def test_a_model_refuses_to_run_on_a_part_of_each_sequence(name, field, accelerator):
    """Also one of attention layers only, whose tokens would see their own part of the sequence."""
    model, ids = small_model(name), tokens(1, 6)
    accelerator.state.parallelism_config = ParallelismConfig(**{field: 2})
    with pytest.raises(ValueError, match=rf"ParallelismConfig\({field}=2\) is not supported"):
        model(ids, labels=ids)
    accelerator.state.parallelism_config = ParallelismConfig()
    assert model(ids, labels=ids).loss.isfinite()


def test_configs_saved_with_the_former_layer_type_load(tmp_path):
    config = small_config("hybrid")
    fields = config.to_dict() | {"layer_types": ["recurrent_state", "full_attention"]}
    loaded = type(config).from_dict(fields)
    assert loaded.layer_types == config.layer_types == ["recurrent_linear_attention", "full_attention"]
    assert loaded.to_dict() == config.to_dict()
