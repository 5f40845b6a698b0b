// The forward pass and the decode step of the rules with a decay per key dimension; equations of docs/derivation.md,
// section 11, in vector_chunk.h.
#include "threads.h"
#include "vector_chunk.h"

namespace mdn {
namespace vector_decay {
namespace {

struct ForwardWorkspace {
    TokenVectors vectors;
    Matrix S;                              // [K, V]
    Matrix values, solved, out, more_out;  // [C, 16]

    ForwardWorkspace(Arena& arena, const Unit& unit)
        : vectors(arena, unit.K),
          S(arena.matrix(unit.K, unit.problem.value_dim)),
          values(arena.panel(C)),
          solved(arena.panel(C)),
          out(arena.panel(C)),
          more_out(arena.panel(C)) {}
};

MDN_FLATTEN void forward_panel(const Unit& unit, ForwardWorkspace& ws, long chunk, long column) {
    const MdnVectorDecay& problem = unit.problem;
    const TokenVectors& vectors = ws.vectors;
    const Matrix S = ws.S.from(0, column), values = ws.values, solved = ws.solved, out = ws.out, more = ws.more_out;
    unit.load_values(values, problem.v, chunk, column);
    const bool has_p = problem.p != nullptr, has_e = problem.e != nullptr;
    if (has_e) {  // (33): RWKV-7
        multiply_lower(solved, vectors.pk, values, C);
        multiply(vectors.p_bar, S, C, unit.K,
                 [&](long i, const Vector& sum) { store(solved.row(i), load(solved.row(i)) + sum); });
        solve_lower(solved, vectors.pe, C);
    } else if (has_p) {  // (33): KDA
        multiply(vectors.p_bar, S, C, unit.K,
                 [&](long i, const Vector& sum) { store(solved.row(i), load(values.row(i)) - sum); });
        solve_lower(solved, vectors.pk, C);
    }
    if (has_p && problem.solved != nullptr) unit.store_values(problem.solved, chunk, column, solved);
    const Matrix written = has_p && !has_e ? solved : values;
    if (problem.o != nullptr) {
        multiply_lower(out, vectors.qk, written, C);  // (34)
        if (has_e) multiply_lower(more, vectors.qe, solved, C);
        multiply(vectors.q_bar, S, C, unit.K, [&](long i, const Vector& sum) {
            const Vector inside = has_e ? load(out.row(i)) + load(more.row(i)) : load(out.row(i));
            store(out.row(i), inside + sum);
        });
        unit.store_values(problem.o, chunk, column, out);
    }
    advance(unit, vectors, S, S, written, solved);
}

void forward_unit(const void* context, long index) {
    const MdnVectorDecay& problem = *static_cast<const MdnVectorDecay*>(context);
    const Unit unit(problem, index);
    const auto run = [&](ForwardWorkspace& ws) {
        fill_zeros(ws.vectors.pk, C);
        fill_zeros(ws.vectors.pe, C);
        unit.load_state(ws.S, problem.initial);
        for (long chunk = 0; chunk < unit.chunks(); ++chunk) {
            ws.vectors.load_writes(unit, chunk);
            ws.vectors.load_probes(unit, chunk);
            if (problem.o != nullptr) ws.vectors.load_queries(unit, chunk);
            for (long column = 0; column < problem.value_dim; column += kWidth) forward_panel(unit, ws, chunk, column);
        }
        unit.store_state(problem.final, ws.S);
    };
    with_workspace<ForwardWorkspace>(run, unit);
}

// ------------------------------------------------------------------------------------------------------- decode step

// (31): probed = S^T p, then S = diag(alpha) S + writes and o = S^T q in one pass; sixteen columns at a time.
MDN_FLATTEN void step_unit(const void* context, long index) {
    const MdnVectorStep& step = *static_cast<const MdnVectorStep*>(context);
    const long head = index % step.heads, b = index / step.heads, slot = step.slots == nullptr ? b : step.slots[b];
    const long at = (b * step.heads + head) * step.key_dim;
    float* S = step.S + slot * step.S_strides[0] + head * step.S_strides[1];
    const float *v = step.v + (b * step.heads + head) * step.value_dim, *q = step.q + at, *k = step.k + at;
    const float *p = step.p + at, *e = step.e + at, *log_alpha = step.log_alpha + at;
    const bool has_p = step.p != nullptr, has_e = step.e != nullptr;
    float* alpha = scratch_of_this_thread().reserve(step.key_dim);
    for_vectors(step.key_dim,
                [&](long d, long count) { store_first(alpha + d, exp(load_first(log_alpha + d, count)), count); });
    for_vectors(step.value_dim, [&](long column, long count) {
        Vector probed = zeros(), o = zeros();
        const Vector values = load_first(v + column, count);
        if (has_p)
            for (long d = 0; d < step.key_dim; ++d)
                probed = probed + load_first(S + d * step.S_strides[2] + column, count) * p[d];
        const Vector written = has_p && !has_e ? values - probed : values;
        for (long d = 0; d < step.key_dim; ++d) {
            float* row = S + d * step.S_strides[2] + column;
            Vector state = load_first(row, count) * alpha[d] + written * k[d];
            if (has_e) state = state + probed * e[d];
            store_first(row, state, count);
            o = o + state * q[d];
        }
        store_first(step.o + (b * step.heads + head) * step.value_dim + column, o, count);
    });
}

}  // namespace
}  // namespace vector_decay
}  // namespace mdn

extern "C" {

int mdn_vector_forward(const MdnVectorDecay* problem) {
    const long units = problem->sequences * problem->heads;
    return mdn::run_units(problem->threads, units, mdn::vector_decay::forward_unit, problem) ? 0 : 1;
}

int mdn_vector_step(const MdnVectorStep* step) {
    for (long b = 0; step->slots != nullptr && b < step->batch; ++b)
        if (step->slots[b] < 0 || step->slots[b] >= step->slot_count) return 2;
    return mdn::run_units(step->threads, step->batch * step->heads, mdn::vector_decay::step_unit, step) ? 0 : 1;
}

void mdn_vector_interface(int64_t sizes[2]) {
    sizes[0] = sizeof(MdnVectorDecay);
    sizes[1] = sizeof(MdnVectorStep);
}
}
