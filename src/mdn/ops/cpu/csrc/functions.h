// exp and the functions made from it, sixteen floats at a time, within 2 units in the last place; and vectors that end
// before the sixteenth.
#pragma once

#include "memory.h"

namespace mdn {

typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

// e^x for x <= 88: e^x = 2^n e^r with an integer n and |r| <= ln(2) / 2, where a polynomial of degree 7 is exact to
// half a unit. Below -87 it is 0; NaN stays NaN.
MDN_INLINE Lanes exp(const Lanes x) {
    constexpr float kLowest = -87, kRound = 12582912;  // adding and subtracting 1.5 * 2^23 rounds to an integer
    constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    const Lanes lowest = kLowest - Lanes{};
    const Lanes inside = x < lowest ? lowest : x;
    const Lanes n = (inside * kLog2e + kRound) - kRound;
    const Lanes r = (inside - n * kLn2High) - n * kLn2Low;
    Lanes p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Lanes power = (Lanes)((__builtin_convertvector(n, Integers) + 127) << 23);
    return x < lowest ? Lanes{} : p * power;
}

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
MDN_INLINE Lanes sigmoid(const Lanes x) {
    const Lanes e = exp(x < 0 ? x : -x);
    return (x < 0 ? e : Lanes{} + 1) / (1 + e);
}

template <class Function>
MDN_INLINE Vector map(const Vector& x, Function&& function) {
    Vector y;
    for (int i = 0; i < kParts; ++i) y.part[i] = function(x.part[i]);
    return y;
}

MDN_INLINE Vector exp(const Vector& x) {
    return map(x, [](const Lanes part) { return exp(part); });
}

MDN_INLINE Vector sigmoid(const Vector& x) {
    return map(x, [](const Lanes part) { return sigmoid(part); });
}

MDN_INLINE Vector maximum(Vector a, const Vector& b) {
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] < b.part[i] ? b.part[i] : a.part[i];
    return a;
}

// x, but 0 where `factor` is 0.
MDN_INLINE Vector zero_where_zero(Vector x, const Vector& factor) {
    for (int i = 0; i < kParts; ++i) x.part[i] = factor.part[i] != 0 ? x.part[i] : Lanes{};
    return x;
}

// The first `count` <= 16 floats; the others are `rest`.
MDN_INLINE Vector load_first(const float* from, long count, float rest = 0) {
    if (count == kWidth) return load(from);
    float x[kWidth];
    for (long i = 0; i < kWidth; ++i) x[i] = i < count ? from[i] : rest;
    return load(x);
}

MDN_INLINE void store_first(float* to, const Vector& x, long count) {
    if (count == kWidth) return store(to, x);
    float y[kWidth];
    store(y, x);
    for (long i = 0; i < count; ++i) to[i] = y[i];
}

// body(first, count) over a row of `width` floats, sixteen at a time; the last count may be smaller.
template <class Body>
MDN_INLINE void for_vectors(long width, Body&& body) {
    long i = 0;
    for (; i + kWidth <= width; i += kWidth) body(i, static_cast<long>(kWidth));
    if (i < width) body(i, width - i);
}

}  // namespace mdn
