// Scratch memory of one thread, and the rows of tensors that move between it and the caller's memory.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "vector.h"

namespace mdn {

constexpr long round_up(long x, long multiple = kWidth) { return (x + multiple - 1) / multiple * multiple; }

// Row stride of a scratch matrix: an odd number of cache lines, because rows a power of two apart fall into the same
// cache sets.
constexpr long row_stride(long columns) { return ((columns + kWidth - 1) / kWidth | 1) * kWidth; }

// Hands out pieces of one block. With no block it only counts, so a workspace is built twice: once to measure, once to
// use. In a checked build (tests/sanitizers) every piece is an allocation of its own, so that reading past its end is
// seen.
class Arena {
   public:
    explicit Arena(float* block) : next_(block), measuring_(block == nullptr) {}

    float* floats(long count) {
        const long padded = round_up(count);
        taken_ += padded;
        if (measuring_) return nullptr;
#if defined(MDN_CHECKED)
        pieces_.emplace_back(new float[count]);
        return pieces_.back().get();
#else
        float* piece = next_;
        next_ += padded;
        return piece;
#endif
    }

    Matrix matrix(long rows, long columns) { return {floats(rows * row_stride(columns)), row_stride(columns)}; }

    // Sixteen columns, without a gap between the rows.
    Matrix panel(long rows) { return {floats(rows * kWidth), kWidth}; }

    long taken() const { return taken_; }

   private:
    [[maybe_unused]] float* next_;
    bool measuring_;
    long taken_ = 0;
#if defined(MDN_CHECKED)
    std::vector<std::unique_ptr<float[]>> pieces_;
#endif
};

// One block per thread, kept between calls: memory that is freed goes back to the system and every page of it faults in
// again. Very large blocks are not kept. A block that fills a good part of a huge page is backed by huge pages where
// the system grants them: 512 times fewer page faults, and addresses that the processor translates at once.
class Scratch {
   public:
    ~Scratch() { release(); }

    float* reserve(long count) {
        if (count > count_) {
            release();
            allocate(count);
        }
        return block_;
    }

    void release_if_large() {
        constexpr long kKept = 16L << 20;  // floats: 64 MiB
        if (count_ > kKept) release();
    }

   private:
    void allocate(long count) {
        constexpr size_t kCacheLine = 64, kHugePage = 2 << 20;
        size_t size = count * sizeof(float);
        const bool huge = size >= kHugePage / 4;
        alignment_ = std::align_val_t(huge ? kHugePage : kCacheLine);
        if (huge) size = (size + kHugePage - 1) / kHugePage * kHugePage;
        block_ = static_cast<float*>(::operator new(size, alignment_));
        count_ = count;
#if defined(MADV_HUGEPAGE)
        if (huge) madvise(block_, size, MADV_HUGEPAGE);  // a hint: nothing is lost when it is refused
#endif
    }

    void release() {
        if (block_ != nullptr) ::operator delete(block_, alignment_);
        block_ = nullptr;
        count_ = 0;
    }

    float* block_ = nullptr;
    long count_ = 0;
    std::align_val_t alignment_{};
};

inline Scratch& scratch_of_this_thread() {
    thread_local Scratch scratch;
    return scratch;
}

// Builds the pass's workspace in this thread's scratch memory and calls body with it.
template <class Workspace, class Body, class... Sizes>
inline void with_workspace(Body&& body, const Sizes&... sizes) {
    Scratch& scratch = scratch_of_this_thread();
    Arena measure(nullptr);
    { Workspace unused(measure, sizes...); }
    Arena arena(scratch.reserve(measure.taken()));
    Workspace workspace(arena, sizes...);
    body(workspace);
    scratch.release_if_large();
}

typedef uint16_t BFloat16;  // the upper half of a float32

MDN_INLINE float to_float(float x) { return x; }

MDN_INLINE float to_float(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

MDN_INLINE void from_float(float* to, float x) { *to = x; }

MDN_INLINE void from_float(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    *to = static_cast<BFloat16>(x != x ? 0x7fc0 : rounded);
}

// `count` values, then zeros up to `padded`. Sixteen at a time is a loop of known length, which compilers vectorise.
template <class Element>
MDN_INLINE void load_padded(float* __restrict to, const Element* __restrict from, long count, long padded) {
    long i = 0;
    for (; i + kWidth <= count; i += kWidth)
        for (long j = i; j < i + kWidth; ++j) to[j] = to_float(from[j]);
    for (; i < count; ++i) to[i] = to_float(from[i]);
    for (; i < padded; ++i) to[i] = 0;
}

template <class Element>
MDN_INLINE void store_row(Element* __restrict to, const float* __restrict from, long count) {
    long i = 0;
    for (; i + kWidth <= count; i += kWidth)
        for (long j = i; j < i + kWidth; ++j) from_float(to + j, from[j]);
    for (; i < count; ++i) from_float(to + i, from[i]);
}

inline void fill_zeros(float* to, long count) { std::memset(to, 0, count * sizeof(float)); }

inline void fill_zeros(const Matrix to, long rows) { fill_zeros(to.data, rows * to.stride); }

inline float dot(const float* a, const float* b, long padded) {
    Vector sum = zeros();
    for (long i = 0; i < padded; i += kWidth) sum = sum + load(a + i) * load(b + i);
    return total(sum);
}

inline void scale_row(float* x, float factor, long padded) {
    for (long i = 0; i < padded; i += kWidth) store(x + i, load(x + i) * factor);
}

// The project's L2 norm is x * inverse_norm(x).
inline float inverse_norm(const float* x, long padded) { return 1.0f / std::sqrt(dot(x, x, padded) + 1e-6f); }

// A [rows, columns] matrix from rows `from_stride` elements apart; zeros in the rows up to `padded_rows` and in the
// columns up to a multiple of 16.
template <class Element>
inline void load_matrix(const Matrix to, const Element* from, long from_stride, long rows, long padded_rows,
                        long columns) {
    const long padded = round_up(columns);
    for (long i = 0; i < rows; ++i) load_padded(to.row(i), from + i * from_stride, columns, padded);
    for (long i = rows; i < padded_rows; ++i) fill_zeros(to.row(i), padded);
}

template <class Element>
inline void store_matrix(Element* to, long to_stride, const Matrix from, long rows, long columns) {
    for (long i = 0; i < rows; ++i) store_row(to + i * to_stride, from.row(i), columns);
}

// Prefetches the first 16 elements of some rows, one row at a time while a product works on something else: the row of
// one token lies too far from the next for the processor to predict it. A row that does not exist is ignored.
struct Prefetch {
    const char* first = nullptr;
    long stride = 0, rows = 0;  // stride in bytes

    Prefetch() = default;
    template <class Element>
    Prefetch(const Element* first, long stride, long rows)
        : first(reinterpret_cast<const char*>(first)),
          stride(stride * sizeof(Element)),
          rows(rows) {}
    Prefetch(const Matrix matrix, long rows) : Prefetch(matrix.data, matrix.stride, rows) {}

    MDN_INLINE void row(long i) const {
        if (i < rows) __builtin_prefetch(first + i * stride, 0, 2);
    }
};

}  // namespace mdn
