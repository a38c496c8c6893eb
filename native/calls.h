/* Collectives like an earlier one: from the group's method to the end in one call. */

#ifndef ECHELON_CALLS_H
#define ECHELON_CALLS_H

#include "board.h"
#include "python.h"

enum { MAX_DIMS = 6, NUM_FLIGHTS = 1000 };
enum target { NO_TARGET, IN_PLACE, INTO_OUT };

/* A collective that was made before: what its arguments were, and how it runs. Made by Python, which keeps all that it
 * points at. All fields have 64 bits. */
struct known_call {
    struct known_call *next;
    /* The key, filled in by `learn`. Names are compared by address; a tensor that is not there has no dtype. */
    PyObject *kind, *op;
    int64_t root;
    struct key {
        int64_t dtype, num_dims, shape[MAX_DIMS];
    } tensor, out;
    /* Its note, ended by a zero, and the note's checksum. */
    const char *text;
    uint64_t text_bytes, checksum;
    /* How it runs: see `reduce`, `broadcast` and `exchange` in board.h. `plan` is that of an exchange. */
    uint64_t act, target, reduction, num_shown, begin, is_published, source;
    const struct plan *plan;
    uint64_t changes_tensor, changes_out;
    PyObject *result_shape; /* of a result in a new tensor, like the argument; NULL where there is none */
    /* For records, and for whoever goes on with it. */
    PyObject *object;
};

/* One operation that has ended: an entry of the flight recorder. */
struct flight {
    PyObject *object, *code;
    int64_t instruction;
    uint64_t sequence, signature, thread;
    double started, ended;
};

struct flights {
    uint64_t count; /* since the beginning; the ring holds the last ones */
    struct flight ring[NUM_FLIGHTS];
};

/* Numbers of a group's calls on this rank. Python moves them as well, one thread at a time, while it sets `is_held`. */
struct calls {
    uint64_t sequence;  /* of the last collective that has begun */
    uint64_t signature; /* checksum of all calls so far, 32 bits */
    uint64_t left;      /* the last collective that has ended, and all before it */
    uint64_t is_held;
    uint64_t num_marks; /* calls without messages, which belong into the record of the next collective */
    uint64_t is_stopped;
    struct board *board; /* NULL until the group has its region */
    struct flights *flights;
    struct known_call *first; /* the last that was used */
};

/* The functions that Python calls. */
PyObject *use_interpreter(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *learn(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *run_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *list_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *clear_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

#endif
