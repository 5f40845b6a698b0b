// The states S and M of one unit, [K, V] in scratch memory, and how a chunk advances them.
#pragma once

#include "chunk.h"

namespace mdn {

// Both states of one unit, or their gradients: [K, V], or a panel of 16 columns of them, [K, 16].
struct States {
    Matrix S, M;

    States panel(long column) const { return {S.from(0, column), M.from(0, column)}; }
};

// From the caller's [N, HV, K, V] (null: zeros) to scratch, zeros in the padding.
inline void load_state(const Unit& unit, const Matrix to, const float* from) {
    const MdnProblem& problem = unit.problem;
    const long K = round_up(problem.key_dim);
    if (from == nullptr) return fill_zeros(to, K);
    load_matrix(to, from + unit.state_offset(), problem.value_dim, problem.key_dim, K, unit.columns);
}

inline void store_state(const Unit& unit, float* to, const Matrix from) {
    const MdnProblem& problem = unit.problem;
    store_matrix(to + unit.state_offset(), problem.value_dim, from, problem.key_dim, unit.columns);
}

// (8) for one panel: S' = abar_C S0 - b_C M0 + K^T diag(write_S) R,  M' = mbar_C M0 - K^T diag(write_M) R.
// `after` may be `before`; `residual` (R) and the scratch `weighted` are [C, 16]. Prefetched meanwhile: where M' and
// the next panel's S' will go if that is new memory, and `next`, which the next panel begins with.
inline void advance_states(const Chunk& chunk, const Gates& gates, const Matrix k_T, const States before,
                           const States after, const Matrix residual, const Matrix weighted, const Prefetch next) {
    const float abar_C = gates.abar_C, b_C = gates.b_C, mbar_C = gates.mbar_C;
    const auto weigh_residual = [&](const float* weight) {
        for (long i = 0; i < chunk.rows; ++i) store(weighted.row(i), load(residual.row(i)) * weight[i]);
    };
    weigh_residual(gates.write_S);
    if (!chunk.problem.has_momentum) {
        multiply(k_T, weighted, chunk.K, chunk.rows, [&](long i, const Vector& sum) {
            next.row(i);
            store(after.S.row(i), load(before.S.row(i)) * abar_C + sum);
        });
        return;
    }
    const long new_rows = after.S.data == before.S.data ? 0 : chunk.K;
    const Prefetch next_M(after.M, new_rows), next_S(after.S.from(0, kWidth), new_rows);
    multiply(k_T, weighted, chunk.K, chunk.rows, [&](long i, const Vector& sum) {
        next.row(i);
        next_M.row(i);
        store(after.S.row(i), load(before.S.row(i)) * abar_C - load(before.M.row(i)) * b_C + sum);
    });
    weigh_residual(gates.write_M);
    multiply(k_T, weighted, chunk.K, chunk.rows, [&](long i, const Vector& sum) {
        next_S.row(i);
        store(after.M.row(i), load(before.M.row(i)) * mbar_C - sum);
    });
}

}  // namespace mdn
