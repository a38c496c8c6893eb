/* The memory of torch's tensors, by the C exchange functions of DLPack 1.3, without headers of torch. */

#ifndef ECHELON_TENSOR_H
#define ECHELON_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#include "python.h"

struct view {
    char *data;
    int64_t count;
    int dtype; /* of combine.h; -1 for others */
    int64_t num_bytes;
    /* DLPack's code and number of bits; 0 for vectors of several lanes, and for complex numbers, which torch may have to
     * conjugate. */
    uint64_t type;
    uint64_t num_dims;
    const int64_t *shape; /* torch's own memory, as long as the tensor is left alone */
};

/* Takes a capsule "dlpack_exchange_api" and the classes of ordinary tensors. False if this DLPack is another one. */
bool open_exchange(PyObject *capsule, PyObject *tensor_class, PyObject *parameter_class);

/* False unless the object is a dense, contiguous CPU tensor of torch's own class. Lazy negatives are not seen. */
bool view_of(PyObject *object, struct view *view);

/* Whether a tensor's values are those of its memory times -1. */
bool is_negative(PyObject *tensor);

#endif
