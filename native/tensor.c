/* The memory of torch's tensors. One call of the exchange takes 30 to 80 ns, `data_ptr()` from Python 90. */

#include "tensor.h"

#include "combine.h"

/* Of dlpack.h, version 1.3. */
struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_exchange {
    uint32_t major, minor;
    struct dl_exchange *previous;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, struct dl_tensor *tensor);
};

enum { DL_CPU = 1, DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5 };

static const struct dl_exchange *exchange;
static PyObject *classes[2], *is_neg;

bool open_exchange(PyObject *capsule, PyObject *tensor_class, PyObject *parameter_class) {
    const struct dl_exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!found)
        PyErr_Clear();
    /* A library may offer several versions of the table. */
    while (found && found->major != 1)
        found = found->previous;
    if (!found || !found->tensor_from_object)
        return false;
    exchange = found;
    classes[0] = tensor_class;
    classes[1] = parameter_class;
    Py_IncRef(capsule);
    Py_IncRef(tensor_class);
    Py_IncRef(parameter_class);
    is_neg = PyObject_GetAttrString(tensor_class, "is_neg");
    return is_neg != NULL;
}

static int dtype_of(const struct dl_tensor *tensor) {
    if (tensor->type_lanes != 1)
        return -1;
    switch (tensor->type_code << 8 | tensor->type_bits) {
    case DL_FLOAT << 8 | 32: return F32;
    case DL_FLOAT << 8 | 64: return F64;
    case DL_FLOAT << 8 | 16: return F16;
    case DL_BFLOAT << 8 | 16: return BF16;
    case DL_INT << 8 | 32: return I32;
    case DL_INT << 8 | 64: return I64;
    default: return -1;
    }
}

bool view_of(PyObject *object, struct view *view) {
    /* A subclass may have no memory at all: of a fake tensor DLPack gives a pointer. */
    PyObject *class = PyObject_Type(object);
    Py_DecRef(class);
    if (!exchange || (class != classes[0] && class != classes[1]))
        return false;
    struct dl_tensor tensor;
    if (exchange->tensor_from_object(object, &tensor)) {
        PyErr_Clear();
        return false;
    }
    if (tensor.device_type != DL_CPU)
        return false;
    int64_t count = 1;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        if (tensor.strides && tensor.shape[i] > 1 && tensor.strides[i] != count)
            return false;
        count *= tensor.shape[i];
    }
    view->data = (char *)tensor.data + tensor.byte_offset;
    view->count = count;
    view->dtype = dtype_of(&tensor);
    view->num_bytes = count * tensor.type_lanes * tensor.type_bits / 8;
    bool is_read = tensor.type_lanes == 1 && tensor.type_code != DL_COMPLEX;
    view->type = is_read ? (uint64_t)tensor.type_code << 8 | tensor.type_bits : 0;
    view->num_dims = (uint64_t)tensor.ndim;
    view->shape = tensor.shape;
    return true;
}

/* torch has no other way: DLPack does not see the bit, and tensors of torch._neg_view have any strides. */
bool is_negative(PyObject *tensor) {
    PyObject *found = PyObject_CallFunctionObjArgs(is_neg, tensor, NULL);
    bool answer = !found || PyObject_IsTrue(found);
    if (found)
        Py_DecRef(found);
    else
        PyErr_Clear();
    return answer;
}
