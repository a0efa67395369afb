/* Tasks of a pool in memory that it shares with its workers; pool_task_ring.py describes it.
 *
 * The memory may have been changed by a worker that went wild: nothing here reads or writes
 * outside of it, whatever it says. */
#include "_quick_packets.h"

#include <stdint.h>
#include <string.h>

/* As in pool_task_ring.py. */
#define OWNER_BITS 20
#define OWNER_MASK ((1 << OWNER_BITS) - 1)

struct head {
    uint64_t oldest; /* all tasks before this one have been claimed; there may be more */
};

struct place {
    uint64_t word;   /* the number of the task, counted from 1, and who has claimed it */
    uint64_t copied; /* the number of the last task that was copied from here */
    uint64_t size;   /* bytes of the task, which follow */
    char bytes[];
};

struct ring {
    Py_buffer memory;
    uint64_t count; /* of places */
    uint64_t room;  /* bytes of a place, its numbers included */
};

/* Return 0, or -1 for an error. On success the caller releases the memory. */
static int open_ring(struct ring *ring, PyObject *memory, Py_ssize_t room, uint64_t owner)
{
    /* 0 is nobody. */
    if (owner == 0 || owner > OWNER_MASK) {
        PyErr_SetString(PyExc_ValueError, "no such owner");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &ring->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (room > (Py_ssize_t)sizeof(struct place) && room % 8 == 0
        && (uintptr_t)ring->memory.buf % 8 == 0
        && ring->memory.len >= (Py_ssize_t)sizeof(struct head) + room) {
        ring->room = (uint64_t)room;
        ring->count = ((uint64_t)ring->memory.len - sizeof(struct head)) / ring->room;
        return 0;
    }
    PyBuffer_Release(&ring->memory);
    PyErr_SetString(PyExc_ValueError, "the memory has no room for a task, or is not aligned");
    return -1;
}

/* Return the place of a task; numbers are counted from 1. */
static struct place *place_of(const struct ring *ring, uint64_t number)
{
    char *first = (char *)ring->memory.buf + sizeof(struct head);

    return (struct place *)(first + (number - 1) % ring->count * ring->room);
}

/* Return whether a task was put into its place: not if it is too long, or if the place is in use
 * by an older one that nobody has copied yet. */
PyObject *publish_task(PyObject *module, PyObject *arguments)
{
    PyObject *memory;
    Py_ssize_t room;
    unsigned long long number;
    Py_buffer task;
    struct ring ring;
    int done = 0;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnKy*", &memory, &room, &number, &task))
        return NULL;
    if (open_ring(&ring, memory, room, OWNER_MASK) < 0) {
        PyBuffer_Release(&task);
        return NULL;
    }
    if ((uint64_t)task.len <= ring.room - sizeof(struct place)) {
        struct place *place = place_of(&ring, number);
        uint64_t before = __atomic_load_n(&place->word, __ATOMIC_ACQUIRE) >> OWNER_BITS;

        if (before == __atomic_load_n(&place->copied, __ATOMIC_ACQUIRE)) {
            memcpy(place->bytes, task.buf, (size_t)task.len);
            place->size = (uint64_t)task.len;
            /* From here on workers see it. */
            __atomic_store_n(
                &place->word, (uint64_t)number << OWNER_BITS, __ATOMIC_RELEASE);
            done = 1;
        }
    }
    PyBuffer_Release(&ring.memory);
    PyBuffer_Release(&task);
    return PyBool_FromLong(done);
}

/* Find the oldest task that nobody has claimed; return its number, or 0 if there is none. */
static uint64_t find_task(const struct ring *ring, struct place **found)
{
    struct head *head = ring->memory.buf;
    uint64_t number = __atomic_load_n(&head->oldest, __ATOMIC_ACQUIRE);

    /* Not for ever, whatever another process has written there. */
    for (uint64_t step = 0; step <= 2 * ring->count; step++) {
        struct place *place = place_of(ring, ++number);
        uint64_t word = __atomic_load_n(&place->word, __ATOMIC_ACQUIRE);
        uint64_t there = word >> OWNER_BITS;

        if (there < number)
            return 0;
        if (word == number << OWNER_BITS) {
            *found = place;
            return number;
        }
        if (there > number)
            /* The last task in this place has been claimed, and so have all before that one. */
            number = there - ring->count;
    }
    return 0;
}

/* Claim a task, unless another process was faster; return whether it was claimed. */
static int claim(struct place *place, uint64_t number, uint64_t owner)
{
    uint64_t word = number << OWNER_BITS;

    return __atomic_compare_exchange_n(&place->word, &word, word | owner, 0, __ATOMIC_SEQ_CST,
        __ATOMIC_ACQUIRE);
}

/* Claim the oldest task for an owner and return its bytes; None if there is none. */
PyObject *claim_task(PyObject *module, PyObject *arguments)
{
    PyObject *memory, *task = NULL;
    Py_ssize_t room;
    unsigned long owner;
    uint64_t number;
    struct place *place = NULL;
    struct ring ring;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "Onk", &memory, &room, &owner)
        || open_ring(&ring, memory, room, owner) < 0)
        return NULL;
    while (task == NULL && (number = find_task(&ring, &place)) != 0) {
        /* If the claim succeeds, these are this task's. */
        uint64_t size = place->size;
        uint64_t before = __atomic_load_n(&place->copied, __ATOMIC_ACQUIRE);

        if (size > ring.room - sizeof(struct place))
            break;
        /* Before the claim: if there is no memory for it, another worker may have some. */
        task = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
        if (task == NULL)
            break;
        if (claim(place, number, owner)) {
            struct head *head = ring.memory.buf;

            memcpy(PyBytes_AsString(task), place->bytes, (size_t)size);
            /* Not backwards: if the pool has taken this process for dead, it may have freed the
             * place, and a later task may have been copied from there. */
            __atomic_compare_exchange_n(&place->copied, &before, number, 0, __ATOMIC_RELEASE,
                __ATOMIC_RELAXED);
            /* Perhaps less than another process has just written: that costs a longer search. */
            __atomic_store_n(&head->oldest, number, __ATOMIC_RELEASE);
        } else
            Py_CLEAR(task);
    }
    PyBuffer_Release(&ring.memory);
    if (task == NULL && !PyErr_Occurred())
        return Py_NewRef(Py_None);
    return task;
}

/* Claim a certain task for an owner that has its bytes; return False if it was claimed before. */
PyObject *withdraw_task(PyObject *module, PyObject *arguments)
{
    PyObject *memory;
    Py_ssize_t room;
    unsigned long long number;
    unsigned long owner;
    struct ring ring;
    int done;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnKk", &memory, &room, &number, &owner)
        || open_ring(&ring, memory, room, owner) < 0)
        return NULL;
    done = claim(place_of(&ring, number), number, owner);
    if (done)
        __atomic_store_n(&place_of(&ring, number)->copied, (uint64_t)number, __ATOMIC_RELEASE);
    PyBuffer_Release(&ring.memory);
    return PyBool_FromLong(done);
}
