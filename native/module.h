/* What the files with functions for Python have in common. */

#ifndef ECHELON_MODULE_H
#define ECHELON_MODULE_H

#include <stdbool.h>
#include <stdint.h>

#include "python.h"

/* False, with an error set, unless all are numbers from 0 to 2^64 - 1. */
bool read_numbers(PyObject *const *arguments, Py_ssize_t count, uint64_t *numbers);
PyObject *wrong_call(void);
PyObject *nothing(void);

PyObject *call_put(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_send(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_find(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_release(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_look(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_answer(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_wake(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_type_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *send_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *receive_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

/* Part of the table of module.c. */
#define MESSAGE_METHODS                                                                                                \
    {"put", call_put, METH_FASTCALL, NULL}, {"send", call_send, METH_FASTCALL, NULL},                                  \
        {"find", call_find, METH_FASTCALL, NULL}, {"release", call_release, METH_FASTCALL, NULL},                      \
        {"receive", call_receive, METH_FASTCALL, NULL}, {"look", call_look, METH_FASTCALL, NULL},                      \
        {"answer", call_answer, METH_FASTCALL, NULL}, {"wake", call_wake, METH_FASTCALL, NULL},                        \
        {"type_of", call_type_of, METH_FASTCALL, NULL}, {"send_known", send_known, METH_FASTCALL, NULL},               \
        {"receive_known", receive_known, METH_FASTCALL, NULL}

#endif
