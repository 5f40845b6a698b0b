// Work on the rows of [rows, ...], block by block.
#pragma once

#include <algorithm>

#include "threads.h"

namespace mdn {

// Runs `work` on every row of [rows, ...], rows_per_unit of them per unit. Returns what functions of the C interface
// do.
template <class Problem, void (*work)(const Problem&, long unit, long first, long end)>
int for_rows(const Problem* problem) {
    const long units = (problem->rows + problem->rows_per_unit - 1) / problem->rows_per_unit;
    const auto run = [](const void* context, long unit) {
        const Problem& problem = *static_cast<const Problem*>(context);
        const long first = unit * problem.rows_per_unit;
        work(problem, unit, first, std::min<long>(first + problem.rows_per_unit, problem.rows));
    };
    return run_units(problem->threads, units, run, problem) ? 0 : 1;
}

}  // namespace mdn
