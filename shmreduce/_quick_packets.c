/* Packets with descriptors: each is written or read by one call. It also waits for input for a
 * short time, without the interpreter lock. _quick_packets_tasks.c has the tasks of pools.
 *
 * This is a Python module, written in the stable interface (PEP 384), so that one
 * library serves every version from 3.11 on. If it was not built, packet_socket.py does
 * the same, and explains it; for the short wait see short_waits.py.
 */
#include "_quick_packets.h"

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

#define SHMREDUCE_VERSION 10
#define MOST_DESCRIPTORS 64 /* as in packet_socket.py */
#define BRIEF 4096 /* bytes of a packet that is sent with the interpreter lock held */
#define LONGEST_LOOK 1e-3 /* seconds between two checks for signals */
#define FIRST_STEP 5e-5 /* seconds of polling until the first check; see packet_socket.py */
#define LONGEST_STEP 2e-4 /* seconds of polling between two checks */
#define SOMEBODY_RAN 1e-5 /* seconds that sched_yield() takes at least if it let others run */

/* For how long to poll. */
struct patience {
    double until; /* till then even if all other processors are taken */
    double last;  /* till then if not; 0: others need this processor, so no longer */
    double next;  /* when to check */
    double step;  /* seconds between the last check and the next */
};

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
    /* This fails if there are more processors than the set has room for. */
    if (sched_getaffinity(0, sizeof usable, &usable) < 0)
        return 1;
    return strtol(running, NULL, 10) > CPU_COUNT(&usable);
}

/* Whether to repeat a call that has failed; -1 if a signal handler raises. A call that a signal
 * has interrupted is repeated, as socket.socket does (PEP 475). */
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
        /* The interpreter lock is kept: releasing it, and then waiting for it behind a thread
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

/* Put the descriptors of a message into the caller's list; close those that do not get there. */
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

static struct patience begin(double patience, double spare)
{
    struct patience begun = {0, 0, 0, FIRST_STEP};

    if (patience > 0) {
        begun.until = seconds_now() + patience;
        begun.last = begun.until + spare;
        begun.next = begun.until - patience + FIRST_STEP;
    }
    return begun;
}

/* As lets_others_run() of processors.py. */
static int lets_others_run(void)
{
    double began = seconds_now();

    sched_yield();
    return seconds_now() - began > SOMEBODY_RAN;
}

/* Whether to look once more before `pause`. If not for others, `last` becomes 0. */
static int goes_on(struct patience *patience, double pause)
{
    double now = seconds_now();

    if (now >= earlier(patience->last, pause))
        return 0;
    if (now < patience->next)
        return 1;
    if (lets_others_run() || (now >= patience->until && all_taken())) {
        patience->last = 0;
        return 0;
    }
    patience->step = earlier(2 * patience->step, LONGEST_STEP);
    patience->next = now + patience->step;
    return 1;
}

/* Look for a packet, repeatedly if there is none. */
static ssize_t look(int fd, const Py_buffer *buffer, int flags, struct patience *patience,
    double pause, struct msghdr *message, union control *control)
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
        if (size >= 0 || errno != EAGAIN)
            return size;
    } while (goes_on(patience, pause));
    errno = EAGAIN;
    return -1;
}

static PyObject *read_packet(PyObject *module, PyObject *arguments)
{
    int fd, flags, again = 1;
    double seconds, spare;
    struct patience patience;
    Py_buffer buffer;
    union control control;
    struct msghdr message;
    ssize_t size = -1;
    PyObject *list, *found = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "iw*iddO!", &fd, &buffer, &flags, &seconds, &spare,
            &PyList_Type, &list))
        return NULL;
    patience = begin(seconds, spare);
    if (seconds <= 0 && flags & MSG_DONTWAIT) {
        size = look(fd, &buffer, flags, &patience, 0, &message, &control);
        again = 0;
    }
    while (again > 0) {
        double pause = seconds_now() + LONGEST_LOOK;
        PyThreadState *state = PyEval_SaveThread();
        int reason;

        size = look(fd, &buffer, flags, &patience, pause, &message, &control);
        reason = errno;
        PyEval_RestoreThread(state);
        errno = reason;
        again = size < 0 ? is_to_be_repeated(patience.last) : 0;
    }
    if (size >= 0) {
        /* Done in this call, in which no signal handler can raise. */
        if (hand_over(&message, list) == 0) {
            if (message.msg_flags & MSG_TRUNC) {
                errno = EMSGSIZE;
                PyErr_SetFromErrno(PyExc_OSError);
            } else
                found = PyLong_FromSsize_t(size);
        }
    } else if (again == 0)
        PyErr_SetFromErrno(PyExc_OSError);
    PyBuffer_Release(&buffer);
    return found;
}

/* Whether reading would return something, or an error; repeatedly if not. */
static int look_for_input(int fd, struct patience *patience, double pause)
{
    struct pollfd one = {fd, POLLIN, 0};

    do {
        int ready = poll(&one, 1, 0);

        /* If something is wrong with the descriptor, reading will raise the error. But a signal
         * may interrupt the call although it does not wait: that says nothing of the input. */
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return 1;
    } while (goes_on(patience, pause));
    return 0;
}

/* Return 1 if there is input at once, 2 if it came during the wait, 0 if there is none. */
static PyObject *await_input(PyObject *module, PyObject *arguments)
{
    int fd, found;
    double seconds, spare;
    struct patience patience = begin(0, 0);

    (void)module;
    if (!PyArg_ParseTuple(arguments, "idd", &fd, &seconds, &spare))
        return NULL;
    /* The interpreter lock is kept, as in write_packet() for a brief packet. */
    if (look_for_input(fd, &patience, 0))
        return PyLong_FromLong(1);
    patience = begin(seconds, spare);
    do {
        PyThreadState *state = PyEval_SaveThread();

        found = look_for_input(fd, &patience, seconds_now() + LONGEST_LOOK);
        PyEval_RestoreThread(state);
        if (!found && PyErr_CheckSignals() < 0)
            return NULL;
    } while (!found && seconds_now() < patience.last);
    return PyLong_FromLong(found ? 2 : 0);
}

/* Close all descriptors of a list and remove them from it. No signal handler runs in between, so
 * the list never has a closed descriptor, and lacks none that is open. */
static PyObject *close_descriptors(PyObject *module, PyObject *list)
{
    (void)module;
    for (Py_ssize_t size = PyList_Size(list); size > 0; size--) {
        long fd = PyLong_AsLong(PyList_GetItem(list, size - 1));

        if (PyErr_Occurred() || PyList_SetSlice(list, size - 1, size, NULL) < 0)
            return NULL;
        /* Errors are ignored: the number is free in any case (close(2)). */
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
    {"publish_task", publish_task, METH_VARARGS, "publish_task(memory, room, number, task)"},
    {"claim_task", claim_task, METH_VARARGS, "claim_task(memory, room, owner)"},
    {"withdraw_task", withdraw_task, METH_VARARGS, "withdraw_task(memory, room, number, owner)"},
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
    .m_doc = "Packets with descriptors, each written or read by one call; tasks of pools.",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__quick_packets(void)
{
    return PyModuleDef_Init(&module);
}
