/* Collectives like an earlier one: from the group's method to the end in one call. */

#ifndef ECHELON_CALLS_H
#define ECHELON_CALLS_H

#include <stdbool.h>

#include "board.h"
#include "python.h"
#include "tensor.h"

enum { MAX_DIMS = 6 };
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
    uint64_t size;  /* of the ring */
    struct flight ring[];
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
    struct flights *flights; /* of all groups */
    struct flights *latest;  /* the group's last collective, which the ring of all groups may have lost */
    struct known_call *first; /* the last that was used */
    struct prepared *messages; /* in message_calls.c */
};

/* What is asked of torch and of the interpreter before each call. */
bool is_in_mode(void);
bool is_in_inference_mode(void);
bool is_none(PyObject *object);
/* Of echelon.backends: whether a rank has closed its messages, and whether one is arriving at an end of a link. */
bool is_closed(PyObject *progress);
bool is_arriving(PyObject *receiver);
/* `acquire` of a lock, without waiting. */
bool try_lock(PyObject *acquire);
/* Autograd learns that the tensor is about to change. False if torch refuses the change. */
bool count_change(PyObject *tensor);
/* A tensor like the first one, with uninitialised values. False if torch cannot make it. */
bool make_tensor(PyObject *like, PyObject *shape, PyObject **made, struct view *view);
/* The code object in the user's file that led here, owned by the caller, and the instruction. NULL if Python has to look. */
PyObject *calling_code(int64_t *instruction);
double seconds(void);
/* The entry keeps what it names. Its `code` comes with its reference. */
void write_down(const struct calls *calls, struct flight flight);

/* The functions that Python calls. */
PyObject *use_interpreter(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *learn(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *run_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *list_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *clear_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

#endif
