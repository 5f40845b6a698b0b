// Products of 8- and 4-bit weights in integers, for processors that multiply bytes (AVX-512 VNNI).
//
// One instruction multiplies 64 unsigned bytes by 64 signed ones and adds every four neighbouring products to a 32-bit
// sum. The blocks of linear.cpp have the order that it needs. x enters as integers of 24 bits with a scale for every 32
// inputs, n = d0 + 256 d1 + 65536 d2 with digits from -128 to 127: one instruction per digit. An x is then off by at
// most 1 / (254 * 65536) of the largest of its 32 neighbours, which float32 itself rounds by 2^-24 of it. Sums of 32
// products are exact, and are added up in float32.
#pragma once

#include <immintrin.h>

#include "interface.h"
#include "memory.h"

namespace mdn {

constexpr int kGroupInputs = 32, kDigits = 3, kWords = kGroupInputs / 4;
constexpr float kMost = 127 << 16;  // the largest n; no rounding can carry it beyond three digits

// 32 inputs of one row of x.
struct Digits {
    int32_t words[kDigits][kWords];  // four inputs each, in the format's order
    int32_t start[kDigits];          // of the sums: weights are read as unsigned, `kOffset` too large
    float scale;                     // x = scale * n
};

// Weights as unsigned bytes: sixteen words of a group at a time, whose inputs are those of word i of x.
struct Int8Bytes {
    static constexpr int kOffset = 128;
    static constexpr long kGroupBytes = 512;

    static MDN_INLINE __m512i load(const char* group, int i) {
        return _mm512_xor_si512(_mm512_loadu_si512(group + i * 64), _mm512_set1_epi8(-128));
    }
    static MDN_INLINE __m128i ordered(__m128i bytes) { return bytes; }
};

// A byte has two neighbouring inputs: word 2 i of x has the even ones of a block, word 2 i + 1 the odd ones.
struct Int4Bytes {
    static constexpr int kOffset = 8;
    static constexpr long kGroupBytes = 256;

    static MDN_INLINE __m512i load(const char* group, int i) {
        const __m512i both = _mm512_xor_si512(_mm512_loadu_si512(group + i / 2 * 64), _mm512_set1_epi8(-0x78));
        return _mm512_and_si512(i % 2 == 0 ? both : _mm512_srli_epi32(both, 4), _mm512_set1_epi8(15));
    }
    static MDN_INLINE __m128i ordered(__m128i bytes) {
        return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    }
};

// The largest of 32 magnitudes; NaN if one of them is.
MDN_INLINE float largest_of_group(const float* x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);  // of NaN as an integer it is larger than of any number
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
    const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + kWidth), magnitude);
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
    float largest;
    std::memcpy(&largest, &bits, 4);
    return largest;
}

template <class Bytes>
MDN_INLINE void find_digits(Digits& to, const float* x) {
    constexpr float kLeast = 1e-30f;  // kMost / kLeast is still finite
    const float found = largest_of_group(x), largest = found < kLeast ? kLeast : found;
    to.scale = largest / kMost;
    __m512i rest[2];
    for (int half = 0; half < 2; ++half)
        rest[half] = _mm512_cvtps_epi32(_mm512_loadu_ps(x + half * kWidth) * (kMost / largest));
    int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(rest[0], rest[1]));
    for (int d = 0; d < kDigits; ++d) {
        for (int half = 0; half < 2; ++half) {
            const __m128i bytes = Bytes::ordered(_mm512_cvtepi32_epi8(rest[half]));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to.words[d] + half * 4), bytes);
            rest[half] = _mm512_srai_epi32(_mm512_add_epi32(rest[half], _mm512_set1_epi32(128)), 8);
        }
        const int32_t higher = _mm512_reduce_add_epi32(_mm512_add_epi32(rest[0], rest[1]));
        to.start[d] = -Bytes::kOffset * (total - 256 * higher);
        total = higher;
    }
}

// y[rows, 16] = x[rows, depth] @ panel[depth, 16]; x is [groups, batch]. scale(group) is what the weights of a group
// are multiplied with.
template <class Bytes, int rows, class Scale>
MDN_FLATTEN void multiply_digits(const char* weights, const Digits* x, long groups, long batch, const Matrix y,
                                 Scale&& scale) {
    for (int r = 0; r < rows; ++r) store(y.row(r), zeros());
    for (long group = 0; group < groups; ++group, weights += Bytes::kGroupBytes, x += batch) {
        __m512i sum[rows][kDigits];
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < kDigits; ++d) sum[r][d] = _mm512_set1_epi32(x[r].start[d]);
#pragma GCC unroll 8
        for (int i = 0; i < kWords; ++i) {
            const __m512i bytes = Bytes::load(weights, i);
            for (int r = 0; r < rows; ++r)
                for (int d = 0; d < kDigits; ++d)
                    sum[r][d] = _mm512_dpbusd_epi32(sum[r][d], bytes, _mm512_set1_epi32(x[r].words[d][i]));
        }
        const Vector of_group = scale(group);
        for (int r = 0; r < rows; ++r) {
            const Words low = (Words)sum[r][0] + ((Words)sum[r][1] << 8);
            const Vector lower{{__builtin_convertvector(low, Lanes)}};
            const Vector upper{{__builtin_convertvector((Words)sum[r][2], Lanes)}};
            store(y.row(r), load(y.row(r)) + (upper * 65536 + lower) * x[r].scale * of_group);
        }
    }
}

}  // namespace mdn
