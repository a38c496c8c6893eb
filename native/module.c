/* The functions that Python calls, and the words of shared memory as a sequence.
 *
 * Python makes the functions from the table `echelon_methods` (PyCFunction_NewEx), so there is no module to import and
 * none that depends on a version of Python. Arguments are checked for their number and kind alone: the one caller is
 * echelon._native. */

#include <stdbool.h>

#include "board.h"
#include "calls.h"
#include "module.h"
#include "python.h"
#include "shared.h"
#include "tensor.h"

/* Raised with each change of a function's arguments or of a struct: echelon._native refuses another one. */
enum { VERSION = 9, MAX_PARTS = 1024 };
/* From here on other threads may run meanwhile. */
enum { LONG_COPY = 256 << 10 };

#ifndef ECHELON_EXPLORE
void *(*copy_bytes)(void *to, const void *from, size_t num_bytes);
#endif
static void *(*move)(void *to, const void *from, size_t num_bytes);

bool read_numbers(PyObject *const *arguments, Py_ssize_t count, uint64_t *numbers) {
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(arguments[i]);
        if (numbers[i] == UINT64_MAX && PyErr_Occurred())
            return false;
    }
    return true;
}

PyObject *wrong_call(void) {
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments for the native library");
    return NULL;
}

PyObject *nothing(void) { return PyBool_FromLong(1); }

/* Words: a sequence of 64-bit numbers in shared memory, each loaded by acquire and stored by release. */

struct words {
    uint64_t *first;
    Py_ssize_t count;
    PyObject *owner;
};

static PyObject *words_class, *none;
static size_t object_bytes;

static struct words *words_in(PyObject *self) { return (struct words *)((char *)self + object_bytes); }

static uint64_t *word_at(PyObject *self, PyObject *key) {
    struct words *words = words_in(self);
    Py_ssize_t index = PyLong_AsSsize_t(key);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= words->count) {
        PyErr_SetString(PyExc_IndexError, "word outside the mapped part of the shared memory");
        return NULL;
    }
    return words->first + index;
}

static PyObject *load_word(PyObject *self, PyObject *key) {
    uint64_t *word = word_at(self, key);
    return word ? PyLong_FromUnsignedLongLong(LOAD(word, ACQUIRE)) : NULL;
}

static int store_word(PyObject *self, PyObject *key, PyObject *value) {
    uint64_t *word = word_at(self, key), number;
    if (!word || !value || !read_numbers(&value, 1, &number)) {
        wrong_call();
        return -1;
    }
    STORE(word, number, RELEASE);
    return 0;
}

static Py_ssize_t count_words(PyObject *self) { return words_in(self)->count; }

static void free_words(PyObject *self) {
    PyObject *class = PyObject_Type(self);
    Py_DecRef(words_in(self)->owner);
    PyObject_Free(self);
    Py_DecRef(class); /* of PyObject_Type, and the one that the object held */
    Py_DecRef(class);
}

static PyObject *make_words(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2];
    (void)self;
    if (count != 3 || !read_numbers(arguments, 2, numbers))
        return wrong_call();
    PyObject *made = PyType_GenericAlloc(words_class, 0);
    if (made) {
        Py_IncRef(arguments[2]);
        *words_in(made) = (struct words){(uint64_t *)numbers[0], (Py_ssize_t)numbers[1], arguments[2]};
    }
    return made;
}

/* memmove's address, and the size of an object's head, which differs between builds of Python. */
static PyObject *set_up(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2];
    (void)self;
    if (count != 2 || !read_numbers(arguments, 2, numbers))
        return wrong_call();
    move = (void *(*)(void *, const void *, size_t))numbers[0];
#ifndef ECHELON_EXPLORE
    copy_bytes = move;
#endif
    object_bytes = numbers[1];
    static PyType_Slot slots[] = {
        {Py_mp_subscript, (void *)load_word},
        {Py_mp_ass_subscript, (void *)store_word},
        {Py_mp_length, (void *)count_words},
        {Py_tp_dealloc, (void *)free_words},
        {Py_tp_doc, (void *)"64-bit numbers in shared memory: each is loaded by acquire and stored by release."},
        {0, NULL},
    };
    PyType_Spec spec = {"echelon._native.Words", (int)(object_bytes + sizeof(struct words)), 0,
                        Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots};
    words_class = PyType_FromSpec(&spec);
    return words_class ? PyLong_FromLong(VERSION) : NULL;
}

static PyObject *use_tensors(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 4)
        return wrong_call();
    none = arguments[3];
    return PyBool_FromLong(open_exchange(arguments[0], arguments[1], arguments[2]));
}

/* Memory */

static PyObject *fence(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self, (void)arguments;
    if (count)
        return wrong_call();
    FENCE();
    return nothing();
}

static PyObject *copy(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[3];
    (void)self;
    if (count != 3 || !read_numbers(arguments, 3, numbers))
        return wrong_call();
    void *state = numbers[2] >= LONG_COPY ? PyEval_SaveThread() : NULL;
    move((void *)numbers[0], (const void *)numbers[1], numbers[2]);
    if (state)
        PyEval_RestoreThread(state);
    return nothing();
}

/* combine(op, target, source, source, ...): False if there is no function for these tensors, and nothing was done. */
static PyObject *combine(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t op;
    struct view target, source;
    const void *sources[MAX_PARTS];
    (void)self;
    if (count < 4 || !read_numbers(arguments, 1, &op))
        return wrong_call();
    Py_ssize_t num_sources = count - 2;
    if (num_sources > MAX_PARTS || !view_of(arguments[1], &target))
        return PyBool_FromLong(0);
    combine_function function = find_combine((int)op, target.dtype);
    if (!function)
        return PyBool_FromLong(0);
    for (Py_ssize_t i = 0; i < num_sources; i++) {
        if (!view_of(arguments[2 + i], &source) || source.dtype != target.dtype || source.count != target.count)
            return PyBool_FromLong(0);
        sources[i] = source.data;
    }
    void *state = target.num_bytes >= LONG_COPY ? PyEval_SaveThread() : NULL;
    function(target.data, sources, (size_t)num_sources, (size_t)target.count);
    if (state)
        PyEval_RestoreThread(state);
    return PyBool_FromLong(1);
}

/* The board. Every function takes its address first. */

/* meet(board, mark, note, number, ...) */
static PyObject *call_meet(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2], words[NUM_WORDS];
    (void)self;
    if (count < 3 || count > 3 + NUM_WORDS || !read_numbers(arguments, 2, numbers) ||
        !read_numbers(arguments + 3, count - 3, words))
        return wrong_call();
    char *text = PyBytes_AsString(arguments[2]);
    if (!text)
        return NULL;
    return PyLong_FromLong(meet((struct board *)numbers[0], numbers[1], text, (uint64_t)PyBytes_Size(arguments[2]),
                                words, (int)(count - 3)));
}

static PyObject *start_reduction(PyObject *const *arguments, struct reduction *reduction) {
    uint64_t numbers[2];
    char *text = PyBytes_AsString(arguments[2]);
    if (!text || !read_numbers(arguments, 2, numbers))
        return NULL;
    return PyLong_FromLong(
        reduce((struct board *)numbers[0], numbers[1], text, (uint64_t)PyBytes_Size(arguments[2]), reduction));
}

/* all_reduce(board, mark, note, op, number of bytes, tensor): NOT_SO if the tensor goes the long way. */
static PyObject *call_all_reduce(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2];
    struct view view;
    combine_function combine;
    (void)self;
    if (count != 6 || !read_numbers(arguments + 3, 2, numbers))
        return wrong_call();
    if (!view_of(arguments[5], &view) || (uint64_t)view.num_bytes != numbers[1] ||
        !(combine = find_combine((int)numbers[0], view.dtype)))
        return PyLong_FromLong(NOT_SO);
    struct reduction reduction = {view.data, view.data, numbers[1], 0, (uint64_t)view.count, size_of(view.dtype), 1,
                                  combine};
    return start_reduction(arguments, &reduction);
}

/* reduce(board, mark, note, op, bytes shown, tensor, first byte, target): the part of the tensor as long as the target.
 * A target of None: this rank reduces nothing. */
static PyObject *call_reduce(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t op, shown, begin;
    struct view view, target = {.data = NULL};
    combine_function combine;
    (void)self;
    if (count != 8 || !read_numbers(arguments + 3, 1, &op) || !read_numbers(arguments + 4, 1, &shown) ||
        !read_numbers(arguments + 6, 1, &begin))
        return wrong_call();
    if (!view_of(arguments[5], &view) || !(combine = find_combine((int)op, view.dtype)))
        return PyLong_FromLong(NOT_SO);
    if (view_of(arguments[7], &target) ? target.dtype != view.dtype : arguments[7] != none)
        return PyLong_FromLong(NOT_SO);
    if (shown > (uint64_t)view.num_bytes || begin + (uint64_t)target.num_bytes > (uint64_t)view.num_bytes)
        return PyLong_FromLong(NOT_SO);
    struct reduction reduction = {view.data, target.data, shown, begin, (uint64_t)target.count, size_of(view.dtype), 0,
                                  combine};
    return start_reduction(arguments, &reduction);
}

/* exchange(board, mark, note, plan, address of own blocks, address of the target, number, ...) */
static PyObject *call_exchange(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2], addresses[2], words[NUM_WORDS];
    (void)self;
    if (count < 6 || count > 6 + NUM_WORDS || !read_numbers(arguments, 2, numbers) ||
        !read_numbers(arguments + 4, 2, addresses) || !read_numbers(arguments + 6, count - 6, words))
        return wrong_call();
    char *text = PyBytes_AsString(arguments[2]), *plan = PyBytes_AsString(arguments[3]);
    if (!text || !plan)
        return NULL;
    return PyLong_FromLong(exchange((struct board *)numbers[0], numbers[1], text,
                                    (uint64_t)PyBytes_Size(arguments[2]), (const struct plan *)plan,
                                    (const char *)addresses[0], (char *)addresses[1], words, (int)(count - 6)));
}

/* broadcast(board, mark, note, source, number of bytes, tensor) */
static PyObject *call_broadcast(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2], more[2];
    struct view view;
    (void)self;
    if (count != 6 || !read_numbers(arguments, 2, numbers) || !read_numbers(arguments + 3, 2, more))
        return wrong_call();
    char *text = PyBytes_AsString(arguments[2]);
    if (!text)
        return NULL;
    if (!view_of(arguments[5], &view) || (uint64_t)view.num_bytes != more[1])
        return PyLong_FromLong(NOT_SO);
    return PyLong_FromLong(broadcast((struct board *)numbers[0], numbers[1], text,
                                     (uint64_t)PyBytes_Size(arguments[2]), view.data, more[1], more[0]));
}

/* play(board, program, op, dtype's tensor, address of own data, address of the target): TO_COMBINE if Python combines. */
static PyObject *call_play(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[3], op, address;
    struct view view = {.dtype = -1};
    (void)self;
    if (count != 6 || !read_numbers(arguments, 1, &address) || !read_numbers(arguments + 2, 1, &op) ||
        !read_numbers(arguments + 4, 2, numbers))
        return wrong_call();
    char *program = PyBytes_AsString(arguments[1]);
    if (!program)
        return NULL;
    bool is_known = view_of(arguments[3], &view) && view.dtype >= 0;
    return PyLong_FromLong(play((struct board *)address, (const struct program *)program, (const char *)numbers[0],
                                (char *)numbers[1], is_known ? find_combine((int)op, view.dtype) : NULL,
                                is_known ? size_of(view.dtype) : 0));
}

static PyObject *call_wait_for_all(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t numbers[2];
    (void)self;
    if (count != 2 || !read_numbers(arguments, 2, numbers))
        return wrong_call();
    return PyLong_FromLong(wait_for_all((struct board *)numbers[0], numbers[1]));
}

/* wait_for_mark(board): DONE once the peer's mark is not 0. */
static PyObject *call_wait_for_mark(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t address;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &address))
        return wrong_call();
    return PyLong_FromLong(wait_for_mark((struct board *)address));
}

static PyObject *call_go_on(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t address;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &address))
        return wrong_call();
    return PyLong_FromLong(go_on((struct board *)address));
}

static PyObject *call_tick(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t address;
    (void)self;
    if (count != 1 || !read_numbers(arguments, 1, &address))
        return wrong_call();
    tick((struct board *)address);
    return nothing();
}

__attribute__((visibility("default"))) PyMethodDef echelon_methods[] = {
    {"set_up", set_up, METH_FASTCALL, NULL},
    {"use_tensors", use_tensors, METH_FASTCALL, NULL},
    {"words", make_words, METH_FASTCALL, NULL},
    {"fence", fence, METH_FASTCALL, NULL},
    {"copy", copy, METH_FASTCALL, NULL},
    {"combine", combine, METH_FASTCALL, NULL},
    {"meet", call_meet, METH_FASTCALL, NULL},
    {"all_reduce", call_all_reduce, METH_FASTCALL, NULL},
    {"reduce", call_reduce, METH_FASTCALL, NULL},
    {"exchange", call_exchange, METH_FASTCALL, NULL},
    {"broadcast", call_broadcast, METH_FASTCALL, NULL},
    {"play", call_play, METH_FASTCALL, NULL},
    {"wait_for_all", call_wait_for_all, METH_FASTCALL, NULL},
    {"wait_for_mark", call_wait_for_mark, METH_FASTCALL, NULL},
    {"go_on", call_go_on, METH_FASTCALL, NULL},
    {"tick", call_tick, METH_FASTCALL, NULL},
    MESSAGE_METHODS,
    {"use_interpreter", use_interpreter, METH_FASTCALL, NULL},
    {"learn", learn, METH_FASTCALL, NULL},
    {"run_known", run_known, METH_FASTCALL, NULL},
    {"list_flights", list_flights, METH_FASTCALL, NULL},
    {"clear_flights", clear_flights, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

#ifdef ECHELON_EXPLORE
__attribute__((visibility("default"))) void set_explore(uint64_t (*function)(int, uint64_t, uint64_t, int)) {
    explore = function;
}
#endif
