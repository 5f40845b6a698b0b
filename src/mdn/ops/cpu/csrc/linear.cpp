// y = x W^T + bias with packed weights of 16, 8 or 4 bits; activations and sums are float32.
//
// Rows of W (outputs) are packed in panels of 16, and a panel in blocks of 64 bytes: one 32-bit word per output, which
// holds the weights of 2, 4 or 8 neighbouring inputs, the first one lowest. Shifts inside the words decode them
// whatever the width of the processor's registers is. A panel is read from front to back, x enters as scalars and no
// sum runs across a vector (as in `tile`); at a small batch the time is that of reading the weights from memory.
#include "interface.h"
#include "memory.h"
#include "threads.h"

namespace mdn {
namespace {

constexpr long kBlockBytes = 64;
constexpr long kBytesAhead = 1024;  // prefetched; reading past the end of the weights is harmless

typedef int32_t Words __attribute__((vector_size(kLanes * 4)));  // of kLanes outputs
typedef int32_t WordsInMemory __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

// The number of a format's `bits` bits that belongs to input `j` of a block, as a signed integer.
template <int bits>
MDN_INLINE Words signed_field(const Words words, int j) {
    return words << (32 - bits * (j + 1)) >> (32 - bits);
}

// A format says how many inputs are in a block, what their weights are, and what the sum over a group of inputs is
// multiplied with.
struct BFloat16Weights {
    static constexpr int kInputs = 2;

    static MDN_INLINE Lanes decode(const Words words, int j) {
        return (Lanes)(j == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
    }
    static long group(long depth) { return depth; }
    static MDN_INLINE Vector scale(const MdnLinear&, long, long) { return filled(1); }
};

struct Int8Weights {
    static constexpr int kInputs = 4;

    static MDN_INLINE Lanes decode(const Words words, int j) {
        return __builtin_convertvector(signed_field<8>(words, j), Lanes);
    }
    static long group(long depth) { return depth; }
    // [panels, 16] float32: one per row of W
    static MDN_INLINE Vector scale(const MdnLinear& linear, long panel, long) {
        return load(static_cast<const float*>(linear.scales) + panel * kWidth);
    }
};

struct Int4Weights {
    static constexpr int kInputs = 8;
    static constexpr long kGroup = 32;

    static MDN_INLINE Lanes decode(const Words words, int j) {
        return __builtin_convertvector(signed_field<4>(words, j), Lanes);
    }
    static long group(long) { return kGroup; }
    // [panels, groups, 16] bfloat16: one per row of W and group of 32 inputs
    static MDN_INLINE Vector scale(const MdnLinear& linear, long panel, long group) {
        float scale[kWidth];
        const BFloat16* scales = static_cast<const BFloat16*>(linear.scales);
        load_padded(scale, scales + (panel * (linear.depth / kGroup) + group) * kWidth, kWidth, kWidth);
        return load(scale);
    }
};

// Few rows of x leave registers free: several sums per row then keep the additions from waiting for one another.
constexpr int sums_per_row(int rows) { return rows == 1 ? 4 : rows <= kTileRows / 2 ? 2 : 1; }

// Adds x[rows, depth] @ panel[depth, 16] to y[rows, 16].
template <class Format, int rows>
MDN_FLATTEN void multiply_panel(const MdnLinear& linear, long panel, const float* x, const Matrix y) {
    constexpr int kInputs = Format::kInputs, kSums = sums_per_row(rows) < kInputs ? sums_per_row(rows) : kInputs;
    const long depth = linear.depth, group = Format::group(depth);
    const char* block = static_cast<const char*>(linear.weights) + panel * (depth / kInputs) * kBlockBytes;
    for (long first = 0; first < depth; first += group) {
        Vector sum[rows][kSums] = {};
        for (long k = first; k < first + group; k += kInputs, block += kBlockBytes) {
            __builtin_prefetch(block + kBytesAhead, 0, 3);
            Words words[kParts];
            for (int i = 0; i < kParts; ++i)
                words[i] = *reinterpret_cast<const WordsInMemory*>(block + i * sizeof(Words));
#pragma GCC unroll 8
            for (int j = 0; j < kInputs; ++j) {
                Vector weights;
                for (int i = 0; i < kParts; ++i) weights.part[i] = Format::decode(words[i], j);
#pragma GCC unroll 16
                for (int r = 0; r < rows; ++r) {
                    Vector& s = sum[r][j % kSums];
                    s = s + weights * x[r * depth + k + j];
                }
            }
        }
        const Vector scale = Format::scale(linear, panel, first / group);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            for (int s = 1; s < kSums; ++s) sum[r][0] = sum[r][0] + sum[r][s];
            store(y.row(r), load(y.row(r)) + sum[r][0] * scale);
        }
    }
}

// Sixteen outputs of all rows of x.
template <class Format>
void linear_panel(const void* context, long panel) {
    const MdnLinear& linear = *static_cast<const MdnLinear*>(context);
    const long column = panel * kWidth, width = linear.outputs - column < kWidth ? linear.outputs - column : kWidth;
    float bias[kWidth] = {}, sums[kTileRows * kWidth];
    if (linear.bias != nullptr) load_padded(bias, linear.bias + column, width, kWidth);
    for (long row = 0; row < linear.batch;) {
        const Matrix y{sums, kWidth};
        const float* x = linear.x + row * linear.depth;
        const long left = linear.batch - row;
        const auto multiply_rows = [&](auto count) {
            constexpr int rows = decltype(count)::value;
            for (int r = 0; r < rows; ++r) store(y.row(r), load(bias));
            multiply_panel<Format, rows>(linear, panel, x, y);
            store_matrix(linear.y + row * linear.outputs + column, linear.outputs, y, rows, width);
            row += rows;
        };
        if (left >= kTileRows)
            multiply_rows(Count<kTileRows>());
        else if (left >= kRestRows)
            multiply_rows(Count<kRestRows>());
        else if (left >= 2)
            multiply_rows(Count<2>());
        else
            multiply_rows(Count<1>());
    }
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_linear(const MdnLinear* linear) {
    const long panels = (linear->outputs + mdn::kWidth - 1) / mdn::kWidth;
    const auto work = linear->format == MDN_BFLOAT16 ? mdn::linear_panel<mdn::BFloat16Weights>
                      : linear->format == MDN_INT8   ? mdn::linear_panel<mdn::Int8Weights>
                                                     : mdn::linear_panel<mdn::Int4Weights>;
    return mdn::run_units(linear->threads, panels, work, linear) ? 0 : 1;
}
