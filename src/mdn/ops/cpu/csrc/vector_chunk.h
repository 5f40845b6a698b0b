// One chunk of sixteen tokens of a rule with a decay per key dimension, as the forward and the backward pass need it.
// Names and equation numbers are those of docs/derivation.md, section 11:
//
//     [Q K], [Q E], [P K], [P E]      inner products with the decay between the two tokens                (32)
//     Qbar, Pbar, Kbar, Ebar          decayed from the chunk's start, or up to its end                     (32)
//
//     KDA       (I + [P K]) R      = V - Pbar S0              written = R                                  (33)
//     RWKV-7    (I - [P E]) probed = [P K] V + Pbar S0        written = V
//     GLA                                                     written = V
//
//     O  = Qbar S0 + [Q K] written + [Q E] probed             the terms with E: RWKV-7 only                (34)
//     S' = diag(abar_C) S0 + Kbar^T written + Ebar^T probed
//
// `solved` is R or, with E, `probed`. Decays between tokens are products of alphas, never quotients: nothing overflows,
// and an alpha of 0 is exact.
#pragma once

#include <algorithm>

#include "functions.h"
#include "triangular.h"
#include "vector_decay.h"

namespace mdn {
namespace vector_decay {

constexpr long C = kWidth;

// One head of one sequence: where its numbers are.
struct Unit {
    const MdnVectorDecay& problem;
    long head, sequence, first, tokens, K;

    Unit(const MdnVectorDecay& problem, long unit)
        : problem(problem),
          head(unit % problem.heads),
          sequence(unit / problem.heads),
          first(problem.offsets[sequence]),
          tokens(problem.offsets[sequence + 1] - first),
          K(round_up(problem.key_dim)) {}

    long chunks() const { return (tokens + C - 1) / C; }
    long tokens_of(long chunk) const { return std::min(C, tokens - chunk * C); }
    long key_offset(long chunk) const { return ((first + chunk * C) * problem.heads + head) * problem.key_dim; }
    long value_offset(long chunk) const { return ((first + chunk * C) * problem.heads + head) * problem.value_dim; }
    long state_offset() const { return (sequence * problem.heads + head) * problem.key_dim * problem.value_dim; }
    long key_stride() const { return problem.heads * problem.key_dim; }
    long value_stride() const { return problem.heads * problem.value_dim; }
    long width(long column) const { return std::min<long>(kWidth, problem.value_dim - column); }

    void load_keys(const Matrix to, const float* tensor, long chunk) const {
        load_matrix(to, tensor + key_offset(chunk), key_stride(), tokens_of(chunk), C, problem.key_dim);
    }
    void store_keys(float* tensor, long chunk, const Matrix from) const {
        store_matrix(tensor + key_offset(chunk), key_stride(), from, tokens_of(chunk), problem.key_dim);
    }
    void load_values(const Matrix to, const float* tensor, long chunk, long column) const {
        load_matrix(to, tensor + value_offset(chunk) + column, value_stride(), tokens_of(chunk), C, width(column));
    }
    void store_values(float* tensor, long chunk, long column, const Matrix from) const {
        store_matrix(tensor + value_offset(chunk) + column, value_stride(), from, tokens_of(chunk), width(column));
    }
    void load_state(const Matrix to, const float* from) const {
        if (from == nullptr) return fill_zeros(to, K);
        load_matrix(to, from + state_offset(), problem.value_dim, problem.key_dim, K, problem.value_dim);
    }
    void store_state(float* to, const Matrix from) const {
        store_matrix(to + state_offset(), problem.value_dim, from, problem.key_dim, problem.value_dim);
    }
};

// q, k, p and e of a chunk's tokens, and everything else of it that does not depend on V.
struct TokenVectors {
    Matrix q, k, p, e, alpha;           // [C, K]
    Matrix abar;                        // [C + 1, K]: alpha_1 .. alpha_i, ones in row 0
    Matrix to_end;                      // [C, K]: alpha_{j+1} .. alpha_C
    Matrix q_bar, p_bar, k_bar, e_bar;  // [C, K]
    Matrix k_bar_T, e_bar_T;            // [K, C]
    Matrix qk, qe, pk, pe;              // [C, C], lower triangular; pe is -[P E]
    float* row;                         // [K]

    TokenVectors(Arena& arena, long K)
        : q(arena.matrix(C, K)),
          k(arena.matrix(C, K)),
          p(arena.matrix(C, K)),
          e(arena.matrix(C, K)),
          alpha(arena.matrix(C, K)),
          abar(arena.matrix(C + 1, K)),
          to_end(arena.matrix(C, K)),
          q_bar(arena.matrix(C, K)),
          p_bar(arena.matrix(C, K)),
          k_bar(arena.matrix(C, K)),
          e_bar(arena.matrix(C, K)),
          k_bar_T(arena.matrix(K, C)),
          e_bar_T(arena.matrix(K, C)),
          qk(arena.matrix(C, C)),
          qe(arena.matrix(C, C)),
          pk(arena.matrix(C, C)),
          pe(arena.matrix(C, C)),
          row(arena.floats(K)) {}

    // What the state needs: the decays, Kbar and Ebar.
    void load_writes(const Unit& unit, long chunk) {
        const MdnVectorDecay& problem = unit.problem;
        unit.load_keys(alpha, problem.log_alpha, chunk);
        unit.load_keys(k, problem.k, chunk);
        for (long d = 0; d < unit.K; d += kWidth) {
            Vector product = filled(1);
            store(abar.row(0) + d, product);
            for (long i = 0; i < C; ++i) {
                const Vector a = exp(load(alpha.row(i) + d));
                store(alpha.row(i) + d, a);
                product = product * a;
                store(abar.row(i + 1) + d, product);
            }
            product = filled(1);
            for (long i = C - 1; i >= 0; --i) {
                store(to_end.row(i) + d, product);
                product = product * load(alpha.row(i) + d);
            }
        }
        scale(k_bar, k, to_end, unit.K);
        transpose(k_bar_T, k_bar, C, unit.K);
        if (problem.e == nullptr) return;
        unit.load_keys(e, problem.e, chunk);
        scale(e_bar, e, to_end, unit.K);
        transpose(e_bar_T, e_bar, C, unit.K);
    }

    // What the errors need, after load_writes.
    void load_probes(const Unit& unit, long chunk) {
        if (unit.problem.p == nullptr) return;
        unit.load_keys(p, unit.problem.p, chunk);
        scale(p_bar, p, abar, unit.K);
        for (long i = 0; i < C; ++i) find_products(unit, p.row(i), i, i - 1, pk, pe, -1);
    }

    // What the outputs need, after load_writes.
    void load_queries(const Unit& unit, long chunk) {
        unit.load_keys(q, unit.problem.q, chunk);
        scale(q_bar, q, abar.from(1, 0), unit.K);
        for (long i = 0; i < C; ++i) find_products(unit, q.row(i), i, i, qk, qe, 1);
    }

    static void scale(const Matrix to, const Matrix x, const Matrix factor, long K) {
        for (long i = 0; i < C; ++i)
            for (long d = 0; d < K; d += kWidth) store(to.row(i) + d, load(x.row(i) + d) * load(factor.row(i) + d));
    }

   private:
    // (32) Row i of [X K] and, times `sign`, of [X E], X = Q or P: x decays token by token on its way from token `last`
    // back to the first.
    MDN_FLATTEN void find_products(const Unit& unit, const float* x, long i, long last, const Matrix xk,
                                   const Matrix xe, float sign) {
        const long K = unit.K;
        const bool has_e = unit.problem.e != nullptr;
        for (long d = 0; d < K; d += kWidth) store(row + d, load(x + d));
        for (long j = last; j >= 0; --j) {
            Vector with_k = zeros(), with_e = zeros();
            for (long d = 0; d < K; d += kWidth) {
                const Vector decayed = load(row + d);
                with_k = with_k + decayed * load(k.row(j) + d);
                if (has_e) with_e = with_e + decayed * load(e.row(j) + d);
                store(row + d, decayed * load(alpha.row(j) + d));
            }
            xk.row(i)[j] = total(with_k);
            if (has_e) xe.row(i)[j] = sign * total(with_e);
        }
    }
};

// (34) S' of one panel, [K, 16]; `written` and `solved` are [C, 16]. `after` may be `before`.
inline void advance(const Unit& unit, const TokenVectors& vectors, const Matrix before, const Matrix after,
                    const Matrix written, const Matrix solved) {
    const float* decay = vectors.abar.row(C);
    multiply(vectors.k_bar_T, written, unit.K, C,
             [&](long i, const Vector& sum) { store(after.row(i), load(before.row(i)) * decay[i] + sum); });
    if (unit.problem.e != nullptr)
        multiply(vectors.e_bar_T, solved, unit.K, C,
                 [&](long i, const Vector& sum) { store(after.row(i), load(after.row(i)) + sum); });
}

}  // namespace vector_decay
}  // namespace mdn
