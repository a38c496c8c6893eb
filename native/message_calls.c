/* The functions of messages.c that Python calls, and messages like an earlier one in one call.
 *
 * Strategy. Once Python has checked a message and sent or received one like it, it keeps a `struct prepared` for the
 * group's later calls: `send_known` and `receive_known`. They do nothing unless the message can leave or has come, takes
 * nobody's turn, and needs no check. The lock of the rank's messages is tried, not waited for. The interpreter's lock is
 * held to the end. */

#include <string.h>

#include "board.h"
#include "calls.h"
#include "messages.h"
#include "module.h"
#include "tensor.h"

/* As FAR_ADDRESS of echelon.backends.admission: of a view in an empty storage torch tells the offset as the address. */
#define FAR_ADDRESS ((uint64_t)1 << 40)

static const struct message *message_of(PyObject *bytes) { return (const struct message *)PyBytes_AsString(bytes); }

static bool has_layout(const struct view *view, const struct message *message) {
    return message->type && view->type == message->type && view->num_dims == message->num_dims &&
           !memcmp(view->shape, message->shape, message->num_dims * sizeof *message->shape) &&
           ((uint64_t)view->data > FAR_ADDRESS || !message->num_bytes);
}

/* True if the tensor has the message's shape and dtype, and its values are in its own memory. */
static bool view_as(PyObject *tensor, const struct message *message, struct view *view) {
    return view_of(tensor, view) && has_layout(view, message) && !is_negative(tensor);
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

/* look(inlet, nanoseconds of spinning, nanoseconds of yielding) */
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

static bool is_true(PyObject *object) {
    int answer = PyObject_IsTrue(object);
    if (answer < 0)
        PyErr_Clear();
    return answer;
}

/* Whether another message comes first, or a check of Python's: what these objects say changes under the lock alone. */
static bool is_blocked(const struct prepared *prepared) {
    for (int i = 0; i < NUM_QUEUES && prepared->queues[i]; i++)
        if (is_true(prepared->queues[i]))
            return true;
    return is_closed(prepared->progress) || (prepared->receiver && is_arriving(prepared->receiver));
}

/* Puts or takes the message. The lock is released before anything else runs. */
static int move_message(const struct prepared *prepared, void *data) {
    const struct message *message = prepared->message;
    if (!try_lock(prepared->acquire))
        return NOT_SO;
    int code = NOT_SO;
    if (!is_blocked(prepared))
        code = prepared->is_send ? put((struct outlet *)message->end, head_of(message), message->head_bytes, data,
                                       message->num_bytes, 0, 0)
                                 : take((struct inlet *)message->end, message, data);
    if (code == DONE)
        ++*prepared->count;
    PyObject *released = PyObject_CallNoArgs(prepared->release);
    if (released)
        Py_DecRef(released);
    else
        PyErr_Clear();
    return code;
}

/* Called again before the message moves: other threads may run while torch and the interpreter are asked. */
static struct prepared *find_prepared(const struct calls *calls, bool is_send, PyObject *const *arguments,
                                      const struct view *view) {
    int64_t peer = PyLong_AsSsize_t(arguments[0]), tag = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return NULL;
    }
    for (struct prepared *each = calls->messages; each; each = each->next)
        if (each->is_send == is_send && each->peer == peer && each->tag == tag &&
            (!view || has_layout(view, each->message)))
            return each;
    return NULL;
}

static void write_message_down(const struct calls *calls, const struct prepared *prepared, PyObject *code,
                               int64_t instruction, double started) {
    struct flight flight = {prepared->object, code,    instruction, 0,
                            0,                PyThread_get_thread_ident(), started, seconds()};
    write_down(calls, flight);
}

/* send_known(dst, tag, tensor), with the address of `struct calls` as self: False if nothing was done. */
PyObject *send_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    struct calls *calls = PyLong_AsVoidPtr(self);
    struct view view;
    if (count != 3 || !calls)
        return wrong_call();
    if (!calls->messages || calls->is_stopped || !view_of(arguments[2], &view))
        return PyBool_FromLong(0);
    const struct prepared *prepared = find_prepared(calls, true, arguments, &view);
    int64_t instruction = 0;
    PyObject *code = NULL;
    double started = seconds();
    if (!prepared || is_in_mode() || is_negative(arguments[2]) || !(code = calling_code(&instruction)) ||
        prepared != find_prepared(calls, true, arguments, &view) || move_message(prepared, view.data) != DONE) {
        if (code)
            Py_DecRef(code);
        return PyBool_FromLong(0);
    }
    write_message_down(calls, prepared, code, instruction, started);
    return PyBool_FromLong(1);
}

/* receive_known(src, tag, out): the tensor, which is `out` unless that is None. False if nothing was done. */
PyObject *receive_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    struct calls *calls = PyLong_AsVoidPtr(self);
    struct view view;
    if (count != 3 || !calls)
        return wrong_call();
    bool has_out = !is_none(arguments[2]);
    if (!calls->messages || calls->is_stopped || (has_out && !view_of(arguments[2], &view)))
        return PyBool_FromLong(0);
    const struct view *known = has_out ? &view : NULL;
    const struct prepared *prepared = find_prepared(calls, false, arguments, known);
    int64_t instruction = 0;
    PyObject *code = NULL, *tensor = has_out ? arguments[2] : NULL;
    double started = seconds();
    if (has_out)
        Py_IncRef(tensor);
    if (!prepared || is_in_mode() || is_in_inference_mode() || !(code = calling_code(&instruction)) ||
        prepared != find_prepared(calls, false, arguments, known) || /* else the ring may be unmapped */
        !has_record((const struct inlet *)prepared->message->end, prepared->spin) ||
        (has_out ? is_negative(tensor) || !count_change(tensor)
                 : !make_tensor(prepared->like, prepared->shape, &tensor, &view)) ||
        prepared != find_prepared(calls, false, arguments, known) || move_message(prepared, view.data) != DONE) {
        if (code)
            Py_DecRef(code);
        if (tensor)
            Py_DecRef(tensor);
        return PyBool_FromLong(0);
    }
    write_message_down(calls, prepared, code, instruction, started);
    return tensor;
}
