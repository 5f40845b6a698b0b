// The states S and M of one unit, [K, V] in scratch memory, and how a chunk moves them on.
#pragma once

#include "chunk.h"

namespace mdn {

// Builds the pass's workspace in this thread's scratch memory and calls body with it.
template <class Workspace, class Body, class... Sizes>
inline void with_workspace(Body&& body, const Sizes&... sizes) {
    Scratch& scratch = scratch_of_this_thread();
    Arena measure(nullptr);
    { Workspace unused(measure, sizes...); }
    Arena arena(scratch.reserve(measure.taken()));
    Workspace workspace(arena, sizes...);
    body(workspace);
    scratch.release_if_large();
}

// From the caller's [K, V] (null: zeros) to scratch, zeros in the padding.
inline void load_state(const Unit& unit, float* to, long stride, const float* from) {
    const long rows = round_up(unit.problem.key_dim);
    if (from == nullptr) return fill_zeros(to, rows * stride);
    load_matrix(to, stride, from + unit.state_at(), unit.problem.value_dim, unit.problem.key_dim, rows, unit.columns);
}

inline void store_state(const Unit& unit, float* to, const float* from, long stride) {
    store_matrix(to + unit.state_at(), unit.problem.value_dim, from, stride, unit.problem.key_dim, unit.columns);
}

// Sixteen columns of both states.
struct StatePanel {
    float *state, *momentum;
    long stride;
};

// S' = abar_C S - b_C M + K^T diag(write_state) R;  M' = mbar_C M + K^T diag(write_momentum) R, for one panel.
// `after` may be `before`. `residual` and the scratch `write` are [C, 16]. Asked for ahead: where M' and the next panel's S' will
// go if that is new memory, and `ahead`, which the next panel begins with.
inline void advance_states(const MdnProblem& problem, const Gates& gates, const Keys& keys, const StatePanel& before,
                           const StatePanel& after, const float* residual, float* write, const Ahead& ahead) {
    const long rows = gates.rows, key_dim = round_up(problem.key_dim), stride = before.stride;
    const float decay = gates.decay(), b = gates.b[rows], momentum_decay = gates.momentum_decay();
    const auto scaled_residual = [&](const float* factor) {
        for (long i = 0; i < rows; ++i) store(write + i * kWidth, load(residual + i * kWidth) * factor[i]);
    };
    scaled_residual(gates.write_state);
    if (!problem.has_momentum) {
        multiply(keys.k_columns, keys.columns_stride, write, kWidth, key_dim, rows, [&](long i, const Row& sum) {
            ahead.row(i);
            store(after.state + i * stride, load(before.state + i * stride) * decay + sum);
        });
        return;
    }
    const long unseen = after.state == before.state ? 0 : key_dim;
    const Ahead momentum_ahead(after.momentum, stride, unseen), state_ahead(after.state + kWidth, stride, unseen);
    multiply(keys.k_columns, keys.columns_stride, write, kWidth, key_dim, rows, [&](long i, const Row& sum) {
        ahead.row(i), momentum_ahead.row(i);
        const Row kept = load(before.state + i * stride) * decay - load(before.momentum + i * stride) * b;
        store(after.state + i * stride, kept + sum);
    });
    scaled_residual(gates.write_momentum);
    multiply(keys.k_columns, keys.columns_stride, write, kWidth, key_dim, rows, [&](long i, const Row& sum) {
        state_ahead.row(i);
        store(after.momentum + i * stride, load(before.momentum + i * stride) * momentum_decay + sum);
    });
}

}  // namespace mdn
