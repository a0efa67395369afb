/* Declarations that the files of _quick_packets share. */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *publish_task(PyObject *module, PyObject *arguments);
PyObject *claim_task(PyObject *module, PyObject *arguments);
PyObject *withdraw_task(PyObject *module, PyObject *arguments);
