// One token: decode, equation (1) of docs/derivation.md. The time goes into moving the states, so S is read twice only
// while it is still in the cache, and each state is written once.
//
//     r = v - S^T p;    M = mu M - eta k r^T;    S = alpha S - beta M + direct k r^T;    o = scale S^T q
//
// With look-ahead (22) r = v - (alpha S - beta mu M)^T p.
#include "interface.h"
#include "memory.h"
#include "threads.h"

namespace mdn {
namespace {

// Sixteen columns of the caller's states, or the fewer that are left at the end of a row.
struct Sixteen {
    Vector load(const float* from) const { return mdn::load(from); }
    void store(float* to, const Vector& x) const { mdn::store(to, x); }
};

struct Fewer {
    long count;

    Vector load(const float* from) const {
        float padded[kWidth] = {};
        std::memcpy(padded, from, count * sizeof(float));
        return mdn::load(padded);
    }
    void store(float* to, const Vector& x) const {
        float padded[kWidth];
        mdn::store(padded, x);
        std::memcpy(to, padded, count * sizeof(float));
    }
};

template <class Body>
MDN_INLINE void for_columns(long columns, Body&& body) {
    long c = 0;
    for (; c + kWidth <= columns; c += kWidth) body(c, Sixteen());
    if (c < columns) body(c, Fewer{columns - c});
}

// The processor's own prefetching stops at the end of every page, so lines are prefetched some rows ahead (at the end
// of a head: of the next one). Prefetching an address that does not exist does nothing.
constexpr long kRowsAhead = 16;

MDN_INLINE void prefetch(const float* address) { __builtin_prefetch(address, 1, 3); }

// One head of one sequence: its gates, its states and its vectors, which are padded with zeros to a multiple of 16.
struct Head {
    float alpha, mu, beta, eta, direct;
    Matrix S, M;  // [K, V] in the caller's memory
    long key_dim, value_dim;
    float *q, *k;      // [K]
    float *p_S, *p_M;  // [K]: what probes S, and with look-ahead also what probes -M
    float *r, *o;      // [V]
};

// Calls body(count, first) over blocks of key rows: a block reads r and o once for all its rows.
template <class Body>
MDN_INLINE void for_rows(long rows, Body&& body) {
    long first = 0;
    for (; first + 2 <= rows; first += 2) body(Count<2>(), first);
    for (; first < rows; ++first) body(Count<1>(), first);
}

// r = v - S^T p_S + M^T p_M; r holds v before.
template <bool lookahead>
MDN_FLATTEN void find_residual(const Head head) {
    for_rows(head.key_dim, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const Matrix S = head.S.from(first, 0), M = head.M.from(lookahead ? first : 0, 0);
        const float *p_S = head.p_S + first, *p_M = head.p_M + first;
        for_columns(head.value_dim, [&](long c, auto columns) {
            Vector r = load(head.r + c);
            for (int i = 0; i < block; ++i) {
                prefetch(S.row(i + kRowsAhead) + c);
                r = r - columns.load(S.row(i) + c) * p_S[i];
                if (lookahead) r = r + columns.load(M.row(i) + c) * p_M[i];
            }
            store(head.r + c, r);
        });
    });
}

// M = mu M - eta k r^T;  S = alpha S - beta M + direct k r^T;  o = S^T q.
template <bool has_momentum, bool has_direct>
MDN_FLATTEN void update_states(const Head head) {
    for_rows(head.key_dim, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const Matrix S = head.S.from(first, 0), M = head.M.from(has_momentum ? first : 0, 0);
        const float *k = head.k + first, *q = head.q + first;
        for_columns(head.value_dim, [&](long c, auto columns) {
            const Vector r = load(head.r + c), write = r * -head.eta, direct_write = r * head.direct;
            Vector o = load(head.o + c), new_M[block], new_S[block];
            // S and M often lie a multiple of 4 KB apart; a load that follows a store to such an address waits for it.
            // So all loads come first.
            for (int i = 0; i < block; ++i) {
                new_S[i] = columns.load(S.row(i) + c);
                if (!has_momentum) continue;
                prefetch(M.row(i + kRowsAhead) + c);
                new_M[i] = columns.load(M.row(i) + c);
            }
            for (int i = 0; i < block; ++i) {
                new_M[i] = has_momentum ? new_M[i] * head.mu + write * k[i] : write * k[i];
                new_S[i] = new_S[i] * head.alpha - new_M[i] * head.beta;
                if (has_direct) new_S[i] = new_S[i] + direct_write * k[i];
                o = o + new_S[i] * q[i];
            }
            for (int i = 0; i < block; ++i) {
                if (has_momentum) columns.store(M.row(i) + c, new_M[i]);
                columns.store(S.row(i) + c, new_S[i]);
            }
            store(head.o + c, o);
        });
    });
}

// One row of q, k or p, after the L2 norm and times `factor`.
template <class Element>
void load_key(const MdnStep& step, float* to, const void* from, long row, float factor) {
    const long K = round_up(step.key_dim);
    load_padded(to, static_cast<const Element*>(from) + row * step.key_dim, step.key_dim, K);
    scale_row(to, step.l2norm ? inverse_norm(to, K) * factor : factor, K);
}

Matrix state_of(float* state, const int64_t strides[3], long slot, long head) {
    return {state + slot * strides[0] + head * strides[1], strides[2]};
}

template <class Element>
void step_head(const void* context, long unit) {
    const MdnStep& step = *static_cast<const MdnStep*>(context);
    const long row = unit / step.value_heads, value_head = unit % step.value_heads;
    const long slot = step.slots != nullptr ? step.slots[row] : row;
    const long key_row = row * step.key_heads + value_head / (step.value_heads / step.key_heads);
    const long K = round_up(step.key_dim), V = round_up(step.value_dim);
    Arena vectors(scratch_of_this_thread().reserve(4 * K + 2 * V));
    Head head;
    head.alpha = step.log_alpha != nullptr ? std::exp(step.log_alpha[unit]) : 1;
    head.mu = step.has_momentum ? std::exp(step.log_mu[unit]) : 0;
    head.beta = step.beta != nullptr ? step.beta[unit] : 1;
    head.eta = step.eta != nullptr ? step.eta[unit] : 1;
    head.direct = step.direct != nullptr ? step.direct[unit] : 0;
    head.S = state_of(step.S, step.S_strides, slot, value_head);
    head.M = step.has_momentum ? state_of(step.M, step.M_strides, slot, value_head) : Matrix{};
    head.key_dim = step.key_dim;
    head.value_dim = step.value_dim;
    head.q = vectors.floats(K);
    head.k = vectors.floats(K);
    head.p_S = vectors.floats(K);
    head.p_M = vectors.floats(K);
    head.r = vectors.floats(V);
    head.o = vectors.floats(V);
    load_key<Element>(step, head.q, step.q, key_row, static_cast<float>(step.scale));
    load_key<Element>(step, head.k, step.k, key_row, 1);
    load_padded(head.r, static_cast<const Element*>(step.v) + unit * step.value_dim, step.value_dim, V);
    fill_zeros(head.o, V);
    if (step.has_erase) {
        const void* p = step.p != nullptr ? step.p : step.k;
        load_key<Element>(step, head.p_S, p, key_row, step.p_times_alpha || step.lookahead ? head.alpha : 1);
        if (step.lookahead) load_key<Element>(step, head.p_M, p, key_row, head.beta * head.mu);
        step.lookahead ? find_residual<true>(head) : find_residual<false>(head);
    }
    if (step.has_momentum)
        step.direct != nullptr ? update_states<true, true>(head) : update_states<true, false>(head);
    else
        step.direct != nullptr ? update_states<false, true>(head) : update_states<false, false>(head);
    store_row(static_cast<Element*>(step.o) + unit * step.value_dim, head.o, step.value_dim);
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_step(const MdnStep* step) {
    for (long row = 0; row < step->batch; ++row) {
        const long slot = step->slots != nullptr ? step->slots[row] : row;
        if (slot < 0 || slot >= step->slot_count) return 2;
    }
    const auto work = step->bfloat16 ? mdn::step_head<mdn::BFloat16> : mdn::step_head<float>;
    return mdn::run_units(step->threads, step->batch * step->value_heads, work, step) ? 0 : 1;
}
