// The forward pass: chunk by chunk, 16 columns of V at a time.
//
// Per chunk and panel of 16 columns, with S, M the states before the chunk (names in chunk.h):
//     U = V - diag(abar_prev) P S + diag(b_prev) P M
//     (I + A) R = U                                        A = (P K^T) * eta * gamma_prev, strictly lower triangular
//     O = diag(abar) Q S - diag(b) Q M + W R               W = (Q K^T) * eta * gamma, lower triangular
//     S' = abar_C S - b_C M + K^T diag(write_state) R      M' = mbar_C M + K^T diag(write_momentum) R
#include "state.h"
#include "threads.h"

namespace mdn {
namespace {

struct Workspace {
    Gates gates;
    Keys keys;
    float *erase, *read;            // A and W, [C, C]
    float *state, *momentum;        // [K, V]
    float *residual, *out, *write;  // [C, 16]
    long state_stride;

    Workspace(Arena& arena, const MdnProblem& problem)
        : gates(arena, problem.chunk), keys(arena, problem.chunk, problem.key_dim) {
        const long columns = problem.value_dim / problem.slices;
        state_stride = row_stride(columns);
        for (float** x : {&erase, &read}) *x = arena.take(problem.chunk * row_stride(problem.chunk));
        for (float** x : {&state, &momentum}) *x = arena.take(round_up(problem.key_dim) * state_stride);
        for (float** x : {&residual, &out, &write}) *x = arena.take(problem.chunk * kWidth);
    }
};

// (I + A) R = U in place, by blocks of rows: what is already solved is subtracted by one product, the rest row by row.
void solve_downwards(float* u, const float* a, long a_stride, long rows) {
    for_blocks_down(rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        tile<block>(a + first * a_stride, a_stride, u, kWidth, first, [&](int r, const Row& sum) {
            Row x = load(u + (first + r) * kWidth) - sum;
            for (int s = 0; s < r; ++s)
                x = x - load(u + (first + s) * kWidth) * a[(first + r) * a_stride + first + s];
            store(u + (first + r) * kWidth, x);
        });
    });
}

// U and, from it, R of one panel.
template <class Element>
void find_residual(const Unit& unit, Workspace& ws, long token, long tokens, long column, bool state_is_zero) {
    const MdnProblem& problem = unit.problem;
    const Gates& gates = ws.gates;
    const long key_dim = round_up(problem.key_dim), width = std::min<long>(kWidth, unit.columns - column);
    const Element* v = static_cast<const Element*>(problem.v) + unit.value_at(token) + column;
    const Ahead residual_ahead = unit.panel_ahead<float>(problem.residual, token, column);
    load_matrix(ws.residual, kWidth, v, unit.value_stride(), tokens, gates.rows, width);
    if (problem.has_erase && !state_is_zero) {
        multiply(ws.keys.p, ws.keys.stride, ws.state + column, ws.state_stride, gates.rows, key_dim,
                 [&](long i, const Row& sum) {
                     residual_ahead.row(i);
                     store(ws.residual + i * kWidth, load(ws.residual + i * kWidth) - sum * gates.abar[i]);
                 });
        if (problem.has_momentum)
            multiply(ws.keys.p, ws.keys.stride, ws.momentum + column, ws.state_stride, gates.rows, key_dim,
                     [&](long i, const Row& sum) {
                         store(ws.residual + i * kWidth, load(ws.residual + i * kWidth) + sum * gates.b[i]);
                     });
    }
    if (problem.has_erase) solve_downwards(ws.residual, ws.erase, ws.keys.columns_stride, gates.rows);
    if (problem.residual != nullptr)
        store_matrix(problem.residual + unit.value_at(token) + column, unit.value_stride(), ws.residual, kWidth, tokens,
                     width);
}

template <class Element>
void find_output(const Unit& unit, Workspace& ws, long token, long tokens, long column, bool state_is_zero) {
    const MdnProblem& problem = unit.problem;
    const Gates& gates = ws.gates;
    const long key_dim = round_up(problem.key_dim), stride = ws.keys.columns_stride;
    const Ahead out_ahead = unit.panel_ahead<Element>(problem.o, token, column);
    for_blocks_down(gates.rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        tile<block>(ws.read + first * stride, stride, ws.residual, kWidth, first + block,
                    [&](int r, const Row& sum) { store(ws.out + (first + r) * kWidth, sum); });
    });
    if (!state_is_zero) {
        multiply(ws.keys.q, ws.keys.stride, ws.state + column, ws.state_stride, gates.rows, key_dim,
                 [&](long i, const Row& sum) {
                     out_ahead.row(i);
                     store(ws.out + i * kWidth, load(ws.out + i * kWidth) + sum * gates.abar[i + 1]);
                 });
        if (problem.has_momentum)
            multiply(ws.keys.q, ws.keys.stride, ws.momentum + column, ws.state_stride, gates.rows, key_dim,
                     [&](long i, const Row& sum) {
                         store(ws.out + i * kWidth, load(ws.out + i * kWidth) - sum * gates.b[i + 1]);
                     });
    }
    store_matrix(static_cast<Element*>(problem.o) + unit.value_at(token) + column, unit.value_stride(), ws.out, kWidth,
                 tokens, std::min<long>(kWidth, unit.columns - column));
}

template <class Element>
void forward_chunk(const Unit& unit, Workspace& ws, long token, long tokens, bool state_is_zero) {
    const MdnProblem& problem = unit.problem;
    ws.gates.load(unit, token, tokens);
    ws.keys.load_k<Element>(unit, token, tokens, ws.gates.rows);
    ws.keys.load_p_and_q<Element>(unit, ws.gates, token, tokens);
    const float* gamma = ws.gates.gamma;
    if (problem.has_erase)
        masked_product(ws.erase, nullptr, ws.keys.p, ws.keys, ws.gates, gamma, problem.key_dim);
    masked_product(ws.read, nullptr, ws.keys.q, ws.keys, ws.gates, gamma + ws.gates.stride, problem.key_dim);
    for (long column = 0; column < unit.columns; column += kWidth) {
        find_residual<Element>(unit, ws, token, tokens, column, state_is_zero);
        find_output<Element>(unit, ws, token, tokens, column, state_is_zero);
        const StatePanel panel{ws.state + column, ws.momentum + column, ws.state_stride};
        const Ahead v_ahead = unit.panel_ahead<Element>(problem.v, token, column + kWidth, token + problem.chunk);
        advance_states(problem, ws.gates, ws.keys, panel, panel, ws.residual, ws.write, v_ahead);
    }
}

template <class Element>
void forward_unit(const void* context, long index) {
    const MdnProblem& problem = *static_cast<const MdnProblem*>(context);
    const Unit unit(problem, index);
    with_workspace<Workspace>([&](Workspace& ws) {
        bool state_is_zero = problem.initial_state == nullptr;
        load_state(unit, ws.state, ws.state_stride, problem.initial_state);
        if (problem.has_momentum) load_state(unit, ws.momentum, ws.state_stride, problem.initial_momentum);
        for (long token = 0; token < unit.tokens; token += problem.chunk) {
            forward_chunk<Element>(unit, ws, token, std::min<long>(problem.chunk, unit.tokens - token), state_is_zero);
            state_is_zero = false;
        }
        store_state(unit, problem.final_state, ws.state, ws.state_stride);
        if (problem.has_momentum) store_state(unit, problem.final_momentum, ws.momentum, ws.state_stride);
    }, problem);
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_forward(const MdnProblem* problem) {
    const long units = problem->sequences * problem->value_heads * problem->slices;
    const auto work = problem->bfloat16 ? mdn::forward_unit<mdn::BFloat16> : mdn::forward_unit<float>;
    return mdn::run_units(problem->threads, units, work, problem) ? 0 : 1;
}
