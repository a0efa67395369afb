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
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SHMREDUCE_VERSION 10
#define LINE ((size_t)64) /* bytes that move between a cache and memory at once */
#define PIECE ((size_t)256 << 10) /* bytes */
#define MOST_THREADS 32
/* Bytes. A thread here needs next to none of them, but the C library takes the libraries'
 * thread-local variables from its stack, too. */
#define STACK ((size_t)1 << 20)
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

/* Threads take a piece each, until none is left. So one that gets no processor for a while
 * leaves its share to the others. */
struct job {
    char *target;
    const char *source;
    size_t size;
    bool past_caches;
    atomic_size_t taken;
};

static void *copy_pieces(void *argument)
{
    struct job *job = argument;

    for (;;) {
        size_t place = atomic_fetch_add(&job->taken, PIECE), size;

        if (place >= job->size)
            return NULL;
        size = job->size - place < PIECE ? job->size - place : PIECE;
        if (job->past_caches)
            copy_past_caches(job->target + place, job->source + place, size);
        else
            memcpy(job->target + place, job->source + place, size);
    }
}

/* Starts threads and ends them, while the caller cannot be interrupted. They are not Python's:
 * they need not wait for the interpreter's lock before they begin. A child that another
 * thread forks meanwhile lacks them, and the caller's thread as well. */
static void copy_by_threads(struct job *job, int threads)
{
    pthread_t started[MOST_THREADS];
    int count = 0;
    pthread_attr_t attributes;
    sigset_t all, before;

    if (pthread_attr_init(&attributes) == 0) {
        pthread_attr_setstacksize(&attributes, STACK);
        /* Signals are for the threads that Python knows; but not those of a copy that reads
         * memory which is gone: if they are blocked, faulthandler does not see them (signal(7)). */
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        sigdelset(&all, SIGSEGV);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (count < threads - 1
               && pthread_create(&started[count], &attributes, copy_pieces, job) == 0)
            count++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    copy_pieces(job);
    while (count > 0)
        pthread_join(started[--count], NULL);
}

static void copy_whole(char *target, const char *source, size_t size, bool past_caches, int threads)
{
    if (threads > 1) {
        struct job job = {.target = target, .source = source, .size = size,
                          .past_caches = past_caches};

        copy_by_threads(&job, threads < MOST_THREADS ? threads : MOST_THREADS);
    } else if (past_caches) {
        copy_past_caches(target, source, size);
    } else {
        memcpy(target, source, size);
    }
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
        Py_BEGIN_ALLOW_THREADS
        copy_whole(target.buf, source.buf, (size_t)source.len, past_caches, threads);
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
