"""A mixer of your own in the library's backbone: a gated moving average of a projection, with one number per head.

    python examples/new_mixer.py

    a_t = sigmoid(W_a x_t)              share of the past that is kept, one per head
    s_t = a_t s_{t-1} + (1 - a_t) v_t   moving average of v_t = W_v x_t
    y_t = W_o s_t

It is scalar-decay linear attention with K = 1, so the library's rule computes it: in chunks, over packs, with states.
The mixer only has to hand over the boundaries (``layout``) and its state. ``check_mixer`` proves that it did.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.layers import MIXERS
from mdn.layers.cache_access import LayerState
from mdn.layers.init import TABLE
from mdn.layers.mixer import Mixer, StateShape
from mdn.layers.token_layout import TokenLayout
from mdn.models import MomentumDeltaNetConfig, MomentumDeltaNetForCausalLM
from mdn.ops import chunk_simple_gla
from mdn.testing import check_mixer


class MovingAverage(Mixer):
    def __init__(self, hidden_size: int, num_heads: int = 4, layer_idx: int | None = None, backend: str = "auto"):
        super().__init__(hidden_size, layer_idx, backend)
        self.num_heads = num_heads
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.keep_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def mix(self, hidden_states: Tensor, layout: TokenLayout, state: LayerState | None) -> Tensor:
        v = self.v_proj(hidden_states).unflatten(-1, (self.num_heads, -1))  # [B, T, H, V]
        log_a = F.logsigmoid(self.a_proj(hidden_states) + self.keep_bias)  # [B, T, H]
        one = v.new_ones(*v.shape[:-1], 1)  # queries and keys with K = 1
        s, final_state = chunk_simple_gla(
            q=one,
            k=one,
            v=-torch.expm1(log_a).unsqueeze(-1) * v,
            g=log_a,
            scale=1.0,
            initial_state=None if state is None else state.initial_recurrent(),
            output_final_state=state is not None,
            cu_seqlens=layout.boundaries,
            backend=self.backend,
        )
        if state is not None and final_state is not None:
            state.write_recurrent(final_state)
        return self.o_proj(s.flatten(-2))

    def state_shapes(self) -> dict[str, StateShape]:
        return {"s": StateShape((self.num_heads, 1, self.hidden_size // self.num_heads), torch.float32)}

    def flops_per_token(self, context: int) -> int:
        return 3 * self.hidden_size


MIXERS["moving_average"] = MovingAverage  # `mixer: moving_average` in a config or recipe now means this class
TABLE.insert(0, (MovingAverage, "keep_bias", "ones"))  # every parameter needs an initial value, here 1


def main() -> None:
    check_mixer(MovingAverage, hidden_size=32)
    print("causal, packs and pads without leaks, decodes what it trained")
    torch.manual_seed(0)
    config = MomentumDeltaNetConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, mixer="moving_average"
    )
    model = MomentumDeltaNetForCausalLM(config)
    print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False))


if __name__ == "__main__":
    main()
