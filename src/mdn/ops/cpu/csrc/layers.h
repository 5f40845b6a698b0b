// The C interface of what surrounds the rule in a model: norms, SwiGLU, short convolutions, gates, cross entropy.
// Float32, rows contiguous. Work is divided into blocks of rows ("units"), whose partial sums of a parameter's gradient
// the caller adds up: results do not depend on the number of threads. All return 0, or 1 when memory ran out.
#pragma once

#include <cstdint>

#include "interface.h"

extern "C" {

// Activations of a gate.
#define MDN_NO_GATE 0
#define MDN_SIGMOID 1
#define MDN_SILU 2

// y = x / sqrt(mean(x^2) + eps) * weight * activation(gate), over the last dimension.
struct MdnNorm {
    int64_t rows, width, rows_per_unit, activation, threads;
    double eps;
    const float *x, *gate;      // [rows, width]; gate may be null (MDN_NO_GATE)
    const float* weight;        // [width]
    float* y;                   // [rows, width]
    const float* grad_y;        // backward: [rows, width]
    float *grad_x, *grad_gate;  // [rows, width]
    float* grad_weight;         // [units, width]
};
MDN_PUBLIC int mdn_norm(const MdnNorm* norm);
MDN_PUBLIC int mdn_norm_backward(const MdnNorm* norm);

// y = silu(gate) * up, element by element.
struct MdnSwiGlu {
    int64_t count, threads;
    const float *gate, *up;
    float* y;
    const float* grad_y;
    float *grad_gate, *grad_up;
};
MDN_PUBLIC int mdn_swiglu(const MdnSwiGlu* swiglu);
MDN_PUBLIC int mdn_swiglu_backward(const MdnSwiGlu* swiglu);

// y_t = silu(sum_j weight[j] x_{t - W + 1 + j} + bias) per channel, each sequence for itself; 2 <= W <= 4.
struct MdnConvolution {
    int64_t sequences, channels, width, tokens_per_unit, silu, threads;
    const int64_t* offsets;          // [N + 1]
    const float* x;                  // [T, C]
    const float *weight, *bias;      // [C, W], [C] or null
    const float* state;              // [N, C, W - 1]: the inputs before the first token, oldest first; null: zeros
    float* y;                        // [T, C]
    const float* grad_y;             // backward: [T, C]
    float* grad_x;                   // [T, C]
    float *grad_weight, *grad_bias;  // [units, W, C], [units, C] or null
};
MDN_PUBLIC int mdn_convolution(const MdnConvolution* convolution);
MDN_PUBLIC int mdn_convolution_backward(const MdnConvolution* convolution);

// One token per sequence; `state` [B, C, W - 1] advances in place. Any width.
MDN_PUBLIC int mdn_convolution_step(int64_t batch, int64_t channels, int64_t width, int64_t silu, const float* x,
                                    const float* weight, const float* bias, float* state, float* y);

// The stability-aware gates of the momentum delta rule (layers/momentum_deltanet.py), forward only.
struct MdnGates {
    int64_t rows, key_heads, value_heads;
    int64_t bound_alpha, bound_beta, sigmoid_eta, double_beta;
    double tau, min_log_mu;
    const float *a, *b, *m, *e;                  // [rows, HV]; m may be null: mu = 0
    const float *A_log, *dt_bias;                // [H], [HV]
    const float *Mu_log, *mu_bias, *log_factor;  // [H], [HV], [H]; null with m, or without bounds
    float *log_alpha, *log_mu, *beta, *eta;      // [rows, HV]
};
MDN_PUBLIC int mdn_gates(const MdnGates* gates);

// loss = -log softmax(logits)[label], row by row; a label < 0 counts for nothing.
struct MdnCrossEntropy {
    int64_t rows, classes, rows_per_unit, threads;
    const float* logits;    // [rows, classes]
    const int64_t* labels;  // [rows]
    float *loss, *log_sum;  // [rows]: the loss; log sum exp of the row
    double grad_loss;       // backward: of every row
    float* grad_logits;     // [rows, classes]
};
MDN_PUBLIC int mdn_cross_entropy(const MdnCrossEntropy* entropy);
MDN_PUBLIC int mdn_cross_entropy_backward(const MdnCrossEntropy* entropy);

// sizeof of the five structs above, in their order.
MDN_PUBLIC void mdn_layers_interface(int64_t sizes[5]);
}
