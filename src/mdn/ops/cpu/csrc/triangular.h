// Products with triangular matrices and triangular solves, 16 columns at a time.
//
// What lies on the wrong side of the diagonal is never read, not even to be multiplied by zero: a NaN in one token
// therefore does not reach the tokens before it. Blocks of rows need one product for everything outside the block and
// plain substitution inside it.
#pragma once

#include "vector.h"

namespace mdn {

// y = L x, L lower triangular: y_i = sum over j <= i of L[i, j] x_j.
MDN_INLINE void multiply_lower(const Matrix y, const Matrix lower, const Matrix x, long rows) {
    for_blocks_down(rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const Matrix diagonal = lower.from(first, first);
        Vector sum[block] = {};
        accumulate(sum, lower.from(first, 0), x, first);
#pragma GCC unroll 16
        for (int s = 0; s < block; ++s) {
            const Vector x_s = load(x.row(first + s));
#pragma GCC unroll 16
            for (int r = s; r < block; ++r) sum[r] = sum[r] + x_s * diagonal.row(r)[s];
        }
#pragma GCC unroll 16
        for (int r = 0; r < block; ++r) store(y.row(first + r), sum[r]);
    });
}

// y = U x, U upper triangular: y_i = sum over j >= i of U[i, j] x_j.
MDN_INLINE void multiply_upper(const Matrix y, const Matrix upper, const Matrix x, long rows) {
    for_blocks_down(rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const long below = first + block;
        const Matrix diagonal = upper.from(first, first);
        Vector sum[block] = {};
#pragma GCC unroll 16
        for (int s = 0; s < block; ++s) {
            const Vector x_s = load(x.row(first + s));
#pragma GCC unroll 16
            for (int r = 0; r <= s; ++r) sum[r] = sum[r] + x_s * diagonal.row(r)[s];
        }
        accumulate(sum, upper.from(first, below), x.from(below, 0), rows - below);
#pragma GCC unroll 16
        for (int r = 0; r < block; ++r) store(y.row(first + r), sum[r]);
    });
}

// (I + L) x = y in place (x holds y), L strictly lower triangular: from the first row downwards.
MDN_INLINE void solve_lower(const Matrix x, const Matrix lower, long rows) {
    for_blocks_down(rows, [&](auto count, long first) {
        tile<decltype(count)::value>(lower.from(first, 0), x, first, [&](int r, const Vector& sum) {
            const float* row = lower.row(first + r) + first;
            Vector solved = load(x.row(first + r)) - sum;
            for (int s = 0; s < r; ++s) solved = solved - load(x.row(first + s)) * row[s];
            store(x.row(first + r), solved);
        });
    });
}

// (I + U) x = y in place (x holds y), U strictly upper triangular: from the last row upwards.
MDN_INLINE void solve_upper(const Matrix x, const Matrix upper, long rows) {
    for_blocks_up(rows, [&](auto count, long first) {
        constexpr int block = decltype(count)::value;
        const long below = first + block;
        tile<block>(upper.from(first, below), x.from(below, 0), rows - below,
                    [&](int r, const Vector& sum) { store(x.row(first + r), load(x.row(first + r)) - sum); });
        for (int r = block - 2; r >= 0; --r) {
            const float* row = upper.row(first + r) + first;
            Vector solved = load(x.row(first + r));
            for (int s = r + 1; s < block; ++s) solved = solved - load(x.row(first + s)) * row[s];
            store(x.row(first + r), solved);
        }
    });
}

}  // namespace mdn
