// A list of calls in one, and the small element-by-element operations between the others.
#include <cmath>

#include "layers.h"

namespace mdn {
namespace {

// y[i] = function(a[i], b[i]) over up to four dimensions, each operand with its own strides (0: broadcast).
template <class Function>
void for_elements(const MdnElementwise& given, Function&& function) {
    const int64_t *n = given.sizes, *a = given.a_strides, *b = given.b_strides, *y = given.y_strides;
    for (long i = 0; i < n[0]; ++i)
        for (long j = 0; j < n[1]; ++j)
            for (long k = 0; k < n[2]; ++k) {
                const float* from_a = given.a + i * a[0] + j * a[1] + k * a[2];
                const float* from_b = given.b + i * b[0] + j * b[1] + k * b[2];
                float* to = given.y + i * y[0] + j * y[1] + k * y[2];
                for (long l = 0; l < n[3]; ++l) to[l * y[3]] = function(from_a[l * a[3]], from_b[l * b[3]]);
            }
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace
}  // namespace mdn

extern "C" {

int mdn_elementwise(const MdnElementwise* given) {
    using mdn::for_elements;
    const float number = static_cast<float>(given->number);
    switch (given->operation) {
        case MDN_SCALE:
            for_elements(*given, [=](float a, float) { return a * number; });
            return 0;
        case MDN_ADD:
            for_elements(*given, [=](float a, float b) { return a + number * b; });
            return 0;
        case MDN_MULTIPLY:
            for_elements(*given, [](float a, float b) { return a * b; });
            return 0;
        case MDN_ADD_NUMBER:
            for_elements(*given, [=](float a, float) { return a + number; });
            return 0;
        case MDN_EXP:
            for_elements(*given, [](float a, float) { return std::exp(a); });
            return 0;
        case MDN_LOGISTIC:
            for_elements(*given, [](float a, float) { return 1 / (1 + std::exp(-a)); });
            return 0;
        case MDN_SWISH:
            for_elements(*given, [](float a, float) { return a / (1 + std::exp(-a)); });
            return 0;
        case MDN_SOFTPLUS:
            for_elements(*given, [](float a, float) { return mdn::softplus(a); });
            return 0;
        default:
            return 3;
    }
}

int mdn_run(const MdnProgram* program) {
    for (long i = 0; i < program->count; ++i) {
        const int code = program->calls[i].function(program->calls[i].argument);
        if (code != 0) return code;
    }
    return 0;
}
}
