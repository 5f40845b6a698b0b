// What Python hands over: sizes, switches and pointers, as one plain C struct (mirrored in ../_library.py).
//
// Shape letters: N sequences, T tokens of all sequences together, H key heads, HV value heads, K key dim, V value dim.
// Batched and packed input look alike here: sequence n is the tokens offsets[n] .. offsets[n + 1] of one long row.
//
// Columns of V are independent, so a value head can be cut into `slices` of V / slices columns that are worked on as if they were
// heads of their own ("parts", P = HV * slices of them): that is how a few heads keep many threads busy. Gradients of q, k, p and
// the gates are then written once per part and added up by the caller.
#pragma once

#include <cstdint>

#define MDN_PUBLIC __attribute__((visibility("default")))

extern "C" {

struct MdnProblem {
    int64_t sequences, key_heads, value_heads, slices, key_dim, value_dim, chunk, threads;
    int64_t bfloat16;              // q, k, p, v, o and their gradients are bfloat16 instead of float32
    int64_t float32_key_gradient;  // dq, dk, dp are float32 [T, P, K] (one per part) whatever the input is
    int64_t l2norm, p_times_alpha;
    int64_t has_momentum;  // 0: a first-order rule; mu = 0, there is no M and log_mu is not read
    int64_t has_erase;     // 0: p = 0, nothing is subtracted from v
    double scale;
    const int64_t* offsets;  // [N + 1]

    const void *q, *k, *p;                            // [T, H, K]; p may be null: then it is k
    const void* v;                                    // [T, HV, V]
    const float *log_alpha, *log_mu, *beta, *eta;     // [T, HV]; log_alpha, beta, eta may be null: alpha, beta, eta are 1
    const float *initial_state, *initial_momentum;    // [N, HV, K, V] or null: zeros

    void* o;                             // [T, HV, V]
    float* residual;                     // [T, HV, V]: R; may be null in the forward pass
    float *final_state, *final_momentum; // [N, HV, K, V]

    const void* grad_o;                               // [T, HV, V]
    const float *grad_final_state, *grad_final_momentum;  // [N, HV, K, V] or null: zeros
    void *dq, *dk, *dp;                               // [T, P, K]; dp is null when p is
    void* dv;                                         // [T, HV, V]
    float *dlog_alpha, *dlog_mu, *dbeta, *deta;       // [T, P] or null: not wanted
    float *dinitial_state, *dinitial_momentum;        // [N, HV, K, V] or null: not wanted
};

// One token per sequence, the states updated in place. Strides are in floats; the last dimension of a state is contiguous.
struct MdnStep {
    int64_t batch, slot_count, key_heads, value_heads, key_dim, value_dim, threads;
    int64_t bfloat16, l2norm, p_times_alpha, has_momentum, has_erase;
    double scale;
    const int64_t* slots;                                          // [B] or null: slot b for row b
    const void *q, *k, *p, *v;                                     // [B, H, K] (p may be null), [B, HV, V]
    const float *log_alpha, *log_mu, *beta, *eta;                  // [B, HV]; null as above
    float *state, *momentum;                                       // [slots, HV, K, V]
    int64_t state_strides[3], momentum_strides[3];                 // of slot, head and key row
    void* o;                                                       // [B, HV, V]
};

// All return 0, or 1 when memory ran out; mdn_step returns 2 when a slot is out of range (nothing has been changed then).
MDN_PUBLIC int mdn_forward(const MdnProblem* problem);
MDN_PUBLIC int mdn_backward(const MdnProblem* problem);
MDN_PUBLIC int mdn_step(const MdnStep* step);

// Whether this processor and its system can run the variant of that name: "baseline", "avx2" or "avx512".
MDN_PUBLIC int mdn_supports(const char* instruction_set);

// Sizes of the two structs, for a check that Python mirrors them.
MDN_PUBLIC void mdn_struct_sizes(int64_t* sizes);
}
