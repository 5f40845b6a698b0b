// The forward pass: chunk by chunk, 16 columns of V (a panel) at a time; equations of docs/derivation.md.
//
//     (I + erase) R = target                target = V - diag(abar_prev) P S0 + diag(b_prev) P M0              (6)
//     O  = diag(abar) Q S0 - diag(b) Q M0 + attend R                            (Q includes the scale)         (7)
//     S' = abar_C S0 - b_C M0 + K^T diag(write_S) R,    M' = mbar_C M0 - K^T diag(write_M) R                   (8)
#include "state.h"
#include "threads.h"
#include "triangular.h"

namespace mdn {
namespace {

struct Workspace {
    Gates gates;
    TokenVectors vectors;
    Matrix erase, attend;  // [C, C]
    Matrix products;       // [C, C]: P K^T, then Q K^T
    States states;         // [K, V]
    Matrix residual;       // [C, 16]: the right-hand side `target`, then R
    Matrix out, weighted;  // [C, 16]

    Workspace(Arena& arena, const MdnProblem& problem)
        : Workspace(arena, round_up(problem.chunk_size), round_up(problem.key_dim),
                    problem.value_dim / problem.slices) {}

   private:
    Workspace(Arena& arena, long C, long K, long V)
        : gates(arena, C),
          vectors(arena, C, K),
          erase(arena.matrix(C, C)),
          attend(arena.matrix(C, C)),
          products(arena.matrix(C, C)),
          states{arena.matrix(K, V), arena.matrix(K, V)},
          residual(arena.panel(C)),
          out(arena.panel(C)),
          weighted(arena.panel(C)) {}
};

// (6) R of one panel.
template <class Element>
MDN_APART void find_residual(const Chunk& chunk, const Workspace& ws, long column, bool state_is_zero) {
    const MdnProblem& problem = chunk.problem;
    const Matrix residual = ws.residual, p = ws.vectors.p;
    const float *abar = ws.gates.abar + chunk.probe, *b = ws.gates.b + chunk.probe;
    const States states = ws.states.panel(column);
    const Prefetch residual_rows = chunk.prefetch<float>(problem.residual, column);
    const Element* v = chunk.panel(static_cast<const Element*>(problem.v), column);
    load_matrix(residual, v, chunk.unit.value_stride(), chunk.tokens, chunk.rows, chunk.width(column));
    if (problem.has_erase && !state_is_zero) {
        multiply(p, states.S, chunk.rows, chunk.K, [&](long i, const Vector& sum) {
            residual_rows.row(i);
            store(residual.row(i), load(residual.row(i)) - sum * abar[i]);
        });
        if (problem.has_momentum)
            multiply(p, states.M, chunk.rows, chunk.K,
                     [&](long i, const Vector& sum) { store(residual.row(i), load(residual.row(i)) + sum * b[i]); });
    }
    if (problem.has_erase) solve_lower(residual, ws.erase, chunk.rows);
    if (problem.residual != nullptr)
        store_matrix(chunk.panel(problem.residual, column), chunk.unit.value_stride(), residual, chunk.tokens,
                     chunk.width(column));
}

// (7) O of one panel.
template <class Element>
MDN_APART void find_output(const Chunk& chunk, const Workspace& ws, long column, bool state_is_zero) {
    const MdnProblem& problem = chunk.problem;
    const Matrix out = ws.out, q = ws.vectors.q;
    const float *abar = ws.gates.abar + 1, *b = ws.gates.b + 1;
    const States states = ws.states.panel(column);
    const Prefetch o_rows = chunk.prefetch<Element>(problem.o, column);
    multiply_lower(out, ws.attend, ws.residual, chunk.rows);
    if (!state_is_zero) {
        multiply(q, states.S, chunk.rows, chunk.K, [&](long i, const Vector& sum) {
            o_rows.row(i);
            store(out.row(i), load(out.row(i)) + sum * abar[i]);
        });
        if (problem.has_momentum)
            multiply(q, states.M, chunk.rows, chunk.K,
                     [&](long i, const Vector& sum) { store(out.row(i), load(out.row(i)) - sum * b[i]); });
    }
    store_matrix(chunk.panel(static_cast<Element*>(problem.o), column), chunk.unit.value_stride(), out, chunk.tokens,
                 chunk.width(column));
}

template <class Element>
void forward_chunk(const Chunk& chunk, Workspace& ws, bool state_is_zero) {
    const MdnProblem& problem = chunk.problem;
    ws.gates.load(chunk);
    ws.vectors.load_k<Element>(chunk);
    if (problem.o != nullptr) ws.vectors.load_q<Element>(chunk);
    ws.vectors.load_p<Element>(chunk, ws.gates);
    const Matrix k_T = ws.vectors.k_T, gamma_S = ws.gates.gamma_S;
    if (problem.has_erase)
        masked_product(chunk, ws.erase, ws.products, ws.vectors.p, k_T, gamma_S.from(chunk.probe, 0));
    if (problem.o != nullptr) masked_product(chunk, ws.attend, ws.products, ws.vectors.q, k_T, gamma_S.from(1, 0));
    for (long column = 0; column < chunk.unit.columns; column += kWidth) {
        find_residual<Element>(chunk, ws, column, state_is_zero);
        if (problem.o != nullptr) find_output<Element>(chunk, ws, column, state_is_zero);
        const States states = ws.states.panel(column);
        const Prefetch next_v = chunk.prefetch<Element>(problem.v, column + kWidth, chunk.first + problem.chunk_size);
        advance_states(chunk, ws.gates, k_T, states, states, ws.residual, ws.weighted, next_v);
    }
}

template <class Element>
void forward_unit(const void* context, long index) {
    const MdnProblem& problem = *static_cast<const MdnProblem*>(context);
    const Unit unit(problem, index);
    const auto run = [&](Workspace& ws) {
        load_state(unit, ws.states.S, problem.initial_S);
        if (problem.has_momentum) load_state(unit, ws.states.M, problem.initial_M);
        for (long i = 0; i * problem.chunk_size < unit.tokens; ++i)
            forward_chunk<Element>(Chunk(unit, i), ws, i == 0 && problem.initial_S == nullptr);
        store_state(unit, problem.final_S, ws.states.S);
        if (problem.has_momentum) store_state(unit, problem.final_M, ws.states.M);
    };
    with_workspace<Workspace>(run, problem);
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_forward(const MdnProblem* problem) {
    const long units = problem->sequences * problem->value_heads * problem->slices;
    const auto work = problem->bfloat16 ? mdn::forward_unit<mdn::BFloat16> : mdn::forward_unit<float>;
    return mdn::run_units(problem->threads, units, work, problem) ? 0 : 1;
}
