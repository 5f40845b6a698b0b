// What the forward and the backward pass both need of one chunk: normalised keys, gate coefficients, masked products.
//
// Letters as in docs/architecture.md: C rows (tokens of the chunk, padded to a multiple of 16), K key dim. A padding row has
// k = p = q = v = 0, alpha = mu = 1, beta = eta = 0 and so changes nothing.
#pragma once

#include <algorithm>

#include "memory.h"
#include "problem.h"

namespace mdn {

// One part (a value head, or a slice of its columns) of one sequence: where its numbers are.
struct Unit {
    const MdnProblem& problem;
    long sequence, part, parts, head, key_head;  // `part` of `parts`; head = value head
    long first_token, tokens;
    long first_column, columns;  // of V

    Unit(const MdnProblem& problem, long unit) : problem(problem) {
        parts = problem.value_heads * problem.slices;
        sequence = unit / parts;
        part = unit % parts;
        head = part / problem.slices;
        key_head = head / (problem.value_heads / problem.key_heads);
        first_token = problem.offsets[sequence];
        tokens = problem.offsets[sequence + 1] - first_token;
        columns = problem.value_dim / problem.slices;
        first_column = part % problem.slices * columns;
    }

    long key_at(long token) const { return ((first_token + token) * problem.key_heads + key_head) * problem.key_dim; }
    long key_gradient_at(long token) const { return ((first_token + token) * parts + part) * problem.key_dim; }
    long value_at(long token) const {
        return ((first_token + token) * problem.value_heads + head) * problem.value_dim + first_column;
    }
    long gate_at(long token) const { return (first_token + token) * problem.value_heads + head; }
    long gate_gradient_at(long token) const { return (first_token + token) * parts + part; }
    long state_at() const {
        return (sequence * problem.value_heads + head) * problem.key_dim * problem.value_dim + first_column;
    }
    long key_gradient_stride() const { return parts * problem.key_dim; }
    long key_stride() const { return problem.key_heads * problem.key_dim; }
    long value_stride() const { return problem.value_heads * problem.value_dim; }

    // Sixteen columns of a [T, HV, V] tensor for the chunk at `token`; after the last columns, the first ones of the chunk at
    // `next_token`. No rows where there is no such chunk or no tensor.
    template <class Element>
    Ahead panel_ahead(const void* tensor, long token, long column, long next_token = -1) const {
        if (column >= columns) token = next_token, column = 0;
        if (tensor == nullptr || token < 0 || token >= tokens) return {};
        const Element* first = static_cast<const Element*>(tensor) + value_at(token) + column;
        return {first, value_stride(), std::min<long>(problem.chunk, tokens - token)};
    }
};

// Gate coefficients. Row i + 1 of gamma, lmu and element i + 1 of abar, b belong to token i; row 0 is the chunk's start, so
// that "the row before" needs no special case. Each row has one more column, `start`, for the state at the chunk's start:
//     lmu[i]   = mu_i lmu[i - 1] + e_i                lmu[start]   = mbar
//     gamma[i] = alpha_i gamma[i - 1] + beta_i lmu[i]     gamma[start] = b
// Every term is a product of numbers >= 0: nothing is divided or subtracted, so gates of exactly 0 are exact.
struct Gates {
    float *alpha, *mu, *beta, *eta;  // [C]
    float *abar, *b;                 // [C + 1]
    float *gamma, *lmu;              // [C + 1, start + 16]
    float *write_state, *write_momentum;  // [C]: S' = .. + K^T diag(write_state) R, M' = .. + K^T diag(write_momentum) R
    long rows, start, stride;

    Gates(Arena& arena, long chunk) {
        for (float** x : {&alpha, &mu, &beta, &eta, &write_state, &write_momentum}) *x = arena.take(chunk);
        for (float** x : {&abar, &b}) *x = arena.take(chunk + 1);
        for (float** x : {&gamma, &lmu}) *x = arena.take((chunk + 1) * row_stride(chunk + kWidth));
    }

    float decay() const { return abar[rows]; }
    float momentum_decay() const { return lmu[rows * stride + start]; }

    void load(const Unit& unit, long token, long tokens) {
        const MdnProblem& problem = unit.problem;
        rows = round_up(tokens), start = rows, stride = row_stride(rows + kWidth);
        for (long i = 0; i < rows; ++i) {
            const bool real = i < tokens;
            const long at = unit.gate_at(token + (real ? i : 0));
            alpha[i] = real && problem.log_alpha != nullptr ? std::exp(problem.log_alpha[at]) : 1;
            mu[i] = !problem.has_momentum ? 0 : real ? std::exp(problem.log_mu[at]) : 1;
            beta[i] = real ? (problem.beta != nullptr ? problem.beta[at] : 1) : 0;
            eta[i] = real ? (problem.eta != nullptr ? problem.eta[at] : 1) : 0;
        }
        run_recurrences();
    }

   private:
    void run_recurrences() {
        fill_zeros(gamma, stride);
        fill_zeros(lmu, stride);
        lmu[start] = 1, abar[0] = 1, b[0] = 0;
        for (long i = 0; i < rows; ++i) {
            const float *lmu_before = lmu + i * stride, *gamma_before = gamma + i * stride;
            float *lmu_now = lmu + (i + 1) * stride, *gamma_now = gamma + (i + 1) * stride;
            for (long j = 0; j < start + kWidth; j += kWidth) store(lmu_now + j, mdn::load(lmu_before + j) * mu[i]);
            lmu_now[i] = 1;
            for (long j = 0; j < start + kWidth; j += kWidth)
                store(gamma_now + j, mdn::load(gamma_before + j) * alpha[i] + mdn::load(lmu_now + j) * beta[i]);
            abar[i + 1] = abar[i] * alpha[i];
            b[i + 1] = gamma_now[start];
        }
        for (long i = 0; i < rows; ++i) {
            write_state[i] = eta[i] * gamma[rows * stride + i];
            write_momentum[i] = -eta[i] * lmu[rows * stride + i];
        }
    }
};

// The chunk's keys, predictions and queries, [C, K], after the L2 norm, the factor alpha of p and the scale of q.
struct Keys {
    float *k, *p, *q;  // [C, K]; p is also k when nothing distinguishes them
    float* k_columns;  // [K, C]
    float *k_inverse, *p_inverse, *q_inverse;  // [C]: what the L2 norm multiplied a row with
    float* scale;                              // [C]: what q is multiplied with after that
    long stride, columns_stride;
    float* own_p;

    Keys(Arena& arena, long chunk, long key_dim) : stride(row_stride(key_dim)) {
        for (float** x : {&k, &own_p, &q}) *x = arena.take(chunk * stride);
        k_columns = arena.take(round_up(key_dim) * row_stride(chunk));
        for (float** x : {&k_inverse, &p_inverse, &q_inverse, &scale}) *x = arena.take(chunk);
    }

    template <class Element>
    void load_k(const Unit& unit, long token, long tokens, long rows) {
        load_normalised<Element>(k, k_inverse, unit.problem.k, unit, token, tokens, rows);
        columns_stride = row_stride(rows);
        transpose(k_columns, columns_stride, k, stride, rows, round_up(unit.problem.key_dim));
    }

    template <class Element>
    void load_p_and_q(const Unit& unit, const Gates& gates, long token, long tokens) {
        const MdnProblem& problem = unit.problem;
        const long padded = round_up(problem.key_dim);
        load_normalised<Element>(q, q_inverse, problem.q, unit, token, tokens, gates.rows);
        for (long i = 0; i < gates.rows; ++i) {
            scale[i] = static_cast<float>(problem.scale);
            scale_row(q + i * stride, scale[i], padded);
        }
        if (!problem.has_erase) return;
        p = own_p;
        if (problem.p != nullptr)
            load_normalised<Element>(p, p_inverse, problem.p, unit, token, tokens, gates.rows);
        else if (problem.p_times_alpha)
            std::memcpy(p, k, gates.rows * stride * sizeof(float));
        else
            p = k;
        if (!problem.p_times_alpha) return;
        for (long i = 0; i < tokens; ++i) scale_row(p + i * stride, gates.alpha[i], padded);
    }

   private:
    template <class Element>
    void load_normalised(float* to, float* inverse, const void* from, const Unit& unit, long token, long tokens, long rows) {
        const MdnProblem& problem = unit.problem;
        const Element* first = static_cast<const Element*>(from) + unit.key_at(token);
        load_matrix(to, stride, first, unit.key_stride(), tokens, rows, problem.key_dim);
        const long padded = round_up(problem.key_dim);
        if (!problem.l2norm) return;
        // All norms first: none waits for another, so the processor works on several at once.
        for (long i = 0; i < rows; ++i) inverse[i] = inverse_norm(to + i * stride, padded);
        for (long i = 0; i < tokens; ++i) scale_row(to + i * stride, inverse[i], padded);
    }
};

// masked[i, j] = (x_i . k_j) eta_j coefficient[i, j] on and below the diagonal, zero above; products[i, j] = x_i . k_j is kept
// when asked for (only on and below the diagonal blocks). `coefficient` is gamma from its row 0 for A and from row 1 for W.
inline void masked_product(float* masked, float* products, const float* x, const Keys& keys, const Gates& gates,
                           const float* coefficient, long key_dim) {
    const long rows = gates.rows, stride = keys.columns_stride;
    for (long j = 0; j < rows; j += kWidth) {
        const Row eta = load(gates.eta + j);
        for (long i = 0; i < j; ++i) store(masked + i * stride + j, zeros());
        multiply(x + j * keys.stride, keys.stride, keys.k_columns + j, stride, rows - j, round_up(key_dim),
                 [&](long i, const Row& product) {
                     const long at = (j + i) * stride + j;
                     if (products != nullptr) store(products + at, product);
                     store(masked + at, product * eta * load(coefficient + (j + i) * gates.stride + j));
                 });
    }
}

}  // namespace mdn
