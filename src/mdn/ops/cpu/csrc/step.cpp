// One token: decode. The time goes into moving the states, so S is read twice only while it is still in the cache, and each
// state is written once.
//
//     r = v - S^T p;    M = mu M - eta k r^T;    S = alpha S - beta M;    o = scale S^T q
#include <algorithm>

#include "memory.h"
#include "problem.h"
#include "threads.h"

namespace mdn {
namespace {

// Sixteen columns of the caller's states, or the fewer that are left at the end of a row.
struct WholeRow {
    Row load(const float* from) const { return mdn::load(from); }
    void store(float* to, const Row& row) const { mdn::store(to, row); }
};

struct PartOfRow {
    long count;

    Row load(const float* from) const {
        float padded[kWidth] = {};
        std::memcpy(padded, from, count * sizeof(float));
        return mdn::load(padded);
    }
    void store(float* to, const Row& row) const {
        float padded[kWidth];
        mdn::store(padded, row);
        std::memcpy(to, padded, count * sizeof(float));
    }
};

template <class Body>
MDN_INLINE void for_columns(long columns, Body&& body) {
    long c = 0;
    for (; c + kWidth <= columns; c += kWidth) body(c, WholeRow());
    if (c < columns) body(c, PartOfRow{columns - c});
}

// The processor's own prefetching stops at the end of every page, so lines are asked for some pages ahead (at the end of a head:
// of the next one). Asking for an address that does not exist does nothing.
constexpr long kRowsAhead = 16;

MDN_INLINE void ask_for(const float* address) { __builtin_prefetch(address, 1, 3); }

// One head of one sequence: its gates, its states [K, V], and its vectors, padded with zeros to a multiple of 16.
struct Head {
    float alpha, mu, beta, eta;
    float *state, *momentum;
    long state_stride, momentum_stride, rows, columns;
    float *q, *k, *p;  // [K]
    float *r, *o;      // [V]
};

// Calls body(count, first) over blocks of rows: a block reads r and o once for all its rows.
template <class Body>
MDN_INLINE void for_rows(long rows, Body&& body) {
    long first = 0;
    for (; first + 2 <= rows; first += 2) body(Count<2>(), first);
    for (; first < rows; ++first) body(Count<1>(), first);
}

MDN_FLATTEN void subtract_prediction(const Head head) {
    for_rows(head.rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const float *state = head.state + first * head.state_stride, *p = head.p + first;
        for_columns(head.columns, [&](long c, auto columns) {
            Row r = load(head.r + c);
            for (int i = 0; i < block; ++i) {
                ask_for(state + (i + kRowsAhead) * head.state_stride + c);
                r = r - columns.load(state + i * head.state_stride + c) * p[i];
            }
            store(head.r + c, r);
        });
    });
}

template <bool has_momentum>
MDN_FLATTEN void update_states(const Head head) {
    for_rows(head.rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        float* state = head.state + first * head.state_stride;
        float* momentum = has_momentum ? head.momentum + first * head.momentum_stride : nullptr;
        const float *k = head.k + first, *q = head.q + first;
        for_columns(head.columns, [&](long c, auto columns) {
            const Row write = load(head.r + c) * -head.eta;
            Row o = load(head.o + c), new_momentum[block], new_state[block];
            // S and M often lie a multiple of 4 KB apart; a load that follows a store to such an address waits for it. So all
            // loads come first.
            for (int i = 0; i < block; ++i) {
                new_state[i] = columns.load(state + i * head.state_stride + c);
                if (!has_momentum) continue;
                ask_for(momentum + (i + kRowsAhead) * head.momentum_stride + c);
                new_momentum[i] = columns.load(momentum + i * head.momentum_stride + c);
            }
            for (int i = 0; i < block; ++i) {
                new_momentum[i] = has_momentum ? new_momentum[i] * head.mu + write * k[i] : write * k[i];
                new_state[i] = new_state[i] * head.alpha - new_momentum[i] * head.beta;
                o = o + new_state[i] * q[i];
            }
            for (int i = 0; i < block; ++i) {
                if (has_momentum) columns.store(momentum + i * head.momentum_stride + c, new_momentum[i]);
                columns.store(state + i * head.state_stride + c, new_state[i]);
            }
            store(head.o + c, o);
        });
    });
}

template <class Element>
void load_key(const MdnStep& step, float* to, const void* from, long row, float factor) {
    const long padded = round_up(step.key_dim);
    load_padded(to, static_cast<const Element*>(from) + row * step.key_dim, step.key_dim, padded);
    scale_row(to, step.l2norm ? inverse_norm(to, padded) * factor : factor, padded);
}

template <class Element>
void step_head(const void* context, long unit) {
    const MdnStep& step = *static_cast<const MdnStep*>(context);
    const long row = unit / step.value_heads, value_head = unit % step.value_heads;
    const long slot = step.slots != nullptr ? step.slots[row] : row;
    const long key_row = row * step.key_heads + value_head / (step.value_heads / step.key_heads);
    const int64_t *strides = step.state_strides, *momentum_strides = step.momentum_strides;
    const long padded = round_up(step.value_dim);
    Scratch& scratch = scratch_of_this_thread();
    Arena vectors(scratch.reserve(3 * round_up(step.key_dim) + 2 * padded));
    Head head;
    head.alpha = step.log_alpha != nullptr ? std::exp(step.log_alpha[unit]) : 1;
    head.mu = step.has_momentum ? std::exp(step.log_mu[unit]) : 0;
    head.beta = step.beta != nullptr ? step.beta[unit] : 1;
    head.eta = step.eta != nullptr ? step.eta[unit] : 1;
    head.state = step.state + slot * strides[0] + value_head * strides[1];
    head.momentum = step.momentum + (step.has_momentum ? slot * momentum_strides[0] + value_head * momentum_strides[1] : 0);
    head.state_stride = strides[2], head.momentum_stride = momentum_strides[2];
    head.rows = step.key_dim, head.columns = step.value_dim;
    for (float** x : {&head.q, &head.k, &head.p}) *x = vectors.take(round_up(step.key_dim));
    for (float** x : {&head.r, &head.o}) *x = vectors.take(padded);
    load_key<Element>(step, head.q, step.q, key_row, static_cast<float>(step.scale));
    load_key<Element>(step, head.k, step.k, key_row, 1);
    load_padded(head.r, static_cast<const Element*>(step.v) + unit * step.value_dim, step.value_dim, padded);
    fill_zeros(head.o, padded);
    if (step.has_erase) {
        load_key<Element>(step, head.p, step.p != nullptr ? step.p : step.k, key_row, step.p_times_alpha ? head.alpha : 1);
        subtract_prediction(head);
    }
    step.has_momentum ? update_states<true>(head) : update_states<false>(head);
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
