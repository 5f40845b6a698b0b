// y = x W^T + bias for few rows of x: with packed weights of 16, 8 or 4 bits, or with float32 weights as torch keeps
// them; activations and sums are float32.
//
// Packed weights.
// Rows of W (outputs) are packed in panels of 16, and a panel in blocks of 64 bytes: one 32-bit word per output, which
// holds the weights of 2, 4 or 8 neighbouring inputs, the first one lowest. Shifts inside the words decode them
// whatever the width of the processor's registers is. A panel is read from front to back, x enters as scalars and no
// sum runs across a vector (as in `tile`).
//
// One, two or four rows of x (multiply_few): the time is that of reading and decoding the weights. More rows: the time
// is that of the products, so weights are decoded once. The first rows of x, as many as there are registers for,
// multiply them as they are decoded (decode_and_multiply) and leave them in the cache for the other rows
// (multiply_decoded).
//
// Float32 weights lie row by row, so here a sum runs across a vector: of four outputs and a few rows of x at a time
// (RowMajorProduct).
#include "interface.h"
#include "memory.h"
#include "threads.h"
#if defined(__AVX512VNNI__)
#include "digits.h"
#endif

namespace mdn {
namespace {

constexpr long kBlockBytes = 64;
constexpr long kBytesAhead = 1024;  // prefetched; reading past the end of the weights is harmless

typedef int32_t WordsInMemory __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

// The number of a format's `bits` bits that belongs to input `j` of a block, as a signed integer.
template <int bits>
MDN_INLINE Words signed_field(const Words words, int j) {
    return words << (32 - bits * (j + 1)) >> (32 - bits);
}

MDN_INLINE Words words_at(const char* block, int part) {
    return *reinterpret_cast<const WordsInMemory*>(block + part * sizeof(Words));
}

// A format says how many inputs are in a block, what their weights are, and what the sum over a group of inputs is
// multiplied with. kGroup: inputs of a group; 0 if all of them are one.
struct BFloat16Weights {
    static constexpr int kInputs = 2;
    static constexpr long kGroup = 0;

    static MDN_INLINE Lanes decode(const Words words, int j) {
        return (Lanes)(j == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
    }
    static MDN_INLINE Vector scale(const MdnLinear&, long, long) { return filled(1); }
};

struct Int8Weights {
    static constexpr int kInputs = 4;
    static constexpr long kGroup = 0;

    static MDN_INLINE Lanes decode(const Words words, int j) {
        return __builtin_convertvector(signed_field<8>(words, j), Lanes);
    }
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
    // [panels, groups, 16] bfloat16: one per row of W and group of 32 inputs
    static MDN_INLINE Vector scale(const MdnLinear& linear, long panel, long group) {
        float scale[kWidth];
        const BFloat16* scales = static_cast<const BFloat16*>(linear.scales);
        load_padded(scale, scales + (panel * (linear.depth / kGroup) + group) * kWidth, kWidth, kWidth);
        return load(scale);
    }
};

template <class Format>
const char* panel_at(const MdnLinear& linear, long panel, long input) {
    return static_cast<const char*>(linear.weights) + (panel * linear.depth + input) / Format::kInputs * kBlockBytes;
}

// Few rows of x leave registers free: several sums per row then keep the additions from waiting for one another.
constexpr int sums_per_row(int rows) { return rows == 1 ? 4 : 2; }

constexpr bool is_few(long rows) { return rows == 1 || rows == 2 || rows == kRestRows; }

// y[rows, 16] = x[rows, depth] @ panel[depth, 16]
template <class Format, int rows>
MDN_FLATTEN void multiply_few(const MdnLinear& linear, long panel, const float* x, const Matrix y) {
    constexpr int kInputs = Format::kInputs, kSums = sums_per_row(rows) < kInputs ? sums_per_row(rows) : kInputs;
    const long depth = linear.depth, group = Format::kGroup != 0 ? Format::kGroup : depth;
    const char* block = panel_at<Format>(linear, panel, 0);
    Vector result[rows] = {};
    for (long first = 0; first < depth; first += group) {
        Vector sum[rows][kSums] = {};
        for (long k = first; k < first + group; k += kInputs, block += kBlockBytes) {
            __builtin_prefetch(block + kBytesAhead, 0, 3);
            Words words[kParts];
            for (int i = 0; i < kParts; ++i) words[i] = words_at(block, i);
#pragma GCC unroll 8
            for (int j = 0; j < kInputs; ++j) {
                Vector weights;
                for (int i = 0; i < kParts; ++i) weights.part[i] = Format::decode(words[i], j);
                for (int r = 0; r < rows; ++r) {
                    Vector& s = sum[r][j % kSums];
                    s = s + weights * x[r * depth + k + j];
                }
            }
        }
        const Vector scale = Format::scale(linear, panel, first / group);
        for (int r = 0; r < rows; ++r) {
            for (int s = 1; s < kSums; ++s) sum[r][0] = sum[r][0] + sum[r][s];
            result[r] = result[r] + sum[r][0] * scale;
        }
    }
    for (int r = 0; r < rows; ++r) store(y.row(r), result[r]);
}

// Of several rows: x is [inputs, stride], one input of all rows after the other, so that one address and fixed
// distances reach the rows of a tile. (Rows of x that are 4 KB apart would also share one set of the first cache.)
//
// y[rows, 16] += x[inputs first .. first + inputs, rows]^T @ panel[the same, 16]. A format with groups has its scales
// in the weights here, the others have them left out. `decoded` [inputs, 16] receives the weights if kept.
template <class Format, int rows, bool kept>
MDN_FLATTEN void decode_and_multiply(const MdnLinear& linear, long panel, long first, long inputs, const Matrix x,
                                     const Matrix y, float* decoded) {
    constexpr int kInputs = Format::kInputs;
    constexpr bool has_groups = Format::kGroup != 0;
    const long group = has_groups ? Format::kGroup : inputs;
    const char* block = panel_at<Format>(linear, panel, first);
    const float* from = x.row(first);
    Vector sum[rows];
    for (int r = 0; r < rows; ++r) sum[r] = load(y.row(r));
    for (long begin = 0; begin < inputs; begin += group) {
        Vector scale;
        if (has_groups) scale = Format::scale(linear, panel, (first + begin) / group);
        for (long k = begin; k < begin + group; k += kInputs, block += kBlockBytes) {
            __builtin_prefetch(block + kBytesAhead, 0, 3);
            Words words[kParts];
            for (int i = 0; i < kParts; ++i) words[i] = words_at(block, i);
#pragma GCC unroll 8
            for (int j = 0; j < kInputs; ++j, from += x.stride) {
                Vector weights;
                for (int i = 0; i < kParts; ++i) weights.part[i] = Format::decode(words[i], j);
                if (has_groups) weights = weights * scale;
                if (kept) store(decoded + (k + j) * kWidth, weights);
#pragma GCC unroll 16
                for (int r = 0; r < rows; ++r) sum[r] = sum[r] + weights * from[r];
            }
        }
    }
    for (int r = 0; r < rows; ++r) store(y.row(r), sum[r]);
}

// y[rows, 16] += x[inputs, rows]^T @ decoded[inputs, 16]
template <int rows>
MDN_FLATTEN void multiply_decoded(const float* decoded, long inputs, const Matrix x, const Matrix y) {
    Vector sum[rows];
    for (int r = 0; r < rows; ++r) sum[r] = load(y.row(r));
    for (long k = 0; k < inputs; ++k) {
        const Vector weights = load(decoded + k * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) sum[r] = sum[r] + weights * x.row(k)[r];
    }
    for (int r = 0; r < rows; ++r) store(y.row(r), sum[r]);
}

constexpr int kMostRows = kLanes == 16 ? 16 : kTileRows;  // of a tile: its sums stay in registers
constexpr long kRowsTogether = 48;                        // share one decoding
constexpr long kInputsTogether = 128;                     // decoded weights that stay in the first cache: 8 KB

// Calls body(count, first) over tiles of `rows` rows, a multiple of 4.
template <class Body>
MDN_INLINE void for_tiles(long rows, Body&& body) {
    if constexpr (kMostRows == kTileRows) {
        for_blocks_down(rows, body);
    } else {
        long first = 0;
        for (; rows - first >= kMostRows; first += kMostRows) body(Count<kMostRows>(), first);
        for (; rows - first >= 8; first += 8) body(Count<8>(), first);
        for (; first < rows; first += kRestRows) body(Count<kRestRows>(), first);
    }
}

// y[rows, 16] = x[depth, rows]^T @ panel[depth, 16]; at most kRowsTogether rows, a multiple of 4.
template <class Format>
void multiply_many(const MdnLinear& linear, long panel, const Matrix x, long rows, const Matrix y) {
    alignas(64) float decoded[kInputsTogether * kWidth];
    const bool one_tile = rows == kRestRows || (kMostRows != kTileRows && (rows == 8 || rows == kMostRows));
    const long most = one_tile ? linear.depth : kInputsTogether;
    fill_zeros(y, rows);
    for (long first = 0; first < linear.depth; first += most) {
        const long inputs = linear.depth - first < most ? linear.depth - first : most;
        for_tiles(rows, [&](auto count, long row) {
            constexpr int tile = decltype(count)::value;
            if (one_tile)
                decode_and_multiply<Format, tile, false>(linear, panel, first, inputs, x, y, nullptr);
            else if (row == 0)
                decode_and_multiply<Format, tile, true>(linear, panel, first, inputs, x, y, decoded);
            else
                multiply_decoded<tile>(decoded, inputs, x.from(first, row), y.from(row, 0));
        });
    }
    if (Format::kGroup != 0) return;
    const Vector scale = Format::scale(linear, panel, 0);
    for (long r = 0; r < rows; ++r) store(y.row(r), load(y.row(r)) * scale);
}

// x[batch, depth] as [depth, batch], with zeros for the rows up to a multiple of 4.
Matrix interleaved(const MdnLinear& linear, Arena& memory) {
    const long batch = linear.batch, stride = round_up(batch, 4), whole = batch / 4 * 4;
    const Matrix x{memory.floats(linear.depth * stride), stride};
    transpose(x, Matrix{const_cast<float*>(linear.x), linear.depth}, whole, linear.depth);
    for (long k = 0; k < linear.depth; ++k)
        for (long r = whole; r < stride; ++r) x.row(k)[r] = r < batch ? linear.x[r * linear.depth + k] : 0;
    return x;
}

// A product keeps x in the form it needs, in scratch memory, and multiplies some of its rows with a panel:
// y[rows, 16] = x[row .. row + rows, depth] @ panel[depth, 16]. At most kRowsTogether rows.
template <class Format>
struct FloatProduct {
    const MdnLinear& linear;
    Matrix x;  // [depth, batch rounded up to 4], unless the rows are few

    FloatProduct(const MdnLinear& linear, Arena& memory)
        : linear(linear),
          x(is_few(linear.batch) ? Matrix{} : interleaved(linear, memory)) {}

    static long scratch(const MdnLinear& linear) {
        return is_few(linear.batch) ? 0 : linear.depth * round_up(linear.batch, 4);
    }

    void multiply(long panel, long row, long rows, const Matrix y) const {
        if (linear.batch == 1)
            multiply_few<Format, 1>(linear, panel, linear.x, y);
        else if (linear.batch == 2)
            multiply_few<Format, 2>(linear, panel, linear.x, y);
        else if (linear.batch == kRestRows)
            multiply_few<Format, kRestRows>(linear, panel, linear.x, y);
        else
            multiply_many<Format>(linear, panel, x.from(0, row), round_up(rows, 4), y);
    }
};

#if defined(__AVX512VNNI__)
template <class Format, class Bytes>
struct DigitProduct {
    const MdnLinear& linear;
    Digits* x;  // [depth / 32, batch]

    DigitProduct(const MdnLinear& linear, Arena& memory)
        : linear(linear),
          x(reinterpret_cast<Digits*>(memory.floats(scratch(linear)))) {
        run_units(linear.batch < 4 ? 1 : linear.threads, linear.batch, find_row, this);
    }

    static long scratch(const MdnLinear& linear) {
        return linear.batch * (linear.depth / kGroupInputs) * sizeof(Digits) / sizeof(float);
    }

    static void find_row(const void* context, long row) {
        const DigitProduct& product = *static_cast<const DigitProduct*>(context);
        const MdnLinear& linear = product.linear;
        for (long group = 0; group < linear.depth / kGroupInputs; ++group)
            find_digits<Bytes>(product.x[group * linear.batch + row],
                               linear.x + row * linear.depth + group * kGroupInputs);
    }

    template <int tile>
    void multiply_tile(long panel, long row, const Matrix y) const {
        multiply_digits<Bytes, tile>(panel_at<Format>(linear, panel, 0), x + row, linear.depth / kGroupInputs,
                                     linear.batch, y, [&](long group) { return Format::scale(linear, panel, group); });
    }

    void multiply(long panel, long row, long rows, const Matrix y) const {
        long r = 0;
        for (; rows - r >= 8; r += 8) multiply_tile<8>(panel, row + r, y.from(r, 0));
        for (; rows - r >= 4; r += 4) multiply_tile<4>(panel, row + r, y.from(r, 0));
        for (; rows - r >= 2; r += 2) multiply_tile<2>(panel, row + r, y.from(r, 0));
        for (; r < rows; ++r) multiply_tile<1>(panel, row + r, y.from(r, 0));
    }
};

typedef DigitProduct<Int8Weights, Int8Bytes> Int8Product;
typedef DigitProduct<Int4Weights, Int4Bytes> Int4Product;
#else
typedef FloatProduct<Int8Weights> Int8Product;
typedef FloatProduct<Int4Weights> Int4Product;
#endif

constexpr int kOutputsTogether = 4;                 // rows of W that are read side by side
constexpr int kRowsOfBlock = kLanes == 16 ? 6 : 2;  // rows of x whose sums with those stay in registers
constexpr long kDepthOfBlock = 512;                 // four rows of W and a block of x stay in the first cache

// W as torch keeps it: [outputs, depth] float32, any depth.
struct RowMajorProduct {
    const MdnLinear& linear;
    // [depth / lanes, batch, lanes], padded with zeros: rows that are 4 KB apart would share one set of the first cache
    const float* x;

    RowMajorProduct(const MdnLinear& linear, Arena& memory) : linear(linear), x(interleaved_lanes(linear, memory)) {}

    static long scratch(const MdnLinear& linear) { return linear.batch * round_up(linear.depth, kLanes); }

    static const float* interleaved_lanes(const MdnLinear& linear, Arena& memory) {
        float* const x = memory.floats(scratch(linear));
        for (long r = 0; r < linear.batch; ++r)
            for (long k = 0; k < linear.depth; k += kLanes) {
                const long width = linear.depth - k < kLanes ? linear.depth - k : kLanes;
                load_padded(x + k * linear.batch + r * kLanes, linear.x + r * linear.depth + k, width, kLanes);
            }
        return x;
    }

    // y[r, c] += x[r, first : last] . weights[c, first : last] for `rows` rows of x and `outputs` rows of weights
    template <int rows, int outputs>
    MDN_FLATTEN void multiply_block(const Matrix weights, long first, long last, long row, const Matrix y) const {
        Lanes sum[rows][outputs] = {};
        const auto add_products = [&](const float* values, const Lanes(&w)[outputs]) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const Lanes lanes = *reinterpret_cast<const LanesInMemory*>(values + r * kLanes);
#pragma GCC unroll 4
                for (int c = 0; c < outputs; ++c) sum[r][c] += lanes * w[c];
            }
        };
        const float* values = x + first * linear.batch + row * kLanes;
        const long whole = last / kLanes * kLanes, ahead = kOutputsTogether * weights.stride;
        // The next rows of W are prefetched, each block of rows of x its share of them: all at once would be more than
        // the processor can have under way.
        const long blocks = (linear.batch + kRowsOfBlock - 1) / kRowsOfBlock, block = row / kRowsOfBlock;
        Lanes w[outputs];
        for (long k = first; k < whole; k += kLanes, values += linear.batch * kLanes) {
#pragma GCC unroll 4
            for (int c = 0; c < outputs; ++c) {
                w[c] = *reinterpret_cast<const LanesInMemory*>(weights.row(c) + k);
                if (c % blocks == block)
                    __builtin_prefetch(weights.row(c) + k + ahead, 0, 2);  // past the end: harmless
            }
            add_products(values, w);
        }
        if (whole < last) {
            for (int c = 0; c < outputs; ++c) {
                alignas(64) float rest[kLanes];
                load_padded(rest, weights.row(c) + whole, last - whole, kLanes);
                w[c] = *reinterpret_cast<const LanesInMemory*>(rest);
            }
            add_products(values, w);
        }
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < outputs; ++c) y.row(r)[c] += total(sum[r][c]);
    }

    template <int outputs>
    void multiply_rows(const Matrix weights, long first, long last, long row, long rows, const Matrix y) const {
        const auto blocks_of = [&](auto count, long r) {
            constexpr int size = decltype(count)::value;
            for (; rows - r >= size; r += size)
                multiply_block<size, outputs>(weights, first, last, row + r, y.from(r, 0));
            return r;
        };
        long r = blocks_of(Count<kRowsOfBlock>(), 0);
        if (kRowsOfBlock > 4) r = blocks_of(Count<4>(), r);
        if (kRowsOfBlock > 2) r = blocks_of(Count<2>(), r);
        blocks_of(Count<1>(), r);
    }

    void multiply(long panel, long row, long rows, const Matrix y) const {
        const long begin = panel * kWidth, end = begin + kWidth < linear.outputs ? begin + kWidth : linear.outputs;
        const Matrix w{static_cast<float*>(const_cast<void*>(linear.weights)), linear.depth};
        fill_zeros(y, rows);
        for (long first = 0; first < linear.depth; first += kDepthOfBlock) {
            const long last = linear.depth - first < kDepthOfBlock ? linear.depth : first + kDepthOfBlock;
            long c = begin;
            for (; end - c >= kOutputsTogether; c += kOutputsTogether)
                multiply_rows<kOutputsTogether>(w.from(c, 0), first, last, row, rows, y.from(0, c - begin));
            for (; c < end; ++c) multiply_rows<1>(w.from(c, 0), first, last, row, rows, y.from(0, c - begin));
        }
    }
};

// What all units of a call share.
template <class Product>
struct LinearCall {
    const MdnLinear& linear;
    const Product& product;
    long panels, panels_of_unit;
};

// Sixteen outputs of all rows of x.
template <class Product>
void linear_panel(const LinearCall<Product>& call, long panel) {
    const MdnLinear& linear = call.linear;
    const long column = panel * kWidth, width = linear.outputs - column < kWidth ? linear.outputs - column : kWidth;
    alignas(64) float bias[kWidth] = {}, sums[kRowsTogether * kWidth];
    const Matrix y{sums, kWidth};
    if (linear.bias != nullptr) load_padded(bias, linear.bias + column, width, kWidth);
    for (long row = 0; row < linear.batch; row += kRowsTogether) {
        const long rows = linear.batch - row < kRowsTogether ? linear.batch - row : kRowsTogether;
        call.product.multiply(panel, row, rows, y);
        for (long r = 0; r < rows; ++r) store(y.row(r), load(y.row(r)) + load(bias));
        store_matrix(linear.y + row * linear.outputs + column, linear.outputs, y, rows, width);
    }
}

// Neighbouring panels, so that a thread reads a long piece of memory from front to back.
template <class Product>
void linear_unit(const void* context, long unit) {
    const LinearCall<Product>& call = *static_cast<const LinearCall<Product>*>(context);
    const long begin = unit * call.panels_of_unit, end = begin + call.panels_of_unit;
    for (long panel = begin; panel < end && panel < call.panels; ++panel) linear_panel(call, panel);
}

long panels_of_unit(const MdnLinear& linear, long panels) {
    constexpr long kUnitBytes = 64 << 10, kUnitsOfThread = 8;
    constexpr long kBits[] = {16, 8, 4, 32};  // by format
    const long panel_bytes = linear.depth * kWidth * kBits[linear.format] / 8;
    long count = panels / (linear.threads * kUnitsOfThread);
    if (count * panel_bytes > kUnitBytes) count = kUnitBytes / panel_bytes;
    return count < 1 ? 1 : count;
}

template <class Product>
bool run_linear(const MdnLinear& linear) {
    const long panels = (linear.outputs + kWidth - 1) / kWidth, each = panels_of_unit(linear, panels);
    Arena memory(scratch_of_this_thread().reserve(Product::scratch(linear)));
    const Product product(linear, memory);
    const LinearCall<Product> call{linear, product, panels, each};
    return run_units(linear.threads, (panels + each - 1) / each, linear_unit<Product>, &call);
}

}  // namespace
}  // namespace mdn

extern "C" int mdn_linear(const MdnLinear* linear) {
    using namespace mdn;
    const auto run = linear->format == MDN_BFLOAT16 ? run_linear<FloatProduct<BFloat16Weights>>
                     : linear->format == MDN_INT8   ? run_linear<Int8Product>
                     : linear->format == MDN_INT4   ? run_linear<Int4Product>
                                                    : run_linear<RowMajorProduct>;
    try {
        return run(*linear) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
