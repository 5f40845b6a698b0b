// Gradients of the gates of one chunk: the recurrences of Gates (chunk.h), run backwards; equations (15) to (17).
#pragma once

#include "chunk.h"

namespace mdn {

// The backward pass adds the direct gradients of the coefficients; run_adjoint turns them into gradients of the gates.
// Rows and columns as in Gates.
struct GateGradients {
    Matrix grad_gamma_S;        // [C + 1, C]; its last row is the gradient of write_S
    float* grad_write_M;        // [C]: of gamma_M only the last row is read directly, by M'
    float *grad_abar, *grad_b;  // [C + 1]
    float grad_mbar_C;          // of mbar only the last element is read directly, by M'
    float *grad_log_alpha, *grad_log_mu, *grad_beta, *grad_eta, *grad_direct;  // [C]: the results
    float *adjoint_S, *adjoint_M;  // [C]: of gamma_S[i] and gamma_M[i], on the way up

    GateGradients(Arena& arena, long C)
        : grad_gamma_S(arena.matrix(C + 1, C)),
          grad_write_M(arena.floats(C)),
          grad_abar(arena.floats(C + 1)),
          grad_b(arena.floats(C + 1)),
          grad_log_alpha(arena.floats(C)),
          grad_log_mu(arena.floats(C)),
          grad_beta(arena.floats(C)),
          grad_eta(arena.floats(C)),
          grad_direct(arena.floats(C)),
          adjoint_S(arena.floats(C)),
          adjoint_M(arena.floats(C)) {}

    float* grad_write_S(const Chunk& chunk) const { return grad_gamma_S.row(chunk.rows); }

    void clear(const Chunk& chunk) {
        fill_zeros(grad_gamma_S, chunk.rows + 1);
        fill_zeros(grad_write_M, chunk.C);
        fill_zeros(grad_abar, chunk.C + 1);
        fill_zeros(grad_b, chunk.C + 1);
        grad_mbar_C = 0;
    }

    // (16) adjoint_S[i] = grad_gamma_S[i] + alpha_{i+1} adjoint_S[i+1]
    //      adjoint_M[i] = grad_gamma_M[i] + beta_i adjoint_S[i] + mu_{i+1} adjoint_M[i+1]
    //      grad_beta_i = adjoint_S[i] . gamma_M[i],   grad_eta_i = adjoint_M[i, i],   grad_direct_i = adjoint_S[i, i]
    // (17) grad_log_alpha_i = alpha_i (adjoint_S[i] . gamma_S[i-1] + adjoint_abar[i] abar[i-1])
    //      grad_log_mu_i = mu_i adjoint_M[i] . gamma_M[i-1]
    // b and mbar are column 0 of gamma_S and gamma_M; adjoint_abar follows the same recurrence as adjoint_S.
    void run_adjoint(const Chunk& chunk, const Gates& gates) {
        fill_zeros(adjoint_S, chunk.C);
        std::memcpy(adjoint_M, grad_write_M, chunk.C * sizeof(float));
        float adjoint_abar = 0, adjoint_b = 0, adjoint_mbar = grad_mbar_C;
        float alpha_after = 0, mu_after = 1;  // nothing follows the last token
        for (long i = chunk.rows - 1; i >= 0; --i) {
            const float *gamma_S_before = gates.gamma_S.row(i), *gamma_M_before = gates.gamma_M.row(i);
            const float *gamma_M_i = gates.gamma_M.row(i + 1), *grad_gamma_S_i = grad_gamma_S.row(i + 1);
            const float beta_i = gates.beta[i];
            Vector beta_dots = zeros(), mu_dots = zeros(), alpha_dots = zeros();
            for (long j = 0; j <= i; j += kWidth) {
                const Vector of_S = load(grad_gamma_S_i + j) + load(adjoint_S + j) * alpha_after;
                const Vector of_M = load(adjoint_M + j) * mu_after + of_S * beta_i;
                store(adjoint_S + j, of_S);
                store(adjoint_M + j, of_M);
                beta_dots = beta_dots + of_S * load(gamma_M_i + j);
                mu_dots = mu_dots + of_M * load(gamma_M_before + j);
                alpha_dots = alpha_dots + of_S * load(gamma_S_before + j);
            }
            adjoint_abar = grad_abar[i + 1] + alpha_after * adjoint_abar;
            adjoint_b = grad_b[i + 1] + alpha_after * adjoint_b;
            adjoint_mbar = beta_i * adjoint_b + mu_after * adjoint_mbar;
            grad_beta[i] = total(beta_dots) + adjoint_b * gates.mbar[i + 1];
            grad_eta[i] = adjoint_M[i];
            grad_direct[i] = adjoint_S[i];
            grad_log_mu[i] = gates.mu[i] * (total(mu_dots) + adjoint_mbar * gates.mbar[i]);
            grad_log_alpha[i] =
                gates.alpha[i] * (total(alpha_dots) + adjoint_b * gates.b[i] + adjoint_abar * gates.abar[i]);
            alpha_after = gates.alpha[i];
            mu_after = gates.mu[i];
        }
    }

    // To the caller's [T, P].
    void write_out(const Chunk& chunk) const {
        const MdnProblem& problem = chunk.problem;
        const auto write = [&](float* to, const float* from) {
            if (to == nullptr) return;
            for (long i = 0; i < chunk.tokens; ++i) to[chunk.unit.gate_gradient_offset(chunk.first + i)] = from[i];
        };
        write(problem.grad_log_alpha, grad_log_alpha);
        write(problem.grad_log_mu, grad_log_mu);
        write(problem.grad_beta, grad_beta);
        write(problem.grad_eta, grad_eta);
        write(problem.grad_direct, grad_direct);
    }
};

}  // namespace mdn
