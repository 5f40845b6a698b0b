// Around RWKV-7's rule: one pass over memory each, forward and backward.
#include "token_mixing.h"

#include <cmath>

#include "functions.h"
#include "rows.h"

namespace mdn {
namespace {

MDN_INLINE void add_first(float* to, const Vector& x, long count) { store_first(to, load_first(to, count) + x, count); }

// ----------------------------------------------------------------------------------------------------------- streams

MDN_FLATTEN void stream_rows(const MdnStreams& given, long, long first, long end) {
    for (long row = first; row < end; ++row)
        for_vectors(given.width, [&](long i, long count) {
            const long at = row * given.width + i;
            const Vector x = load_first(given.x + at, count), shifted = load_first(given.shifted + at, count);
            for (long s = 0; s < given.count; ++s)
                store_first(given.y[s] + at, x + shifted * load_first(given.mix[s] + i, count), count);
        });
}

MDN_FLATTEN void stream_rows_backward(const MdnStreams& given, long unit, long first, long end) {
    float* grad_mix = given.grad_mix + unit * given.count * given.width;
    fill_zeros(grad_mix, given.count * given.width);
    for (long row = first; row < end; ++row)
        for_vectors(given.width, [&](long i, long count) {
            const long at = row * given.width + i;
            const Vector shifted = load_first(given.shifted + at, count);
            Vector grad_x = zeros(), grad_shifted = zeros();
            for (long s = 0; s < given.count; ++s) {
                const Vector grad = load_first(given.grad_y[s] + at, count);
                grad_x = grad_x + grad;
                grad_shifted = grad_shifted + grad * load_first(given.mix[s] + i, count);
                add_first(grad_mix + s * given.width + i, grad * shifted, count);
            }
            store_first(given.grad_x + at, grad_x, count);
            store_first(given.grad_shifted + at, grad_shifted, count);
        });
}

// ------------------------------------------------------------------------------------------------ arguments of the
// rule

// body(at, in_row) for every head of the rows: where it begins in [rows, H, D] and in [H, D].
template <class Problem, class Body>
MDN_INLINE void for_heads(const Problem& given, long first, long end, Body&& body) {
    for (long row = first; row < end; ++row)
        for (long head = 0; head < given.heads; ++head)
            body((row * given.heads + head) * given.head_dim, head * given.head_dim);
}

constexpr float kSmallestNorm = 1e-12f;  // that of torch's normalize

// |k k_k| of one head.
MDN_INLINE float norm_of_key(const MdnRuleInputs& given, long at, long in_row) {
    Vector squares = zeros();
    for_vectors(given.head_dim, [&](long i, long count) {
        const Vector scaled = load_first(given.k + at + i, count) * load_first(given.k_k + in_row + i, count);
        squares = squares + scaled * scaled;
    });
    return std::sqrt(total(squares));
}

MDN_FLATTEN void input_rows(const MdnRuleInputs& given, long, long first, long end) {
    const float slowest = static_cast<float>(given.slowest);
    for_heads(given, first, end, [&](long at, long in_row) {
        const float inverse = 1 / std::max(norm_of_key(given, at, in_row), kSmallestNorm);
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector k = load_first(given.k + at + i, count), s = sigmoid(load_first(given.rate + at + i, count));
            const Vector k_k = load_first(given.k_k + in_row + i, count), kappa = k * k_k * inverse;
            const Vector k_a = load_first(given.k_a + in_row + i, count);
            store_first(given.w + at + i, sigmoid(load_first(given.decay + at + i, count)) * slowest, count);
            store_first(given.key + at + i, k + k * (s - filled(1)) * k_a, count);
            store_first(given.a + at + i, zeros() - kappa, count);
            store_first(given.b + at + i, kappa * s, count);
        });
    });
}

// With u = k k_k, kappa = u / |u| and h = grad_kappa = grad_b s - grad_a:
//     grad_u = (h - kappa (kappa . h)) / |u|,   grad_k = grad_key (1 + (s - 1) k_a) + grad_u k_k
//     grad_s = grad_b kappa + grad_key k k_a,   grad_k_k = sum of grad_u k,   grad_k_a = sum of grad_key k (s - 1)
MDN_FLATTEN void input_rows_backward(const MdnRuleInputs& given, long unit, long first, long end) {
    const long width = given.heads * given.head_dim;
    const float slowest = static_cast<float>(given.slowest);
    float *grad_k_k = given.grad_k_k + unit * width, *grad_k_a = given.grad_k_a + unit * width;
    fill_zeros(grad_k_k, width);
    fill_zeros(grad_k_a, width);
    for_heads(given, first, end, [&](long at, long in_row) {
        const float norm = norm_of_key(given, at, in_row), inverse = 1 / std::max(norm, kSmallestNorm);
        Vector products = zeros();
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector s = sigmoid(load_first(given.rate + at + i, count));
            const Vector h = load_first(given.grad_b + at + i, count) * s - load_first(given.grad_a + at + i, count);
            const Vector u = load_first(given.k + at + i, count) * load_first(given.k_k + in_row + i, count);
            products = products + u * h;
            store_first(given.grad_rate + at + i, s, count);  // not to find it again
        });
        // A norm below the smallest one does not depend on the key.
        const float along = norm < kSmallestNorm ? 0 : total(products) * inverse * inverse;
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector k = load_first(given.k + at + i, count), s = load_first(given.grad_rate + at + i, count);
            const Vector k_k = load_first(given.k_k + in_row + i, count);
            const Vector k_a = load_first(given.k_a + in_row + i, count);
            const Vector grad_key = load_first(given.grad_key + at + i, count);
            const Vector grad_b = load_first(given.grad_b + at + i, count);
            const Vector u = k * k_k, h = grad_b * s - load_first(given.grad_a + at + i, count);
            const Vector grad_u = (h - u * along) * inverse, rest = filled(1) - s, written = grad_key * k;
            store_first(given.grad_k + at + i, grad_key - grad_key * rest * k_a + grad_u * k_k, count);
            store_first(given.grad_rate + at + i, (grad_b * u * inverse + written * k_a) * s * rest, count);
            add_first(grad_k_k + in_row + i, grad_u * k, count);
            add_first(grad_k_a + in_row + i, zeros() - written * rest, count);
            const Vector decay = sigmoid(load_first(given.decay + at + i, count));
            const Vector slope = decay * (filled(1) - decay) * slowest;
            store_first(given.grad_decay + at + i, load_first(given.grad_w + at + i, count) * slope, count);
        });
    });
}

// ------------------------------------------------------------------------------------------------------------ output

// Of one head: mean and 1 / deviation of o, and r . (k r_k).
struct HeadFacts {
    float mean, inverse, own;
};

MDN_INLINE HeadFacts facts_of_head(const MdnMixedOutput& given, long at, long in_row) {
    Vector sum = zeros(), squares = zeros(), own = zeros();
    for_vectors(given.head_dim, [&](long i, long count) {
        sum = sum + load_first(given.o + at + i, count);
        const Vector rk = load_first(given.r + at + i, count) * load_first(given.k + at + i, count);
        own = own + rk * load_first(given.r_k + in_row + i, count);
    });
    const float mean = total(sum) / given.head_dim;
    for_vectors(given.head_dim, [&](long i, long count) {
        const Vector centred = load_first(given.o + at + i, count, mean) - filled(mean);
        squares = squares + centred * centred;
    });
    const float variance = total(squares) / given.head_dim;
    return {mean, 1 / std::sqrt(variance + static_cast<float>(given.eps)), total(own)};
}

MDN_FLATTEN void output_rows(const MdnMixedOutput& given, long, long first, long end) {
    for_heads(given, first, end, [&](long at, long in_row) {
        const HeadFacts head = facts_of_head(given, at, in_row);
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector n = (load_first(given.o + at + i, count) - filled(head.mean)) * head.inverse;
            const Vector weight = load_first(given.weight + in_row + i, count);
            const Vector bias = load_first(given.bias + in_row + i, count), v = load_first(given.v + at + i, count);
            const Vector y = (n * weight + bias + v * head.own) * load_first(given.gate + at + i, count);
            store_first(given.y + at + i, y, count);
        });
    });
}

// With n the normed o, h = grad_y gate and g = grad_(r . k r_k) = h . v:
//     grad_o = (h weight - mean(h weight) - n mean(h weight n)) / deviation,   grad_v = h (r . k r_k)
//     grad_r = g k r_k,   grad_k = g r r_k,   grad_r_k = sum of g r k
MDN_FLATTEN void output_rows_backward(const MdnMixedOutput& given, long unit, long first, long end) {
    const long width = given.heads * given.head_dim;
    float *grad_r_k = given.grad_r_k + unit * width, *grad_weight = given.grad_weight + unit * width;
    float* grad_bias = given.grad_bias + unit * width;
    for (float* sums : {grad_r_k, grad_weight, grad_bias}) fill_zeros(sums, width);
    for_heads(given, first, end, [&](long at, long in_row) {
        const HeadFacts head = facts_of_head(given, at, in_row);
        Vector sums = zeros(), with_n = zeros(), with_v = zeros();
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector h = load_first(given.grad_y + at + i, count) * load_first(given.gate + at + i, count);
            const Vector n = (load_first(given.o + at + i, count) - filled(head.mean)) * head.inverse;
            const Vector grad_n = h * load_first(given.weight + in_row + i, count);
            sums = sums + grad_n;
            with_n = with_n + grad_n * n;
            with_v = with_v + h * load_first(given.v + at + i, count);
        });
        const float mean = total(sums) / given.head_dim, along = total(with_n) / given.head_dim, g = total(with_v);
        for_vectors(given.head_dim, [&](long i, long count) {
            const Vector grad_y = load_first(given.grad_y + at + i, count);
            const Vector h = grad_y * load_first(given.gate + at + i, count), v = load_first(given.v + at + i, count);
            const Vector n = (load_first(given.o + at + i, count) - filled(head.mean)) * head.inverse;
            const Vector weight = load_first(given.weight + in_row + i, count);
            const Vector inside = n * weight + load_first(given.bias + in_row + i, count) + v * head.own;
            const Vector r = load_first(given.r + at + i, count), k = load_first(given.k + at + i, count);
            const Vector r_k = load_first(given.r_k + in_row + i, count) * g;
            store_first(given.grad_gate + at + i, grad_y * inside, count);
            store_first(given.grad_o + at + i, (h * weight - filled(mean) - n * along) * head.inverse, count);
            store_first(given.grad_v + at + i, h * head.own, count);
            store_first(given.grad_r + at + i, k * r_k, count);
            store_first(given.grad_k + at + i, r * r_k, count);
            add_first(grad_r_k + in_row + i, r * k * g, count);
            add_first(grad_weight + in_row + i, h * n, count);
            add_first(grad_bias + in_row + i, h, count);
        });
    });
}

}  // namespace
}  // namespace mdn

extern "C" {

int mdn_streams(const MdnStreams* streams) { return mdn::for_rows<MdnStreams, mdn::stream_rows>(streams); }

int mdn_streams_backward(const MdnStreams* streams) {
    return mdn::for_rows<MdnStreams, mdn::stream_rows_backward>(streams);
}

int mdn_rule_inputs(const MdnRuleInputs* inputs) { return mdn::for_rows<MdnRuleInputs, mdn::input_rows>(inputs); }

int mdn_rule_inputs_backward(const MdnRuleInputs* inputs) {
    return mdn::for_rows<MdnRuleInputs, mdn::input_rows_backward>(inputs);
}

int mdn_mixed_output(const MdnMixedOutput* output) { return mdn::for_rows<MdnMixedOutput, mdn::output_rows>(output); }

int mdn_mixed_output_backward(const MdnMixedOutput* output) {
    return mdn::for_rows<MdnMixedOutput, mdn::output_rows_backward>(output);
}

void mdn_token_mixing_interface(int64_t sizes[3]) {
    sizes[0] = sizeof(MdnStreams);
    sizes[1] = sizeof(MdnRuleInputs);
    sizes[2] = sizeof(MdnMixedOutput);
}
}
