/* Packets with descriptors beside them, each written or read by one call; and a look, without
 * the interpreter's lock, whether any descriptor has something to be read.
 *
 * A module of Python, written in its stable interface (PEP 384), so that one
 * library serves every version from 3.11 on. It does what packet_socket.py does
 * where it was not built, which says what that is; for the look see short_waits.py.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SHMREDUCE_VERSION 5
#define MOST_DESCRIPTORS 64 /* as packet_socket.py has it */
#define BRIEF 4096 /* bytes of a packet that takes no time to copy */
#define LONGEST_LOOK 1e-3 /* seconds between two looks at what signals have come */
#define STEP 2e-4 /* seconds between two looks at what else runs */

union control {
    char bytes[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
    struct cmsghdr aligned;
};

static double seconds_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double earlier(double one, double other)
{
    return one < other ? one : other;
}

/* As all_taken() of processors.py. */
static int all_taken(void)
{
    char text[128], *running = text;
    cpu_set_t usable;
    ssize_t size;
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 1;
    size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size < 0 ? 0 : size] = '\0';
    for (int space = 0; space < 3; space++) {
        running = strchr(running, ' ');
        if (running == NULL)
            return 1;
        running++;
    }
    /* It fails where there are more processors than the set has room for. */
    if (sched_getaffinity(0, sizeof usable, &usable) < 0)
        return 1;
    return strtol(running, NULL, 10) > CPU_COUNT(&usable);
}

/* Whether a call that has failed is to be made again; -1 if a signal handler raises.
 * Like those of socket.socket (PEP 475), one that a signal has interrupted is. */
static int is_to_be_repeated(double until)
{
    int reason = errno, raised;

    if (reason != EINTR && !(reason == EAGAIN && seconds_now() < until))
        return 0;
    raised = PyErr_CheckSignals() < 0;
    errno = reason;
    return raised ? -1 : 1;
}

static int read_descriptors(PyObject *given, int *found)
{
    Py_ssize_t count = PySequence_Size(given);

    if (count < 0)
        return -1;
    if (count > MOST_DESCRIPTORS) {
        errno = EINVAL;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *item = PySequence_GetItem(given, place);
        long number;

        if (item == NULL)
            return -1;
        number = PyLong_AsLong(item);
        Py_DECREF(item);
        if (number == -1 && PyErr_Occurred())
            return -1;
        if (number < INT_MIN || number > INT_MAX) {
            PyErr_SetString(PyExc_OverflowError, "a descriptor is too large for a C int");
            return -1;
        }
        found[place] = (int)number;
    }
    return (int)count;
}

static PyObject *write_packet(PyObject *module, PyObject *arguments)
{
    int fd, flags, count, descriptors[MOST_DESCRIPTORS], again = 1;
    PyObject *given;
    Py_buffer data;
    union control control;
    struct iovec part;
    struct msghdr message;
    ssize_t written = -1;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "iy*Oi", &fd, &data, &given, &flags))
        return NULL;
    count = read_descriptors(given, descriptors);
    if (count < 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    memset(&message, 0, sizeof message);
    part.iov_base = data.buf;
    part.iov_len = (size_t)data.len;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (count) {
        size_t size = (size_t)count * sizeof(int);

        memset(&control, 0, CMSG_SPACE(size));
        control.aligned.cmsg_level = SOL_SOCKET;
        control.aligned.cmsg_type = SCM_RIGHTS;
        control.aligned.cmsg_len = CMSG_LEN(size);
        memcpy(CMSG_DATA(&control.aligned), descriptors, size);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(size);
    }
    if (data.len <= BRIEF && count == 0) {
        /* With the interpreter's lock: to let it go, and to wait for it behind a thread
         * that computes, may take a thousand times as long as this call. */
        written = sendmsg(fd, &message, flags | MSG_DONTWAIT);
        again = written < 0 && errno == EAGAIN && !(flags & MSG_DONTWAIT);
    }
    while (again > 0) {
        PyThreadState *state = PyEval_SaveThread();
        int reason;

        written = sendmsg(fd, &message, flags);
        reason = errno;
        PyEval_RestoreThread(state);
        errno = reason;
        again = written < 0 ? is_to_be_repeated(0) : 0;
    }
    if (written < 0 && again == 0)
        PyErr_SetFromErrno(PyExc_OSError);
    PyBuffer_Release(&data);
    if (written < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

/* Put the descriptors of a message into the caller's list; close those that cannot be. */
static int hand_over(struct msghdr *message, PyObject *list)
{
    int descriptors[MOST_DESCRIPTORS], count = 0;

    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); each; each = CMSG_NXTHDR(message, each)) {
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            int more = (int)((each->cmsg_len - CMSG_LEN(0)) / sizeof(int));

            if (more > MOST_DESCRIPTORS - count)
                more = MOST_DESCRIPTORS - count;
            memcpy(descriptors + count, CMSG_DATA(each), (size_t)more * sizeof(int));
            count += more;
        }
    }
    for (int place = 0; place < count; place++) {
        PyObject *number = PyLong_FromLong(descriptors[place]);
        int failed = number == NULL || PyList_Append(list, number) < 0;

        Py_XDECREF(number);
        if (failed) {
            for (; place < count; place++)
                close(descriptors[place]);
            return -1;
        }
    }
    return 0;
}

/* Look for a packet, again and again until a time if there is none. */
static ssize_t look(int fd, const Py_buffer *buffer, int flags, double until,
    struct msghdr *message, union control *control)
{
    struct iovec part = {buffer->buf, (size_t)buffer->len};
    ssize_t size;

    do {
        memset(message, 0, sizeof *message);
        message->msg_iov = &part;
        message->msg_iovlen = 1;
        message->msg_control = control;
        message->msg_controllen = sizeof *control;
        size = recvmsg(fd, message, flags | MSG_CMSG_CLOEXEC);
    } while (size < 0 && errno == EAGAIN && seconds_now() < until);
    return size;
}

/* Look until a time, and on until the last one, as long as all who run have a processor.
 * If they do not the last one is 0 afterwards: there is to be no other look. */
static ssize_t look_on(int fd, const Py_buffer *buffer, int flags, double until, double *last,
    struct msghdr *message, union control *control)
{
    ssize_t size = look(fd, buffer, flags, until, message, control);

    while (size < 0 && errno == EAGAIN && (until = seconds_now()) < *last) {
        if (all_taken()) {
            *last = 0;
            errno = EAGAIN;
        } else
            size = look(fd, buffer, flags, earlier(until + STEP, *last), message, control);
    }
    return size;
}

static PyObject *read_packet(PyObject *module, PyObject *arguments)
{
    int fd, flags, again = 1;
    double patience, spare, until = 0, last = 0;
    Py_buffer buffer;
    union control control;
    struct msghdr message;
    ssize_t size = -1;
    PyObject *list, *found = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "iw*iddO!", &fd, &buffer, &flags, &patience, &spare,
            &PyList_Type, &list))
        return NULL;
    if (patience > 0) {
        until = seconds_now() + patience;
        last = until + spare;
    } else if (flags & MSG_DONTWAIT) {
        size = look(fd, &buffer, flags, 0, &message, &control);
        again = 0;
    }
    while (again > 0) {
        double pause = patience > 0 ? seconds_now() + LONGEST_LOOK : 0;
        double end = earlier(last, pause);
        PyThreadState *state = PyEval_SaveThread();
        int reason;

        size = look_on(fd, &buffer, flags, earlier(until, pause), &end, &message, &control);
        reason = errno;
        PyEval_RestoreThread(state);
        errno = reason;
        if (end == 0)
            last = 0;
        again = size < 0 ? is_to_be_repeated(last) : 0;
    }
    if (size >= 0) {
        /* Before this call has returned, when no handler of a signal can raise. */
        if (hand_over(&message, list) == 0)
            found = PyLong_FromSsize_t(size);
    } else if (again == 0)
        PyErr_SetFromErrno(PyExc_OSError);
    PyBuffer_Release(&buffer);
    return found;
}

/* Whether there is something to be read, or to be told by reading: asked until the pause, and
 * on after `until` as long as all who run have a processor. If they do not the last time is 0
 * afterwards: there is to be no other look. */
static int look_for_input(int fd, double until, double pause, double *last)
{
    struct pollfd one = {fd, POLLIN, 0};

    for (;;) {
        double now;

        /* What is wrong with the descriptor is told by reading, too. */
        if (poll(&one, 1, 0) != 0)
            return 1;
        now = seconds_now();
        if (now >= earlier(*last, pause))
            return 0;
        if (now < until)
            continue;
        if (all_taken()) {
            *last = 0;
            return 0;
        }
        until = earlier(now + STEP, *last);
    }
}

/* Return 1 for what is there at once, 2 for what came, 0 for nothing. */
static PyObject *await_input(PyObject *module, PyObject *arguments)
{
    int fd, found;
    double patience, spare, until, last;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "idd", &fd, &patience, &spare))
        return NULL;
    /* With the interpreter's lock, as write_packet() writes what is brief. */
    last = 0;
    if (look_for_input(fd, 0, 0, &last))
        return PyLong_FromLong(1);
    until = seconds_now() + patience;
    last = until + spare;
    do {
        PyThreadState *state = PyEval_SaveThread();

        found = look_for_input(fd, until, seconds_now() + LONGEST_LOOK, &last);
        PyEval_RestoreThread(state);
        if (!found && PyErr_CheckSignals() < 0)
            return NULL;
    } while (!found && seconds_now() < last);
    return PyLong_FromLong(found ? 2 : 0);
}

/* Close all descriptors of a list, and take them off it. No handler of a signal runs in
 * between: none is closed that is in the list, nor left open that is not. */
static PyObject *close_descriptors(PyObject *module, PyObject *list)
{
    (void)module;
    for (Py_ssize_t size = PyList_Size(list); size > 0; size--) {
        long fd = PyLong_AsLong(PyList_GetItem(list, size - 1));

        if (PyErr_Occurred() || PyList_SetSlice(list, size - 1, size, NULL) < 0)
            return NULL;
        /* An error is none of the caller's; close(2): the number is free all the same. */
        if (fd >= 0 && fd <= INT_MAX)
            close((int)fd);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"await_input", await_input, METH_VARARGS, "await_input(fd, patience, spare)"},
    {"close_descriptors", close_descriptors, METH_O, "close_descriptors(descriptors)"},
    {"write_packet", write_packet, METH_VARARGS, "write_packet(fd, data, descriptors, flags)"},
    {"read_packet", read_packet, METH_VARARGS,
        "read_packet(fd, buffer, flags, patience, spare, descriptors)"},
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
    .m_name = "_quick_packets",
    .m_doc = "Packets with descriptors beside them, each written or read by one call.",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__quick_packets(void)
{
    return PyModuleDef_Init(&module);
}
