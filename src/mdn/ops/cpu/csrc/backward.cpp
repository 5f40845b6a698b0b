// The backward pass. Only R was saved; the states at every chunk's start are rebuilt from it, then chunks are visited
// last to first. Equations of docs/derivation.md, with grad_S' and grad_M' the gradients of the states after the chunk:
//
//     grad_R = attend^T grad_O + diag(write_S) K grad_S' - diag(write_M) K grad_M'                             (9)
//     (I + erase)^T grad_target = grad_R,    grad_V = grad_target                                             (10)
//     grad_S0 = abar_C grad_S' + Q^T diag(abar) grad_O - P^T diag(abar_prev) grad_target                      (11)
//     grad_M0 = mbar_C grad_M' - b_C grad_S' - Q^T diag(b) grad_O + P^T diag(b_prev) grad_target
//     grad_erase = -grad_target R^T,    grad_attend = grad_O R^T                                              (12)
//     grad_pk = grad_erase * gamma_S_prev,    grad_qk = grad_attend * gamma_S                                 (13)
//     grad_gamma_S_prev += grad_erase * pk,    grad_gamma_S += grad_attend * qk
//     grad_Q = diag(abar) grad_O S0^T - diag(b) grad_O M0^T + grad_qk K                                       (14)
//     grad_P = -diag(abar_prev) grad_target S0^T + diag(b_prev) grad_target M0^T + grad_pk K
//     grad_K = diag(write_S) R grad_S'^T - diag(write_M) R grad_M'^T + grad_qk^T Q + grad_pk^T P
//     gradients of abar, b, mbar, write_S, write_M: the scalar products inside these                          (15)
//
// Gradients of q, k, p are built transposed, [K, C]: then both operands of every product above are read as they lie in
// memory, and the scalar products of (15) are sums over rows.
#include "gate_gradients.h"
#include "state.h"
#include "threads.h"
#include "triangular.h"

namespace mdn {
namespace {

struct Workspace {
    Gates gates;
    TokenVectors vectors;
    GateGradients gate_gradients;
    Matrix pk, qk, erase, attend;                // [C, C]
    Matrix erase_T, attend_T;                    // [C, C]; after (10) they hold grad_pk_T and grad_qk_T
    Matrix grad_pk, grad_qk;                     // [C, C]
    Matrix qp_T;                                 // [K, 2 C]: Q^T and P^T side by side, P^T from column `rows` on
    Matrix grad_q_T, grad_k_T, grad_p_T;         // [K, C]
    Matrix grad_o, grad_target;                  // [C, V]
    Matrix grad_o_T, grad_target_T, residual_T;  // [V, C]
    Matrix residual;                             // [C, 16]: R of one panel
    Matrix weighted;                             // [2 C, 16]
    States gradient;                             // [K, V]: grad_S' and grad_M', then grad_S0 and grad_M0
    Matrix chunk_starts;                         // [chunks, 2, K, V]: S0 and M0 of every chunk

    Workspace(Arena& arena, const MdnProblem& problem, long chunks)
        : Workspace(arena, round_up(problem.chunk_size), round_up(problem.key_dim),
                    round_up(problem.value_dim / problem.slices), chunks) {}

    States before(long chunk) const {
        const long size = K * chunk_starts.stride;
        float* S = chunk_starts.data + chunk * 2 * size;
        return {{S, chunk_starts.stride}, {S + size, chunk_starts.stride}};
    }

   private:
    long K;

    Workspace(Arena& arena, long C, long K, long V, long chunks)
        : gates(arena, C),
          vectors(arena, C, K),
          gate_gradients(arena, C),
          pk(arena.matrix(C, C)),
          qk(arena.matrix(C, C)),
          erase(arena.matrix(C, C)),
          attend(arena.matrix(C, C)),
          erase_T(arena.matrix(C, C)),
          attend_T(arena.matrix(C, C)),
          grad_pk(arena.matrix(C, C)),
          grad_qk(arena.matrix(C, C)),
          qp_T(arena.matrix(K, 2 * C)),
          grad_q_T(arena.matrix(K, C)),
          grad_k_T(arena.matrix(K, C)),
          grad_p_T(arena.matrix(K, C)),
          grad_o(arena.matrix(C, V)),
          grad_target(arena.matrix(C, V)),
          grad_o_T(arena.matrix(V, C)),
          grad_target_T(arena.matrix(V, C)),
          residual_T(arena.matrix(V, C)),
          residual(arena.panel(C)),
          weighted(arena.panel(2 * C)),
          gradient{arena.matrix(K, V), arena.matrix(K, V)},
          chunk_starts(arena.matrix(chunks * 2 * K, V)),
          K(K) {}
};

struct BackwardChunk : Chunk {
    long index;
    bool state_is_zero;     // S0 and M0
    bool gradient_is_zero;  // grad_S' and grad_M'

    BackwardChunk(const Unit& unit, long index, long chunks)
        : Chunk(unit, index),
          index(index),
          state_is_zero(index == 0 && problem.initial_S == nullptr),
          gradient_is_zero(index == chunks - 1 && problem.grad_final_S == nullptr) {}
};

void load_residual(const Chunk& chunk, const Matrix residual, long column) {
    load_matrix(residual, chunk.panel(chunk.problem.residual, column), chunk.unit.value_stride(), chunk.tokens, chunk.C,
                chunk.width(column));
}

// S0 and M0 of every chunk, by (8) with the saved R.
template <class Element>
void rebuild_states(const Unit& unit, Workspace& ws, long chunks) {
    const MdnProblem& problem = unit.problem;
    load_state(unit, ws.before(0).S, problem.initial_S);
    if (problem.has_momentum) load_state(unit, ws.before(0).M, problem.initial_M);
    for (long i = 0; i + 1 < chunks; ++i) {
        const Chunk chunk(unit, i);
        ws.gates.load(chunk);
        ws.vectors.load_k<Element>(chunk);
        for (long column = 0; column < unit.columns; column += kWidth) {
            load_residual(chunk, ws.residual, column);
            const Prefetch next_residual =
                chunk.prefetch<float>(problem.residual, column + kWidth, chunk.first + problem.chunk_size);
            advance_states(chunk, ws.gates, ws.vectors.k_T, ws.before(i).panel(column), ws.before(i + 1).panel(column),
                           ws.residual, ws.weighted, next_residual);
        }
    }
}

// With look-ahead (22) erase reads rows of gamma_S that have a diagonal, which is no part of it.
void clear_diagonal(const Matrix x, long rows) {
    for (long i = 0; i < rows; ++i) x.row(i)[i] = 0;
}

// Everything of the forward pass that does not depend on V, and its transposes.
template <class Element>
void prepare_chunk(const Chunk& chunk, Workspace& ws) {
    ws.gates.load(chunk);
    ws.vectors.load_k<Element>(chunk);
    ws.vectors.load_q<Element>(chunk);
    ws.vectors.load_p<Element>(chunk, ws.gates);
    const Matrix k_T = ws.vectors.k_T, gamma_S = ws.gates.gamma_S;
    transpose(ws.qp_T, ws.vectors.q, chunk.C, chunk.K);
    masked_product(chunk, ws.attend, ws.qk, ws.vectors.q, k_T, gamma_S.from(1, 0));
    transpose(ws.attend_T, ws.attend, chunk.rows, chunk.rows);
    if (!chunk.problem.has_erase) return;
    transpose(ws.qp_T.from(0, chunk.rows), ws.vectors.p, chunk.C, chunk.K);
    masked_product(chunk, ws.erase, ws.pk, ws.vectors.p, k_T, gamma_S.from(chunk.probe, 0));
    transpose(ws.erase_T, ws.erase, chunk.rows, chunk.rows);
    if (chunk.problem.lookahead) clear_diagonal(ws.pk, chunk.rows);
}

// (9) and (10) for one panel: grad_target, which is also grad_V; the transposes that (14) needs.
template <class Element>
void find_value_gradient(const BackwardChunk& chunk, Workspace& ws, long column) {
    const MdnProblem& problem = chunk.problem;
    const Unit& unit = chunk.unit;
    const Matrix grad_o = ws.grad_o.from(0, column), grad_target = ws.grad_target.from(0, column), k = ws.vectors.k;
    const float *write_S = ws.gates.write_S, *write_M = ws.gates.write_M;
    const States gradient = ws.gradient.panel(column);
    load_matrix(grad_o, chunk.panel(static_cast<const Element*>(problem.grad_o), column), unit.value_stride(),
                chunk.tokens, chunk.C, chunk.width(column));
    const long next_column = column + kWidth, next_first = chunk.first - problem.chunk_size;
    const Prefetch grad_v_rows = chunk.prefetch<Element>(problem.grad_v, column);
    const Prefetch next_grad_o = chunk.prefetch<Element>(problem.grad_o, next_column, next_first);
    const Prefetch next_residual = chunk.prefetch<float>(problem.residual, next_column, next_first);

    multiply_upper(grad_target, ws.attend_T, grad_o, chunk.rows);
    if (!chunk.gradient_is_zero) {
        multiply(k, gradient.S, chunk.rows, chunk.K, [&](long i, const Vector& sum) {
            grad_v_rows.row(i);
            next_grad_o.row(i);
            next_residual.row(i);
            store(grad_target.row(i), load(grad_target.row(i)) + sum * write_S[i]);
        });
        if (problem.has_momentum)
            multiply(k, gradient.M, chunk.rows, chunk.K, [&](long i, const Vector& sum) {
                store(grad_target.row(i), load(grad_target.row(i)) - sum * write_M[i]);
            });
    }
    if (problem.has_erase) solve_upper(grad_target, ws.erase_T, chunk.rows);
    for (long i = chunk.rows; i < chunk.C; ++i) store(grad_target.row(i), zeros());

    store_matrix(chunk.panel(static_cast<Element*>(problem.grad_v), column), unit.value_stride(), grad_target,
                 chunk.tokens, chunk.width(column));
    load_residual(chunk, ws.residual, column);
    transpose(ws.grad_o_T.from(column, 0), grad_o, chunk.C, kWidth);
    transpose(ws.grad_target_T.from(column, 0), grad_target, chunk.C, kWidth);
    transpose(ws.residual_T.from(column, 0), ws.residual, chunk.C, kWidth);
}

// One of the six terms of (14) that go through a state: with Y = state @ rows_T, [K, C],
//     grad_x_T += sign * Y diag(weight)        and, for (15),        grad_weight += sign * sum over K of x_T * Y
struct StateTerm {
    Matrix state;         // [K, V]: S0, M0, grad_S' or grad_M'
    Matrix rows_T;        // [V, C]: grad_O, grad_target or R, transposed
    Matrix x_T;           // [K, C]: Q, P or K, transposed
    Matrix grad_x_T;      // [K, C]
    const float* weight;  // [C]: abar, b, write_S or write_M
    float* grad_weight;   // [C]
    float sign;
    bool is_first;  // of the terms that are added to this grad_x_T: it is overwritten
};

void add_state_term(const Chunk& chunk, const StateTerm& term) {
    const Matrix x_T = term.x_T, grad_x_T = term.grad_x_T;
    const bool is_first = term.is_first;
    for (long t = 0; t < chunk.C; t += kWidth) {
        const Vector weight = load(term.weight + t) * term.sign;
        Vector dots = zeros();
        multiply(term.state, term.rows_T.from(0, t), chunk.K, round_up(chunk.unit.columns),
                 [&](long i, const Vector& sum) {
                     float* gradient = grad_x_T.row(i) + t;
                     dots = dots + load(x_T.row(i) + t) * sum;
                     store(gradient, is_first ? sum * weight : load(gradient) + sum * weight);
                 });
        store(term.grad_weight + t, load(term.grad_weight + t) + dots * term.sign);
    }
}

// The terms of (14) through states, one state after the other: S0, M0, grad_S' and grad_M' together do not fit into the
// L2 cache.
void find_key_gradients_through_states(const BackwardChunk& chunk, const Workspace& ws) {
    const Gates& gates = ws.gates;
    const GateGradients& out = ws.gate_gradients;
    const bool momentum = chunk.problem.has_momentum, erase = chunk.problem.has_erase;
    const long probe = chunk.probe;
    const Matrix q_T = ws.qp_T, p_T = ws.qp_T.from(0, chunk.rows), k_T = ws.vectors.k_T;
    const Matrix grad_q_T = ws.grad_q_T, grad_p_T = ws.grad_p_T, grad_k_T = ws.grad_k_T;
    const auto add = [&](const StateTerm& term) { add_state_term(chunk, term); };
    if (chunk.state_is_zero) {
        fill_zeros(grad_q_T, chunk.K);
        fill_zeros(grad_p_T, chunk.K);
    } else {
        const auto [S0, M0] = ws.before(chunk.index);
        add({S0, ws.grad_o_T, q_T, grad_q_T, gates.abar + 1, out.grad_abar + 1, 1, true});
        if (erase) add({S0, ws.grad_target_T, p_T, grad_p_T, gates.abar + probe, out.grad_abar + probe, -1, true});
        if (momentum) add({M0, ws.grad_o_T, q_T, grad_q_T, gates.b + 1, out.grad_b + 1, -1, false});
        if (momentum && erase)
            add({M0, ws.grad_target_T, p_T, grad_p_T, gates.b + probe, out.grad_b + probe, 1, false});
    }
    if (chunk.gradient_is_zero) {
        fill_zeros(grad_k_T, chunk.K);
    } else {
        const auto [grad_S, grad_M] = ws.gradient;
        add({grad_S, ws.residual_T, k_T, grad_k_T, gates.write_S, out.grad_write_S(chunk), 1, true});
        if (momentum) add({grad_M, ws.residual_T, k_T, grad_k_T, gates.write_M, out.grad_write_M, -1, false});
    }
}

// What attend (through Q and grad_O) or erase (through P and grad_target) contributes to (12), (13) and (14).
struct ProductTerm {
    Matrix rows;           // [C, V]: grad_O or grad_target
    float sign;            // 1 or -1
    Matrix products;       // [C, C]: qk or pk
    Matrix gamma;          // [C, C]: gamma_S from row 1 (attend) or from row `probe` (erase)
    Matrix grad_gamma;     // [C, C]: its gradient
    Matrix grad_products;  // [C, C]: grad_qk or grad_pk, lower triangular
    Matrix grad_products_T;
    Matrix x_T, grad_x_T;  // [K, C]: Q or P
};

// (12) G = sign * rows @ R^T is the gradient of attend or erase;
// (13) grad_products = G * gamma, grad_gamma += G * products.
MDN_FLATTEN void find_product_gradients(const Chunk& chunk, const Matrix residual_T, const ProductTerm term) {
    for (long j = 0; j < chunk.rows; j += kWidth)
        multiply(term.rows.from(j, 0), residual_T.from(0, j), chunk.rows - j, round_up(chunk.unit.columns),
                 [&](long r, const Vector& sum) {
                     const long i = j + r;
                     const Vector grad_masked = sum * term.sign;
                     float* grad_gamma = term.grad_gamma.row(i) + j;
                     store(grad_gamma, load(grad_gamma) + grad_masked * load(term.products.row(i) + j));
                     store(term.grad_products.row(i) + j, grad_masked * load(term.gamma.row(i) + j));
                 });
}

// The last terms of (14): grad_X^T += K^T grad_products^T and grad_K^T += X^T grad_products, X = Q or P; blocks above
// the diagonal are skipped.
void add_product_terms(const Chunk& chunk, const Matrix k_T, const Matrix grad_k_T, const ProductTerm& term) {
    transpose(term.grad_products_T, term.grad_products, chunk.rows, chunk.C);
    for (long t = 0; t < chunk.rows; t += kWidth) {
        const Matrix grad_x = term.grad_x_T.from(0, t), grad_k = grad_k_T.from(0, t);
        multiply(k_T, term.grad_products_T.from(0, t), chunk.K, std::min<long>(t + kWidth, chunk.rows),
                 [&](long i, const Vector& sum) { store(grad_x.row(i), load(grad_x.row(i)) + sum); });
        multiply(term.x_T.from(0, t), term.grad_products.from(t, t), chunk.K, chunk.rows - t,
                 [&](long i, const Vector& sum) { store(grad_k.row(i), load(grad_k.row(i)) + sum); });
    }
}

void find_key_gradients_through_products(const Chunk& chunk, const Workspace& ws) {
    const Matrix gamma_S = ws.gates.gamma_S, grad_gamma_S = ws.gate_gradients.grad_gamma_S;
    const auto add = [&](const ProductTerm& term, bool has_diagonal) {
        find_product_gradients(chunk, ws.residual_T, term);
        if (!has_diagonal) clear_diagonal(term.grad_products, chunk.rows);
        add_product_terms(chunk, ws.vectors.k_T, ws.grad_k_T, term);
    };
    const Matrix q_T = ws.qp_T, p_T = ws.qp_T.from(0, chunk.rows);
    const long probe = chunk.probe;
    add({ws.grad_o, 1, ws.qk, gamma_S.from(1, 0), grad_gamma_S.from(1, 0), ws.grad_qk, ws.attend_T, q_T, ws.grad_q_T},
        true);
    if (chunk.problem.has_erase)
        add({ws.grad_target, -1, ws.pk, gamma_S.from(probe, 0), grad_gamma_S.from(probe, 0), ws.grad_pk, ws.erase_T,
             p_T, ws.grad_p_T},
            !chunk.problem.lookahead);
}

// (11) for one panel; also the gradients of abar_C, b_C and mbar_C (15), which are sums over the whole states.
MDN_FLATTEN void find_state_gradients(const BackwardChunk& chunk, Workspace& ws, long column) {
    const Gates& gates = ws.gates;
    const long rows = chunk.rows, depth = chunk.problem.has_erase ? 2 * rows : rows;
    const States before = ws.before(chunk.index).panel(column), gradient = ws.gradient.panel(column);
    const float abar_C = gates.abar_C, b_C = gates.b_C, mbar_C = gates.mbar_C;
    const Matrix grad_o = ws.grad_o.from(0, column), grad_target = ws.grad_target.from(0, column);
    const Matrix weighted = ws.weighted;
    const auto stack = [&](const float* weight_of_grad_o, const float* weight_of_grad_target) {
        for (long i = 0; i < rows; ++i) {
            store(weighted.row(i), load(grad_o.row(i)) * weight_of_grad_o[i]);
            store(weighted.row(rows + i), load(grad_target.row(i)) * -weight_of_grad_target[i]);
        }
    };
    // What the second product and the next panel's first one will read.
    const Prefetch this_S(before.S, chunk.K), next_M(before.M.from(0, kWidth), chunk.K);
    Vector abar_dots = zeros(), b_dots = zeros(), mbar_dots = zeros();
    if (chunk.problem.has_momentum) {
        stack(gates.b + 1, gates.b + chunk.probe);
        multiply(ws.qp_T, weighted, chunk.K, depth, [&](long i, const Vector& sum) {
            const Vector grad_S = load(gradient.S.row(i)), grad_M = load(gradient.M.row(i)), M0 = load(before.M.row(i));
            this_S.row(i);
            b_dots = b_dots - grad_S * M0;
            mbar_dots = mbar_dots + grad_M * M0;
            store(gradient.M.row(i), grad_M * mbar_C - grad_S * b_C - sum);
        });
    }
    stack(gates.abar + 1, gates.abar + chunk.probe);
    multiply(ws.qp_T, weighted, chunk.K, depth, [&](long i, const Vector& sum) {
        const Vector grad_S = load(gradient.S.row(i));
        next_M.row(i);
        abar_dots = abar_dots + grad_S * load(before.S.row(i));
        store(gradient.S.row(i), grad_S * abar_C + sum);
    });
    ws.gate_gradients.grad_abar[rows] += total(abar_dots);
    ws.gate_gradients.grad_b[rows] += total(b_dots);
    ws.gate_gradients.grad_mbar_C += total(mbar_dots);
}

// p = alpha p: its share of grad_log_alpha is grad_p . p. Without a p of its own, grad_P then becomes a part of grad_K.
void undo_probe(const Chunk& chunk, const Workspace& ws) {
    const bool times_alpha = chunk.problem.p_times_alpha, is_k = chunk.problem.p == nullptr;
    const Matrix p_T = ws.qp_T.from(0, chunk.rows);
    for (long t = 0; t < chunk.C; t += kWidth) {
        const Vector factor = times_alpha ? load(ws.gates.alpha + t) : filled(1);
        Vector dots = zeros();
        for (long i = 0; i < chunk.K; ++i) {
            const Vector grad_p = load(ws.grad_p_T.row(i) + t);
            float* grad_k = ws.grad_k_T.row(i) + t;
            dots = dots + grad_p * load(p_T.row(i) + t);
            if (is_k) store(grad_k, load(grad_k) + grad_p * factor);
        }
        float* grad_log_alpha = ws.gate_gradients.grad_log_alpha + t;
        if (times_alpha) store(grad_log_alpha, load(grad_log_alpha) + dots);
    }
}

// (18) From the gradient of x = factor * y, y = inverse_norm * raw, to that of raw:
// factor * inverse_norm * (grad_x - y (y . grad_x)), in place. grad_x_T and x_T are [K, C]; factor(t) gives 16 tokens.
template <class Factor>
void undo_norm(const Chunk& chunk, const Matrix grad_x_T, const Matrix x_T, const float* inverse_norm,
               Factor&& factor) {
    for (long t = 0; t < chunk.C; t += kWidth) {
        const Matrix grad = grad_x_T.from(0, t), x = x_T.from(0, t);
        const Vector scale = factor(t);
        if (!chunk.problem.l2norm) {
            for (long i = 0; i < chunk.K; ++i) store(grad.row(i), load(grad.row(i)) * scale);
            continue;
        }
        const Vector to_y = inverse_or_zero(scale), to_raw = scale * load(inverse_norm + t);
        Vector dots = zeros();
        for (long i = 0; i < chunk.K; ++i) dots = dots + load(x.row(i)) * load(grad.row(i));
        dots = dots * to_y;
        for (long i = 0; i < chunk.K; ++i) {
            const Vector y = load(x.row(i)) * to_y;
            store(grad.row(i), (load(grad.row(i)) - y * dots) * to_raw);
        }
    }
}

// grad_q, grad_k, grad_p: from [K, C] to the caller's rows. The rows of q are not needed any more and serve as scratch.
template <class Output>
void store_key_gradient(const Chunk& chunk, const Workspace& ws, void* to, const Matrix gradient_T) {
    transpose(ws.vectors.q, gradient_T, chunk.K, chunk.C);
    store_matrix(static_cast<Output*>(to) + chunk.unit.key_gradient_offset(chunk.first),
                 chunk.unit.key_gradient_stride(), ws.vectors.q, chunk.tokens, chunk.problem.key_dim);
}

template <class Element>
void store_gradients(const Chunk& chunk, const Workspace& ws) {
    const MdnProblem& problem = chunk.problem;
    const TokenVectors& vectors = ws.vectors;
    const auto one = [](long) { return filled(1); };
    const auto scale = [&](long) { return filled(static_cast<float>(problem.scale)); };
    const auto alpha_or_one = [&](long t) { return problem.p_times_alpha ? load(ws.gates.alpha + t) : filled(1); };
    const auto store_one = [&](void* to, const Matrix gradient_T) {
        if (problem.float32_key_gradient)
            store_key_gradient<float>(chunk, ws, to, gradient_T);
        else
            store_key_gradient<Element>(chunk, ws, to, gradient_T);
    };
    if (problem.has_erase) undo_probe(chunk, ws);
    undo_norm(chunk, ws.grad_q_T, ws.qp_T, vectors.q_inverse_norm, scale);
    store_one(problem.grad_q, ws.grad_q_T);
    undo_norm(chunk, ws.grad_k_T, vectors.k_T, vectors.k_inverse_norm, one);
    store_one(problem.grad_k, ws.grad_k_T);
    if (problem.has_erase && problem.p != nullptr) {
        undo_norm(chunk, ws.grad_p_T, ws.qp_T.from(0, chunk.rows), vectors.p_inverse_norm, alpha_or_one);
        store_one(problem.grad_p, ws.grad_p_T);
    }
    ws.gate_gradients.write_out(chunk);
}

template <class Element>
void backward_chunk(const BackwardChunk& chunk, Workspace& ws) {
    const MdnProblem& problem = chunk.problem;
    prepare_chunk<Element>(chunk, ws);
    ws.gate_gradients.clear(chunk);
    for (long column = 0; column < chunk.unit.columns; column += kWidth)
        find_value_gradient<Element>(chunk, ws, column);
    find_key_gradients_through_states(chunk, ws);
    find_key_gradients_through_products(chunk, ws);
    if (chunk.index > 0 || problem.initial_S != nullptr)
        for (long column = 0; column < chunk.unit.columns; column += kWidth) find_state_gradients(chunk, ws, column);
    ws.gate_gradients.run_adjoint(chunk, ws.gates);
    store_gradients<Element>(chunk, ws);
}

template <class Element>
void backward_unit(const void* context, long index) {
    const MdnProblem& problem = *static_cast<const MdnProblem*>(context);
    const Unit unit(problem, index);
    const long chunks = (unit.tokens + problem.chunk_size - 1) / problem.chunk_size;
    const auto run = [&](Workspace& ws) {
        rebuild_states<Element>(unit, ws, chunks);
        load_state(unit, ws.gradient.S, problem.grad_final_S);
        if (problem.has_momentum) load_state(unit, ws.gradient.M, problem.grad_final_M);
        for (long i = chunks - 1; i >= 0; --i) backward_chunk<Element>(BackwardChunk(unit, i, chunks), ws);
        if (problem.grad_initial_S == nullptr) return;
        store_state(unit, problem.grad_initial_S, ws.gradient.S);
        if (problem.has_momentum) store_state(unit, problem.grad_initial_M, ws.gradient.M);
    };
    with_workspace<Workspace>(run, problem, std::max<long>(chunks, 1));
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_backward(const MdnProblem* problem) {
    const long units = problem->sequences * problem->value_heads * problem->slices;
    const auto work = problem->bfloat16 ? mdn::backward_unit<mdn::BFloat16> : mdn::backward_unit<float>;
    return mdn::run_units(problem->threads, units, work, problem) ? 0 : 1;
}
