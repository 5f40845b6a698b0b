// The backward pass of the rules with a decay per key dimension; forward equations in vector_chunk.h. Only what the
// probes found was saved (R or X); states at the chunk starts are rebuilt from it, then chunks are visited last to
// first. With U the unknown (KDA: R, RWKV-7: X, GLA: V), its key u (KDA, GLA: k, RWKV-7: e) and M = [P K] or -[P E]:
//
//     grad_U = [Q U]^T grad_O + Ubar grad_S'            (I + M)^T grad_target = grad_U   (with p)
//     grad_V = grad_target (KDA), grad_U (GLA), [Q K]^T grad_O + Kbar grad_S' + [P K]^T grad_target (RWKV-7)
//     grad_S0 = abar_C grad_S' + Qbar^T grad_O + sign Pbar^T grad_target                 sign = -1 (KDA), 1 (RWKV-7)
//     grad_[Q K] = grad_O W^T,  grad_[Q E] = grad_O X^T,  grad_[P K] = sign grad_target W^T,  grad_[P E] = grad_target
//     X^T grad_Qbar = grad_O S0^T,  grad_Pbar = sign grad_target S0^T,  grad_Kbar = W grad_S'^T,  grad_Ebar = X
//     grad_S'^T
//
// where W is what goes along k (R or V). Every decay is a product of alphas between two clocks, so the logarithm of
// abar_t receives x grad_x from each vector whose decay ends at clock t and -x grad_x where one begins; the gradient of
// log_alpha_l is their sum over the clocks t >= l.
#include "threads.h"
#include "vector_chunk.h"

namespace mdn {
namespace vector_decay {
namespace {

struct BackwardWorkspace {
    Keys keys;
    Matrix grad_q, grad_k, grad_p, grad_e;      // [C, K]
    Matrix grad_x_T;                            // [K, C]
    Matrix clocks;                              // [C + 1, K]: gradients of log abar
    Matrix q_bar_T, p_bar_T;                    // [K, C]
    Matrix qk_T, qe_T, pk_T, pe_T;              // [C, C]
    Matrix grad_qk, grad_qe, grad_pk, grad_pe;  // [C, C]
    Matrix grad_o, grad_target;                 // [C, V]
    Matrix grad_o_T, grad_target_T;             // [V, C]
    Matrix written_T, found_T;                  // [V, C]: W and X
    Matrix values, found, scratch;              // [C, 16]
    Matrix gradient;                            // [K, V]: grad_S', then grad_S0
    Matrix starts;                              // [chunks, K, V]
    long K;

    BackwardWorkspace(Arena& arena, const Unit& unit)
        : BackwardWorkspace(arena, unit.K, round_up(unit.problem.value_dim), unit.chunks()) {}

    Matrix before(long chunk) const { return starts.from(chunk * K, 0); }

   private:
    BackwardWorkspace(Arena& arena, long K, long V, long chunks)
        : keys(arena, K),
          grad_q(arena.matrix(C, K)),
          grad_k(arena.matrix(C, K)),
          grad_p(arena.matrix(C, K)),
          grad_e(arena.matrix(C, K)),
          grad_x_T(arena.matrix(K, C)),
          clocks(arena.matrix(C + 1, K)),
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
          found_T(arena.matrix(V, C)),
          values(arena.panel(C)),
          found(arena.panel(C)),
          scratch(arena.panel(C)),
          gradient(arena.matrix(K, V)),
          starts(arena.matrix(chunks * K, V)),
          K(K) {}
};

// W and X of one panel.
void load_written(const Unit& unit, BackwardWorkspace& ws, long chunk, long column) {
    const MdnVectorDecay& problem = unit.problem;
    if (problem.p != nullptr) unit.load_values(ws.found, problem.found, chunk, column);
    if (problem.p == nullptr || problem.e != nullptr) unit.load_values(ws.values, problem.v, chunk, column);
}

void rebuild_states(const Unit& unit, BackwardWorkspace& ws) {
    unit.load_state(ws.before(0), unit.problem.initial);
    const Matrix written = unit.problem.p != nullptr && unit.problem.e == nullptr ? ws.found : ws.values;
    for (long chunk = 0; chunk + 1 < unit.chunks(); ++chunk) {
        ws.keys.load_writes(unit, chunk);
        for (long column = 0; column < unit.problem.value_dim; column += kWidth) {
            load_written(unit, ws, chunk, column);
            advance(unit, ws.keys, ws.before(chunk).from(0, column), ws.before(chunk + 1).from(0, column), written,
                    ws.found);
        }
    }
}

MDN_INLINE void add_product(const Matrix to, const Matrix a, const Matrix b, long rows, long depth) {
    multiply(a, b, rows, depth, [&](long i, const Vector& sum) { store(to.row(i), load(to.row(i)) + sum); });
}

// grad_target and grad_V of one panel, and the transposes that the gradients of keys need.
MDN_FLATTEN void find_value_gradients(const Unit& unit, BackwardWorkspace& ws, long chunk, long column) {
    const MdnVectorDecay& problem = unit.problem;
    const Keys& keys = ws.keys;
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    const Matrix grad_o = ws.grad_o.from(0, column), grad_target = ws.grad_target.from(0, column);
    const Matrix gradient = ws.gradient.from(0, column);
    unit.load_values(grad_o, problem.grad_o, chunk, column);
    load_written(unit, ws, chunk, column);
    multiply_upper(grad_target, has_e ? ws.qe_T : ws.qk_T, grad_o, C);
    add_product(grad_target, has_e ? keys.e_bar : keys.k_bar, gradient, C, unit.K);
    if (has_p) solve_upper(grad_target, has_e ? ws.pe_T : ws.pk_T, C);
    if (has_e) {
        multiply_upper(ws.scratch, ws.pk_T, grad_target, C);
        add_product(ws.scratch, keys.k_bar, gradient, C, unit.K);
        unit.store_values(problem.grad_v, chunk, column, ws.scratch);
        multiply_upper(ws.scratch, ws.qk_T, grad_o, C);
        float* grad_v = problem.grad_v + unit.value_offset(chunk) + column;
        for (long i = 0; i < unit.tokens_of(chunk); ++i)
            for (long c = 0; c < unit.width(column); ++c) grad_v[i * unit.value_stride() + c] += ws.scratch.row(i)[c];
        transpose(ws.found_T.from(column, 0), ws.found, C, kWidth);
    } else {
        unit.store_values(problem.grad_v, chunk, column, grad_target);
    }
    transpose(ws.written_T.from(column, 0), has_p && !has_e ? ws.found : ws.values, C, kWidth);
    transpose(ws.grad_o_T.from(column, 0), grad_o, C, kWidth);
    transpose(ws.grad_target_T.from(column, 0), grad_target, C, kWidth);
}

// grad_x = sign (state @ rows_T)^T * decay: the part of a vector's gradient that goes through a state.
MDN_FLATTEN void through_state(const Unit& unit, BackwardWorkspace& ws, const Matrix grad_x, const Matrix state,
                               const Matrix rows_T, const Matrix decay, float sign) {
    multiply(state, rows_T, unit.K, round_up(unit.problem.value_dim),
             [&](long i, const Vector& sum) { store(ws.grad_x_T.row(i), sum * sign); });
    transpose(grad_x, ws.grad_x_T, unit.K, C);
    Keys::scale(grad_x, grad_x, decay, unit.K);
}

void find_gradients_through_states(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    const Keys& keys = ws.keys;
    const Matrix S0 = ws.before(chunk);
    through_state(unit, ws, ws.grad_q, S0, ws.grad_o_T, keys.abar.from(1, 0), 1);
    if (problem.p != nullptr)
        through_state(unit, ws, ws.grad_p, S0, ws.grad_target_T, keys.abar, problem.e != nullptr ? 1 : -1);
    through_state(unit, ws, ws.grad_k, ws.gradient, ws.written_T, keys.to_end, 1);
    if (problem.e != nullptr) through_state(unit, ws, ws.grad_e, ws.gradient, ws.found_T, keys.to_end, 1);
    // The last clock: the state's own decay, and the ends of Kbar and Ebar.
    const long V = round_up(problem.value_dim);
    for (long d = 0; d < unit.K; ++d) ws.clocks.row(C)[d] = keys.abar.row(C)[d] * dot(ws.gradient.row(d), S0.row(d), V);
    for (long j = 0; j < C; ++j)
        for (long d = 0; d < unit.K; d += kWidth) {
            Vector ends = load(keys.k.row(j) + d) * load(ws.grad_k.row(j) + d);
            if (problem.e != nullptr) ends = ends + load(keys.e.row(j) + d) * load(ws.grad_e.row(j) + d);
            store(ws.clocks.row(C) + d, load(ws.clocks.row(C) + d) + ends);
        }
}

// What [X K] and [X E] contribute between different tokens, x = q (clock i) or p (clock i - 1), sixteen of K at a time:
// grad_x_i += D (grad_xk_ij k_j + grad_xe_ij e_j),  grad_k_j += grad_xk_ij D x_i,  grad_e_j += grad_xe_ij D x_i.
template <bool has_e>
MDN_FLATTEN void add_product_gradients(const Unit& unit, BackwardWorkspace& ws, const Matrix x, const Matrix grad_x,
                                       const Matrix grad_xk, const Matrix grad_xe, bool is_late) {
    const Keys& keys = ws.keys;
    for (long d = 0; d < unit.K; d += kWidth)
        for (long i = 1; i < C; ++i) {
            Vector decay = is_late ? load(keys.alpha.row(i) + d) : filled(1), gradient = load(grad_x.row(i) + d);
            const Vector x_i = load(x.row(i) + d);
            for (long j = i - 1; j >= 0; --j) {
                const float with_k = grad_xk.row(i)[j];
                const Vector decayed = decay * x_i;
                float* grad_k = ws.grad_k.row(j) + d;
                Vector keys_j = load(keys.k.row(j) + d) * with_k;
                store(grad_k, load(grad_k) + decayed * with_k);
                if (has_e) {
                    const float with_e = grad_xe.row(i)[j];
                    float* grad_e = ws.grad_e.row(j) + d;
                    keys_j = keys_j + load(keys.e.row(j) + d) * with_e;
                    store(grad_e, load(grad_e) + decayed * with_e);
                }
                gradient = gradient + decay * keys_j;
                decay = decay * load(keys.alpha.row(j) + d);
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
    outer(ws.grad_qk, ws.grad_o, ws.written_T, 1);
    if (has_e) outer(ws.grad_qe, ws.grad_o, ws.found_T, 1);
    if (has_p) outer(ws.grad_pk, ws.grad_target, ws.written_T, has_e ? 1 : -1);
    if (has_e) outer(ws.grad_pe, ws.grad_target, ws.found_T, 1);
    const auto add = has_e ? add_product_gradients<true> : add_product_gradients<false>;
    add(unit, ws, ws.keys.q, ws.grad_q, ws.grad_qk, ws.grad_qe, true);
    if (has_p) add(unit, ws, ws.keys.p, ws.grad_p, ws.grad_pk, ws.grad_pe, false);
}

// The gradient of log_alpha from those of the clocks; then the terms of q_i with its own k_i and e_i, which no decay
// separates.
void finish_gradients(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    const Keys& keys = ws.keys;
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    for (long d = 0; d < unit.K; d += kWidth) {
        Vector later = load(ws.clocks.row(C) + d);
        for (long i = C - 1; i >= 0; --i) {
            const Vector q = load(keys.q.row(i) + d), k = load(keys.k.row(i) + d);
            const Vector grad_q = load(ws.grad_q.row(i) + d), grad_k = load(ws.grad_k.row(i) + d);
            later = later + q * grad_q - k * grad_k;
            if (has_e) later = later - load(keys.e.row(i) + d) * load(ws.grad_e.row(i) + d);
            store(ws.clocks.row(i) + d, later);  // of log_alpha_i
            if (has_p) later = later + load(keys.p.row(i) + d) * load(ws.grad_p.row(i) + d);
            const float with_k = ws.grad_qk.row(i)[i];
            Vector own = k * with_k;
            store(ws.grad_k.row(i) + d, grad_k + q * with_k);
            if (has_e) {
                const float with_e = ws.grad_qe.row(i)[i];
                own = own + load(keys.e.row(i) + d) * with_e;
                store(ws.grad_e.row(i) + d, load(ws.grad_e.row(i) + d) + q * with_e);
            }
            store(ws.grad_q.row(i) + d, grad_q + own);
        }
    }
    unit.store_keys(problem.grad_log_alpha, chunk, ws.clocks);
    unit.store_keys(problem.grad_q, chunk, ws.grad_q);
    unit.store_keys(problem.grad_k, chunk, ws.grad_k);
    if (has_p) unit.store_keys(problem.grad_p, chunk, ws.grad_p);
    if (has_e) unit.store_keys(problem.grad_e, chunk, ws.grad_e);
}

MDN_FLATTEN void retreat(const Unit& unit, BackwardWorkspace& ws, long column) {
    const MdnVectorDecay& problem = unit.problem;
    const Matrix gradient = ws.gradient.from(0, column);
    const float* decay = ws.keys.abar.row(C);
    multiply(ws.q_bar_T, ws.grad_o.from(0, column), unit.K, C,
             [&](long i, const Vector& sum) { store(gradient.row(i), load(gradient.row(i)) * decay[i] + sum); });
    if (problem.p == nullptr) return;
    const float sign = problem.e != nullptr ? 1 : -1;
    multiply(ws.p_bar_T, ws.grad_target.from(0, column), unit.K, C,
             [&](long i, const Vector& sum) { store(gradient.row(i), load(gradient.row(i)) + sum * sign); });
}

void backward_chunk(const Unit& unit, BackwardWorkspace& ws, long chunk) {
    const MdnVectorDecay& problem = unit.problem;
    Keys& keys = ws.keys;
    keys.load_all(unit, chunk);
    transpose(ws.q_bar_T, keys.q_bar, C, unit.K);
    transpose(ws.qk_T, keys.qk, C, C);
    if (problem.p != nullptr) {
        transpose(ws.p_bar_T, keys.p_bar, C, unit.K);
        transpose(ws.pk_T, keys.pk, C, C);
    }
    if (problem.e != nullptr) {
        transpose(ws.qe_T, keys.qe, C, C);
        transpose(ws.pe_T, keys.pe, C, C);
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
    with_workspace<BackwardWorkspace>(unit, [&](BackwardWorkspace& ws) {
        for (const Matrix products : {ws.keys.qk, ws.keys.qe, ws.keys.pk, ws.keys.pe}) fill_zeros(products, C);
        unit.load_state(ws.gradient, problem.grad_final);
        if (unit.tokens > 0) rebuild_states(unit, ws);
        for (long chunk = unit.chunks() - 1; chunk >= 0; --chunk) backward_chunk(unit, ws, chunk);
        unit.store_state(problem.grad_initial, ws.gradient);
    });
}

}  // namespace
}  // namespace vector_decay
}  // namespace mdn

extern "C" int mdn_vector_backward(const MdnVectorDecay* problem) {
    const long units = problem->sequences * problem->heads;
    return mdn::run_units(problem->threads, units, mdn::vector_decay::backward_unit, problem) ? 0 : 1;
}
