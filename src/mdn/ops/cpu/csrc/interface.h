// The C interface: what Python passes, as plain structs of sizes, switches and pointers (mirrored in ../bindings.py).
//
// Shape letters: N sequences, T tokens of all sequences together, H key heads, HV value heads, K key dim, V value dim.
// Batched and packed input look alike here: sequence n is the tokens offsets[n] .. offsets[n + 1] of one long row.
//
// Columns of V are independent, so a value head can be cut into `slices` of V / slices columns that are treated as
// heads of their own ("parts", P = HV * slices of them): that is how a few heads keep many threads busy. Gradients of
// q, k, p and the gates are then written once per part and added up by the caller.
#pragma once

#include <cstdint>

#define MDN_PUBLIC __attribute__((visibility("default")))

// Raised whenever a struct or the meaning of a field changes; Python refuses a library built with another one.
#define MDN_INTERFACE_VERSION 6

extern "C" {

// A forward or backward pass over whole sequences.
struct MdnProblem {
    int64_t sequences, key_heads, value_heads, slices, key_dim, value_dim;
    int64_t chunk_size;  // tokens per chunk, a multiple of 4
    int64_t threads;
    int64_t bfloat16;              // q, k, p, v, o and their gradients are bfloat16 instead of float32
    int64_t float32_key_gradient;  // grad_q, grad_k, grad_p are float32 [T, P, K] whatever the input is
    int64_t l2norm, p_times_alpha;
    int64_t lookahead;     // the error is read at alpha S - beta mu M instead of S; p_times_alpha is 0 then
    int64_t has_momentum;  // 0: a first-order rule; mu = 0, there is no M and log_mu is not read
    int64_t has_erase;     // 0: p = 0, nothing is subtracted from v
    double scale;
    const int64_t* offsets;  // [N + 1]

    const void *q, *k, *p;                         // [T, H, K]; p may be null: then it is k
    const void* v;                                 // [T, HV, V]
    const float *log_alpha, *log_mu, *beta, *eta;  // [T, HV]; log_alpha, beta, eta may be null: alpha, beta, eta are 1
    const float* direct;                           // [T, HV] or null: zeros
    const float *initial_S, *initial_M;            // [N, HV, K, V] or null: zeros

    void* o;                   // [T, HV, V]; may be null in the forward pass: states only
    float* residual;           // [T, HV, V]; may be null in the forward pass
    float *final_S, *final_M;  // [N, HV, K, V]

    const void* grad_o;                                          // [T, HV, V]
    const float *grad_final_S, *grad_final_M;                    // [N, HV, K, V] or null: zeros
    void *grad_q, *grad_k, *grad_p;                              // [T, P, K]; grad_p is null when p is
    void* grad_v;                                                // [T, HV, V]
    float *grad_log_alpha, *grad_log_mu, *grad_beta, *grad_eta;  // [T, P] or null: not requested
    float* grad_direct;                                          // the same
    float *grad_initial_S, *grad_initial_M;                      // [N, HV, K, V] or null: not requested
};

// One token per sequence, the states updated in place. Strides are in floats; the last dimension of a state is
// contiguous.
struct MdnStep {
    int64_t batch, slot_count, key_heads, value_heads, key_dim, value_dim, threads;
    int64_t bfloat16, l2norm, p_times_alpha, lookahead, has_momentum, has_erase;
    double scale;
    const int64_t* slots;                          // [B] or null: slot b for row b
    const void *q, *k, *p, *v;                     // [B, H, K] (p may be null), [B, HV, V]
    const float *log_alpha, *log_mu, *beta, *eta;  // [B, HV]; null as above
    const float* direct;                           // [B, HV] or null: zeros
    float *S, *M;                                  // [slots, HV, K, V]
    int64_t S_strides[3], M_strides[3];            // of slot, head and key row
    void* o;                                       // [B, HV, V]
};

// Formats of weights: three packed ones, and plain rows.
#define MDN_BFLOAT16 0
#define MDN_INT8 1
#define MDN_INT4 2
#define MDN_FLOAT32 3

// y = x W^T + bias. A packed W is in panels of 16 outputs, its rows padded with zeros to a multiple of 16 and its
// columns (inputs) to a multiple of 32; `depth` counts the padding, x is padded likewise. float32 has no padding.
struct MdnLinear {
    int64_t batch, depth, outputs, format, threads;
    const void* weights;  // [panels, depth / n, 16, n], n = 2 bfloat16, 4 int8 or 8 int4 (first one lowest);
                          // [outputs, depth] float32
    const void* scales;   // null; [panels, 16] float32 (int8); [panels, depth / 32, 16] bfloat16 (int4)
    const float* x;       // [batch, depth]
    const float* bias;    // [outputs] or null
    float* y;             // [batch, outputs]
};

// All return 0, or 1 when memory ran out; mdn_step returns 2 when a slot is out of range (nothing has been changed).
MDN_PUBLIC int mdn_forward(const MdnProblem* problem);
MDN_PUBLIC int mdn_backward(const MdnProblem* problem);
MDN_PUBLIC int mdn_step(const MdnStep* step);
MDN_PUBLIC int mdn_linear(const MdnLinear* linear);

// Whether this processor and its system can run the variant of that name: "baseline", "avx2", "avx512" or "avx512vnni".
MDN_PUBLIC int mdn_supports(const char* instruction_set);

// The interface version, sizeof(MdnProblem), sizeof(MdnStep), sizeof(MdnLinear).
MDN_PUBLIC void mdn_interface(int64_t version_and_sizes[4]);
}
