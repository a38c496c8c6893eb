/* The functions of combine.c for one kind of registers: VARIANT is their attribute, NAME gives them their names. */

OWN_TYPE(sum_f32, float, ADDED, NO_END)
OWN_TYPE(mean_f32, float, ADDED, DIVIDE)
OWN_TYPE(max_f32, float, LARGER, NO_END)
OWN_TYPE(min_f32, float, SMALLER, NO_END)
OWN_TYPE(sum_f64, double, ADDED, NO_END)
OWN_TYPE(mean_f64, double, ADDED, DIVIDE)
OWN_TYPE(max_f64, double, LARGER, NO_END)
OWN_TYPE(min_f64, double, SMALLER, NO_END)
OWN_TYPE(sum_i32, uint32_t, ADDED, NO_END)
OWN_TYPE(max_i32, int32_t, LARGER, NO_END)
OWN_TYPE(min_i32, int32_t, SMALLER, NO_END)
OWN_TYPE(sum_i64, uint64_t, ADDED, NO_END)
OWN_TYPE(max_i64, int64_t, LARGER, NO_END)
OWN_TYPE(min_i64, int64_t, SMALLER, NO_END)

VARIANT static inline void NAME(bf16s_up)(float *to, const uint16_t *from, size_t length) {
    EACH to[i] = bf16_up(from[i]);
}

VARIANT static inline void NAME(bf16s_down)(uint16_t *to, const float *from, size_t length) {
    EACH to[i] = bf16_down(from[i]);
}

WIDE_TYPE(sum_all_bf16, bf16s_up, bf16s_down, ADDED, NO_END)
WIDE_TYPE(mean_bf16, bf16s_up, bf16s_down, ADDED, DIVIDE)
WIDE_TYPE(max_bf16, bf16s_up, bf16s_down, LARGER, NO_END)
WIDE_TYPE(min_bf16, bf16s_up, bf16s_down, SMALLER, NO_END)

/* Of two ranks, without the blocks of float32: 0.7 of the time. */
VARIANT static void NAME(sum_bf16)(void *target, const void *const *sources, size_t n, size_t count) {
    uint16_t *total = target;
    const uint16_t *first = sources[0], *next = sources[1];
    size_t length = count;
    if (n > 2) {
        NAME(sum_all_bf16)(target, sources, n, count);
        return;
    }
    EACH total[i] = bf16_down(bf16_up(first[i]) + bf16_up(next[i]));
}

#if defined(HAS_HALVES)

#include <immintrin.h>

/* By intrinsics: compilers leave these loops in software, 10 times slower. */
VARIANT static inline void NAME(f16s_up)(float *to, const uint16_t *from, size_t length) {
    size_t i = 0;
    for (; i + 8 <= length; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < length; i++)
        to[i] = _cvtsh_ss(from[i]);
}

VARIANT static inline void NAME(f16s_down)(uint16_t *to, const float *from, size_t length) {
    size_t i = 0;
    for (; i + 8 <= length; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < length; i++)
        to[i] = (uint16_t)_cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

#elif defined(__aarch64__)

VARIANT static inline void NAME(f16s_up)(float *to, const uint16_t *from, size_t length) {
    const __fp16 *halves = (const __fp16 *)from;
    EACH to[i] = halves[i];
}

VARIANT static inline void NAME(f16s_down)(uint16_t *to, const float *from, size_t length) {
    __fp16 *halves = (__fp16 *)to;
    EACH halves[i] = (__fp16)from[i];
}

#endif

#if defined(HAS_HALVES) || defined(__aarch64__)
WIDE_TYPE(sum_f16, f16s_up, f16s_down, ADDED, NO_END)
WIDE_TYPE(mean_f16, f16s_up, f16s_down, ADDED, DIVIDE)
WIDE_TYPE(max_f16, f16s_up, f16s_down, LARGER, NO_END)
WIDE_TYPE(min_f16, f16s_up, f16s_down, SMALLER, NO_END)
#define OF_F16(name) NAME(name)
#else
#define OF_F16(name) NULL /* then torch does it */
#endif

static const combine_function NAME(functions)[NUM_OPS][NUM_DTYPES] = {
    [SUM] = {NAME(sum_f32), NAME(sum_f64), NAME(sum_bf16), OF_F16(sum_f16), NAME(sum_i32), NAME(sum_i64)},
    [MEAN] = {NAME(mean_f32), NAME(mean_f64), NAME(mean_bf16), OF_F16(mean_f16), NULL, NULL},
    [MAX] = {NAME(max_f32), NAME(max_f64), NAME(max_bf16), OF_F16(max_f16), NAME(max_i32), NAME(max_i64)},
    [MIN] = {NAME(min_f32), NAME(min_f64), NAME(min_bf16), OF_F16(min_f16), NAME(min_i32), NAME(min_i64)},
};

#undef OF_F16
