/* Collectives like an earlier one: from the group's method to the end in one call.
 *
 * Strategy. Once Python has checked and run a collective, `learn` keeps its arguments and how it ran. A later call with
 * these arguments takes its number, meets, and writes its record here. The interpreter's lock is held from the number to
 * the end, so no other thread sees a state between. If a peer has not come after a spin, Python goes on with the
 * operation: it makes the record that other ranks may ask for, and looks around. Calls that may not begin here, because
 * another one is under way or a tensor is not ordinary, take Python's way from the start. */

#define _GNU_SOURCE
#include "calls.h"

#include <time.h>

#include "shared.h"
#include "tensor.h"

/* What is asked of torch and of the interpreter before each call: see `use_interpreter`. */
enum { DISPATCH_DEPTH, TRANSFORM_STACK, INFERENCE_MODE, COUNT_CHANGE, NEW_EMPTY, GET_FRAME, KIND_OF_FILE };
enum { FORWARD_AD = KIND_OF_FILE + 1, LEVEL, CODE_FILE, IS_CLOSED, DELIVERY, NONE, NO, ONE, NUM_OBJECTS };
/* Of source files, as `kind_of` in echelon.call_site tells. */
enum { OF_USER, OF_LIBRARY };
enum { NUM_CODES = 64 };
static const uint32_t MULTIPLIER = 0x85EBCA6B;
static const uintptr_t FAR_ADDRESS = (uintptr_t)1 << 40;

static PyObject *objects[NUM_OBJECTS];

/* Code objects and the kinds of their files. They are kept, so an address stands for one of them. */
static struct {
    PyObject *code;
    long kind;
} codes[NUM_CODES];

double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Returns a number, and drops its object; -1 for an error. */
static long number_of(PyObject *object) {
    long number = object ? PyLong_AsLong(object) : -1;
    if (PyErr_Occurred())
        PyErr_Clear();
    if (object)
        Py_DecRef(object);
    return number;
}

static long ask(int function) { return number_of(PyObject_CallNoArgs(objects[function])); }

static bool has_transforms(void) {
    PyObject *answer = PyObject_CallNoArgs(objects[TRANSFORM_STACK]);
    if (!answer)
        PyErr_Clear();
    else
        Py_DecRef(answer);
    return answer != objects[NONE];
}

/* The level of forward-mode AD, an attribute of torch's module: -1 outside of it. */
static bool has_tangents(void) { return number_of(PyObject_GetAttr(objects[FORWARD_AD], objects[LEVEL])) != -1; }

bool is_in_mode(void) { return ask(DISPATCH_DEPTH) || has_transforms() || has_tangents(); }

bool is_in_inference_mode(void) { return ask(INFERENCE_MODE); }

bool is_none(PyObject *object) { return object == objects[NONE]; }

/* True as well if there is no such attribute. */
static bool is_other(PyObject *object, int name, int expected) {
    PyObject *found = PyObject_GetAttr(object, objects[name]);
    if (found)
        Py_DecRef(found);
    else
        PyErr_Clear();
    return found != objects[expected];
}

bool is_closed(PyObject *progress) { return is_other(progress, IS_CLOSED, NO); }

bool is_arriving(PyObject *receiver) { return is_other(receiver, DELIVERY, NONE); }

bool try_lock(PyObject *acquire) {
    PyObject *answer = PyObject_CallFunctionObjArgs(acquire, objects[NO], NULL);
    if (answer)
        Py_DecRef(answer);
    else
        PyErr_Clear();
    return answer && answer != objects[NO];
}

bool count_change(PyObject *tensor) {
    PyObject *one = PyTuple_Pack(1, tensor);
    PyObject *answer = one ? PyObject_CallFunctionObjArgs(objects[COUNT_CHANGE], one, NULL) : NULL;
    if (one)
        Py_DecRef(one);
    if (answer)
        Py_DecRef(answer);
    else
        PyErr_Clear();
    return answer;
}

static long kind_of(PyObject *code) {
    size_t slot = ((uintptr_t)code >> 6) % NUM_CODES;
    if (codes[slot].code == code)
        return codes[slot].kind;
    PyObject *file = PyObject_GetAttr(code, objects[CODE_FILE]);
    long kind = file ? number_of(PyObject_CallFunctionObjArgs(objects[KIND_OF_FILE], file, NULL)) : -1;
    if (file)
        Py_DecRef(file);
    PyObject *before = codes[slot].code;
    Py_IncRef(code);
    codes[slot].code = code;
    codes[slot].kind = kind;
    if (before)
        Py_DecRef(before);
    return kind;
}

PyObject *calling_code(int64_t *instruction) {
    /* The group's method is the innermost frame: builtins have none. */
    PyObject *frame = PyObject_CallFunctionObjArgs(objects[GET_FRAME], objects[ONE], NULL), *found = NULL;
    if (!frame)
        PyErr_Clear();
    while (frame) {
        PyObject *code = PyFrame_GetCode(frame);
        long kind = kind_of(code);
        if (kind == OF_USER) {
            *instruction = PyFrame_GetLasti(frame);
            found = code;
            break;
        }
        Py_DecRef(code);
        if (kind != OF_LIBRARY)
            break;
        PyObject *outer = PyFrame_GetBack(frame);
        Py_DecRef(frame);
        frame = outer;
    }
    if (frame)
        Py_DecRef(frame);
    return found;
}

static bool has_key(const struct key *key, const struct view *view) {
    if ((uint64_t)key->dtype != view->type || (uint64_t)key->num_dims != view->num_dims)
        return false;
    for (uint64_t i = 0; i < view->num_dims; i++)
        if (key->shape[i] != view->shape[i])
            return false;
    return true;
}

/* Finds a call by its arguments, and puts it first. */
static struct known_call *find(struct calls *calls, PyObject *kind, int64_t root, PyObject *op, const struct view *tensor,
                               const struct view *out) {
    for (struct known_call **at = &calls->first; *at; at = &(*at)->next) {
        struct known_call *known = *at;
        if (known->kind == kind && known->root == root && known->op == op && has_key(&known->tensor, tensor) &&
            has_key(&known->out, out)) {
            *at = known->next;
            known->next = calls->first;
            return calls->first = known;
        }
    }
    return NULL;
}

bool make_tensor(PyObject *like, PyObject *shape, PyObject **made, struct view *view) {
    *made = PyObject_CallFunctionObjArgs(objects[NEW_EMPTY], like, shape, NULL);
    if (!*made)
        PyErr_Clear();
    return *made && view_of(*made, view);
}

static bool may_begin(const struct calls *calls) {
    return calls->board && calls->left == calls->sequence && !calls->is_held && !calls->num_marks && !calls->is_stopped;
}

/* What Python announces of a tensor outside symmetric memory. A peer reads it if the blocks of another rank no longer
 * lie beside the announcement: then all ranks have to see that they cannot read each other's tensors in place. */
static const uint64_t ordinary[3];

static int start(struct board *board, const struct known_call *known, uint64_t mark, const struct view *tensor,
                 const struct view *out) {
    if (known->act == RECEIVES)
        return broadcast(board, mark, known->text, known->text_bytes, tensor->data, (uint64_t)tensor->num_bytes,
                         known->source);
    if (known->act == EXCHANGES)
        return exchange(board, mark, known->text, known->text_bytes, known->plan, tensor->data, out->data, ordinary,
                        sizeof ordinary / sizeof *ordinary);
    if (known->act == MEETS_ONLY)
        return meet(board, mark, known->text, known->text_bytes, NULL, 0);
    const struct view *target = known->target == IN_PLACE ? tensor : out;
    uint64_t count = known->target == NO_TARGET ? 0 : (uint64_t)target->count;
    struct reduction reduction = {tensor->data, target->data, known->num_shown, known->begin, count,
                                  size_of(tensor->dtype), known->is_published,
                                  find_combine((int)known->reduction, tensor->dtype)};
    return reduce(board, mark, known->text, known->text_bytes, &reduction);
}

static void drop(PyObject *object) {
    if (object)
        Py_DecRef(object);
}

/* Returns the entry that had this place. */
static struct flight push(struct flights *flights, struct flight flight) {
    struct flight *place = &flights->ring[flights->count++ % flights->size], before = *place;
    Py_IncRef(flight.object);
    Py_IncRef(flight.code);
    *place = flight;
    return before;
}

void write_down(const struct calls *calls, struct flight flight) {
    struct flight before = push(calls->flights, flight), latest = {0};
    if (flight.sequence)
        latest = push(calls->latest, flight);
    /* Last: what dies with these may run code of the program. */
    drop(flight.code);
    drop(before.object);
    drop(before.code);
    drop(latest.object);
    drop(latest.code);
}

/* False for two kinds that Python looks at: complex numbers, which may be lazy conjugates, and tensors without memory of
 * their own, which tell an offset in place of an address. */
static bool view_argument(PyObject *argument, struct view *view) {
    *view = (struct view){.type = -1};
    return argument == objects[NONE] ||
           (view_of(argument, view) && view->type && (uintptr_t)view->data > FAR_ADDRESS);
}

/* run_known(kind, root, op, tensor, out), with the address of `struct calls` as self. True: it is done. (result,): done, with
 * a new tensor. False: nothing was done. Else (object, number, signature): it has begun, and Python goes on with it. */
PyObject *run_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    struct calls *calls = PyLong_AsVoidPtr(self);
    if (count != 5 || !calls)
        return wrong_call();
    struct view tensor, out;
    int64_t root = PyLong_AsSsize_t(arguments[1]);
    if (root == -1 && PyErr_Occurred())
        PyErr_Clear(); /* -1 is the root of those that have none, and such a call fails on the long way */
    if (!may_begin(calls) || !view_argument(arguments[3], &tensor) || !view_argument(arguments[4], &out))
        return PyBool_FromLong(0);
    struct known_call *known = find(calls, arguments[0], root, arguments[2], &tensor, &out);
    int64_t instruction = 0;
    PyObject *code = NULL, *made = NULL;
    if (!known || is_in_mode() || is_in_inference_mode() || (tensor.data && is_negative(arguments[3])) ||
        (out.data && is_negative(arguments[4])) || !(code = calling_code(&instruction)) ||
        (known->changes_tensor && !count_change(arguments[3])) || (known->changes_out && !count_change(arguments[4])) ||
        (known->result_shape && !make_tensor(arguments[3], known->result_shape, &made, &out)) || !may_begin(calls) ||
        calls->first != known) {
        drop(code);
        drop(made);
        return PyBool_FromLong(0);
    }
    struct flight flight = {known->object, code, instruction, ++calls->sequence, 0, PyThread_get_thread_ident(),
                            seconds(), 0};
    flight.signature = calls->signature = (uint32_t)(calls->signature * MULTIPLIER + known->checksum);
    struct board *board = calls->board;
    board->is_brief = 1;
    int outcome = start(board, known, flight.sequence << 32 | flight.signature, &tensor, &out);
    board->is_brief = 0;
    if (outcome != DONE) {
        drop(code);
        drop(made); /* whoever goes on gives another target */
        board->begun = 1 + (uint64_t)outcome;
        return Py_BuildValue("(OKK)", known->object, (unsigned long long)flight.sequence,
                             (unsigned long long)flight.signature);
    }
    calls->left = flight.sequence;
    flight.ended = seconds();
    write_down(calls, flight);
    if (!made)
        return PyBool_FromLong(1);
    PyObject *result = PyTuple_Pack(1, made);
    drop(made);
    return result;
}

static void set_key(struct key *key, const struct view *view) {
    key->dtype = view->type;
    key->num_dims = view->num_dims;
    for (uint64_t i = 0; i < view->num_dims; i++)
        key->shape[i] = view->shape[i];
}

/* learn(calls, known call, kind, root, op, tensor, out): False if such a call cannot be made here. */
PyObject *learn(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 7)
        return wrong_call();
    struct calls *calls = PyLong_AsVoidPtr(arguments[0]);
    struct known_call *known = PyLong_AsVoidPtr(arguments[1]);
    struct view tensor, out;
    if (!view_argument(arguments[5], &tensor) || !view_argument(arguments[6], &out) || tensor.num_dims > MAX_DIMS ||
        out.num_dims > MAX_DIMS || (out.data && tensor.data && out.type != tensor.type) ||
        (known->act == REDUCES && !find_combine((int)known->reduction, tensor.dtype)))
        return PyBool_FromLong(0);
    known->kind = arguments[2];
    known->root = PyLong_AsSsize_t(arguments[3]);
    known->op = arguments[4];
    set_key(&known->tensor, &tensor);
    set_key(&known->out, &out);
    known->next = calls->first;
    calls->first = known;
    return PyBool_FromLong(1);
}

/* list_flights(flights): (object, code, instruction, number, signature, thread, started, ended), the oldest first. */
PyObject *list_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 1)
        return wrong_call();
    struct flights *flights = PyLong_AsVoidPtr(arguments[0]);
    PyObject *list = PyList_New(0);
    uint64_t end = flights->count;
    for (uint64_t i = end > flights->size ? end - flights->size : 0; list && i < end; i++) {
        /* A copy with references: building the entry may run code of the program, which writes into the ring. */
        struct flight flight = flights->ring[i % flights->size];
        Py_IncRef(flight.object);
        Py_IncRef(flight.code);
        PyObject *entry = Py_BuildValue("(OOLKKKdd)", flight.object, flight.code, (long long)flight.instruction,
                                        (unsigned long long)flight.sequence, (unsigned long long)flight.signature,
                                        (unsigned long long)flight.thread, flight.started, flight.ended);
        drop(flight.object);
        drop(flight.code);
        if (!entry || PyList_Append(list, entry)) {
            Py_DecRef(list);
            list = NULL;
        }
        drop(entry);
    }
    return list;
}

PyObject *clear_flights(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 1)
        return wrong_call();
    struct flights *flights = PyLong_AsVoidPtr(arguments[0]);
    for (uint64_t i = 0; i < flights->size; i++) {
        struct flight before = flights->ring[i];
        flights->ring[i] = (struct flight){0};
        drop(before.object);
        drop(before.code);
    }
    flights->count = 0;
    return PyBool_FromLong(1);
}

/* use_interpreter(...): functions and names, in the order of the enumerations above. */
PyObject *use_interpreter(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != NUM_OBJECTS - 1)
        return wrong_call();
    for (int i = 0; i < NUM_OBJECTS - 1 && !objects[ONE]; i++) {
        Py_IncRef(arguments[i]);
        objects[i] = arguments[i];
    }
    if (!objects[ONE])
        objects[ONE] = PyLong_FromLong(1);
    return PyBool_FromLong(1);
}
