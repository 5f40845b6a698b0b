// Runs independent units of work on several threads.
#pragma once

namespace mdn {

// Calls work(context, unit) once for every unit in [0, units), on up to `threads` threads, the caller among them.
// Denormal numbers are flushed to zero meanwhile. Returns false if a unit ran out of memory.
bool run_units(long threads, long units, void (*work)(const void* context, long unit), const void* context);

}  // namespace mdn
