"""The one-file form of the rule with vector decays is the library's rule."""

from __future__ import annotations

import torch

from definition import relative_error
from mdn.minimal_vector import chunkwise, random_inputs, recurrence
from mdn.ops import chunk_vector_momentum_delta_rule


def test_both_forms_of_the_file_are_the_library_rule() -> None:
    torch.manual_seed(1)
    x, S, M = random_inputs(37, 8, 12)
    q, k, v, alpha, mu, beta, eta, direct = (y.unsqueeze(1).unsqueeze(0) for y in x)  # [1, T, 1, D]
    gates = {"beta": beta.squeeze(-1), "eta": eta.squeeze(-1), "direct": direct.squeeze(-1)}
    o, state = chunk_vector_momentum_delta_rule(
        *(q, k, v, alpha.log(), mu.log()),
        **gates,
        initial_state=torch.stack([S, M])[:, None, None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    for form in (recurrence(x, S, M), chunkwise(x, S, M, 8)):
        for actual, expected in zip(form, (o[0, :, 0], *state[:, 0, 0])):
            assert relative_error(actual, expected) <= 1e-13
