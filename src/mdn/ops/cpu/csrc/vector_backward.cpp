// The backward pass of the rules with a decay per key dimension; forward equations in vector_chunk.h. Only `solved` was
// saved; the states at the chunks' starts are rebuilt from it, then chunks are visited last to first. Equations of
// docs/derivation.md, section 11, with Y the key that `solved` is written along (KDA: K, RWKV-7: E) and sign = -1 (KDA)
// or 1 (RWKV-7):
//
//     grad_solved = [Q Y]^T grad_O + Ybar grad_S'                                                             (35)
//     (I + [P K])^T grad_target = grad_solved  (KDA),   (I - [P E])^T grad_target = grad_solved  (RWKV-7)
//     grad_V = grad_target  (KDA),   [Q K]^T grad_O + Kbar grad_S'  (GLA), + [P K]^T grad_target  (RWKV-7)
//     grad_S0 = diag(abar_C) grad_S' + Qbar^T grad_O + sign Pbar^T grad_target
//
//     grad_[Q K] = grad_O written^T,     grad_[P K] = sign grad_target written^T                              (36)
//     grad_[Q E] = grad_O probed^T,      grad_[P E] = grad_target probed^T
//     grad_Qbar = grad_O S0^T,           grad_Pbar = sign grad_target S0^T
//     grad_Kbar = written grad_S'^T,     grad_Ebar = probed grad_S'^T
//
//     gradients of q, k, p, e: each product times its decay                                                   (37)
//     grad_log_abar_t = q_t grad_q_t - k_t grad_k_t - e_t grad_e_t + p_{t+1} grad_p_{t+1} + [t = C] (...)      (38)
//     grad_log_alpha_l = sum over t >= l of grad_log_abar_t
//
// (38) because every decay runs from one token to another: the logarithm of abar_t receives x grad_x from each vector x
// whose decay ends at token t, and -x grad_x where one begins.
#include "threads.h"
#include "vector_chunk.h"

namespace mdn {
namespace vector_decay {
namespace {

struct BackwardWorkspace {
    TokenVectors vectors;
    Matrix grad_q, grad_k, grad_p, grad_e;      // [C, K]
    Matrix grad_x_T;                            // [K, C]
    Matrix grad_log_alpha;                      // [C, K]
    float* grad_log_abar_C;                     // [K]: what (38) adds at t = C
    Matrix q_bar_T, p_bar_T;                    // [K, C]
    Matrix qk_T, qe_T, pk_T, pe_T;              // [C, C]
    Matrix grad_qk, grad_qe, grad_pk, grad_pe;  // [C, C]
    Matrix grad_o, grad_target;                 // [C, V]
    Matrix grad_o_T, grad_target_T;             // [V, C]
    Matrix written_T, solved_T;                 // [V, C]
    Matrix values, solved, scratch;             // [C, 16]
    Matrix gradient;                            // [K, V]: grad_S', then grad_S0
    Matrix starts;                              // [chunks, K, V]
    long K;

    BackwardWorkspace(Arena& arena, const Unit& unit)
        : BackwardWorkspace(arena, unit.K, round_up(unit.problem.value_dim), unit.chunks()) {}

    Matrix before(long chunk) const { return starts.from(chunk * K, 0); }

   private:
    BackwardWorkspace(Arena& arena, long K, long V, long chunks)
        : vectors(arena, K),
          grad_q(arena.matrix(C, K)),
          grad_k(arena.matrix(C, K)),
          grad_p(arena.matrix(C, K)),
          grad_e(arena.matrix(C, K)),
          grad_x_T(arena.matrix(K, C)),
          grad_log_alpha(arena.matrix(C, K)),
          grad_log_abar_C(arena.floats(K)),
          q_bar_T(arena.matrix(K, C)),
          p_bar_T(arena.matrix(K, C)),
          qk_T(arena.matrix(C, C)),
          qe_T(arena.matrix(C, C)),
          pk_T(arena.matrix(C, C)),
          pe_T(arena.matrix(C, C)),
          grad_qk(arena.matrix(C, C)),
          grad_qe(arena.matrix(C, C)),
          grad_pk(arena.matrix(C, C)),
          grad_pe(arena.matrix(C, C)),
          grad_o(arena.matrix(C, V)),
          grad_target(arena.matrix(C, V)),
          grad_o_T(arena.matrix(V, C)),
          grad_target_T(arena.matrix(V, C)),
          written_T(arena.matrix(V, C)),
          solved_T(arena.matrix(V, C)),
          values(arena.panel(C)),
          solved(arena.panel(C)),
          scratch(arena.panel(C)),
          gradient(arena.matrix(K, V)),
          starts(arena.matrix(chunks * K, V)),
          K(K) {}
};

// `solved` and, where it is written, V of one panel.
void load_written(const Unit& unit, BackwardWorkspace& ws, long chunk, long column) {
    const MdnVectorDecay& problem = unit.problem;
    if (problem.p != nullptr) unit.load_values(ws.solved, problem.solved, chunk, column);
    if (problem.p == nullptr || problem.e != nullptr) unit.load_values(ws.values, problem.v, chunk, column);
}

void rebuild_states(const Unit& unit, BackwardWorkspace& ws) {
    unit.load_state(ws.before(0), unit.problem.initial);
    const Matrix written = unit.problem.p != nullptr && unit.problem.e == nullptr ? ws.solved : ws.values;
    for (long chunk = 0; chunk + 1 < unit.chunks(); ++chunk) {
        ws.vectors.load_writes(unit, chunk);
        for (long column = 0; column < unit.problem.value_dim; column += kWidth) {
            load_written(unit, ws, chunk, column);
            advance(unit, ws.vectors, ws.before(chunk).from(0, column), ws.before(chunk + 1).from(0, column), written,
                    ws.solved);
        }
    }
}

MDN_INLINE void add_product(const Matrix to, const Matrix a, const Matrix b, long rows, long depth) {
    multiply(a, b, rows, depth, [&](long i, const Vector& sum) { store(to.row(i), load(to.row(i)) + sum); });
}

// (35) grad_target and grad_V of one panel, and the transposes that (36) needs.
MDN_FLATTEN void find_value_gradients(const Unit& unit, BackwardWorkspace& ws, long chunk, long column) {
    const MdnVectorDecay& problem = unit.problem;
    const TokenVectors& vectors = ws.vectors;
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    const Matrix grad_o = ws.grad_o.from(0, column), grad_target = ws.grad_target.from(0, column);
    const Matrix gradient = ws.gradient.from(0, column);
    unit.load_values(grad_o, problem.grad_o, chunk, column);
    load_written(unit, ws, chunk, column);
    multiply_upper(grad_target, has_e ? ws.qe_T : ws.qk_T, grad_o, C);
    add_product(grad_target, has_e ? vectors.e_bar : vectors.k_bar, gradient, C, unit.K);
    if (has_p) solve_upper(grad_target, has_e ? ws.pe_T : ws.pk_T, C);
    if (has_e) {
        multiply_upper(ws.scratch, ws.pk_T, grad_target, C);
        add_product(ws.scratch, vectors.k_bar, gradient, C, unit.K);
        unit.store_values(problem.grad_v, chunk, column, ws.scratch);
        multiply_upper(ws.scratch, ws.qk_T, grad_o, C);
        float* grad_v = problem.grad_v + unit.value_offset(chunk) + column;
        for (long i = 0; i < unit.tokens_of(chunk); ++i)
            for (long c = 0; c < unit.width(column); ++c) grad_v[i * unit.value_stride() + c] += ws.scratch.row(i)[c];
        transpose(ws.solved_T.from(column, 0), ws.solved, C, kWidth);
    } else {
        unit.store_values(problem.grad_v, chunk, column, grad_target);
    }
    transpose(ws.written_T.from(column, 0), has_p && !has_e ? ws.solved : ws.values, C, kWidth);
    transpose(ws.grad_o_T.from(column, 0), grad_o, C, kWidth);
    transpose(ws.grad_target_T.from(column, 0), grad_target, C, kWidth);
}

// (36), (37) grad_x = sign (state @ rows_T)^T * decay: the part of a vector's gradient that goes through a state.
MDN_FLATTEN void through_state(const Unit& unit, BackwardWorkspace& ws, const Matrix grad_x, const Matrix state,
                               const Matrix rows_T, const Matrix decay, float sign) {
    multiply(state, rows_T, unit.K, round_up(unit.problem.value_dim),
             [&](long i, const Vector& sum) { store(ws.grad_x_T.row(i), sum * sign); });
    transpose(grad_x, ws.grad_x_T, unit.K, C);
    TokenVectors::scale(grad_x, grad_x, decay, unit.K);
}

void find_gradients_through_states(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    const TokenVectors& vectors = ws.vectors;
    const Matrix S0 = ws.before(chunk);
    through_state(unit, ws, ws.grad_q, S0, ws.grad_o_T, vectors.abar.from(1, 0), 1);
    if (problem.p != nullptr)
        through_state(unit, ws, ws.grad_p, S0, ws.grad_target_T, vectors.abar, problem.e != nullptr ? 1 : -1);
    through_state(unit, ws, ws.grad_k, ws.gradient, ws.written_T, vectors.to_end, 1);
    if (problem.e != nullptr) through_state(unit, ws, ws.grad_e, ws.gradient, ws.solved_T, vectors.to_end, 1);
    // (38) at t = C: the state's own decay, and the ends of Kbar and Ebar.
    const long V = round_up(problem.value_dim);
    float* at_end = ws.grad_log_abar_C;
    for (long d = 0; d < unit.K; ++d) at_end[d] = vectors.abar.row(C)[d] * dot(ws.gradient.row(d), S0.row(d), V);
    for (long j = 0; j < C; ++j)
        for (long d = 0; d < unit.K; d += kWidth) {
            Vector ends = load(vectors.k.row(j) + d) * load(ws.grad_k.row(j) + d);
            if (problem.e != nullptr) ends = ends + load(vectors.e.row(j) + d) * load(ws.grad_e.row(j) + d);
            store(at_end + d, load(at_end + d) + ends);
        }
}

// (37) What [X K] and [X E] contribute between different tokens, sixteen of K at a time. D is the decay after token j,
// up to token i for x = q (`is_late`) and to token i - 1 for x = p: grad_x_i += D (grad_xk_ij k_j + grad_xe_ij e_j),
// grad_k_j += grad_xk_ij D x_i,  grad_e_j += grad_xe_ij D x_i.
template <bool has_e>
MDN_FLATTEN void add_product_gradients(const Unit& unit, BackwardWorkspace& ws, const Matrix x, const Matrix grad_x,
                                       const Matrix grad_xk, const Matrix grad_xe, bool is_late) {
    const TokenVectors& vectors = ws.vectors;
    for (long d = 0; d < unit.K; d += kWidth)
        for (long i = 1; i < C; ++i) {
            Vector decay = is_late ? load(vectors.alpha.row(i) + d) : filled(1), gradient = load(grad_x.row(i) + d);
            const Vector x_i = load(x.row(i) + d);
            for (long j = i - 1; j >= 0; --j) {
                const float with_k = grad_xk.row(i)[j];
                const Vector decayed = decay * x_i;
                float* grad_k = ws.grad_k.row(j) + d;
                Vector keys_j = load(vectors.k.row(j) + d) * with_k;
                store(grad_k, load(grad_k) + decayed * with_k);
                if (has_e) {
                    const float with_e = grad_xe.row(i)[j];
                    float* grad_e = ws.grad_e.row(j) + d;
                    keys_j = keys_j + load(vectors.e.row(j) + d) * with_e;
                    store(grad_e, load(grad_e) + decayed * with_e);
                }
                gradient = gradient + decay * keys_j;
                decay = decay * load(vectors.alpha.row(j) + d);
            }
            store(grad_x.row(i) + d, gradient);
        }
}

void find_gradients_through_products(const Unit& unit, BackwardWorkspace& ws) {
    const MdnVectorDecay& problem = unit.problem;
    const long V = round_up(problem.value_dim);
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    const auto outer = [&](const Matrix to, const Matrix rows, const Matrix columns_T, float sign) {
        multiply(rows, columns_T, C, V, [&](long i, const Vector& sum) { store(to.row(i), sum * sign); });
    };
    outer(ws.grad_qk, ws.grad_o, ws.written_T, 1);  // (36)
    if (has_e) outer(ws.grad_qe, ws.grad_o, ws.solved_T, 1);
    if (has_p) outer(ws.grad_pk, ws.grad_target, ws.written_T, has_e ? 1 : -1);
    if (has_e) outer(ws.grad_pe, ws.grad_target, ws.solved_T, 1);
    const auto add = has_e ? add_product_gradients<true> : add_product_gradients<false>;
    add(unit, ws, ws.vectors.q, ws.grad_q, ws.grad_qk, ws.grad_qe, true);
    if (has_p) add(unit, ws, ws.vectors.p, ws.grad_p, ws.grad_pk, ws.grad_pe, false);
}

// (38), then the terms of (37) of q_i with its own k_i and e_i, which no decay separates.
void finish_gradients(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    const TokenVectors& vectors = ws.vectors;
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    for (long d = 0; d < unit.K; d += kWidth) {
        Vector later = load(ws.grad_log_abar_C + d);  // sum over the tokens after i
        for (long i = C - 1; i >= 0; --i) {
            const Vector q = load(vectors.q.row(i) + d), k = load(vectors.k.row(i) + d);
            const Vector grad_q = load(ws.grad_q.row(i) + d), grad_k = load(ws.grad_k.row(i) + d);
            later = later + q * grad_q - k * grad_k;
            if (has_e) later = later - load(vectors.e.row(i) + d) * load(ws.grad_e.row(i) + d);
            // Nothing passes an alpha of 0, so its gradient is 0; the terms of the sum cancel only up to rounding.
            store(ws.grad_log_alpha.row(i) + d, zero_where_zero(later, load(vectors.alpha.row(i) + d)));
            if (has_p) later = later + load(vectors.p.row(i) + d) * load(ws.grad_p.row(i) + d);
            const float with_k = ws.grad_qk.row(i)[i];
            Vector own = k * with_k;
            store(ws.grad_k.row(i) + d, grad_k + q * with_k);
            if (has_e) {
                const float with_e = ws.grad_qe.row(i)[i];
                own = own + load(vectors.e.row(i) + d) * with_e;
                store(ws.grad_e.row(i) + d, load(ws.grad_e.row(i) + d) + q * with_e);
            }
            store(ws.grad_q.row(i) + d, grad_q + own);
        }
    }
    unit.store_keys(problem.grad_log_alpha, chunk, ws.grad_log_alpha);
    unit.store_keys(problem.grad_q, chunk, ws.grad_q);
    unit.store_keys(problem.grad_k, chunk, ws.grad_k);
    if (has_p) unit.store_keys(problem.grad_p, chunk, ws.grad_p);
    if (has_e) unit.store_keys(problem.grad_e, chunk, ws.grad_e);
}

// (35) grad_S0 of one panel, where grad_S' was.
MDN_FLATTEN void retreat(const Unit& unit, BackwardWorkspace& ws, long column) {
    const MdnVectorDecay& problem = unit.problem;
    const Matrix gradient = ws.gradient.from(0, column);
    const float* decay = ws.vectors.abar.row(C);
    multiply(ws.q_bar_T, ws.grad_o.from(0, column), unit.K, C,
             [&](long i, const Vector& sum) { store(gradient.row(i), load(gradient.row(i)) * decay[i] + sum); });
    if (problem.p == nullptr) return;
    const float sign = problem.e != nullptr ? 1 : -1;
    multiply(ws.p_bar_T, ws.grad_target.from(0, column), unit.K, C,
             [&](long i, const Vector& sum) { store(gradient.row(i), load(gradient.row(i)) + sum * sign); });
}

void backward_chunk(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    TokenVectors& vectors = ws.vectors;
    vectors.load_writes(unit, chunk);
    vectors.load_probes(unit, chunk);
    vectors.load_queries(unit, chunk);
    transpose(ws.q_bar_T, vectors.q_bar, C, unit.K);
    transpose(ws.qk_T, vectors.qk, C, C);
    if (problem.p != nullptr) {
        transpose(ws.p_bar_T, vectors.p_bar, C, unit.K);
        transpose(ws.pk_T, vectors.pk, C, C);
    }
    if (problem.e != nullptr) {
        transpose(ws.qe_T, vectors.qe, C, C);
        transpose(ws.pe_T, vectors.pe, C, C);
    }
    for (long column = 0; column < problem.value_dim; column += kWidth) find_value_gradients(unit, ws, chunk, column);
    find_gradients_through_states(unit, ws, chunk);
    find_gradients_through_products(unit, ws);
    finish_gradients(unit, ws, chunk);
    for (long column = 0; column < problem.value_dim; column += kWidth) retreat(unit, ws, column);
}

void backward_unit(const void* context, long index) {
    const MdnVectorDecay& problem = *static_cast<const MdnVectorDecay*>(context);
    const Unit unit(problem, index);
    const auto run = [&](BackwardWorkspace& ws) {
        for (const Matrix products : {ws.vectors.qk, ws.vectors.qe, ws.vectors.pk, ws.vectors.pe})
            fill_zeros(products, C);
        unit.load_state(ws.gradient, problem.grad_final);
        if (unit.tokens > 0) rebuild_states(unit, ws);
        for (long chunk = unit.chunks() - 1; chunk >= 0; --chunk) backward_chunk(unit, ws, chunk);
        unit.store_state(problem.grad_initial, ws.gradient);
    };
    with_workspace<BackwardWorkspace>(run, unit);
}

}  // namespace
}  // namespace vector_decay
}  // namespace mdn

extern "C" int mdn_vector_backward(const MdnVectorDecay* problem) {
    const long units = problem->sequences * problem->heads;
    return mdn::run_units(problem->threads, units, mdn::vector_decay::backward_unit, problem) ? 0 : 1;
}
