/* The part of CPython's stable ABI that the library calls, so that it is built without Python.h. Two functions are not in
 * it, but public since 3.11: PyFrame_GetBack and PyFrame_GetLasti.
 *
 * PyObject stays opaque: no field of any object is touched, so one library serves every version from 3.11 on and builds
 * without a global lock. The symbols come from the interpreter that loads the library. */

#ifndef ECHELON_PYTHON_H
#define ECHELON_PYTHON_H

#include <stddef.h>
#include <stdint.h>

typedef struct _object PyObject;
typedef struct _thread_state PyThreadState;
typedef ptrdiff_t Py_ssize_t;

typedef struct {
    const char *name;
    PyObject *(*function)(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
    int flags;
    const char *doc;
} PyMethodDef;

typedef struct {
    int slot;
    void *function;
} PyType_Slot;

typedef struct {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;

enum { METH_FASTCALL = 0x80 };
enum { Py_mp_ass_subscript = 3, Py_mp_length = 4, Py_mp_subscript = 5, Py_tp_dealloc = 52, Py_tp_doc = 56 };
enum { Py_TPFLAGS_DISALLOW_INSTANTIATION = 1 << 7, Py_TPFLAGS_IMMUTABLETYPE = 1 << 8 };

extern PyObject *PyExc_IndexError;
extern PyObject *PyExc_TypeError;

void Py_IncRef(PyObject *object);
void Py_DecRef(PyObject *object);
PyObject *PyBool_FromLong(long value);
PyObject *Py_BuildValue(const char *format, ...);
char *PyBytes_AsString(PyObject *bytes);
Py_ssize_t PyBytes_Size(PyObject *bytes);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
void PyErr_Clear(void);
PyObject *PyErr_Occurred(void);
void PyErr_SetString(PyObject *kind, const char *text);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);
PyObject *PyLong_FromLong(long value);
PyObject *PyLong_FromUnsignedLongLong(unsigned long long value);
long PyLong_AsLong(PyObject *number);
Py_ssize_t PyLong_AsSsize_t(PyObject *number);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *number);
int PyList_Append(PyObject *list, PyObject *object);
PyObject *PyList_New(Py_ssize_t count);
void *PyLong_AsVoidPtr(PyObject *number);
PyObject *PyObject_CallFunctionObjArgs(PyObject *callable, ...);
PyObject *PyObject_CallNoArgs(PyObject *callable);
void PyObject_Free(void *memory);
PyObject *PyFrame_GetBack(PyObject *frame);
PyObject *PyFrame_GetCode(PyObject *frame);
int PyFrame_GetLasti(PyObject *frame);
PyObject *PyObject_GetAttr(PyObject *object, PyObject *name);
PyObject *PyObject_GetAttrString(PyObject *object, const char *name);
int PyObject_IsTrue(PyObject *object);
PyObject *PyObject_Type(PyObject *object);
unsigned long PyThread_get_thread_ident(void);
PyObject *PyTuple_Pack(Py_ssize_t count, ...);
PyObject *PyType_FromSpec(PyType_Spec *spec);
PyObject *PyType_GenericAlloc(PyObject *type, Py_ssize_t count);

/* Of module.c: the error for a call with other arguments. */
PyObject *wrong_call(void);

#endif
