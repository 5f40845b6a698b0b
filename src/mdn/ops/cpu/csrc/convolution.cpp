// Short causal convolutions, one per channel, followed by SiLU.
//
//     u_t = bias + sum_j weight[j] x_{t - W + 1 + j}        y_t = silu(u_t)        x before a sequence: state or zero
//     d_t = grad_y_t silu'(u_t)     grad_x_s = sum_j weight[j] d_{s + W - 1 - j}     grad_weight[j] = sum_t d_t x_{...}
//
// A unit is a block of tokens; inside it, 16 channels at a time. Only x is needed for the backward pass: u is found
// again, also for the W - 1 tokens after the block that depend on its x.
#include "functions.h"
#include "layers.h"
#include "threads.h"

namespace mdn {
namespace {

// Tokens first .. end of all sequences together, cut where sequences begin.
template <class Body>
MDN_INLINE void for_sequences(const MdnConvolution& given, long first, long end, Body&& body) {
    long n = 0;
    for (long high = given.sequences; high - n > 1;) {
        const long middle = (n + high) / 2;
        (given.offsets[middle] <= first ? n : high) = middle;
    }
    for (; n < given.sequences && first < end; ++n) {
        const long stop = std::min<long>(end, given.offsets[n + 1]);
        if (stop > first) body(n, first, stop);
        first = std::max(first, stop);
    }
}

// Input `token` of sequence n, which may lie before its first one.
template <int W>
MDN_INLINE Vector input(const MdnConvolution& given, long n, long token, long channel, long count) {
    const long before = given.offsets[n] - token;
    if (before <= 0) return load_first(given.x + token * given.channels + channel, count);
    if (given.state == nullptr) return zeros();
    float x[kWidth] = {};
    const float* state = given.state + (n * given.channels + channel) * (W - 1) + W - 1 - before;
    for (long c = 0; c < count; ++c) x[c] = state[c * (W - 1)];
    return load(x);
}

template <int W>
MDN_INLINE void load_taps(const MdnConvolution& given, long channel, long count, Vector (&taps)[W], Vector& bias) {
    for (int j = 0; j < W; ++j) {
        float tap[kWidth] = {};
        for (long c = 0; c < count; ++c) tap[c] = given.weight[(channel + c) * W + j];
        taps[j] = load(tap);
    }
    bias = given.bias == nullptr ? zeros() : load_first(given.bias + channel, count);
}

// Calls body(token, window, u) for tokens first .. end of sequence n; window[j] is the input that tap j meets.
template <int W, class Body>
MDN_INLINE void slide(const MdnConvolution& given, long n, long first, long end, long channel, long count,
                      const Vector (&taps)[W], const Vector& bias, Body&& body) {
    Vector window[W];
    for (int j = 1; j < W; ++j) window[j] = input<W>(given, n, first - W + j, channel, count);
    for (long token = first; token < end; ++token) {
        for (int j = 1; j < W; ++j) window[j - 1] = window[j];
        window[W - 1] = load_first(given.x + token * given.channels + channel, count);
        Vector u = bias;
        for (int j = 0; j < W; ++j) u = u + window[j] * taps[j];
        body(token, window, u);
    }
}

template <int W>
MDN_FLATTEN void convolve_unit(const void* context, long unit) {
    const MdnConvolution& given = *static_cast<const MdnConvolution*>(context);
    const long first = unit * given.tokens_per_unit, total = given.offsets[given.sequences];
    const bool silu = given.silu;
    for_vectors(given.channels, [&](long channel, long count) {
        Vector taps[W], bias;
        load_taps<W>(given, channel, count, taps, bias);
        for_sequences(
            given, first, std::min<long>(first + given.tokens_per_unit, total), [&](long n, long from, long to) {
                slide<W>(given, n, from, to, channel, count, taps, bias,
                         [&](long token, const Vector(&)[W], const Vector& u) {
                             store_first(given.y + token * given.channels + channel, silu ? u * sigmoid(u) : u, count);
                         });
            });
    });
}

template <int W>
MDN_FLATTEN void convolve_backward_unit(const void* context, long unit) {
    const MdnConvolution& given = *static_cast<const MdnConvolution*>(context);
    const long first = unit * given.tokens_per_unit, total = given.offsets[given.sequences], C = given.channels;
    const long end = std::min<long>(first + given.tokens_per_unit, total);
    const bool silu = given.silu;
    for_vectors(C, [&](long channel, long count) {
        Vector taps[W], bias, grad_taps[W], grad_bias = zeros();
        load_taps<W>(given, channel, count, taps, bias);
        for (int j = 0; j < W; ++j) grad_taps[j] = zeros();
        for_sequences(given, first, end, [&](long n, long from, long to) {
            // d of the last W tokens, oldest first: token t completes the gradient of x at t - W + 1.
            Vector d[W];
            for (int j = 0; j < W; ++j) d[j] = zeros();
            const auto complete = [&](long token) {
                const long source = token - W + 1;
                if (source < from || source >= to) return;
                Vector grad_x = zeros();
                for (int j = 0; j < W; ++j) grad_x = grad_x + d[W - 1 - j] * taps[j];
                store_first(given.grad_x + source * C + channel, grad_x, count);
            };
            const auto shift = [&](const Vector& newest) {
                for (int j = 1; j < W; ++j) d[j - 1] = d[j];
                d[W - 1] = newest;
            };
            const long halo = std::min<long>(to + W - 1, given.offsets[n + 1]);
            slide<W>(given, n, from, halo, channel, count, taps, bias,
                     [&](long token, const Vector(&window)[W], const Vector& u) {
                         const Vector grad_y = load_first(given.grad_y + token * C + channel, count);
                         const Vector s = sigmoid(u);
                         shift(silu ? grad_y * (s + u * s * (filled(1) - s)) : grad_y);
                         if (token < to) {
                             for (int j = 0; j < W; ++j) grad_taps[j] = grad_taps[j] + d[W - 1] * window[j];
                             grad_bias = grad_bias + d[W - 1];
                         }
                         complete(token);
                     });
            for (long token = halo; token < to + W - 1; ++token) {  // past the sequence's end nothing depends on x
                shift(zeros());
                complete(token);
            }
        });
        for (int j = 0; j < W; ++j) store_first(given.grad_weight + (unit * W + j) * C + channel, grad_taps[j], count);
        if (given.grad_bias != nullptr) store_first(given.grad_bias + unit * C + channel, grad_bias, count);
    });
}

int for_tokens(const MdnConvolution* given, void (*work)(const void*, long)) {
    const long units = (given->offsets[given->sequences] + given->tokens_per_unit - 1) / given->tokens_per_unit;
    return run_units(given->threads, units, work, given) ? 0 : 1;
}

}  // namespace
}  // namespace mdn

extern "C" {

int mdn_convolution(const MdnConvolution* given) {
    return mdn::for_tokens(given, given->width == 2   ? mdn::convolve_unit<2>
                                  : given->width == 3 ? mdn::convolve_unit<3>
                                                      : mdn::convolve_unit<4>);
}

int mdn_convolution_backward(const MdnConvolution* given) {
    return mdn::for_tokens(given, given->width == 2   ? mdn::convolve_backward_unit<2>
                                  : given->width == 3 ? mdn::convolve_backward_unit<3>
                                                      : mdn::convolve_backward_unit<4>);
}

int mdn_convolution_step(const MdnConvolutionStep* given) {
    const long history = given->width - 1, count = given->batch * given->channels;
    float* y = given->y;
    for (long i = 0; i < count; ++i) {
        const long channel = i % given->channels;
        const float* taps = given->weight + channel * given->width;
        const float x = given->x[i];
        float* held = given->state + i * history;
        float sum = (given->bias == nullptr ? 0 : given->bias[channel]) + taps[history] * x;
        for (long j = 0; j < history; ++j) {
            sum += taps[j] * held[j];
            held[j] = j + 1 < history ? held[j + 1] : x;
        }
        y[i] = sum;
    }
    if (!given->silu) return 0;
    mdn::for_vectors(count, [&](long i, long part) {
        const mdn::Vector u = mdn::load_first(y + i, part);
        mdn::store_first(y + i, u * mdn::sigmoid(u), part);
    });
    return 0;
}
}
