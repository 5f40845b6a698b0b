// What the forward and the backward pass both need of one chunk: its vectors q, k, p, its gate coefficients and the
// matrices erase and attend. Names and equation numbers are those of docs/derivation.md.
//
// Scratch matrices are padded: a chunk has C rows or columns, a multiple of 16, of which `tokens` are real. A padding
// token has k = p = q = v = 0, alpha = mu = 1, beta = eta = 0 and so changes nothing. K is a multiple of 16 likewise.
// A name that ends in _T is the transpose of the matrix without it.
#pragma once

#include <algorithm>

#include "interface.h"
#include "memory.h"

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

    // Offsets of a token into q, k, p [T, H, K], into their gradients [T, P, K], into v, o, residual [T, HV, V], into
    // the gates [T, HV] and into their gradients [T, P]; the offset of this unit into a state [N, HV, K, V].
    long key_offset(long token) const {
        return ((first_token + token) * problem.key_heads + key_head) * problem.key_dim;
    }
    long key_gradient_offset(long token) const { return ((first_token + token) * parts + part) * problem.key_dim; }
    long value_offset(long token) const {
        return ((first_token + token) * problem.value_heads + head) * problem.value_dim + first_column;
    }
    long gate_offset(long token) const { return (first_token + token) * problem.value_heads + head; }
    long gate_gradient_offset(long token) const { return (first_token + token) * parts + part; }
    long state_offset() const {
        return (sequence * problem.value_heads + head) * problem.key_dim * problem.value_dim + first_column;
    }

    // From one token to the next.
    long key_stride() const { return problem.key_heads * problem.key_dim; }
    long key_gradient_stride() const { return parts * problem.key_dim; }
    long value_stride() const { return problem.value_heads * problem.value_dim; }
};

// One chunk of one unit.
struct Chunk {
    const Unit& unit;
    const MdnProblem& problem;
    long first;   // its first token, counted from the sequence's start
    long tokens;  // how many it has
    long rows;    // the same, rounded up to a multiple of 4: rows of the products
    long C;       // the same, rounded up to a multiple of 16: rows and columns of scratch matrices
    long K;       // key_dim, rounded up to a multiple of 16
    long probe;   // row of the coefficients that p of the first token reads: 0, before it, or 1 with look-ahead (22)

    Chunk(const Unit& unit, long index)
        : unit(unit),
          problem(unit.problem),
          first(index * problem.chunk_size),
          tokens(std::min<long>(problem.chunk_size, unit.tokens - first)),
          rows(round_up(tokens, 4)),
          C(round_up(tokens)),
          K(round_up(problem.key_dim)),
          probe(problem.lookahead ? 1 : 0) {}

    // Columns that the panel at `column` has of its 16.
    long width(long column) const { return std::min<long>(kWidth, unit.columns - column); }

    // Sixteen columns of a [T, HV, V] tensor: a panel of this chunk.
    template <class Element>
    Element* panel(Element* tensor, long column) const {
        return tensor + unit.value_offset(first) + column;
    }

    // The same for prefetching; past the last columns, the first panel of the chunk at `next_first`. No rows where
    // there is no such chunk or no tensor.
    template <class Element>
    Prefetch prefetch(const void* tensor, long column, long next_first = -1) const {
        long token = first;
        if (column >= unit.columns) {
            token = next_first;
            column = 0;
        }
        if (tensor == nullptr || token < 0 || token >= unit.tokens) return {};
        const Element* panel = static_cast<const Element*>(tensor) + unit.value_offset(token) + column;
        return {panel, unit.value_stride(), std::min<long>(problem.chunk_size, unit.tokens - token)};
    }
};

// Gate coefficients. Row i + 1 of gamma_S and gamma_M and element i + 1 of abar, b, mbar belong to token i (counted
// from 0 here); row 0 is the chunk's start, so that "the row before" needs no special case. Column 0 of the derivation,
// the weights of the states at the chunk's start, is kept apart, as b and mbar; columns here are tokens.
//
// Every term is a product of numbers >= 0: nothing is divided or subtracted, so gates of exactly 0 are exact.
struct Gates {
    float *alpha, *mu, *beta, *eta, *direct;  // [C]
    float *abar, *b, *mbar;                   // [C + 1]
    Matrix gamma_S, gamma_M;                  // [C + 1, C]; row r is written up to column columns_of_row(r)
    float *write_S, *write_M;                 // [C]: the last rows of gamma_S and gamma_M
    float abar_C, b_C, mbar_C;                // weights of S0 in S', of -M0 in S' and of M0 in M'

    Gates(Arena& arena, long C)
        : alpha(arena.floats(C)),
          mu(arena.floats(C)),
          beta(arena.floats(C)),
          eta(arena.floats(C)),
          direct(arena.floats(C)),
          abar(arena.floats(C + 1)),
          b(arena.floats(C + 1)),
          mbar(arena.floats(C + 1)),
          gamma_S(arena.matrix(C + 1, C)),
          gamma_M(arena.matrix(C + 1, C)) {}

    void load(const Chunk& chunk) {
        const MdnProblem& problem = chunk.problem;
        for (long i = 0; i < chunk.C; ++i) {
            const bool real = i < chunk.tokens;
            const long offset = chunk.unit.gate_offset(chunk.first + (real ? i : 0));
            alpha[i] = real && problem.log_alpha != nullptr ? std::exp(problem.log_alpha[offset]) : 1;
            mu[i] = !problem.has_momentum ? 0 : real ? std::exp(problem.log_mu[offset]) : 1;
            beta[i] = !real ? 0 : problem.beta != nullptr ? problem.beta[offset] : 1;
            eta[i] = !real ? 0 : problem.eta != nullptr ? problem.eta[offset] : 1;
            direct[i] = real && problem.direct != nullptr ? problem.direct[offset] : 0;
        }
        find_start_weights(chunk);
        find_write_weights(chunk);
        write_S = gamma_S.row(chunk.rows);
        write_M = gamma_M.row(chunk.rows);
        abar_C = abar[chunk.rows];
        b_C = b[chunk.rows];
        mbar_C = mbar[chunk.rows];
    }

   private:
    // (3) and column 0 of (4) and (5).
    void find_start_weights(const Chunk& chunk) {
        float abar_i = 1, b_i = 0, mbar_i = 1;
        for (long i = 0; i <= chunk.C; ++i) {
            abar[i] = abar_i;
            b[i] = b_i;
            mbar[i] = mbar_i;
            if (i == chunk.C) break;
            abar_i *= alpha[i];
            mbar_i *= mu[i];
            b_i = alpha[i] * b_i + beta[i] * mbar_i;
        }
    }

    // (4) gamma_M[i] = mu_i gamma_M[i - 1] + eta_i e_i
    // (5) gamma_S[i] = alpha_i gamma_S[i - 1] + beta_i gamma_M[i] + direct_i e_i                                 (20)
    void find_write_weights(const Chunk& chunk) {
        fill_zeros(gamma_S.row(0), chunk.C);
        fill_zeros(gamma_M.row(0), chunk.C);
        for (long i = 0; i < chunk.rows; ++i) {
            const float *gamma_S_before = gamma_S.row(i), *gamma_M_before = gamma_M.row(i);
            float *gamma_S_i = gamma_S.row(i + 1), *gamma_M_i = gamma_M.row(i + 1);
            const float alpha_i = alpha[i], mu_i = mu[i], beta_i = beta[i];
            const long last = i / kWidth * kWidth;  // the block of 16 columns with column i
            const auto advance = [&](long j, const Vector& new_write) {
                const Vector M = mdn::load(gamma_M_before + j) * mu_i + new_write;
                store(gamma_M_i + j, M);
                return mdn::load(gamma_S_before + j) * alpha_i + M * beta_i;
            };
            for (long j = 0; j < last; j += kWidth) store(gamma_S_i + j, advance(j, zeros()));
            const Vector e_i = unit_vector(i - last);
            store(gamma_S_i + last, advance(last, e_i * eta[i]) + e_i * direct[i]);
            if (last + kWidth < columns_of_row(chunk, i + 1)) {
                store(gamma_M_i + last + kWidth, zeros());
                store(gamma_S_i + last + kWidth, zeros());
            }
        }
    }

    // Up to the block of 16 columns on the diagonal: row r belongs to token r - 1, and token r reads it as the row
    // before.
    static long columns_of_row(const Chunk& chunk, long r) { return std::min(chunk.C, round_up(r + 1)); }
};

// q, k and p of a chunk's tokens, after the L2 norm, the factor alpha of p and the scale of q.
struct TokenVectors {
    Matrix q, k, p;                                           // [C, K]; p is k itself when nothing distinguishes them
    Matrix k_T;                                               // [K, C]
    float *q_inverse_norm, *k_inverse_norm, *p_inverse_norm;  // [C]
    Matrix own_p;                                             // [C, K]: where p is when it is not k

    TokenVectors(Arena& arena, long C, long K)
        : q(arena.matrix(C, K)),
          k(arena.matrix(C, K)),
          p(k),
          k_T(arena.matrix(K, C)),
          q_inverse_norm(arena.floats(C)),
          k_inverse_norm(arena.floats(C)),
          p_inverse_norm(arena.floats(C)),
          own_p(arena.matrix(C, K)) {}

    template <class Element>
    void load_k(const Chunk& chunk) {
        load_normalised<Element>(chunk, k, k_inverse_norm, chunk.problem.k);
        transpose(k_T, k, chunk.C, chunk.K);
    }

    template <class Element>
    void load_q(const Chunk& chunk) {
        load_normalised<Element>(chunk, q, q_inverse_norm, chunk.problem.q);
        const float scale = static_cast<float>(chunk.problem.scale);
        for (long i = 0; i < chunk.tokens; ++i) scale_row(q.row(i), scale, chunk.K);
    }

    template <class Element>
    void load_p(const Chunk& chunk, const Gates& gates) {
        const MdnProblem& problem = chunk.problem;
        if (!problem.has_erase) return;
        p = problem.p != nullptr || problem.p_times_alpha ? own_p : k;
        if (problem.p != nullptr)
            load_normalised<Element>(chunk, p, p_inverse_norm, problem.p);
        else if (problem.p_times_alpha)
            std::memcpy(p.data, k.data, chunk.C * k.stride * sizeof(float));
        if (!problem.p_times_alpha) return;
        for (long i = 0; i < chunk.tokens; ++i) scale_row(p.row(i), gates.alpha[i], chunk.K);
    }

   private:
    template <class Element>
    void load_normalised(const Chunk& chunk, const Matrix to, float* inverse_norms, const void* tensor) {
        const Element* from = static_cast<const Element*>(tensor) + chunk.unit.key_offset(chunk.first);
        load_matrix(to, from, chunk.unit.key_stride(), chunk.tokens, chunk.C, chunk.problem.key_dim);
        if (!chunk.problem.l2norm) return;
        // All norms first: none waits for another, so the processor works on several at once.
        for (long i = 0; i < chunk.C; ++i) inverse_norms[i] = inverse_norm(to.row(i), chunk.K);
        for (long i = 0; i < chunk.tokens; ++i) scale_row(to.row(i), inverse_norms[i], chunk.K);
    }
};

// (6), (7): masked = (X K^T) * gamma, in the blocks of 16 x 16 on and below the diagonal; those above are not written.
// `gamma` is gamma_S from its row `probe` for erase (X = P) and from its row 1 for attend (X = Q), [C, C]. The products
// X K^T, [C, C], are left in `products`. Their sums over K are added up from shorter ones, which halves a rounding
// error that gamma_S would enlarge.
inline void masked_product(const Chunk& chunk, const Matrix masked, const Matrix products, const Matrix x,
                           const Matrix k_T, const Matrix gamma) {
    constexpr long kSegment = 2 * kWidth;
    for (long j = 0; j < chunk.rows; j += kWidth) {
        const Matrix sums = products.from(j, j), masked_block = masked.from(j, j), gamma_block = gamma.from(j, j);
        const long rows = chunk.rows - j;
        long done = 0;
        for (; done + kSegment < chunk.K; done += kSegment)
            multiply(x.from(j, done), k_T.from(done, j), rows, kSegment,
                     [&](long i, const Vector& sum) { store(sums.row(i), done == 0 ? sum : load(sums.row(i)) + sum); });
        multiply(x.from(j, done), k_T.from(done, j), rows, chunk.K - done, [&](long i, const Vector& sum) {
            const Vector product = done == 0 ? sum : load(sums.row(i)) + sum;
            store(sums.row(i), product);
            store(masked_block.row(i), product * load(gamma_block.row(i)));
        });
    }
}

}  // namespace mdn
