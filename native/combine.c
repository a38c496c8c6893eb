/* Reductions of the common dtypes, with the bits that torch gives.
 *
 * The values of rank 0 come first, then those of 1, 2 ... 32- and 64-bit numbers are combined in their own type, 16-bit
 * floats as float32 and rounded once at the end, to the nearest, ties to even. A mean is multiplied by 1/n where n is a
 * power of two, else divided. A NaN stays one; which of several NaNs, and which of the zeros is the larger, torch itself
 * decides by the position of an element. Integers wrap around.
 *
 * Elements are taken in blocks that stay in the first-level cache: each source is read once, the target written once. */

#include "combine.h"

#include <string.h>

#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < length; i++)
#else
#define EACH _Pragma("GCC ivdep") for (size_t i = 0; i < length; i++)
#endif

enum { BLOCK = 1024 };

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Whether the target is a source that is read after the first values of the block have been written. */
static bool overwrites(const void *target, const void *const *sources, size_t n) {
    for (size_t k = 2; k < n; k++)
        if (sources[k] == target)
            return true;
    return false;
}

/* The combination of the values so far and the next one. */
#define ADDED(a, b) ((a) + (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#define NO_END(type)
#define DIVIDE(type)                                                                                                 \
    if (n & (n - 1)) {                                                                                               \
        EACH total[i] /= (type)n;                                                                                    \
    } else {                                                                                                         \
        type factor = (type)1 / (type)n;                                                                             \
        EACH total[i] *= factor;                                                                                     \
    }

/* Numbers that are combined in their own type. Sums of integers are unsigned, as signed ones must not overflow in C. */
#define OWN_TYPE(name, type, COMBINED, END)                                                                          \
    VARIANT static void NAME(name)(void *target, const void *const *sources, size_t n, size_t count) {               \
        bool apart = overwrites(target, sources, n);                                                                 \
        for (size_t at = 0; at < count; at += BLOCK) {                                                               \
            size_t length = smaller(BLOCK, count - at);                                                              \
            const type *first = (const type *)sources[0] + at, *next = (const type *)sources[1] + at;                \
            type scratch[BLOCK], *total = apart ? scratch : (type *)target + at;                                     \
            EACH total[i] = COMBINED(first[i], next[i]);                                                             \
            for (size_t k = 2; k < n; k++) {                                                                         \
                next = (const type *)sources[k] + at;                                                                \
                EACH total[i] = COMBINED(total[i], next[i]);                                                         \
            }                                                                                                        \
            END(type)                                                                                                \
            if (apart)                                                                                               \
                memcpy((type *)target + at, total, length * sizeof(type));                                           \
        }                                                                                                            \
    }

/* 16-bit floats: both are widened to float32, exactly. */
#define WIDE_TYPE(name, UP, DOWN, COMBINED, END)                                                                     \
    VARIANT static void NAME(name)(void *target, const void *const *sources, size_t n, size_t count) {               \
        for (size_t at = 0; at < count; at += BLOCK) {                                                               \
            size_t length = smaller(BLOCK, count - at);                                                              \
            float total[BLOCK], term[BLOCK];                                                                         \
            NAME(UP)(total, (const uint16_t *)sources[0] + at, length);                                              \
            for (size_t k = 1; k < n; k++) {                                                                         \
                NAME(UP)(term, (const uint16_t *)sources[k] + at, length);                                           \
                EACH total[i] = COMBINED(total[i], term[i]);                                                         \
            }                                                                                                        \
            END(float)                                                                                               \
            NAME(DOWN)((uint16_t *)target + at, total, length);                                                      \
        }                                                                                                            \
    }

static inline float bf16_up(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t bf16_down(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#define VARIANT
#define NAME(name) plain_##name
#include "combine_types.h"
#undef VARIANT
#undef NAME

#if defined(__x86_64__)

#include <cpuid.h>

/* The same for wider registers, chosen when the library is first used. No clones of the compiler: their resolver takes
 * the plain ones where zig has compiled it. */
#define HAS_HALVES 1
#define VARIANT __attribute__((target("avx2,f16c")))
#define NAME(name) wide_##name
#include "combine_types.h"

static bool is_wide(void) {
    unsigned int a, b, c, d, low, high;
    const unsigned int needed = bit_F16C | bit_OSXSAVE | bit_AVX;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed)
        return false;
    /* Whether the kernel saves the registers. */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

#else

static const combine_function (*const wide_functions)[NUM_DTYPES] = plain_functions;

static bool is_wide(void) { return false; }

#endif

combine_function find_combine(int op, int dtype) {
    static int wide = -1;
    if (wide < 0)
        wide = is_wide();
    if (op < 0 || op >= NUM_OPS || dtype < 0 || dtype >= NUM_DTYPES)
        return NULL;
    return wide ? wide_functions[op][dtype] : plain_functions[op][dtype];
}

size_t size_of(int dtype) {
    static const size_t sizes[NUM_DTYPES] = {4, 8, 2, 2, 4, 8};
    return sizes[dtype];
}
