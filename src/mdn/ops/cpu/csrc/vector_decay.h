// The C interface of the rules with a decay for every key dimension (ops/first_order/chunk_vector.py), float32:
//
//     probed_t = S_{t-1}^T p_t,    S_t = diag(alpha_t) S_{t-1} + (what is written),    o_t = S_t^T q_t        (31)
//
//     written:    no p (GLA) k_t v_t^T;    p without e (KDA) k_t (v_t - probed_t)^T;
//                 p and e (RWKV-7) k_t v_t^T + e_t probed_t^T
//
// Scales, norms, writing strengths and the factor alpha of p are in q, k and p already.
#pragma once

#include <cstdint>

#include "interface.h"

extern "C" {

// Sequence n is the tokens offsets[n] .. offsets[n + 1]; all heads have keys of their own.
struct MdnVectorDecay {
    int64_t sequences, heads, key_dim, value_dim, threads;
    const int64_t* offsets;                  // [N + 1]
    const float *q, *k, *p, *e, *log_alpha;  // [T, H, K]; p and e may be null
    const float* v;                          // [T, H, V]
    const float* initial;                    // [N, H, K, V] or null: zeros
    float* o;                                // [T, H, V] or null: only the states
    float* solved;                           // [T, H, V]: v - probed, or with e probed; null: not kept (or without p)
    float* final;                            // [N, H, K, V]
    const float *grad_o, *grad_final;        // backward: [T, H, V]; [N, H, K, V] or null
    float *grad_q, *grad_k, *grad_p, *grad_e, *grad_log_alpha, *grad_v;
    float* grad_initial;  // [N, H, K, V]
};
MDN_PUBLIC int mdn_vector_forward(const MdnVectorDecay* problem);
MDN_PUBLIC int mdn_vector_backward(const MdnVectorDecay* problem);

// One token per row; S [B, H, K, V] is updated in place, at slot slots[b] if there are slots.
struct MdnVectorStep {
    int64_t batch, slot_count, heads, key_dim, value_dim, threads;
    const int64_t* slots;                    // [B] or null
    const float *q, *k, *p, *e, *log_alpha;  // [B, H, K]
    const float* v;                          // [B, H, V]
    float* S;                                // [slots, H, K, V]
    int64_t S_strides[3];                    // of slot, head and key row, in floats
    float* o;                                // [B, H, V]
};
MDN_PUBLIC int mdn_vector_step(const MdnVectorStep* step);

// sizeof of both structs.
MDN_PUBLIC void mdn_vector_interface(int64_t sizes[2]);
}
