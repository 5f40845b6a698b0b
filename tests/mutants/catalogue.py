"""The faults: a dropped term, a swapped index, a wrong row, a missing gate, a border off by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    backend: str
    fault: str
    file: str
    """in src/mdn/ops"""
    old: str
    """text that occurs once in the file"""
    new: str
    tests: str = ""
    """which tests of the suite to run, as in `pytest -k`; empty: all"""

    def __str__(self) -> str:
        return f"{self.backend}: {self.fault} ({self.file})"


MATH, TORCH, PASSES = "momentum/chunk_math.py", "momentum/chunk_torch.py", "momentum/passes.py"
ROUNDS, VECTOR_MATH = "momentum/rounds.py", "momentum/vector_math.py"
FORWARD, BACKWARD, CHUNK = "cpu/csrc/forward.cpp", "cpu/csrc/backward.cpp", "cpu/csrc/chunk.h"
STATE, GATE_GRADIENTS, STEP = "cpu/csrc/state.h", "cpu/csrc/gate_gradients.h", "cpu/csrc/step.cpp"
VECTOR_CHUNK, VECTOR_BACKWARD = "cpu/csrc/vector_chunk.h", "cpu/csrc/vector_backward.cpp"
REFERENCE, INPUTS = "momentum/reference.py", "first_order/inputs.py"
SCALAR, VECTOR, SCAN = "first_order/chunk_scalar.py", "first_order/chunk_vector.py", "first_order/state_scan.py"

MUTANTS = (
    # ------------------------------------------------------------------------------ the torch form of the momentum rule
    Mutant(
        "torch",
        "eta is missing in the weights of the writes",
        MATH,
        "torch.mul(decay_mu.mT, _with_one(gates.eta).mT, out=gamma_M_out).mT",
        "torch.mul(decay_mu.mT, _with_one(torch.ones_like(gates.eta)).mT, out=gamma_M_out).mT",
    ),
    Mutant(
        "torch",
        "erase uses the weights after the token instead of those before it",
        MATH,
        "torch.mul(pk_qk[:, :size], gamma_S[:, probe_rows, 1:], out=scratch.erase)",
        "torch.mul(pk_qk[:, :size], gamma_S[:, 1:, 1:], out=scratch.erase)",
    ),
    Mutant(
        "torch",
        "with look-ahead a token's error is read with its own write",
        MATH,
        "grad_masked[:, :size].tril_(-1)",
        "grad_masked[:, :size].tril_()",
        tests="lookahead",
    ),
    Mutant(
        "torch",
        "gradient: the direct write gets the column sums of its matrix",
        MATH,
        "change_mu.diagonal(dim1=-2, dim2=-1)[:, 1:].clone()",
        "change_mu.tril().sum(-2)[:, 1:]",
        tests="general",
    ),
    Mutant(
        "torch",
        "states before a group miss the direct write",
        TORCH,
        "factors[..., 0] += after * gates.direct",
        "factors[..., 0] += 0 * gates.direct",
        tests="general",
    ),
    Mutant(
        "torch",
        "the momentum before a chunk is forgotten in the next fast weight",
        ROUNDS,
        "        next_S.addcmul_(M, self.b_C, value=-1)\n",
        "",
    ),
    Mutant(
        "torch",
        "segments of decays begin one token early",
        MATH,
        "ones.triu(1), out=out)",
        "ones.triu(0), out=out)",
    ),
    Mutant(
        "torch",
        "gradient: the last momentum weights are not passed on",
        MATH,
        "    change_mu[:, -1] += grad_gamma_M_end  # (13), (15)\n",
        "",
    ),
    Mutant(
        "torch",
        "gradient: p's share of log_alpha is missing",
        MATH,
        "        gates.log_alpha.add_(along_p)  # (17): p is proportional to alpha\n",
        "        pass\n",
    ),
    Mutant(
        "torch",
        "gradient: S and M are swapped in what is carried to the chunk before",
        ROUNDS,
        "grad_M0.addcmul_(grad_S, self.b_C, value=-1)",
        "grad_M0.addcmul_(grad_M, self.b_C, value=-1)",
    ),
    Mutant(
        "torch",
        "gradient: sequences that end in a chunk are carried into the next one",
        ROUNDS,
        "after[i][arrived:] = grad_X[arrived : sizes[i]]",
        "after[i][:] = grad_X[: sizes[i]]",
    ),
    Mutant(
        "torch",
        "gradient: the triangular system is not transposed",
        ROUNDS,
        "torch.linalg.solve_triangular(erase, rows, upper=False,",
        "torch.linalg.solve_triangular(erase.mT, rows, upper=True,",
    ),
    Mutant(
        "torch",
        "gradient: the write of momentum does not reach k",
        MATH,
        "rows.addcmul_(pairs[:, :, 0], factors[..., :1]).addcmul_(pairs[:, :, 1], factors[..., 1:])",
        "rows.addcmul_(pairs[:, :, 0], factors[..., :1])",
    ),
    Mutant(
        "torch",
        "gradient: the norm's projection is missing",
        PASSES,
        "            gradient.addcmul_(unit, along.unsqueeze(-1), value=-1)  # (18); the factor n is applied below\n",
        "            pass\n",
    ),
    Mutant(
        "torch",
        "gradient: states rebuilt between groups of chunks miss beta",
        TORCH,
        "torch.bmm((after * gates.beta).unsqueeze(1), decay_mu[:, 1:])",
        "torch.bmm(after.unsqueeze(1), decay_mu[:, 1:])",
    ),
    Mutant(
        "torch",
        "gradient: value heads that share a key head are not added up",
        PASSES,
        "gradient = gradient.unflatten(0, (-1, shared)).sum(1)",
        "gradient = gradient.unflatten(0, (-1, shared))[:, 0]",
    ),
    Mutant(
        "torch",
        "a gate of -inf is not clamped",
        MATH,
        "F.pad(log_gate.clamp(min=LOG_OF_ZERO) * LOG2_E, (1, 0))",
        "F.pad(log_gate * LOG2_E, (1, 0))",
    ),
    Mutant(
        "torch",
        "tokens that fill a ragged chunk up are not neutral",
        PASSES,
        "rows = torch.where(group.valid.repeat_interleave(self.heads, dim=0), rows, 0.0)",
        "pass",
    ),
    Mutant(
        "torch",
        "the step reads before it writes",
        REFERENCE,
        "    o = torch.matmul(q.unsqueeze(-2), S).squeeze(-2)\n",
        "    o = torch.matmul(q.unsqueeze(-2), (S + beta[..., None, None] * M) / alpha.unsqueeze(-1)).squeeze(-2)\n",
    ),
    Mutant(
        "torch",
        "the step does not write the momentum back into its slots",
        REFERENCE,
        "        state.M.index_copy_(0, state_indices, M)\n",
        "",
    ),
    Mutant(
        "recurrent",
        "the momentum misses eta",
        REFERENCE,
        'torch.einsum("bhk,bhv->bhkv", eta[:, t, :, None] * k[:, t], residual)',
        'torch.einsum("bhk,bhv->bhkv", k[:, t], residual)',
    ),
    # ------------------------------------------------------------------- a decay for every key dimension, in torch
    Mutant(
        "torch",
        "vector momentum: the momentum of the earlier run does not reach the later run's reads",
        VECTOR_MATH,
        "read_M.mul_(mbar).addcmul_(read_S, b, value=-1)",
        "read_M.mul_(mbar)",
        tests="vector",
    ),
    Mutant(
        "torch",
        "vector momentum: joined runs forget what the earlier one moved from M to S",
        VECTOR_MATH,
        "torch.addcmul(later.abar * self.b, later.b, self.mbar)",
        "later.b * self.mbar",
        tests="vector",
    ),
    Mutant(
        "torch",
        "vector momentum: a query does not read its own token's direct write",
        VECTOR_MATH,
        "attend.diagonal(dim1=-2, dim2=-1).copy_(own)",
        "attend.diagonal(dim1=-2, dim2=-1).copy_(own * 0)",
        tests="vector",
    ),
    Mutant(
        "torch",
        "vector momentum: gradient of mu without its way through b",
        VECTOR_MATH,
        "torch.addcmul(grad_steps.mbar, grad_b, beta)",
        "grad_steps.mbar + 0 * beta",
        tests="vector",
    ),
    Mutant(
        "torch",
        "vector momentum: places behind the last token decay",
        VECTOR_MATH,
        "padded(gates.alpha, 1.0)",
        "padded(gates.alpha, 0.0)",
        tests="vector",
    ),
    # --------------------------------------------------------------------------------------------- the native kernel
    Mutant(
        "cpu",
        "b is taken after the token in the target",
        FORWARD,
        "load(residual.row(i)) + sum * b[i])",
        "load(residual.row(i)) + sum * b[i + 1])",
    ),
    Mutant(
        "cpu",
        "the output reads S0 with the decay before the token",
        FORWARD,
        "const float *abar = ws.gates.abar + 1, *b = ws.gates.b + 1;",
        "const float *abar = ws.gates.abar, *b = ws.gates.b + 1;",
    ),
    Mutant(
        "cpu",
        "eta is missing in the weights of the writes",
        CHUNK,
        "advance(last, e_i * eta[i])",
        "advance(last, e_i)",
    ),
    Mutant(
        "cpu",
        "the weights of momentum lose a block of 16 columns at its border",
        CHUNK,
        "return std::min(chunk.C, round_up(r + 1));",
        "return std::min(chunk.C, round_up(r));",
    ),
    Mutant(
        "cpu",
        "the momentum is not subtracted from the next fast weight",
        STATE,
        "load(before.S.row(i)) * abar_C - load(before.M.row(i)) * b_C + sum);",
        "load(before.S.row(i)) * abar_C + sum);",
    ),
    Mutant(
        "cpu",
        "gradient: the adjoint of mbar misses beta",
        GATE_GRADIENTS,
        "adjoint_mbar = beta_i * adjoint_b + mu_after * adjoint_mbar;",
        "adjoint_mbar = adjoint_b + mu_after * adjoint_mbar;",
    ),
    Mutant(
        "cpu",
        "gradient: the row before is the row itself",
        GATE_GRADIENTS,
        "const float *gamma_S_before = gates.gamma_S.row(i), *gamma_M_before = gates.gamma_M.row(i);",
        "const float *gamma_S_before = gates.gamma_S.row(i), *gamma_M_before = gates.gamma_M.row(i + 1);",
    ),
    Mutant(
        "cpu",
        "gradient: the states before the last chunk but one are not rebuilt",
        BACKWARD,
        "for (long i = 0; i + 1 < chunks; ++i) {",
        "for (long i = 0; i + 2 < chunks; ++i) {",
    ),
    Mutant(
        "cpu",
        "gradient: the write of momentum does not reach the values",
        BACKWARD,
        "load(grad_target.row(i)) - sum * write_M[i]);",
        "load(grad_target.row(i)));",
    ),
    Mutant("cpu", "the step forgets eta", STEP, "write = r * -head.eta,", "write = r * -1.0f,"),
    Mutant(
        "cpu",
        "the step writes directly into S before it decays",
        STEP,
        "new_S[i] = new_S[i] + direct_write * k[i];",
        "new_S[i] = new_S[i] + direct_write * (k[i] * head.alpha);",
        tests="general and step",
    ),
    Mutant(
        "cpu",
        "with look-ahead the gradient of erase has a diagonal",
        BACKWARD,
        "if (!has_diagonal) clear_diagonal(term.grad_products, chunk.rows);",
        "",
        tests="lookahead",
    ),
    Mutant(
        "cpu",
        "gradient: the direct write gets that of the write into the momentum",
        GATE_GRADIENTS,
        "grad_direct[i] = adjoint_S[i];",
        "grad_direct[i] = adjoint_M[i];",
        tests="general",
    ),
    Mutant(
        "cpu",
        "the step uses the wrong key head",
        STEP,
        "value_head / (step.value_heads / step.key_heads)",
        "value_head % step.key_heads",
    ),
    Mutant(
        "cpu",
        "the step ignores slots",
        STEP,
        "    const long slot = step.slots != nullptr ? step.slots[row] : row;\n    const long key_row",
        "    const long slot = row;\n    const long key_row",
    ),
    # ------------------------------------------------------------------ a decay for every key dimension, natively
    Mutant(
        "cpu",
        "vector decay: p reads the state after its token's decay",
        VECTOR_CHUNK,
        "find_products(unit, p.row(i), i, i - 1, pk, pe, -1);",
        "find_products(unit, p.row(i), i, i, pk, pe, -1);",
        tests="kda or rwkv7",
    ),
    Mutant(
        "cpu",
        "vector decay: gradient of the decays without the state's own",
        VECTOR_BACKWARD,
        "at_end[d] = vectors.abar.row(C)[d] * dot(ws.gradient.row(d), S0.row(d), V);",
        "at_end[d] = 0;",
        tests="gla or kda or rwkv7",
    ),
    Mutant(
        "cpu",
        "vector decay: gradient of the values misses what the erase key wrote",
        VECTOR_BACKWARD,
        "multiply_upper(ws.scratch, ws.pk_T, grad_target, C);",
        "multiply_upper(ws.scratch, ws.pk_T, grad_o, C);",
        tests="rwkv7",
    ),
    # ---------------------------------------------------------------------------------------- the first-order rules
    Mutant(
        "torch",
        "value heads use key heads in turns instead of in groups",
        INPUTS,
        "x.repeat_interleave(heads // x.shape[-2], -2)",
        "torch.cat([x] * (heads // x.shape[-2]), -2)",
    ),
    Mutant(
        "torch",
        "a step does not write back into its slots",
        "first_order/reference.py",
        "        state.index_copy_(0, state_indices, S)\n",
        "        pass\n",
    ),
    Mutant(
        "torch",
        "scalar decay: erase sees the row of the token itself",
        SCALAR,
        "* one_row_down(gamma_S)",
        "* gamma_S.tril(-1)",
    ),
    Mutant(
        "torch",
        "scalar decay: probes are not decayed from the chunk's start",
        SCALAR,
        "one_row_down(abar, first=1.0) * p)",
        "p)",
    ),
    Mutant(
        "torch",
        "vector decay: a write is decayed once too often to the chunk's end",
        VECTOR,
        "following = F.pad(log_alpha[..., 1:, :], (0, 0, 0, 1))",
        "following = log_alpha",
    ),
    Mutant(
        "torch",
        "vector decay: gradient of the decay one token late",
        VECTOR,
        "merge.pairs.earlier(grad_g)[..., 1:, :].add_(along_columns)",
        "merge.pairs.earlier(grad_g)[..., :-1, :].add_(along_columns)",
    ),
    Mutant(
        "torch",
        "vector decay: rwkv7 drops what its erase key finds inside the chunk",
        VECTOR,
        "o = o + matmul(qe[0], probed)",
        "o = o + 0 * matmul(qe[0], probed)",
    ),
    Mutant(
        "torch",
        "state scan: gradient through the probes is missing",
        SCAN,
        "                grad_before -= probes[now].transpose(-1, -2) @ grad_values[now]\n",
        "",
    ),
    Mutant(
        "torch",
        "state scan: finished sequences are put back in the wrong order",
        SCAN,
        "torch.cat(finished[::-1])",
        "torch.cat(finished)",
    ),
    # ------------------------------------------------------------------------------------------- the Triton kernels
    Mutant(
        "triton",
        "b uses the decay of the momentum before the token",
        "triton/prepare.py",
        "b = alpha * b + beta * mbar",
        "b = alpha * b + beta * (mbar / mu)",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "the write misses eta",
        "triton/prepare.py",
        "row_M = mu * row_M + tl.where(j == i, eta, 0.0)",
        "row_M = mu * row_M + tl.where(j == i, 1.0, 0.0)",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "the momentum before a chunk is forgotten in the next fast weight",
        "triton/scans.py",
        "join_columns(turn.abar * S - turn.b * M, turn.mbar * M)",
        "join_columns(turn.abar * S, turn.mbar * M)",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "gradient: the weight of M in S is not carried to the chunk before",
        "triton/scans.py",
        "join_columns(turn.abar * grad_S, turn.mbar * grad_M - turn.b * grad_S)",
        "join_columns(turn.abar * grad_S, turn.mbar * grad_M)",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "gradient: the write of momentum does not reach the values",
        "triton/scans.py",
        "grad_R = turn.write_S * of_S - turn.write_M * of_M",
        "grad_R = turn.write_S * of_S",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "gradient: alpha and mu are swapped between rows",
        "triton/backward_gates.py",
        "            row_S *= alpha\n            row_M *= mu\n",
        "            row_S *= mu\n            row_M *= alpha\n",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "gradient: p's share of log_alpha is missing",
        "triton/backward_gates.py",
        "of_alpha += tl.load(vector_at(grad_vectors, slot, GRAD_ALPHA_IN_P, GRAD_VECTORS, C))",
        "of_alpha += 0.0",
        "gates or pack or lengths",
    ),
    Mutant(
        "triton",
        "the step reads the error at the state that has not decayed",
        "triton/decode.py",
        "        p_t *= alpha\n",
        "        p_t *= 1.0\n",
        "decode",
    ),
)
