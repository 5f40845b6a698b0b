// Sixteen floats at a time, and the one product that everything else is made of.
//
// A Vector is 16 neighbouring floats, held in as many registers as the processor needs: one with AVX-512, two with AVX,
// four with SSE or NEON. It uses only the vector extension that GCC and Clang share, so the same source serves them
// all.
#pragma once

namespace mdn {

#if defined(__AVX512F__) || defined(MDN_WIDE)  // MDN_WIDE: this shape on a processor without it, for tests
constexpr int kLanes = 16, kTileRows = 12, kRestRows = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 6, kRestRows = 4;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 6, kRestRows = 4;
#else
constexpr int kLanes = 4, kTileRows = 2, kRestRows = 2;  // sixteen registers of four floats hold two rows of sums
#endif

constexpr int kWidth = 16;
constexpr int kParts = kWidth / kLanes;

#define MDN_INLINE inline __attribute__((always_inline))
#define MDN_FLATTEN __attribute__((flatten))  // inlines every call in the body, down to the last lambda
#define MDN_APART __attribute__((noinline))   // so that its loops have all registers for their own addresses

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef float LanesInMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int Words __attribute__((vector_size(kLanes * 4)));  // as many integers of 32 bits
typedef float Four __attribute__((vector_size(16)));
typedef float FourInMemory __attribute__((vector_size(16), aligned(4), may_alias));

struct Vector {
    Lanes part[kParts];
};

MDN_INLINE Vector zeros() { return Vector{}; }

MDN_INLINE Vector filled(float x) {
    Vector vector;
    for (int i = 0; i < kParts; ++i) vector.part[i] = x - Lanes{};  // x + 0 would be an addition: it changes -0
    return vector;
}

MDN_INLINE Vector load(const float* from) {
    Vector vector;
    for (int i = 0; i < kParts; ++i) vector.part[i] = *reinterpret_cast<const LanesInMemory*>(from + i * kLanes);
    return vector;
}

MDN_INLINE void store(float* to, const Vector& x) {
    for (int i = 0; i < kParts; ++i) *reinterpret_cast<LanesInMemory*>(to + i * kLanes) = x.part[i];
}

MDN_INLINE Vector operator+(Vector a, const Vector& b) {
    for (int i = 0; i < kParts; ++i) a.part[i] += b.part[i];
    return a;
}

MDN_INLINE Vector operator-(Vector a, const Vector& b) {
    for (int i = 0; i < kParts; ++i) a.part[i] -= b.part[i];
    return a;
}

MDN_INLINE Vector operator*(Vector a, const Vector& b) {
    for (int i = 0; i < kParts; ++i) a.part[i] *= b.part[i];
    return a;
}

MDN_INLINE Vector operator*(Vector a, float scalar) {
    for (int i = 0; i < kParts; ++i) a.part[i] *= scalar;
    return a;
}

// 1 at `index`, 0 elsewhere.
MDN_INLINE Vector unit_vector(long index) {
    static constexpr float kOneAmongZeros[2 * kWidth] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    return load(kOneAmongZeros + kWidth - 1 - index);
}

// 1 / x, and 0 where x is 0.
MDN_INLINE Vector inverse_or_zero(const Vector& x) {
    float y[kWidth];
    store(y, x);
    for (float& each : y) each = each != 0 ? 1 / each : 0;
    return load(y);
}

// The sum of all lanes, by halves: few additions that wait for one another.
MDN_INLINE float total(const Lanes& lanes) {
    Four four[kLanes / 4];
    __builtin_memcpy(four, &lanes, sizeof(lanes));
    for (int i = 1; i < kLanes / 4; ++i) four[0] += four[i];
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

MDN_INLINE float total(const Vector& x) {
    Lanes lanes = x.part[0];
    for (int i = 1; i < kParts; ++i) lanes += x.part[i];
    return total(lanes);
}

// A matrix in scratch memory: rows `stride` floats apart.
struct Matrix {
    float* data;
    long stride;

    MDN_INLINE float* row(long i) const { return data + i * stride; }
    MDN_INLINE Matrix from(long i, long j) const { return {row(i) + j, stride}; }  // the part that begins at (i, j)
};

// Calls body(count, first) over blocks of rows from the top. `rows` is a multiple of 4; the block sizes are
// compile-time constants, so that a block's sums stay in registers.
template <int rows>
struct Count {
    static constexpr int value = rows;
};

MDN_INLINE bool takes_full_tile(long remaining) { return remaining >= kTileRows && remaining != 2 * kRestRows; }

template <class Body>
MDN_INLINE void for_blocks_down(long rows, Body&& body) {
    long first = 0;
    for (; takes_full_tile(rows - first); first += kTileRows) body(Count<kTileRows>(), first);
    for (; first < rows; first += kRestRows) body(Count<kRestRows>(), first);
}

// The same block sizes, visited from the bottom row upwards.
template <class Body>
MDN_INLINE void for_blocks_up(long rows, Body&& body) {
    for (; takes_full_tile(rows); rows -= kTileRows) body(Count<kTileRows>(), rows - kTileRows);
    for (; rows > 0; rows -= kRestRows) body(Count<kRestRows>(), rows - kRestRows);
}

// sum[r] += sum over l < depth of a[r, l] * b[l, 0:16].
// A is read as scalars straight from row-major memory (no packing); B is a panel of 16 columns.
template <int rows>
MDN_INLINE void accumulate(Vector (&sum)[rows], const Matrix a, const Matrix b, long depth) {
#pragma GCC unroll 4
    for (long l = 0; l < depth; ++l) {
        const Vector x = load(b.row(l));
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < kParts; ++i) sum[r].part[i] += x.part[i] * a.row(r)[l];
    }
}

// finish(r, sum over l < depth of a[r, l] * b[l, 0:16]) for each of `rows` rows.
template <int rows, class Finish>
MDN_INLINE void tile(const Matrix a, const Matrix b, long depth, Finish&& finish) {
    Vector sum[rows];
    for (int r = 0; r < rows; ++r) sum[r] = zeros();
    accumulate(sum, a, b, depth);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) finish(r, sum[r]);
}

// finish(i, A[i, :depth] @ B[:depth, 0:16]) for every row i of A.
template <class Finish>
MDN_INLINE void multiply(const Matrix a, const Matrix b, long rows, long depth, Finish&& finish) {
    for_blocks_down(rows, [&](auto count, long first) {
        tile<decltype(count)::value>(a.from(first, 0), b, depth,
                                     [&](int r, const Vector& sum) { finish(first + r, sum); });
    });
}

#if defined(__clang__)
#define MDN_SHUFFLE(a, b, w, x, y, z) __builtin_shufflevector(a, b, w, x, y, z)
#else
typedef int FourIndices __attribute__((vector_size(16)));
#define MDN_SHUFFLE(a, b, w, x, y, z) __builtin_shuffle(a, b, FourIndices{w, x, y, z})
#endif

MDN_INLINE Four load_four(const float* from) { return *reinterpret_cast<const FourInMemory*>(from); }
MDN_INLINE void store_four(float* to, const Four& x) { *reinterpret_cast<FourInMemory*>(to) = x; }

// to[c, r] = from[r, c]; rows and columns are multiples of 4.
inline void transpose(const Matrix to, const Matrix from, long rows, long columns) {
    for (long c = 0; c < columns; c += 4) {
        for (long r = 0; r < rows; r += 4) {
            const float* x = from.row(r) + c;
            const Four a = load_four(x), b = load_four(x + from.stride);
            const Four d = load_four(x + 2 * from.stride), e = load_four(x + 3 * from.stride);
            const Four ab_low = MDN_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = MDN_SHUFFLE(a, b, 2, 6, 3, 7);
            const Four de_low = MDN_SHUFFLE(d, e, 0, 4, 1, 5), de_high = MDN_SHUFFLE(d, e, 2, 6, 3, 7);
            float* y = to.row(c) + r;
            store_four(y, MDN_SHUFFLE(ab_low, de_low, 0, 1, 4, 5));
            store_four(y + to.stride, MDN_SHUFFLE(ab_low, de_low, 2, 3, 6, 7));
            store_four(y + 2 * to.stride, MDN_SHUFFLE(ab_high, de_high, 0, 1, 4, 5));
            store_four(y + 3 * to.stride, MDN_SHUFFLE(ab_high, de_high, 2, 3, 6, 7));
        }
    }
}

#undef MDN_SHUFFLE

}  // namespace mdn
