// What a loader asks before it uses a variant. Every variant answers this on any processor of its family.
#include "interface.h"

#include <cstring>

extern "C" int mdn_supports(const char* instruction_set) {
    if (std::strcmp(instruction_set, "baseline") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(instruction_set, "avx2") == 0) return avx2;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
    if (std::strcmp(instruction_set, "avx512") == 0) return avx512;
    if (std::strcmp(instruction_set, "avx512vnni") == 0) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}

extern "C" void mdn_interface(int64_t version_and_sizes[4]) {
    version_and_sizes[0] = MDN_INTERFACE_VERSION;
    version_and_sizes[1] = sizeof(MdnProblem);
    version_and_sizes[2] = sizeof(MdnStep);
    version_and_sizes[3] = sizeof(MdnLinear);
}
