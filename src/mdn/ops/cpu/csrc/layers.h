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

// One token per sequence; `state` advances in place. Any width.
struct MdnConvolutionStep {
    int64_t batch, channels, width, silu;
    const float* x;              // [B, C]
    const float *weight, *bias;  // [C, W], [C] or null
    float* state;                // [B, C, W - 1]
    float* y;                    // [B, C]
};
MDN_PUBLIC int mdn_convolution_step(const MdnConvolutionStep* step);

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

// y = operation(a, b), element by element over four dimensions; strides in floats, 0 where an operand is broadcast.
#define MDN_SCALE 0       // a * number
#define MDN_ADD 1         // a + number * b
#define MDN_MULTIPLY 2    // a * b
#define MDN_ADD_NUMBER 3  // a + number
#define MDN_EXP 4
#define MDN_LOGISTIC 5  // 1 / (1 + e^-a)
#define MDN_SWISH 6     // a / (1 + e^-a)
#define MDN_SOFTPLUS 7

struct MdnElementwise {
    int64_t operation;
    double number;
    int64_t sizes[4], a_strides[4], b_strides[4], y_strides[4];
    const float *a, *b;  // b is a itself where the operation has one operand
    float* y;
};
MDN_PUBLIC int mdn_elementwise(const MdnElementwise* elementwise);

// Calls of this interface, one after the other; stops at the first that does not return 0, and returns that.
struct MdnCall {
    int (*function)(const void* argument);
    const void* argument;
};
struct MdnProgram {
    int64_t count;
    const MdnCall* calls;
};
MDN_PUBLIC int mdn_run(const MdnProgram* program);

// sizeof of the eight structs above (without MdnCall), in their order.
MDN_PUBLIC void mdn_layers_interface(int64_t sizes[8]);
}
