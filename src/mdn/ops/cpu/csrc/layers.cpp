// Norms, SwiGLU, gates and cross entropy: one pass over memory each.
#include "layers.h"

#include <cmath>

#include "functions.h"
#include "rows.h"

namespace mdn {
namespace {

// ------------------------------------------------------------------------------------------------------------- norms

// activation(g) and its derivative.
struct Gate {
    Vector value, slope;
};

template <int activation>
MDN_INLINE Gate open_gate(const float* gate, long count) {
    if (activation == MDN_NO_GATE) return {filled(1), zeros()};
    const Vector g = load_first(gate, count), s = sigmoid(g), rest = filled(1) - s;
    if (activation == MDN_SIGMOID) return {s, s * rest};
    return {g * s, s + g * s * rest};
}

float inverse_rms(const MdnNorm& norm, const float* x) {
    Vector squares = zeros();
    for_vectors(norm.width, [&](long i, long count) {
        const Vector part = load_first(x + i, count);
        squares = squares + part * part;
    });
    return 1 / std::sqrt(total(squares) / norm.width + static_cast<float>(norm.eps));
}

template <int activation>
MDN_FLATTEN void norm_rows(const MdnNorm& norm, long, long first, long end) {
    for (long row = first; row < end; ++row) {
        const float *x = norm.x + row * norm.width, *gate = norm.gate + row * norm.width;
        float* y = norm.y + row * norm.width;
        const float inverse = inverse_rms(norm, x);
        for_vectors(norm.width, [&](long i, long count) {
            const Vector normed = load_first(x + i, count) * inverse * load_first(norm.weight + i, count);
            store_first(y + i, normed * open_gate<activation>(gate + i, count).value, count);
        });
    }
}

// With n = x / rms(x), y = n w a(g) and h = grad_y a(g):
//     grad_w = sum of h n,  grad_g = grad_y n w a'(g),  grad_x = (h w - n mean(h w n)) / rms(x)
template <int activation>
MDN_FLATTEN void norm_rows_backward(const MdnNorm& norm, long unit, long first, long end) {
    float* grad_weight = norm.grad_weight + unit * norm.width;
    fill_zeros(grad_weight, norm.width);
    for (long row = first; row < end; ++row) {
        const long at = row * norm.width;
        const float *x = norm.x + at, *gate = norm.gate + at, *grad_y = norm.grad_y + at;
        const float inverse = inverse_rms(norm, x);
        Vector products = zeros();
        for_vectors(norm.width, [&](long i, long count) {
            const Vector n = load_first(x + i, count) * inverse, w = load_first(norm.weight + i, count);
            const Vector given = load_first(grad_y + i, count);
            const Gate a = open_gate<activation>(gate + i, count);
            const Vector h = given * a.value;
            products = products + h * w * n;
            store_first(grad_weight + i, load_first(grad_weight + i, count) + h * n, count);
            store_first(norm.grad_x + at + i, h * w, count);
            if (activation != MDN_NO_GATE) store_first(norm.grad_gate + at + i, given * n * w * a.slope, count);
        });
        const float mean = total(products) / norm.width;
        for_vectors(norm.width, [&](long i, long count) {
            const Vector n = load_first(x + i, count) * inverse;
            float* grad_x = norm.grad_x + at + i;
            store_first(grad_x, (load_first(grad_x, count) - n * mean) * inverse, count);
        });
    }
}

// ------------------------------------------------------------------------------------------------------------ SwiGLU

constexpr long kElements = 1 << 13;  // of a unit

MDN_FLATTEN void swiglu_unit(const void* context, long unit) {
    const MdnSwiGlu& given = *static_cast<const MdnSwiGlu*>(context);
    const long at = unit * kElements;
    for_vectors(std::min<long>(kElements, given.count - at), [&](long i, long count) {
        const Vector gate = load_first(given.gate + at + i, count), up = load_first(given.up + at + i, count);
        store_first(given.y + at + i, gate * sigmoid(gate) * up, count);
    });
}

MDN_FLATTEN void swiglu_backward_unit(const void* context, long unit) {
    const MdnSwiGlu& given = *static_cast<const MdnSwiGlu*>(context);
    const long at = unit * kElements;
    for_vectors(std::min<long>(kElements, given.count - at), [&](long i, long count) {
        const Vector gate = load_first(given.gate + at + i, count), up = load_first(given.up + at + i, count);
        const Vector grad_y = load_first(given.grad_y + at + i, count);
        const Vector s = sigmoid(gate), silu = gate * s;
        store_first(given.grad_up + at + i, grad_y * silu, count);
        store_first(given.grad_gate + at + i, grad_y * up * (s + silu * (filled(1) - s)), count);
    });
}

int for_elements(const MdnSwiGlu* swiglu, void (*work)(const void*, long)) {
    return run_units(swiglu->threads, (swiglu->count + kElements - 1) / kElements, work, swiglu) ? 0 : 1;
}

// ------------------------------------------------------------------------------------------------------ cross entropy

MDN_FLATTEN void entropy_rows(const MdnCrossEntropy& given, long, long first, long end) {
    for (long row = first; row < end; ++row) {
        const float* logits = given.logits + row * given.classes;
        Vector largest = filled(-INFINITY), sum = zeros();
        for_vectors(given.classes,
                    [&](long i, long count) { largest = maximum(largest, load_first(logits + i, count, -INFINITY)); });
        float each[kWidth], top = -INFINITY;
        store(each, largest);
        for (float x : each) top = top < x ? x : top;
        const Vector shift = filled(top);
        for_vectors(given.classes,
                    [&](long i, long count) { sum = sum + exp(load_first(logits + i, count, -INFINITY) - shift); });
        given.log_sum[row] = top + std::log(total(sum));
        given.loss[row] = given.labels[row] < 0 ? 0 : given.log_sum[row] - logits[given.labels[row]];
    }
}

MDN_FLATTEN void entropy_rows_backward(const MdnCrossEntropy& given, long, long first, long end) {
    const float grad_loss = static_cast<float>(given.grad_loss);
    for (long row = first; row < end; ++row) {
        const float* logits = given.logits + row * given.classes;
        float* grad = given.grad_logits + row * given.classes;
        if (given.labels[row] < 0) {
            fill_zeros(grad, given.classes);
            continue;
        }
        const Vector shift = filled(given.log_sum[row]);
        for_vectors(given.classes, [&](long i, long count) {
            store_first(grad + i, exp(load_first(logits + i, count) - shift) * grad_loss, count);
        });
        grad[given.labels[row]] -= grad_loss;
    }
}

// ------------------------------------------------------------------------------------------------------------- gates

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

float plain_sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

void find_gates(const MdnGates& given) {
    const long group = given.value_heads / given.key_heads;
    for (long i = 0; i < given.rows * given.value_heads; ++i) {
        const long head = i % given.value_heads, key_head = head / group;
        const float e = given.e[i] / static_cast<float>(given.tau);
        const float eta = given.sigmoid_eta ? 2 * plain_sigmoid(e) : 1 + std::tanh(e);
        float log_alpha = -std::exp(given.A_log[key_head]) * softplus(given.a[i] + given.dt_bias[head]);
        float beta = plain_sigmoid(given.b[i]);
        if (given.log_factor != nullptr) {
            const float tangent = eta * std::exp(given.log_factor[key_head]), square = tangent * tangent;
            if (given.bound_alpha) log_alpha -= std::log1p(square);
            if (given.bound_beta) beta *= square / (1 + square);
        }
        given.eta[i] = eta;
        given.log_alpha[i] = log_alpha;
        given.beta[i] = given.double_beta ? 2 * beta : beta;
        given.log_mu[i] = -INFINITY;
        if (given.m != nullptr)
            given.log_mu[i] = std::max(-std::exp(given.Mu_log[key_head]) * softplus(given.m[i] + given.mu_bias[head]),
                                       static_cast<float>(given.min_log_mu));
    }
}

}  // namespace
}  // namespace mdn

extern "C" {

int mdn_norm(const MdnNorm* norm) {
    using namespace mdn;
    return norm->activation == MDN_NO_GATE   ? for_rows<MdnNorm, norm_rows<MDN_NO_GATE>>(norm)
           : norm->activation == MDN_SIGMOID ? for_rows<MdnNorm, norm_rows<MDN_SIGMOID>>(norm)
                                             : for_rows<MdnNorm, norm_rows<MDN_SILU>>(norm);
}

int mdn_norm_backward(const MdnNorm* norm) {
    using namespace mdn;
    return norm->activation == MDN_NO_GATE   ? for_rows<MdnNorm, norm_rows_backward<MDN_NO_GATE>>(norm)
           : norm->activation == MDN_SIGMOID ? for_rows<MdnNorm, norm_rows_backward<MDN_SIGMOID>>(norm)
                                             : for_rows<MdnNorm, norm_rows_backward<MDN_SILU>>(norm);
}

int mdn_swiglu(const MdnSwiGlu* swiglu) { return mdn::for_elements(swiglu, mdn::swiglu_unit); }

int mdn_swiglu_backward(const MdnSwiGlu* swiglu) { return mdn::for_elements(swiglu, mdn::swiglu_backward_unit); }

int mdn_cross_entropy(const MdnCrossEntropy* entropy) {
    return mdn::for_rows<MdnCrossEntropy, mdn::entropy_rows>(entropy);
}

int mdn_cross_entropy_backward(const MdnCrossEntropy* entropy) {
    return mdn::for_rows<MdnCrossEntropy, mdn::entropy_rows_backward>(entropy);
}

int mdn_gates(const MdnGates* gates) {
    mdn::find_gates(*gates);
    return 0;
}

void mdn_layers_interface(int64_t sizes[8]) {
    const int64_t found[8] = {
        sizeof(MdnNorm),  sizeof(MdnSwiGlu),       sizeof(MdnConvolution), sizeof(MdnConvolutionStep),
        sizeof(MdnGates), sizeof(MdnCrossEntropy), sizeof(MdnElementwise), sizeof(MdnProgram)};
    for (int i = 0; i < 8; ++i) sizes[i] = found[i];
}
}
