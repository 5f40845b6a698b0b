// Threads without owning a pool.
//
// torch already has a spin-waiting pool of OpenMP threads. A second pool would compete with it for the cores, so this
// library joins the team of torch's own OpenMP library, found at run time by name (nothing is linked). Where there is
// none, and in a forked child, whose inherited team has no threads behind it, plain threads are started for the call.
#include "threads.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#endif

#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace mdn {
namespace {

// Denormals cost a hundred cycles each and mean nothing here; decaying states produce them in masses.
class FlushDenormals {
   public:
#if defined(__x86_64__) || defined(__i386__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

   private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | (1ul << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

   private:
    unsigned long before_;
#endif
};

struct Job {
    void (*work)(const void*, long);
    const void* context;
    long units;
    std::atomic<long> next{0};
    std::atomic<bool> failed{false};
};

// What every thread of the team runs: take the next unit until none is left.
void take_units(void* argument) {
    Job& job = *static_cast<Job*>(argument);
    FlushDenormals flush;
    try {
        for (long unit; (unit = job.next.fetch_add(1)) < job.units;) job.work(job.context, unit);
    } catch (const std::bad_alloc&) {
        job.failed = true;
    }
}

typedef void (*OpenMpParallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

bool in_forked_child = false;

OpenMpParallel find_team() {
#if defined(_WIN32)
    return nullptr;
#else
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
    return reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

const OpenMpParallel team_of_torch = find_team();

void run_on_new_threads(long threads, Job& job) {
    std::vector<std::thread> helpers;
    try {
        while (static_cast<long>(helpers.size()) + 1 < threads) helpers.emplace_back(take_units, &job);
    } catch (const std::system_error&) {
        // The system grants no more threads: those that run do all the work.
    }
    take_units(&job);
    for (auto& helper : helpers) helper.join();
}

}  // namespace

bool run_units(long threads, long units, void (*work)(const void*, long), const void* context) {
    Job job{work, context, units};
    if (threads > units) threads = units;
    if (threads <= 1)
        take_units(&job);
    else if (team_of_torch != nullptr && !in_forked_child)
        team_of_torch(take_units, &job, static_cast<unsigned>(threads), 0);
    else
        run_on_new_threads(threads, job);
    return !job.failed;
}

}  // namespace mdn
