// The backward pass. Only R was saved; the states at every chunk's start are rebuilt from it, then chunks are visited last to first.
//
// Per chunk, with S, M the states before it, dS, dM the gradients of the states after it, W, A, gates as in forward.cpp:
//     dR = W^T dO + diag(write_state) K dS + diag(write_momentum) K dM;       (I + A)^T dU = dR;       dV = dU
//     dQ = diag(abar) dO S^T - diag(b) dO M^T + ...                  dP = -diag(abar_prev) dU S^T + diag(b_prev) dU M^T + ...
//     dK = diag(write_state) R dS^T + diag(write_momentum) R dM^T + ...      "...": through W and A (through_keys)
//     dS <- abar_C dS + Q^T diag(abar) dO - P^T diag(abar_prev) dU
//     dM <- mbar_C dM - b_C dS - Q^T diag(b) dO + P^T diag(b_prev) dU
// Gradients of q, k, p are built transposed, [K, C]: then both operands of every product above are read as they lie in memory, and
// the scalar products that the gates need (such as dO_i . S^T q_i) are sums over rows.
#include "gate_gradients.h"
#include "state.h"
#include "threads.h"

namespace mdn {
namespace {

// Of the states, and of their gradients: [K, V].
struct States {
    float *state, *momentum;
    long stride;

    StatePanel panel(long column) const { return {state + column, momentum + column, stride}; }
};

struct Workspace {
    Gates gates;
    Keys keys;
    GateGradients gate_gradients;
    long square_stride, state_stride, states_size;
    float *pk, *qk, *erase, *read;               // [C, C]: P K^T and Q K^T, then A and W
    float *erase_columns, *read_columns;         // their transposes; later those of dpk and dqk
    float *dpk, *dqk;                            // [C, C]: gradients of P K^T and Q K^T
    float* qp_columns;                           // [K, 2 C]: Q and P transposed, side by side
    float *dq_columns, *dk_columns, *dp_columns; // [K, C]
    float *dout, *du;                            // [C, V]
    float *dout_columns, *du_columns, *residual_columns;  // [V, C]
    float *panel, *write;                        // [C, 16] and [2 C, 16]
    float* rebuilt;                              // [chunks, 2, K, V]: states at the start of each chunk
    States gradient;                             // dS and dM

    Workspace(Arena& arena, const MdnProblem& problem, long chunks)
        : gates(arena, problem.chunk),
          keys(arena, problem.chunk, problem.key_dim),
          gate_gradients(arena, problem.chunk) {
        const long chunk = problem.chunk, columns = problem.value_dim / problem.slices, key_dim = round_up(problem.key_dim);
        square_stride = row_stride(chunk), state_stride = row_stride(columns), states_size = key_dim * state_stride;
        for (float** x : {&pk, &qk, &erase, &read, &erase_columns, &read_columns, &dpk, &dqk})
            *x = arena.take(chunk * square_stride);
        qp_columns = arena.take(key_dim * row_stride(2 * chunk));
        for (float** x : {&dq_columns, &dk_columns, &dp_columns}) *x = arena.take(key_dim * square_stride);
        for (float** x : {&dout, &du}) *x = arena.take(chunk * state_stride);
        for (float** x : {&dout_columns, &du_columns, &residual_columns}) *x = arena.take(round_up(columns) * square_stride);
        panel = arena.take(chunk * kWidth), write = arena.take(2 * chunk * kWidth);
        gradient = {arena.take(states_size), arena.take(states_size), state_stride};
        rebuilt = arena.take(chunks * 2 * states_size);
    }

    States before(long chunk) const {
        float* state = rebuilt + chunk * 2 * states_size;
        return {state, state + states_size, state_stride};
    }
};

// One chunk of one unit: what the functions below need to know.
struct Place {
    const Unit& unit;
    const MdnProblem& problem;
    long index, token, tokens, key_dim;   // key_dim padded
    bool state_is_zero, gradient_is_zero; // S, M before the chunk; dS, dM after it

    Place(const Unit& unit, long index, bool state_is_zero, bool gradient_is_zero)
        : unit(unit),
          problem(unit.problem),
          index(index),
          token(index * problem.chunk),
          tokens(std::min<long>(problem.chunk, unit.tokens - token)),
          key_dim(round_up(problem.key_dim)),
          state_is_zero(state_is_zero),
          gradient_is_zero(gradient_is_zero) {}

    long width(long column) const { return std::min<long>(kWidth, unit.columns - column); }
};

void load_residual_panel(const Place& at, Workspace& ws, long column) {
    const float* residual = at.problem.residual + at.unit.value_at(at.token) + column;
    load_matrix(ws.panel, kWidth, residual, at.unit.value_stride(), at.tokens, ws.gates.rows, at.width(column));
}

template <class Element>
void rebuild_states(const Unit& unit, Workspace& ws, long chunks) {
    const MdnProblem& problem = unit.problem;
    load_state(unit, ws.before(0).state, ws.state_stride, problem.initial_state);
    if (problem.has_momentum) load_state(unit, ws.before(0).momentum, ws.state_stride, problem.initial_momentum);
    for (long chunk = 0; chunk + 1 < chunks; ++chunk) {
        const Place at(unit, chunk, false, false);
        ws.gates.load(unit, at.token, at.tokens);
        ws.keys.load_k<Element>(unit, at.token, at.tokens, ws.gates.rows);
        for (long column = 0; column < unit.columns; column += kWidth) {
            load_residual_panel(at, ws, column);
            const Ahead ahead =
                unit.panel_ahead<float>(problem.residual, at.token, column + kWidth, at.token + problem.chunk);
            advance_states(problem, ws.gates, ws.keys, ws.before(chunk).panel(column), ws.before(chunk + 1).panel(column),
                           ws.panel, ws.write, ahead);
        }
    }
}

template <class Element>
void prepare_chunk(const Place& at, Workspace& ws) {
    const MdnProblem& problem = at.problem;
    ws.gates.load(at.unit, at.token, at.tokens);
    ws.keys.load_k<Element>(at.unit, at.token, at.tokens, ws.gates.rows);
    ws.keys.load_p_and_q<Element>(at.unit, ws.gates, at.token, at.tokens);
    const long rows = ws.gates.rows, stride = ws.keys.columns_stride, wide = row_stride(2 * rows);
    transpose(ws.qp_columns, wide, ws.keys.q, ws.keys.stride, rows, at.key_dim);
    masked_product(ws.read, ws.qk, ws.keys.q, ws.keys, ws.gates, ws.gates.gamma + ws.gates.stride, problem.key_dim);
    transpose(ws.read_columns, stride, ws.read, stride, rows, rows);
    if (!problem.has_erase) return;
    transpose(ws.qp_columns + rows, wide, ws.keys.p, ws.keys.stride, rows, at.key_dim);
    masked_product(ws.erase, ws.pk, ws.keys.p, ws.keys, ws.gates, ws.gates.gamma, problem.key_dim);
    transpose(ws.erase_columns, stride, ws.erase, stride, rows, rows);
}

// (I + A)^T dU = dR in place, from the last row upwards; a_columns is A^T.
void solve_upwards(float* u, long u_stride, const float* a_columns, long a_stride, long rows) {
    for_blocks_up(rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const long below = first + block;
        tile<block>(a_columns + first * a_stride + below, a_stride, u + below * u_stride, u_stride, rows - below,
                    [&](int r, const Row& sum) {
                        store(u + (first + r) * u_stride, load(u + (first + r) * u_stride) - sum);
                    });
        for (int r = block - 2; r >= 0; --r) {
            Row x = load(u + (first + r) * u_stride);
            for (int s = r + 1; s < block; ++s)
                x = x - load(u + (first + s) * u_stride) * a_columns[(first + r) * a_stride + first + s];
            store(u + (first + r) * u_stride, x);
        }
    });
}

// dR, dU and dV of one panel.
template <class Element>
void find_value_gradient(const Place& at, Workspace& ws, long column) {
    const MdnProblem& problem = at.problem;
    const Gates& gates = ws.gates;
    const long rows = gates.rows, stride = ws.keys.columns_stride;
    float *dout = ws.dout + column, *du = ws.du + column;
    const Element* grad_o = static_cast<const Element*>(problem.grad_o) + at.unit.value_at(at.token) + column;
    load_matrix(dout, ws.state_stride, grad_o, at.unit.value_stride(), at.tokens, rows, at.width(column));
    for_blocks_down(rows, [&](auto count, long first) {
        tile<decltype(count)::value>(
            ws.read_columns + first * stride + first, stride, dout + first * ws.state_stride, ws.state_stride, rows - first,
            [&](int r, const Row& sum) { store(du + (first + r) * ws.state_stride, sum); });
    });
    const long next_column = column + kWidth, next_token = at.token - problem.chunk;
    const Ahead dv_ahead = at.unit.panel_ahead<Element>(problem.dv, at.token, column);
    const Ahead grad_o_ahead = at.unit.panel_ahead<Element>(problem.grad_o, at.token, next_column, next_token);
    const Ahead residual_ahead = at.unit.panel_ahead<float>(problem.residual, at.token, next_column, next_token);
    const auto ask_ahead = [&](long i) {
        for (const Ahead* ahead : {&dv_ahead, &grad_o_ahead, &residual_ahead}) ahead->row(i);
    };
    const auto add_scaled = [&](const float* gradient, const float* factor, auto&& meanwhile) {
        multiply(ws.keys.k, ws.keys.stride, gradient + column, ws.state_stride, rows, at.key_dim, [&](long i, const Row& sum) {
            meanwhile(i);
            store(du + i * ws.state_stride, load(du + i * ws.state_stride) + sum * factor[i]);
        });
    };
    if (!at.gradient_is_zero) {
        add_scaled(ws.gradient.state, gates.write_state, ask_ahead);
        if (problem.has_momentum) add_scaled(ws.gradient.momentum, gates.write_momentum, [](long) {});
    }
    if (problem.has_erase) solve_upwards(du, ws.state_stride, ws.erase_columns, stride, rows);
    store_matrix(static_cast<Element*>(problem.dv) + at.unit.value_at(at.token) + column, at.unit.value_stride(), du,
                 ws.state_stride, at.tokens, at.width(column));
    load_residual_panel(at, ws, column);
    transpose(ws.dout_columns + column * stride, stride, dout, ws.state_stride, rows, kWidth);
    transpose(ws.du_columns + column * stride, stride, du, ws.state_stride, rows, kWidth);
    transpose(ws.residual_columns + column * stride, stride, ws.panel, kWidth, rows, kWidth);
}

// The parts of dq, dk, dp that go through one state: gradient (+)= factor * (state @ columns), [K, C], and the factors' own
// gradient, sum over rows of x * (state @ columns).
void through_state(const Place& at, const Workspace& ws, const float* state, const float* columns, const float* x,
                   long x_stride, const float* factor, float sign, float* gradient, bool first, float* factor_gradient) {
    const long stride = ws.keys.columns_stride;
    for (long t = 0; t < ws.gates.rows; t += kWidth) {
        const Row scaled = load(factor + t) * sign;
        Row dots = zeros();
        multiply(state, ws.state_stride, columns + t, stride, at.key_dim, round_up(at.unit.columns), [&](long i, const Row& sum) {
            dots = dots + load(x + i * x_stride + t) * sum;
            const Row before = first ? zeros() : load(gradient + i * stride + t);
            store(gradient + i * stride + t, before + sum * scaled);
        });
        store(factor_gradient + t, dots * sign);
    }
}

// One state after the other: S, M, dS, dM together do not fit into the L2 cache.
void find_key_gradients_through_states(const Place& at, Workspace& ws) {
    const Gates& gates = ws.gates;
    GateGradients& d = ws.gate_gradients;
    const long stride = ws.keys.columns_stride, wide = row_stride(2 * gates.rows);
    const bool momentum = at.problem.has_momentum, erase = at.problem.has_erase;
    const float *q = ws.qp_columns, *p = ws.qp_columns + gates.rows, *k = ws.keys.k_columns;
    const float *dout = ws.dout_columns, *du = ws.du_columns, *residual = ws.residual_columns;
    float *dq = ws.dq_columns, *dp = ws.dp_columns, *dk = ws.dk_columns;
    if (at.state_is_zero) {
        fill_zeros(dq, at.key_dim * stride);
        fill_zeros(dp, at.key_dim * stride);
    } else {
        const States before = ws.before(at.index);
        through_state(at, ws, before.state, dout, q, wide, gates.abar + 1, 1, dq, true, d.abar);
        if (erase) through_state(at, ws, before.state, du, p, wide, gates.abar, -1, dp, true, d.abar_prev);
        if (momentum) through_state(at, ws, before.momentum, dout, q, wide, gates.b + 1, -1, dq, false, d.b);
        if (momentum && erase) through_state(at, ws, before.momentum, du, p, wide, gates.b, 1, dp, false, d.b_prev);
    }
    if (at.gradient_is_zero) {
        fill_zeros(dk, at.key_dim * stride);
    } else {
        const States& after = ws.gradient;
        through_state(at, ws, after.state, residual, k, stride, gates.write_state, 1, dk, true, d.write_state);
        if (momentum)
            through_state(at, ws, after.momentum, residual, k, stride, gates.write_momentum, 1, dk, false, d.write_momentum);
    }
}

// Through W (or A, with sign = -1): from d = sign * rows @ R^T, the gradient of the plain products, and what it says about gamma and eta.
MDN_FLATTEN void through_products(const Place& at, Workspace& ws, const float* rows_of, float sign, const float* products,
                      long gamma_row, float* dproducts) {
    const Gates& gates = ws.gates;
    GateGradients& d = ws.gate_gradients;
    const long stride = ws.keys.columns_stride;
    for (long j = 0; j < gates.rows; j += kWidth) {
        const Row eta = load(gates.eta + j);
        Row deta = load(d.eta + j);
        for (long i = 0; i < j; ++i) store(dproducts + i * stride + j, zeros());
        multiply(rows_of + j * ws.state_stride, ws.state_stride, ws.residual_columns + j, stride, gates.rows - j,
                 round_up(at.unit.columns), [&](long i, const Row& sum) {
                     const long row = (j + i + gamma_row) * gates.stride + j;
                     const Row gamma = load(gates.gamma + row), x = sum * sign;
                     const Row with_product = x * load(products + (j + i) * stride + j);
                     store(d.gamma + row, load(d.gamma + row) + with_product * eta);
                     deta = deta + with_product * gamma;
                     store(dproducts + (j + i) * stride + j, x * eta * gamma);
                 });
        store(d.eta + j, deta);
    }
}

// dX^T += K^T (dproducts)^T and dK^T += X^T dproducts, X = Q or P; blocks above the diagonal are skipped.
void through_keys(const Place& at, Workspace& ws, const float* x_columns, const float* dproducts, float* dproducts_columns,
                  float* dx_columns) {
    const long rows = ws.gates.rows, stride = ws.keys.columns_stride, wide = row_stride(2 * rows);
    transpose(dproducts_columns, stride, dproducts, stride, rows, rows);
    for (long t = 0; t < rows; t += kWidth) {
        float *dx = dx_columns + t, *dk = ws.dk_columns + t;
        multiply(ws.keys.k_columns, stride, dproducts_columns + t, stride, at.key_dim, t + kWidth,
                 [&](long i, const Row& sum) { store(dx + i * stride, load(dx + i * stride) + sum); });
        multiply(x_columns + t, wide, dproducts + t * stride + t, stride, at.key_dim, rows - t,
                 [&](long i, const Row& sum) { store(dk + i * stride, load(dk + i * stride) + sum); });
    }
}

// dS and dM before the chunk, for one panel; also the gradients of abar_C, b_C and mbar_C, which are sums over the whole states.
MDN_FLATTEN void find_state_gradients(const Place& at, Workspace& ws, long column) {
    const Gates& gates = ws.gates;
    const long rows = gates.rows, stride = ws.state_stride, wide = row_stride(2 * rows);
    const long depth = at.problem.has_erase ? 2 * rows : rows;
    const StatePanel before = ws.before(at.index).panel(column), gradient = ws.gradient.panel(column);
    const float decay = gates.decay(), b = gates.b[rows], momentum_decay = gates.momentum_decay();
    const auto stack = [&](const float* factor_of_dout, const float* factor_of_du, float sign) {
        for (long i = 0; i < rows; ++i) {
            store(ws.write + i * kWidth, load(ws.dout + i * stride + column) * (sign * factor_of_dout[i]));
            store(ws.write + (rows + i) * kWidth, load(ws.du + i * stride + column) * (-sign * factor_of_du[i]));
        }
    };
    // What the second product and the next panel's first one will read.
    const Ahead state_ahead(before.state, stride, at.key_dim), momentum_ahead(before.momentum + kWidth, stride, at.key_dim);
    Row decay_dots = zeros(), b_dots = zeros(), momentum_dots = zeros();
    if (at.problem.has_momentum) {
        stack(gates.b + 1, gates.b, -1);
        multiply(ws.qp_columns, wide, ws.write, kWidth, at.key_dim, depth, [&](long i, const Row& sum) {
            const Row ds = load(gradient.state + i * stride), dm = load(gradient.momentum + i * stride);
            const Row momentum = load(before.momentum + i * stride);
            state_ahead.row(i);
            b_dots = b_dots - ds * momentum;
            momentum_dots = momentum_dots + dm * momentum;
            store(gradient.momentum + i * stride, dm * momentum_decay - ds * b + sum);
        });
    }
    stack(gates.abar + 1, gates.abar, 1);
    multiply(ws.qp_columns, wide, ws.write, kWidth, at.key_dim, depth, [&](long i, const Row& sum) {
        const Row ds = load(gradient.state + i * stride);
        momentum_ahead.row(i);
        decay_dots = decay_dots + ds * load(before.state + i * stride);
        store(gradient.state + i * stride, ds * decay + sum);
    });
    ws.gate_gradients.last_abar += total(decay_dots);
    ws.gate_gradients.last_b += total(b_dots);
    ws.gate_gradients.last_mbar += total(momentum_dots);
}

// P = alpha P: its share of dlog_alpha. Without a p of its own, dP then becomes a part of dK.
void undo_prediction(const Place& at, Workspace& ws) {
    const long rows = ws.gates.rows, stride = ws.keys.columns_stride, wide = row_stride(2 * rows);
    const bool times_alpha = at.problem.p_times_alpha, is_k = at.problem.p == nullptr;
    for (long t = 0; t < rows; t += kWidth) {
        const Row factor = times_alpha ? load(ws.gates.alpha + t) : filled(1);
        Row dots = zeros();
        for (long i = 0; i < at.key_dim; ++i) {
            const Row dp = load(ws.dp_columns + i * stride + t);
            float* dk = ws.dk_columns + i * stride + t;
            dots = dots + dp * load(ws.qp_columns + i * wide + rows + t);
            if (is_k) store(dk, load(dk) + dp * factor);
        }
        float* log_alpha = ws.gate_gradients.log_alpha + t;
        if (times_alpha) store(log_alpha, load(log_alpha) + dots);
    }
}

// From the gradient of x = factor * y, y = inverse * raw (its L2 norm), to that of raw: factor * inverse * (dx - y (y . dx)).
// dx, in place, and x are [K, C]; factor and inverse are one number per token.
void undo_norm(const Place& at, const Workspace& ws, float* dx, const float* x, long x_stride, const float* factor,
               const float* inverse) {
    const long stride = ws.keys.columns_stride;
    for (long t = 0; t < ws.gates.rows; t += kWidth) {
        const Row scale = factor != nullptr ? load(factor + t) : filled(1);
        if (!at.problem.l2norm) {
            for (long i = 0; i < at.key_dim; ++i) store(dx + i * stride + t, load(dx + i * stride + t) * scale);
            continue;
        }
        const Row to_y = inverse_or_zero(scale), to_raw = scale * load(inverse + t);
        Row dots = zeros();
        for (long i = 0; i < at.key_dim; ++i) dots = dots + load(x + i * x_stride + t) * load(dx + i * stride + t);
        dots = dots * to_y;
        for (long i = 0; i < at.key_dim; ++i) {
            const Row y = load(x + i * x_stride + t) * to_y;
            store(dx + i * stride + t, (load(dx + i * stride + t) - y * dots) * to_raw);
        }
    }
}

// dq, dk, dp: from [K, C] to the caller's rows. The rows of q are not needed any more and serve as scratch.
template <class Output>
void store_key_gradient(const Place& at, const Workspace& ws, void* to, const float* columns) {
    transpose(ws.keys.q, ws.keys.stride, columns, ws.keys.columns_stride, at.key_dim, ws.gates.rows);
    store_matrix(static_cast<Output*>(to) + at.unit.key_gradient_at(at.token), at.unit.key_gradient_stride(), ws.keys.q,
                 ws.keys.stride, at.tokens, at.problem.key_dim);
}

template <class Element>
void store_gradients(const Place& at, Workspace& ws) {
    const MdnProblem& problem = at.problem;
    const Keys& keys = ws.keys;
    const long rows = ws.gates.rows, stride = keys.columns_stride, wide = row_stride(2 * rows);
    const auto store_one = [&](void* to, const float* columns) {
        if (problem.float32_key_gradient)
            store_key_gradient<float>(at, ws, to, columns);
        else
            store_key_gradient<Element>(at, ws, to, columns);
    };
    if (problem.has_erase) undo_prediction(at, ws);
    undo_norm(at, ws, ws.dq_columns, ws.qp_columns, wide, keys.scale, keys.q_inverse);
    store_one(problem.dq, ws.dq_columns);
    undo_norm(at, ws, ws.dk_columns, keys.k_columns, stride, nullptr, keys.k_inverse);
    store_one(problem.dk, ws.dk_columns);
    if (problem.has_erase && problem.p != nullptr) {
        const float* factor = problem.p_times_alpha ? ws.gates.alpha : nullptr;
        undo_norm(at, ws, ws.dp_columns, ws.qp_columns + rows, wide, factor, keys.p_inverse);
        store_one(problem.dp, ws.dp_columns);
    }
    ws.gate_gradients.write_out(at.unit, at.token, at.tokens);
}

template <class Element>
void backward_chunk(const Place& at, Workspace& ws) {
    const MdnProblem& problem = at.problem;
    const long rows = round_up(at.tokens);
    prepare_chunk<Element>(at, ws);
    ws.gate_gradients.clear(ws.gates);
    for (long column = 0; column < at.unit.columns; column += kWidth) find_value_gradient<Element>(at, ws, column);
    find_key_gradients_through_states(at, ws);
    through_products(at, ws, ws.dout, 1, ws.qk, 1, ws.dqk);
    through_keys(at, ws, ws.qp_columns, ws.dqk, ws.read_columns, ws.dq_columns);
    if (problem.has_erase) {
        through_products(at, ws, ws.du, -1, ws.pk, 0, ws.dpk);
        through_keys(at, ws, ws.qp_columns + rows, ws.dpk, ws.erase_columns, ws.dp_columns);
    }
    if (at.index > 0 || problem.initial_state != nullptr)
        for (long column = 0; column < at.unit.columns; column += kWidth) find_state_gradients(at, ws, column);
    ws.gate_gradients.run_adjoint(ws.gates);
    store_gradients<Element>(at, ws);
}

template <class Element>
void backward_unit(const void* context, long index) {
    const MdnProblem& problem = *static_cast<const MdnProblem*>(context);
    const Unit unit(problem, index);
    const long chunks = (unit.tokens + problem.chunk - 1) / problem.chunk;
    const auto work = [&](Workspace& ws) {
        rebuild_states<Element>(unit, ws, chunks);
        load_state(unit, ws.gradient.state, ws.state_stride, problem.grad_final_state);
        if (problem.has_momentum) load_state(unit, ws.gradient.momentum, ws.state_stride, problem.grad_final_momentum);
        for (long chunk = chunks - 1; chunk >= 0; --chunk) {
            const bool state_is_zero = chunk == 0 && problem.initial_state == nullptr;
            const bool gradient_is_zero = chunk == chunks - 1 && problem.grad_final_state == nullptr;
            backward_chunk<Element>(Place(unit, chunk, state_is_zero, gradient_is_zero), ws);
        }
        if (problem.dinitial_state == nullptr) return;
        store_state(unit, problem.dinitial_state, ws.gradient.state, ws.state_stride);
        if (problem.has_momentum) store_state(unit, problem.dinitial_momentum, ws.gradient.momentum, ws.state_stride);
    };
    with_workspace<Workspace>(work, problem, std::max<long>(chunks, 1));
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_backward(const MdnProblem* problem) {
    const long units = problem->sequences * problem->value_heads * problem->slices;
    const auto work = problem->bfloat16 ? mdn::backward_unit<mdn::BFloat16> : mdn::backward_unit<float>;
    return mdn::run_units(problem->threads, units, work, problem) ? 0 : 1;
}
