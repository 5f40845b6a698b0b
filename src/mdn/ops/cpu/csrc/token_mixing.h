// The C interface of what surrounds RWKV-7's rule (layers/token_mixing.py): its streams, the arguments of the rule and
// the output. Float32, rows contiguous; units, sums of gradients and results as in layers.h.
#pragma once

#include <cstdint>

#include "interface.h"

extern "C" {

// y_s = x + shifted * mix_s for every stream s.
#define MDN_MOST_STREAMS 6

struct MdnStreams {
    int64_t rows, width, rows_per_unit, count, threads;
    const float *x, *shifted;               // [rows, width]
    const float* mix[MDN_MOST_STREAMS];     // [width] each
    float* y[MDN_MOST_STREAMS];             // [rows, width] each
    const float* grad_y[MDN_MOST_STREAMS];  // backward: the same
    float *grad_x, *grad_shifted;           // [rows, width]
    float* grad_mix;                        // [units, count, width]
};
MDN_PUBLIC int mdn_streams(const MdnStreams* streams);
MDN_PUBLIC int mdn_streams_backward(const MdnStreams* streams);

// With the rate s = sigmoid(rate) and, for every head, kappa = k k_k / |k k_k|:
//     w = slowest sigmoid(decay),   key = k (1 + (s - 1) k_a),   a = -kappa,   b = kappa s
struct MdnRuleInputs {
    int64_t rows, heads, head_dim, rows_per_unit, threads;
    double slowest;
    const float *k, *decay, *rate;                     // [rows, H, D]
    const float *k_k, *k_a;                            // [H, D]
    float *w, *key, *a, *b;                            // [rows, H, D]
    const float *grad_w, *grad_key, *grad_a, *grad_b;  // backward: the same
    float *grad_k, *grad_decay, *grad_rate;            // [rows, H, D]
    float *grad_k_k, *grad_k_a;                        // [units, H, D]
};
MDN_PUBLIC int mdn_rule_inputs(const MdnRuleInputs* inputs);
MDN_PUBLIC int mdn_rule_inputs_backward(const MdnRuleInputs* inputs);

// y = (layer_norm(o) weight + bias + (sum of r k r_k) v) gate, the norm and the sum over every head.
struct MdnMixedOutput {
    int64_t rows, heads, head_dim, rows_per_unit, threads;
    double eps;
    const float *o, *r, *k, *v, *gate;                     // [rows, H, D]
    const float *r_k, *weight, *bias;                      // [H, D]
    float* y;                                              // [rows, H, D]
    const float* grad_y;                                   // backward: the same
    float *grad_o, *grad_r, *grad_k, *grad_v, *grad_gate;  // [rows, H, D]
    float *grad_r_k, *grad_weight, *grad_bias;             // [units, H, D]
};
MDN_PUBLIC int mdn_mixed_output(const MdnMixedOutput* output);
MDN_PUBLIC int mdn_mixed_output_backward(const MdnMixedOutput* output);

// sizeof of the three structs.
MDN_PUBLIC void mdn_token_mixing_interface(int64_t sizes[3]);
}
