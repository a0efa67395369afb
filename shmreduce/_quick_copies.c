/* Copies many bytes: by several threads, and past the processor's caches if they would not
 * stay there anyway.
 *
 * This is a Python module, written in the stable interface (PEP 384), so that one
 * library serves every version from 3.11 on. Only copying.py uses it, and does
 * without it if it was not built.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SHMREDUCE_VERSION 7
#define LINE ((size_t)64) /* bytes that move between a cache and memory at once */
#define PAGE ((size_t)4096)
#define MOST_THREADS 32
#define STACK ((size_t)64 << 10) /* bytes; what a thread does here needs next to nothing */
#define AHEAD ((size_t)1024) /* bytes between the address that is read and the one prefetched */

#ifdef __SSE2__

/* An ordinary store reads a line from memory before it writes a part of it; these stores
 * write whole lines. So two thirds of the traffic are left. memcpy(3) does the same, but
 * only from a size on that it takes from the processor. On a virtual machine the
 * processor may report caches that the machine does not have. */
static void copy_past_caches(char *target, const char *source, size_t size)
{
    size_t head = -(uintptr_t)target % LINE, end;

    head = head < size ? head : size;
    memcpy(target, source, head);
    target += head;
    source += head;
    size -= head;
    end = size - size % LINE;
    for (size_t place = 0; place < end; place += LINE) {
        const __m128i *from = (const __m128i *)(source + place);
        __m128i *to = (__m128i *)(target + place);
        __m128i one = _mm_loadu_si128(from), two = _mm_loadu_si128(from + 1);
        __m128i three = _mm_loadu_si128(from + 2), four = _mm_loadu_si128(from + 3);

        /* Prefetching an address that is not mapped does nothing. NTA: the line is not kept
         * in the caches, so that the interpreter's own memory stays there. */
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_NTA);
        _mm_stream_si128(to, one);
        _mm_stream_si128(to + 1, two);
        _mm_stream_si128(to + 2, three);
        _mm_stream_si128(to + 3, four);
    }
    /* Without a fence, a later store of this thread could overtake these, for example the one
     * that tells a reader that the bytes are there. */
    _mm_sfence();
    memcpy(target + end, source + end, size - end);
}

#else

static void copy_past_caches(char *target, const char *source, size_t size)
{
    memcpy(target, source, size);
}

#endif

struct part {
    char *target;
    const char *source;
    size_t size;
    bool past_caches, started;
    pthread_t thread;
};

static void *copy_part(void *argument)
{
    struct part *part = argument;

    if (part->past_caches)
        copy_past_caches(part->target, part->source, part->size);
    else
        memcpy(part->target, part->source, part->size);
    return NULL;
}

/* The threads are started here and ended here, while the caller cannot be interrupted. They
 * are not Python's: they need not wait for the interpreter's lock before they begin. A child
 * that another thread forks meanwhile lacks them, and the caller's thread as well. */
static void copy_parts(struct part whole, int threads)
{
    struct part parts[MOST_THREADS];
    size_t step = (whole.size / (size_t)threads / PAGE + 1) * PAGE;
    int count = 0;
    pthread_attr_t attributes;
    sigset_t all, before;

    if (threads == 1 || pthread_attr_init(&attributes)) {
        copy_part(&whole);
        return;
    }
    pthread_attr_setstacksize(&attributes, STACK);
    /* Signals are for the threads that Python knows. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t done = 0; done < whole.size; done += step, count++) {
        parts[count] = whole;
        parts[count].target += done;
        parts[count].source += done;
        parts[count].size = whole.size - done < step ? whole.size - done : step;
        /* The first part is the caller's. */
        parts[count].started
            = count && !pthread_create(&parts[count].thread, &attributes, copy_part, parts + count);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    for (int i = 0; i < count; i++)
        if (!parts[i].started)
            copy_part(parts + i);
    for (int i = 0; i < count; i++)
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    Py_buffer target, source;
    int past_caches, threads = 1;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*y*p|i", &target, &source, &past_caches, &threads))
        return NULL;
    if (target.len != source.len) {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", source.len, target.len);
    } else {
        struct part whole = {.target = target.buf, .source = source.buf,
                             .size = (size_t)source.len, .past_caches = past_caches};

        threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
        Py_BEGIN_ALLOW_THREADS
        copy_parts(whole, threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, past_caches, threads=1)"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", SHMREDUCE_VERSION);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_quick_copies",
    .m_doc = "One copy of many bytes, by several threads, past the processor's caches.",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__quick_copies(void)
{
    return PyModuleDef_Init(&module);
}
