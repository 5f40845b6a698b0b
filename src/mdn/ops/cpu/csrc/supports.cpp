// Asks the processor what it can do. Only the baseline variant's answer is used, so this runs everywhere.
#include <cstring>

#include "problem.h"

extern "C" int mdn_supports(const char* instruction_set) {
    if (std::strcmp(instruction_set, "baseline") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(instruction_set, "avx2") == 0) return avx2;
    if (std::strcmp(instruction_set, "avx512") == 0) return avx2 && __builtin_cpu_supports("avx512f");
#endif
    return 0;
}

extern "C" void mdn_struct_sizes(int64_t* sizes) {
    sizes[0] = sizeof(MdnProblem);
    sizes[1] = sizeof(MdnStep);
}
