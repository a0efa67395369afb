/* The short way of lease transitions: each is made by one call.
 *
 * This is a Python module, written in the stable interface (PEP 384), so that one
 * library serves every version from 3.11 on.
 *
 * lease_transitions.py explains the transitions, and makes all that this file does not make.
 * This file has only the usual case of each. A method makes the transition completely
 * and returns True, or changes nothing and returns False. It returns False if another
 * process holds the block's lock, if the block has another generation or the slot
 * another message than the caller says, if a killed process has left the chain
 * inconsistent, or if the descriptor for the lock is another file's by now, which
 * locks nothing. Then the caller takes the long way, which also finds the error to
 * raise.
 *
 * A call holds the interpreter lock from beginning to end. So no other thread, signal
 * handler or destructor of this process can run in between, and the kernel's byte lock
 * is needed only against other processes. The byte lock does not keep threads of this
 * process apart, since they lock through the same open file description. So while a
 * thread has locked any block by the long way, which the table of block_locks.py
 * shows, nothing is done here.
 *
 * Stores are made in the same order as in lease_transitions.py and lease_slots.py, for the
 * same reason: a process may be killed between any two.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#include "_tables.h"

#define SHMREDUCE_VERSION 10

#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

typedef struct {
    PyObject_HEAD
    Py_buffer tables;
    PyObject *busy; /* blocks that a thread of this process has locked by the long way */
    uint64_t device, inode; /* of the segment's file */
    uint64_t first_lock; /* the offset of block 0's lock byte */
    uint64_t blocks, slots;
    uint64_t *generations;
    uint64_t *words;
    uint32_t *heads;
    uint32_t *next, *previous; /* links: the number of a slot plus one; 0 ends a chain */
    uint8_t *hints;
} QuickSlots;

static int set_lock(int fd, short kind, uint64_t offset)
{
    struct flock lock;

    memset(&lock, 0, sizeof lock);
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)offset;
    lock.l_len = 1;
    return fcntl(fd, F_OFD_SETLK, &lock);
}

/* Whether a descriptor is the segment's. Other code may have closed it, as daemons close all that
 * they find, and its number may be another file's by now. */
static int is_of_segment(const QuickSlots *self, uint64_t fd)
{
    struct stat status;

    return fd <= INT_MAX && fstat((int)fd, &status) == 0
        && (uint64_t)status.st_dev == self->device && (uint64_t)status.st_ino == self->inode;
}

/* The links of the slots before and after a slot in its block's chain. */
struct links {
    uint32_t following, before;
};

/* Whether the links around a slot are consistent. Each is read only once, since another process
 * may damage them at any instant. */
static int find_links(const QuickSlots *self, uint64_t block, uint64_t slot, struct links *found)
{
    found->following = LOAD(self->next[slot]);
    found->before = LOAD(self->previous[slot]);
    if (found->following > self->slots || found->before > self->slots)
        return 0;
    if (found->before)
        return LOAD(self->next[found->before - 1]) == slot + 1;
    return LOAD(self->heads[block]) == slot + 1;
}

static void unlink_slot(QuickSlots *self, uint64_t block, uint64_t slot, struct links links)
{
    /* As LeaseSlots._unlink: the backward link first, the slot's word last. */
    if (links.following)
        STORE(self->previous[links.following - 1], links.before);
    if (links.before)
        STORE(self->next[links.before - 1], links.following);
    else
        STORE(self->heads[block], links.following);
    STORE(self->words[slot], (uint64_t)0);
    if (!LOAD(self->heads[block]))
        STORE(self->hints[block], (uint8_t)1);
}

/* Read numbers; 0 if one does not fit into 64 bits, so that it names nothing. */
static int read_numbers(PyObject *const *arguments, Py_ssize_t given, uint64_t *numbers, int wanted)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%d numbers are needed, %zd were given", wanted, given);
        return -1;
    }
    for (int place = 0; place < wanted; place++) {
        numbers[place] = PyLong_AsUnsignedLongLong(arguments[place]);
        if (numbers[place] == (uint64_t)-1 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError))
                return -1;
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* The arguments, in their order; a transition takes as many of the first as it needs. */
enum { FD, BLOCK, SLOT, WORD, GENERATION, HOLDER, MOST };

typedef int (*Step)(QuickSlots *self, const uint64_t *of);

static int add_step(QuickSlots *self, const uint64_t *of)
{
    uint32_t head = LOAD(self->heads[of[BLOCK]]), link = (uint32_t)of[SLOT] + 1;

    if (LOAD(self->generations[of[BLOCK]]) != of[GENERATION] || head > self->slots)
        return 0;
    STORE(self->next[of[SLOT]], head);
    STORE(self->previous[of[SLOT]], (uint32_t)0);
    STORE(self->words[of[SLOT]], of[WORD]);
    STORE(self->heads[of[BLOCK]], link);
    if (head)
        STORE(self->previous[head - 1], link);
    return 1;
}

static int claim_alone_step(QuickSlots *self, const uint64_t *of)
{
    if (LOAD(self->generations[of[BLOCK]]) != of[GENERATION]
        || LOAD(self->words[of[SLOT]]) != of[WORD]
        || LOAD(self->heads[of[BLOCK]]) != of[SLOT] + 1 || LOAD(self->next[of[SLOT]]))
        return 0;
    STORE(self->words[of[SLOT]], of[HOLDER]);
    return 1;
}

/* For a shared block, which may have other messages and holders. */
static int claim_shared_step(QuickSlots *self, const uint64_t *of)
{
    if (LOAD(self->generations[of[BLOCK]]) != of[GENERATION]
        || LOAD(self->words[of[SLOT]]) != of[WORD])
        return 0;
    STORE(self->words[of[SLOT]], of[HOLDER]);
    return 1;
}

static int consume_step(QuickSlots *self, const uint64_t *of)
{
    struct links links;

    if (LOAD(self->generations[of[BLOCK]]) != of[GENERATION]
        || LOAD(self->words[of[SLOT]]) != of[WORD]
        || !find_links(self, of[BLOCK], of[SLOT], &links))
        return 0;
    /* As LeaseTransitions._consume: the word stops being a message before the slot leaves the chain. */
    STORE(self->words[of[SLOT]], of[HOLDER]);
    unlink_slot(self, of[BLOCK], of[SLOT], links);
    return 1;
}

static int release_step(QuickSlots *self, const uint64_t *of)
{
    struct links links;

    if (LOAD(self->words[of[SLOT]]) != of[WORD]
        || !find_links(self, of[BLOCK], of[SLOT], &links))
        return 0;
    unlink_slot(self, of[BLOCK], of[SLOT], links);
    return 1;
}

/* Make a step under the block's lock, if the lock is free. */
static PyObject *transition(QuickSlots *self, PyObject *const *arguments, Py_ssize_t given,
    int wanted, Step step)
{
    uint64_t of[MOST];
    int readable = read_numbers(arguments, given, of, wanted), done = 0;

    if (readable < 0)
        return NULL;
    if (readable && PyDict_Size(self->busy) == 0 && of[BLOCK] < self->blocks
        && of[SLOT] < self->slots && is_of_segment(self, of[FD])
        && set_lock((int)of[FD], F_WRLCK, self->first_lock + of[BLOCK]) == 0) {
        done = step(self, of);
        set_lock((int)of[FD], F_UNLCK, self->first_lock + of[BLOCK]);
    }
    return PyBool_FromLong(done);
}

#define TRANSITION(name, wanted) \
    static PyObject *name(QuickSlots *self, PyObject *const *arguments, Py_ssize_t given) \
    { \
        return transition(self, arguments, given, wanted, name##_step); \
    }

/* Link the first message of a block that nobody else can name yet. It needs no lock, see
 * LeaseTransitions.start_message, and so it ignores the locks of others. */
static PyObject *start(QuickSlots *self, PyObject *const *arguments, Py_ssize_t given)
{
    uint64_t of[MOST];
    int readable = read_numbers(arguments, given, of + BLOCK, WORD);

    if (readable < 0)
        return NULL;
    if (!readable || of[BLOCK] >= self->blocks || of[SLOT] >= self->slots
        || LOAD(self->heads[of[BLOCK]]))
        return PyBool_FromLong(0);
    STORE(self->next[of[SLOT]], (uint32_t)0);
    STORE(self->previous[of[SLOT]], (uint32_t)0);
    STORE(self->words[of[SLOT]], of[WORD]);
    STORE(self->heads[of[BLOCK]], (uint32_t)of[SLOT] + 1);
    return PyBool_FromLong(1);
}

TRANSITION(add, GENERATION + 1)
TRANSITION(claim_alone, HOLDER + 1)
TRANSITION(claim_shared, HOLDER + 1)
TRANSITION(consume, HOLDER + 1)
TRANSITION(release, WORD + 1)

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {
        "tables", "busy", "device", "inode", "first_lock", "blocks", "slots",
        "generations", "heads", "hints", "words", "next", "previous", NULL,
    };
    unsigned long long device, inode, first_lock, blocks, slots;
    unsigned long long generations, heads, hints, words, next, previous;
    PyObject *tables, *busy;
    QuickSlots *self;
    uint8_t *start;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!KKKKKKKKKKK", names, &tables,
            &PyDict_Type, &busy, &device, &inode, &first_lock, &blocks, &slots, &generations,
            &heads, &hints, &words, &next, &previous))
        return NULL;
    self = (QuickSlots *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(tables, &self->tables, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    start = self->tables.buf;
    /* A link of 32 bits has the slot's number plus one. */
    if (blocks > UINT32_MAX || slots >= UINT32_MAX
        || !fits(&self->tables, generations, 8, blocks) || !fits(&self->tables, heads, 4, blocks)
        || !fits(&self->tables, hints, 1, blocks) || !fits(&self->tables, words, 8, slots)
        || !fits(&self->tables, next, 4, slots) || !fits(&self->tables, previous, 4, slots)) {
        Py_DECREF(self);
        return refuse_tables();
    }
    self->busy = Py_NewRef(busy);
    self->device = device;
    self->inode = inode;
    self->first_lock = first_lock;
    self->blocks = blocks;
    self->slots = slots;
    self->generations = (uint64_t *)(start + generations);
    self->heads = (uint32_t *)(start + heads);
    self->hints = start + hints;
    self->words = (uint64_t *)(start + words);
    self->next = (uint32_t *)(start + next);
    self->previous = (uint32_t *)(start + previous);
    return (PyObject *)self;
}

static void dealloc(QuickSlots *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);

    if (self->tables.obj != NULL)
        PyBuffer_Release(&self->tables);
    Py_XDECREF(self->busy);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, text}

static PyMethodDef methods[] = {
    METHOD("add", add, "add(fd, block, slot, word, generation): link a message."),
    METHOD("start", start, "start(block, slot, word): link a new block's first message."),
    METHOD("claim_alone", claim_alone,
        "claim_alone(fd, block, slot, word, generation, holder): make a hold of the one message."),
    METHOD("claim_shared", claim_shared,
        "claim_shared(fd, block, slot, word, generation, holder): make a hold of a message."),
    METHOD("consume", consume,
        "consume(fd, block, slot, word, generation, holder): end a message."),
    METHOD("release", release, "release(fd, block, slot, word): end a hold."),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "The lease slots of one segment."},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "shmreduce.memory._quick_slots.QuickSlots",
    .basicsize = sizeof(QuickSlots),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);

    if (type == NULL)
        return -1;
    if (PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_DECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return PyModule_AddIntConstant(module, "VERSION", SHMREDUCE_VERSION);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_quick_slots",
    .m_doc = "Transitions of a block's lease slots, each made by one call.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__quick_slots(void)
{
    return PyModuleDef_Init(&module);
}
