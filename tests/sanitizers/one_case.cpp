// Calls every entry point of the native CPU kernel once per combination of switches, on buffers of exactly the right
// size, and looks at every number that comes back. Run under valgrind it shows that nothing uninitialised is read or
// returned; under AddressSanitizer, that nothing outside the buffers is touched.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../../src/mdn/ops/cpu/csrc/interface.h"

namespace {

std::vector<std::unique_ptr<char[]>> buffers;

// Memory that nobody has written to.
template <class Element>
Element* fresh(long count) {
    buffers.emplace_back(new char[count * sizeof(Element)]);
    return reinterpret_cast<Element*>(buffers.back().get());
}

float next_random() { return static_cast<float>(std::rand()) / RAND_MAX; }

// Random numbers in [low, high], as float32 or as bfloat16 (the upper half of a float32).
void* random_values(long count, bool bfloat16, float low = -1, float high = 1) {
    float* values = fresh<float>(count);
    for (long i = 0; i < count; ++i) values[i] = low + (high - low) * next_random();
    if (!bfloat16) return values;
    uint16_t* halves = fresh<uint16_t>(count);
    for (long i = 0; i < count; ++i) halves[i] = reinterpret_cast<uint16_t*>(values)[2 * i + 1];
    return halves;
}

float* random_floats(long count, float low = -1, float high = 1) {
    return static_cast<float*>(random_values(count, false, low, high));
}

long failures = 0;

// Branches on every value: valgrind reports the ones that were never written.
void look_at(const char* name, const void* values, long count, bool bfloat16) {
    for (long i = 0; values != nullptr && i < count; ++i) {
        const bool finite = bfloat16 ? (static_cast<const uint16_t*>(values)[i] & 0x7f80) != 0x7f80
                                     : std::isfinite(static_cast<const float*>(values)[i]);
        if (finite) continue;
        std::printf("%s[%ld] is not finite\n", name, i);
        ++failures;
    }
}

struct Switches {
    bool bfloat16, with_p, momentum, erase, state;
    long slices, chunk_size;

    // The two options of the momentum rule go with switches that they have nothing to do with: all pairs occur.
    bool direct() const { return momentum && erase && with_p; }
    bool lookahead() const { return momentum && erase && state; }
};

void run_sequences(const Switches& on) {
    const long lengths[] = {0, 1, 35, 16}, sequences = 4, heads = 1, value_heads = 2, key_dim = 20, value_dim = 32;
    const long parts = value_heads * on.slices, state_size = sequences * value_heads * key_dim * value_dim;
    int64_t* offsets = fresh<int64_t>(sequences + 1);
    offsets[0] = 0;
    for (long n = 0; n < sequences; ++n) offsets[n + 1] = offsets[n] + lengths[n];
    const long tokens = offsets[sequences], keys = tokens * heads * key_dim, values = tokens * value_heads * value_dim;
    const long gates = tokens * value_heads, key_gradients = tokens * parts * key_dim, gate_gradients = tokens * parts;
    MdnProblem x = {};
    x.sequences = sequences;
    x.key_heads = heads;
    x.value_heads = value_heads;
    x.slices = on.slices;
    x.key_dim = key_dim;
    x.value_dim = value_dim;
    x.chunk_size = on.chunk_size;
    x.threads = 2;
    x.bfloat16 = on.bfloat16;
    x.float32_key_gradient = 1;
    x.l2norm = 1;
    x.lookahead = on.lookahead();
    x.p_times_alpha = !on.lookahead();
    x.has_momentum = on.momentum;
    x.has_erase = on.erase;
    x.scale = 0.2;
    x.offsets = offsets;
    x.q = random_values(keys, on.bfloat16);
    x.k = random_values(keys, on.bfloat16);
    x.p = on.with_p ? random_values(keys, on.bfloat16) : nullptr;
    x.v = random_values(values, on.bfloat16);
    x.log_alpha = random_floats(gates, -1, 0);
    x.beta = random_floats(gates, 0, 1);
    x.eta = random_floats(gates, 0, 1);
    x.log_mu = on.momentum ? random_floats(gates, -1, 0) : nullptr;
    x.direct = on.direct() ? random_floats(gates, 0, 1) : nullptr;
    x.initial_S = on.state ? random_floats(state_size) : nullptr;
    x.initial_M = on.state && on.momentum ? random_floats(state_size) : nullptr;
    x.o = fresh<float>(values);
    x.residual = fresh<float>(values);
    x.final_S = fresh<float>(state_size);
    x.final_M = on.momentum ? fresh<float>(state_size) : nullptr;
    failures += mdn_forward(&x);
    look_at("o", x.o, values, on.bfloat16);
    look_at("residual", x.residual, values, false);
    look_at("final_S", x.final_S, state_size, false);
    look_at("final_M", x.final_M, x.final_M ? state_size : 0, false);

    x.grad_o = x.o;
    x.grad_final_S = on.state ? x.final_S : nullptr;
    x.grad_final_M = on.state ? x.final_M : nullptr;
    x.grad_q = fresh<float>(key_gradients);
    x.grad_k = fresh<float>(key_gradients);
    x.grad_v = fresh<float>(values);
    x.grad_p = on.with_p && on.erase ? fresh<float>(key_gradients) : nullptr;
    x.grad_log_alpha = fresh<float>(gate_gradients);
    x.grad_beta = fresh<float>(gate_gradients);
    x.grad_eta = fresh<float>(gate_gradients);
    x.grad_log_mu = on.momentum ? fresh<float>(gate_gradients) : nullptr;
    x.grad_direct = on.direct() ? fresh<float>(gate_gradients) : nullptr;
    x.grad_initial_S = on.state ? fresh<float>(state_size) : nullptr;
    x.grad_initial_M = on.state && on.momentum ? fresh<float>(state_size) : nullptr;
    failures += mdn_backward(&x);
    for (const void* gradient : {x.grad_q, x.grad_k, x.grad_p})
        look_at("gradient of a key", gradient, key_gradients, false);
    for (const float* gradient : {x.grad_log_alpha, x.grad_log_mu, x.grad_beta, x.grad_eta, x.grad_direct})
        look_at("gradient of a gate", gradient, gate_gradients, false);
    look_at("grad_v", x.grad_v, values, on.bfloat16);
    for (const float* gradient : {x.grad_initial_S, x.grad_initial_M})
        look_at("gradient of a state", gradient, state_size, false);
}

void run_step(const Switches& on) {
    const long batch = 3, slots = 5, heads = 1, value_heads = 2, key_dim = 20, value_dim = 35;
    const long state_size = slots * value_heads * key_dim * value_dim, values = batch * value_heads * value_dim;
    int64_t* chosen = fresh<int64_t>(batch);
    chosen[0] = 4;
    chosen[1] = 0;
    chosen[2] = 2;
    MdnStep x = {};
    x.batch = batch;
    x.slot_count = slots;
    x.key_heads = heads;
    x.value_heads = value_heads;
    x.key_dim = key_dim;
    x.value_dim = value_dim;
    x.threads = 2;
    x.bfloat16 = on.bfloat16;
    x.l2norm = 1;
    x.lookahead = on.lookahead();
    x.p_times_alpha = !on.lookahead();
    x.has_momentum = on.momentum;
    x.has_erase = on.erase;
    x.scale = 0.2;
    x.slots = chosen;
    x.q = random_values(batch * heads * key_dim, on.bfloat16);
    x.k = random_values(batch * heads * key_dim, on.bfloat16);
    x.p = on.with_p ? random_values(batch * heads * key_dim, on.bfloat16) : nullptr;
    x.v = random_values(values, on.bfloat16);
    x.log_alpha = random_floats(batch * value_heads, -1, 0);
    x.beta = random_floats(batch * value_heads, 0, 1);
    x.log_mu = on.momentum ? random_floats(batch * value_heads, -1, 0) : nullptr;
    x.direct = on.direct() ? random_floats(batch * value_heads, 0, 1) : nullptr;
    x.S = random_floats(state_size);
    x.M = on.momentum ? random_floats(state_size) : nullptr;
    const int64_t strides[3] = {value_heads * key_dim * value_dim, key_dim * value_dim, value_dim};
    for (int i = 0; i < 3; ++i) x.S_strides[i] = x.M_strides[i] = strides[i];
    x.o = fresh<float>(values);
    failures += mdn_step(&x);
    look_at("o of a step", x.o, values, on.bfloat16);
    for (const float* state : {x.S, x.M}) look_at("state of a step", state, state_size, false);
    chosen[1] = slots;
    failures += mdn_step(&x) != 2;  // a slot out of range is refused
}

// Every format and every way to divide a batch into rows, with a panel that is not full; float32 with a depth that is no
// multiple of anything.
void run_linear(long format, long batch) {
    const long depth = format == MDN_FLOAT32 ? 539 : 64, outputs = 35, panels = 3;
    MdnLinear x = {};
    x.batch = batch;
    x.depth = depth;
    x.outputs = outputs;
    x.format = format;
    x.threads = 2;
    const long weights = panels * depth * 16, bytes = format == MDN_INT4 ? weights / 2 : weights;
    uint8_t* random_bytes = fresh<uint8_t>(bytes);
    for (long i = 0; i < bytes; ++i) random_bytes[i] = static_cast<uint8_t>(std::rand());
    x.weights = format == MDN_BFLOAT16  ? random_values(weights, true)
                : format == MDN_FLOAT32 ? random_floats(outputs * depth)
                                        : static_cast<const void*>(random_bytes);
    if (format == MDN_INT8) x.scales = random_floats(panels * 16);
    if (format == MDN_INT4) x.scales = random_values(panels * depth / 32 * 16, true);
    x.x = random_floats(batch * depth);
    x.bias = batch % 2 == 0 ? random_floats(outputs) : nullptr;
    x.y = fresh<float>(batch * outputs);
    failures += mdn_linear(&x);
    look_at("y", x.y, batch * outputs, false);
    buffers.clear();
}

}  // namespace

int main() {
    for (int bits = 0; bits < 64; ++bits) {
        const auto bit = [&](int i) { return (bits >> i & 1) != 0; };
        const Switches on{bit(0), bit(1), bit(2), bit(3), bit(4), bit(0) ? 2 : 1, bit(5) ? 32 : 12};
        run_sequences(on);
        run_step(on);
        buffers.clear();
    }
    for (long format : {MDN_BFLOAT16, MDN_INT8, MDN_INT4, MDN_FLOAT32})
        for (long batch = 0; batch < 54; ++batch) run_linear(format, batch);
    std::printf("%ld failures\n", failures);
    return failures != 0;
}
