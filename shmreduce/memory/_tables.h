/* Shared by the modules that read the tables of a segment, which layout.py describes. */
#include <Python.h>

#include <stdint.h>

/* Other processes read and write the same memory. */
#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)

/* Whether `count` numbers of `size` bytes fit into the tables at an offset, and are aligned. */
static inline int fits(const Py_buffer *tables, uint64_t offset, uint64_t size, uint64_t count)
{
    uint64_t room = (uint64_t)tables->len;

    return offset <= room && count <= (room - offset) / size
        && ((uintptr_t)tables->buf + offset) % size == 0;
}

/* Raise the error for tables that are smaller than the caller says. */
static inline void *refuse_tables(void)
{
    PyErr_SetString(PyExc_ValueError, "the tables have no room for so many blocks and slots");
    return NULL;
}
