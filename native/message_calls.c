/* The functions of messages.c that Python calls. */

#include <string.h>

#include "board.h"
#include "messages.h"
#include "module.h"
#include "tensor.h"

/* As FAR_ADDRESS of echelon.backends.admission: of a view in an empty storage torch tells the offset as the address. */
#define FAR_ADDRESS ((uint64_t)1 << 40)

static const struct message *message_of(PyObject *bytes) { return (const struct message *)PyBytes_AsString(bytes); }

/* True if the tensor has the message's shape and dtype, and its values are in its own memory. */
static bool view_as(PyObject *tensor, const struct message *message, struct view *view) {
    return view_of(tensor, view) && message->type && view->type == message->type &&
           view->num_dims == message->num_dims &&
           !memcmp(view->shape, message->shape, message->num_dims * sizeof *message->shape) &&
           ((uint64_t)view->data > FAR_ADDRESS || !message->num_bytes) && !is_negative(tensor);
}

/* put(outlet, header, address, number of bytes, part, bytes of the part): a part of 0 bytes means a small message. */
PyObject *call_put(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t outlet, numbers[4];
    (void)self;
    if (count != 6 || !read_numbers(arguments, 1, &outlet) || !read_numbers(arguments + 2, 4, numbers))
        return wrong_call();
    char *head = PyBytes_AsString(arguments[1]);
    if (!head)
        return NULL;
    return PyLong_FromLong(put((struct outlet *)outlet, head, (uint64_t)PyBytes_Size(arguments[1]),
                               (const void *)numbers[0], numbers[1], numbers[2], numbers[3]));
}

/* send(message, tensor): NOT_SO if the tensor is not like it. */
PyObject *call_send(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const struct message *message;
    struct view view;
    (void)self;
    if (count != 2 || !(message = message_of(arguments[0])))
        return wrong_call();
    if (!view_as(arguments[1], message, &view))
        return PyLong_FromLong(NOT_SO);
    return PyLong_FromLong(put((struct outlet *)message->end, head_of(message), message->head_bytes, view.data,
                               message->num_bytes, 0, 0));
}

PyObject *call_find(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t inlet;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &inlet))
        return wrong_call();
    return PyLong_FromLong(find((struct inlet *)inlet));
}

PyObject *call_release(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t inlet;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &inlet))
        return wrong_call();
    release((struct inlet *)inlet);
    return nothing();
}

/* receive(message, tensor): NOT_SO if the tensor is not like it, or the next record is not such a message. */
PyObject *call_receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const struct message *message;
    struct view view;
    (void)self;
    if (count != 2 || !(message = message_of(arguments[0])))
        return wrong_call();
    if (!view_as(arguments[1], message, &view))
        return PyLong_FromLong(NOT_SO);
    return PyLong_FromLong(take((struct inlet *)message->end, message, view.data));
}

/* look(inlet, spins, nanoseconds) */
PyObject *call_look(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[3];
    (void)self;
    if (count != 3 || !read_numbers(arguments, 3, numbers))
        return wrong_call();
    return PyLong_FromLong(look((const struct inlet *)numbers[0], numbers[1], numbers[2]));
}

PyObject *call_answer(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t inlet;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &inlet))
        return wrong_call();
    answer((const struct inlet *)inlet);
    return nothing();
}

PyObject *call_wake(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t bell;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &bell))
        return wrong_call();
    wake((struct bell *)bell);
    return nothing();
}

/* type_of(tensor): its dtype, for `struct message`. 0 if this library cannot read the tensor. */
PyObject *call_type_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    struct view view;
    (void)self;
    if (count != 1)
        return wrong_call();
    return PyLong_FromUnsignedLongLong(view_of(arguments[0], &view) ? view.type : 0);
}
