/* Reductions of the common dtypes. */

#ifndef ECHELON_COMBINE_H
#define ECHELON_COMBINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum op { SUM, MEAN, MAX, MIN, NUM_OPS };
enum dtype { F32, F64, BF16, F16, I32, I64, NUM_DTYPES };

/* Reduces `count` elements of each source, in their order, into `target`, which may be one of the sources. */
typedef void (*combine_function)(void *target, const void *const *sources, size_t num_sources, size_t count);

/* NULL if there is no such function for this processor. */
combine_function find_combine(int op, int dtype);

size_t size_of(int dtype);

#endif
