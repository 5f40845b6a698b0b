// Gradients of the gates of one chunk: the recurrences of Gates (chunk.h), run backwards.
#pragma once

#include "chunk.h"

namespace mdn {

// The other functions add the direct gradients of the coefficients; run_adjoint then turns them into gradients of the gates.
struct GateGradients {
    float *abar, *abar_prev, *b, *b_prev;  // [C]: of abar_i and b_i as token i reads them, and as token i reads the row before
    float *write_state, *write_momentum;   // [C]
    float *eta, *beta, *log_alpha, *log_mu;  // [C]: the results
    float* gamma;                          // [C + 1, start + 16], rows as in Gates
    float *lambda, *nu;                    // [start + 16]: adjoints of gamma[i] and lmu[i] on the way up
    float last_abar, last_b, last_mbar;    // of abar_C, b_C, mbar_C

    GateGradients(Arena& arena, long chunk) {
        for (float** x : {&abar, &abar_prev, &b, &b_prev, &write_state, &write_momentum, &eta, &beta, &log_alpha, &log_mu})
            *x = arena.take(chunk);
        gamma = arena.take((chunk + 1) * row_stride(chunk + kWidth));
        for (float** x : {&lambda, &nu}) *x = arena.take(row_stride(chunk + kWidth));
    }

    void clear(const Gates& gates) {
        for (float* x : {abar, abar_prev, b, b_prev, write_state, write_momentum, eta, beta, log_alpha, log_mu})
            fill_zeros(x, gates.rows);
        fill_zeros(gamma, (gates.rows + 1) * gates.stride);
        last_abar = last_b = last_mbar = 0;
    }

    // lambda_i = direct_i + alpha_{i+1} lambda_{i+1};            dbeta_i = lambda_i . lmu[i]
    // nu_i     = direct_i + beta_i lambda_i + mu_{i+1} nu_{i+1};    dmu_i = nu_i . lmu[i - 1]
    // omega_i  = direct_i + alpha_{i+1} omega_{i+1};            dalpha_i = lambda_i . gamma[i - 1] + omega_i abar_{i-1}
    void run_adjoint(const Gates& gates) {
        const long rows = gates.rows, start = gates.start, stride = gates.stride;
        collect_direct(gates);
        float omega = last_abar;
        for (long i = rows - 1; i >= 0; --i) {
            const bool last = i == rows - 1;
            const float next_alpha = last ? 0 : gates.alpha[i + 1], next_mu = last ? 1 : gates.mu[i + 1];
            const float *lmu = gates.lmu + (i + 1) * stride, *direct = gamma + (i + 1) * stride;
            Row beta_dots = zeros(), mu_dots = zeros(), alpha_dots = zeros();
            for (long j = 0; j < start + kWidth; j += kWidth) {
                const Row adjoint = load(direct + j) + load(lambda + j) * next_alpha;
                const Row momentum_adjoint = load(nu + j) * next_mu + adjoint * gates.beta[i];
                store(lambda + j, adjoint);
                store(nu + j, momentum_adjoint);
                beta_dots = beta_dots + adjoint * load(lmu + j);
                mu_dots = mu_dots + momentum_adjoint * load(lmu - stride + j);
                alpha_dots = alpha_dots + adjoint * load(gates.gamma + i * stride + j);
            }
            omega = (last ? omega : omega * next_alpha + abar_prev[i + 1]) + abar[i];
            beta[i] = total(beta_dots);
            log_mu[i] = gates.mu[i] * total(mu_dots);
            log_alpha[i] = gates.alpha[i] * (total(alpha_dots) + omega * gates.abar[i]);
        }
    }

    // To the caller's [T, parts].
    void write_out(const Unit& unit, long token, long tokens) const {
        const MdnProblem& problem = unit.problem;
        const auto write = [&](float* to, const float* from) {
            for (long i = 0; to != nullptr && i < tokens; ++i) to[unit.gate_gradient_at(token + i)] = from[i];
        };
        write(problem.dlog_alpha, log_alpha);
        write(problem.dlog_mu, log_mu);
        write(problem.dbeta, beta);
        write(problem.deta, eta);
    }

   private:
    // Moves the gradients of b, write_state and write_momentum to where those numbers came from.
    void collect_direct(const Gates& gates) {
        const long rows = gates.rows, start = gates.start, stride = gates.stride;
        const float *last_gamma = gates.gamma + rows * stride, *last_lmu = gates.lmu + rows * stride;
        fill_zeros(lambda, start + kWidth);
        fill_zeros(nu, start + kWidth);
        for (long i = 0; i < rows; ++i) {
            gamma[(i + 1) * stride + start] += b[i];
            gamma[i * stride + start] += b_prev[i];
            gamma[rows * stride + i] += gates.eta[i] * write_state[i];
            nu[i] = -gates.eta[i] * write_momentum[i];
            eta[i] += last_gamma[i] * write_state[i] - last_lmu[i] * write_momentum[i];
        }
        gamma[rows * stride + start] += last_b;
        nu[start] = last_mbar;
    }
};

}  // namespace mdn
