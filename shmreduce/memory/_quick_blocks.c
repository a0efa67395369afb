/* What a message costs in blocks: to take one, to give it out, to take it over, to end it.
 *
 * A module of Python, written in its stable interface (PEP 384), so that one
 * library serves every version from 3.11 on.
 *
 * Each function does the usual case of a function in Python, which says what it
 * means and does every other: it does all of it, or it changes nothing and returns
 * None or False, for whatever reason. The objects are Python's, too: what is here
 * reads and writes their attributes and tables as that function would.
 *
 * A call holds the interpreter's lock from its beginning to its end, and runs no
 * code in Python from the moment when it looks at what it is going to change: new
 * objects that the garbage collector knows of are made before that, since before
 * CPython 3.12 each of them may set it off. So no other thread, signal handler or
 * destructor comes in between, and what the functions in Python do to be safe from
 * those is not needed. Where a call in the middle fails for want of memory, it is
 * undone what was done.
 *
 * Transitions of lease slots are those of _quick_slots.c, called as methods of the
 * segment's object: where there is none, or it declines, so does what is here.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>
#include <time.h>

#define SHMREDUCE_VERSION 4

/* Names of attributes and methods. */
#define NAMES(_) \
    _(_birth) _(_block) _(_claims) _(_died) _(_heap) _(_known) _(_live) _(_nbytes) \
    _(_prune_at) _(_quick) _(_read_only) _(_record) _(_root) _(_roots) _(_segment) \
    _(_shared) _(add) _(address) _(birth) _(block) _(block_tables) _(boot) _(claim_alone) \
    _(consume) _(current) _(cutting) _(data) _(death) _(directory) _(end) _(ended) \
    _(filling) _(fillings) _(forks) _(generation) _(heap) _(identity) _(import_mapping) \
    _(in_place) _(key) _(last_used) _(ledger) _(live) _(lock_fd) _(mapping) _(mode) \
    _(nbytes) _(nonce) _(offset) _(on_unused) _(owner) _(pages) _(pending) _(private) \
    _(prune) _(read_only) _(record) _(release) _(root) _(segment) _(segments) _(shared) \
    _(slot) _(start) _(token) _(unclaim) _(unused) _(warm) _(written)

#define AS_MEMBER(name) PyObject *name;
#define AS_TEXT(name) #name,
static const char *const texts[] = {NAMES(AS_TEXT)};
enum { NAMES_COUNT = sizeof texts / sizeof texts[0] };

/* What else is needed: the classes, in the order in which they are given, then the rest. */
enum {
    BLOCK, FILLING, LEASE, RECORD, ROOT_REFERENCE, SENT, GIVEN,
    COUNT_REFERENCES = GIVEN, ROOT, TABLES, ROOT_DIED, NOTHING, READ_WRITE, READ_ONLY, HELD,
};

typedef struct {
    union {
        struct {
            NAMES(AS_MEMBER)
        };
        PyObject *each[NAMES_COUNT];
    } names;
    PyObject *held[HELD];
    uint64_t page_size;
    Py_ssize_t few;
    long unshared; /* what is said of the references to a root that its filling alone has */
} State;

#define NAME(name) (state->names.name)

static void drop(PyObject **object)
{
    Py_XDECREF(*object);
}

/* A reference that ends with its variable; the last that was declared goes first. */
#define OWNED __attribute__((cleanup(drop)))

/* Others read and write the same memory. */
#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)

/* The object at the bottom of all views of a block; see make_root() of mapping.py. */

typedef struct {
    PyObject_HEAD
    PyObject *references;
    Py_buffer pages;
    char *start;
    Py_ssize_t size;
} Root;

static int root_buffer(PyObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, self, ((Root *)self)->start, ((Root *)self)->size, 0, flags);
}

static void root_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    /* First: whoever is told may look at the memory. */
    if (((Root *)self)->references != NULL)
        PyObject_ClearWeakRefs(self);
    if (((Root *)self)->pages.obj != NULL)
        PyBuffer_Release(&((Root *)self)->pages);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef root_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Root, references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot root_slots[] = {
    {Py_tp_dealloc, root_dealloc},
    {Py_tp_members, root_members},
    {Py_bf_getbuffer, root_buffer},
    {Py_tp_doc, "The object at the bottom of all views of a block."},
    {0, NULL},
};

/* The garbage collector does not know of it: it would tell of its death, in a cycle,
 * while finalizers may still use the views. */
static PyType_Spec root_spec = {
    .name = "shmreduce.memory._quick_blocks.Root",
    .basicsize = sizeof(Root),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = root_slots,
};

static PyObject *new_root(State *state, PyObject *pages, uint64_t offset, uint64_t size)
{
    PyTypeObject *type = (PyTypeObject *)state->held[ROOT];
    Root *made = (Root *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);

    if (made == NULL)
        return NULL;
    if (PyObject_GetBuffer(pages, &made->pages, PyBUF_WRITABLE) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    if (offset > (uint64_t)made->pages.len || size > (uint64_t)made->pages.len - offset) {
        Py_DECREF(made);
        PyErr_SetString(PyExc_ValueError, "the pages have no room for so many bytes");
        return NULL;
    }
    made->start = (char *)made->pages.buf + offset;
    made->size = (Py_ssize_t)size;
    return (PyObject *)made;
}

/* The tables of a segment that say where its blocks are, and what this process has of them. */

typedef struct {
    PyObject_HEAD
    Py_buffer tables;
    uint64_t blocks, slots, size, data_offset;
    int shared;
    uint64_t *generations, *offsets, *capacities, *words;
    uint32_t *heads;
    uint8_t *hints;
    /* The segment's attributes of these names, which stay the same. */
    PyObject *importer, *holds, *passing, *pins, *outbox, *records, *slots_left, *listed;
    PyObject *out, *small; /* of one that this process has made */
    PyObject *rest; /* of the handles that this process makes for a block */
} Tables;

static PyObject *tables_make(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {
        "tables", "shared", "size", "data_offset", "blocks", "slots", "generations", "offsets",
        "capacities", "words", "heads", "hints", "importer", "holds", "passing", "pins", "outbox",
        "records", "free_slots", "listed", NULL,
    };
    unsigned long long size, data_offset, blocks, slots;
    unsigned long long generations, offsets, capacities, words, heads, hints;
    PyObject *tables, *importer, *holds, *passing, *pins, *outbox, *records, *slots_left, *listed;
    int shared;
    Tables *self;
    uint8_t *start;
    uint64_t room;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OpKKKKKKKKKKO!O!O!O!O!O!O!O!", names,
            &tables, &shared, &size, &data_offset, &blocks, &slots, &generations, &offsets, &capacities,
            &words, &heads, &hints, &PyLong_Type, &importer, &PyDict_Type, &holds, &PyDict_Type,
            &passing, &PyDict_Type, &pins, &PyDict_Type, &outbox, &PyDict_Type, &records,
            &PyList_Type, &slots_left, &PyDict_Type, &listed))
        return NULL;
    self = (Tables *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(tables, &self->tables, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    start = self->tables.buf;
    room = (uint64_t)self->tables.len;
    /* Numbers of 32 bits; so nothing below overflows. */
    if (blocks > UINT32_MAX || slots > UINT32_MAX || generations > room || offsets > room
        || capacities > room || words > room || heads > room || hints > room
        || generations + 8 * blocks > room || offsets + 8 * blocks > room
        || capacities + 8 * blocks > room || words + 8 * slots > room
        || heads + 4 * blocks > room || hints + blocks > room
        || ((uintptr_t)start | generations | offsets | capacities | words) % 8 || heads % 4) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "the tables have no room for so many blocks and slots");
        return NULL;
    }
    self->shared = shared;
    self->size = size;
    self->data_offset = data_offset;
    self->blocks = blocks;
    self->slots = slots;
    self->generations = (uint64_t *)(start + generations);
    self->offsets = (uint64_t *)(start + offsets);
    self->capacities = (uint64_t *)(start + capacities);
    self->words = (uint64_t *)(start + words);
    self->heads = (uint32_t *)(start + heads);
    self->hints = start + hints;
    self->importer = Py_NewRef(importer);
    self->holds = Py_NewRef(holds);
    self->passing = Py_NewRef(passing);
    self->pins = Py_NewRef(pins);
    self->outbox = Py_NewRef(outbox);
    self->records = Py_NewRef(records);
    self->slots_left = Py_NewRef(slots_left);
    self->listed = Py_NewRef(listed);
    return (PyObject *)self;
}

static const size_t members[] = {
    offsetof(Tables, importer), offsetof(Tables, holds), offsetof(Tables, passing),
    offsetof(Tables, pins), offsetof(Tables, outbox), offsetof(Tables, records),
    offsetof(Tables, slots_left), offsetof(Tables, listed), offsetof(Tables, out),
    offsetof(Tables, small), offsetof(Tables, rest),
};

static void tables_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    if (((Tables *)self)->tables.obj != NULL)
        PyBuffer_Release(&((Tables *)self)->tables);
    for (size_t place = 0; place < sizeof members / sizeof members[0]; place++)
        Py_XDECREF(*(PyObject **)((char *)self + members[place]));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef tables_members[] = {
    {"out", T_OBJECT, offsetof(Tables, out), 0, NULL},
    {"small", T_OBJECT, offsetof(Tables, small), 0, NULL},
    {"rest", T_OBJECT, offsetof(Tables, rest), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot tables_slots[] = {
    {Py_tp_new, tables_make},
    {Py_tp_dealloc, tables_dealloc},
    {Py_tp_members, tables_members},
    {Py_tp_doc, "The tables of a segment's blocks."},
    {0, NULL},
};

static PyType_Spec tables_spec = {
    .name = "shmreduce.memory._quick_blocks.BlockTables",
    .basicsize = sizeof(Tables),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tables_slots,
};

/* Return the tables of a segment; NULL if it has none, with an error only if that was one. */
static Tables *tables_of(State *state, PyObject *segment)
{
    PyObject *found = PyObject_GetAttr(segment, NAME(block_tables));

    if (found != NULL && !Py_IS_TYPE(found, (PyTypeObject *)state->held[TABLES])) {
        Py_DECREF(found);
        return NULL;
    }
    return (Tables *)found;
}

/* Handles, as handle.py has them. */

static const char mark[] = "shmreduce\0hdl\x02\n";
enum {
    FROM_CHECKSUM = sizeof mark - 1,
    FROM_LEASE = FROM_CHECKSUM + 4,
    FROM_KEY = FROM_LEASE + 4 + 8,
    FROM_REST = FROM_KEY + 16 + 4 + 8,
    FROM_NBYTES = FROM_REST + 16,
    FROM_SHARED = FROM_NBYTES + 8 + 4,
    SHORTEST = FROM_SHARED + 1 + 1 + 2 + 2,
    MODES = 2, /* of three: a cow block is mapped anew each time */
};

static uint32_t checksums[256];

static uint32_t checksum(const uint8_t *data, size_t size)
{
    uint32_t sum = UINT32_MAX;

    for (size_t place = 0; place < size; place++)
        sum = checksums[(sum ^ data[place]) & 0xFF] ^ (sum >> 8);
    return ~sum;
}

static void fill_checksums(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;

        for (int bit = 0; bit < 8; bit++)
            sum = sum & 1 ? 0xEDB88320u ^ (sum >> 1) : sum >> 1;
        checksums[byte] = sum;
    }
}

static uint64_t get_number(const uint8_t *data, int size)
{
    uint64_t number = 0;

    for (int place = size - 1; place >= 0; place--)
        number = number << 8 | data[place];
    return number;
}

static void put_number(uint8_t *data, int size, uint64_t number)
{
    for (int place = 0; place < size; place++, number >>= 8)
        data[place] = (uint8_t)number;
}

typedef struct {
    const uint8_t *data;
    uint64_t slot, nonce, block, generation, nbytes;
    int shared, mode;
} Handle;

/* Whether an object is a handle of the usual kinds, as it was packed. */
static int read_handle(PyObject *given, Handle *found)
{
    char *text;
    Py_ssize_t size;
    const uint8_t *data;

    if (!PyBytes_CheckExact(given))
        return 0;
    if (PyBytes_AsStringAndSize(given, &text, &size) < 0)
        return 0;
    data = (const uint8_t *)text;
    if (size < SHORTEST || memcmp(data, mark, FROM_CHECKSUM) != 0
        || get_number(data + FROM_CHECKSUM, 4)
            != checksum(data + FROM_LEASE, (size_t)size - FROM_LEASE))
        return 0;
    found->data = data;
    found->slot = get_number(data + FROM_LEASE, 4);
    found->nonce = get_number(data + FROM_LEASE + 4, 8);
    found->block = get_number(data + FROM_KEY + 16, 4);
    found->generation = get_number(data + FROM_KEY + 16 + 4, 8);
    found->nbytes = get_number(data + FROM_NBYTES, 8);
    found->shared = data[FROM_SHARED] != 0;
    found->mode = data[FROM_SHARED + 1];
    return found->mode < MODES && found->nonce < (uint64_t)1 << 62
        && (uint64_t)size
            == SHORTEST + get_number(data + SHORTEST - 4, 2) + get_number(data + SHORTEST - 2, 2);
}

/* Return a handle: of a lease, and what is the same in all of its block's. */
static PyObject *make_handle(uint64_t slot, uint64_t nonce, const uint8_t *constant, size_t size)
{
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(FROM_KEY + size));
    uint8_t *data;

    if (made == NULL)
        return NULL;
    data = (uint8_t *)PyBytes_AsString(made);
    memcpy(data, mark, FROM_CHECKSUM);
    put_number(data + FROM_LEASE, 4, slot);
    put_number(data + FROM_LEASE + 4, 8, nonce);
    memcpy(data + FROM_KEY, constant, size);
    put_number(data + FROM_CHECKSUM, 4, checksum(data + FROM_LEASE, FROM_KEY - FROM_LEASE + size));
    return made;
}

static uint64_t message_word(uint64_t nonce)
{
    return (uint64_t)1 << 62 | nonce;
}

/* Small steps. Those that return int say 1 for yes, 0 for no and -1 for an error. */

static PyObject *new_object(State *state, PyObject *type)
{
    newfunc make = (newfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_new);

    return make((PyTypeObject *)type, state->held[NOTHING], NULL);
}

typedef struct {
    PyObject *name, *value;
} Field;

/* Set attributes. A value of NULL is that of a call that has failed. */
static int set_fields(PyObject *object, const Field *fields, size_t count)
{
    for (size_t place = 0; place < count; place++)
        if (fields[place].value == NULL
            || PyObject_SetAttr(object, fields[place].name, fields[place].value) < 0)
            return -1;
    return 0;
}

#define SET_FIELDS(object, fields) set_fields(object, fields, sizeof fields / sizeof fields[0])

static int get_u64(PyObject *object, PyObject *name, uint64_t *number)
{
    OWNED PyObject *found = PyObject_GetAttr(object, name);

    if (found == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(found);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether an attribute is this very object. */
static int is_field(PyObject *object, PyObject *name, PyObject *wanted)
{
    OWNED PyObject *found = PyObject_GetAttr(object, name);

    return found == NULL ? -1 : found == wanted;
}

/* Whether a table has this very object under a key. */
static int has_item(PyObject *table, PyObject *key, PyObject *wanted)
{
    PyObject *found = PyDict_GetItemWithError(table, key);

    return found == NULL && PyErr_Occurred() ? -1 : found == wanted;
}

/* Take an entry out of a table, if it is there. */
static int take_out(PyObject *table, PyObject *key)
{
    int there = PyDict_Contains(table, key);

    return there > 0 ? PyDict_DelItem(table, key) : there;
}

static int is_true(PyObject *found)
{
    int answer = found == NULL ? -1 : found == Py_True;

    Py_XDECREF(found);
    return answer;
}

/* Return how many forks there were; NULL if another is about to happen, or this is the
 * table of a parent. */
static PyObject *forks_so_far(State *state, PyObject *live)
{
    OWNED PyObject *ledger = NULL, *pending = NULL;
    int current = is_field(live, NAME(current), Py_True);

    if (current <= 0)
        return NULL;
    ledger = PyObject_GetAttr(live, NAME(ledger));
    pending = ledger == NULL ? NULL : PyObject_GetAttr(ledger, NAME(pending));
    if (pending == NULL || PyDict_Size(pending) != 0)
        return NULL;
    return PyObject_GetAttr(ledger, NAME(forks));
}

/* Whether that is still the same number; objects may have been made since. */
static int is_unforked(State *state, PyObject *live, PyObject *forks)
{
    OWNED PyObject *now = forks_so_far(state, live);

    if (now == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return PyObject_RichCompareBool(now, forks, Py_EQ);
}

static double seconds_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Take the last item off a list. */
static int pop_last(PyObject *list)
{
    Py_ssize_t size = PyList_Size(list);

    return PyList_SetSlice(list, size - 1, size, NULL);
}

/* Return the last of the slots that are free and this process's to take, which it keeps;
 * NULL where one has to be looked for. */
static PyObject *peek_slot(Tables *tables, uint64_t *number)
{
    for (;;) {
        Py_ssize_t size = PyList_Size(tables->slots_left);
        OWNED PyObject *slot = NULL;

        if (size <= 0)
            return NULL;
        slot = Py_NewRef(PyList_GetItem(tables->slots_left, size - 1));
        *number = PyLong_AsUnsignedLongLong(slot);
        if ((*number == (uint64_t)-1 && PyErr_Occurred()) || *number >= tables->slots)
            return NULL;
        if (!LOAD(tables->words[*number]))
            return Py_NewRef(slot);
        if (pop_last(tables->slots_left) < 0 || take_out(tables->listed, slot) < 0)
            return NULL;
    }
}

/* Take the slot off the list that peek_slot() has found there. */
static int take_slot(Tables *tables, PyObject *slot)
{
    return pop_last(tables->slots_left) < 0 ? -1 : take_out(tables->listed, slot);
}

/* Whether peek_slot() would find the same slot again. */
static int is_last_slot(Tables *tables, PyObject *slot, uint64_t number)
{
    Py_ssize_t size = PyList_Size(tables->slots_left);

    return size > 0 && PyList_GetItem(tables->slots_left, size - 1) == slot
        && !LOAD(tables->words[number]);
}

/* Receiving: import_block() of loading.py. */

static PyObject *new_block(State *state, PyObject *record, PyObject *root, PyObject *read_only)
{
    OWNED PyObject *block = new_object(state, state->held[BLOCK]);
    OWNED PyObject *nbytes = PyObject_GetAttr(record, NAME(nbytes));
    OWNED PyObject *mode = PyObject_GetAttr(record, NAME(mode));
    OWNED PyObject *shared = PyObject_GetAttr(record, NAME(shared));
    OWNED PyObject *address = PyObject_GetAttr(record, NAME(address));
    const Field fields[] = {
        {NAME(_record), record}, {NAME(_root), root}, {NAME(_read_only), read_only},
        {NAME(nbytes), nbytes}, {NAME(mode), mode}, {NAME(shared), shared},
        {NAME(address), address},
    };

    if (block == NULL || SET_FIELDS(block, fields) < 0)
        return NULL;
    return Py_NewRef(block);
}

/* Return a shared block that is alive here already, as find_shared() of blocks.py does, and
 * note that its message ends with the load. `other` says that there may be one all the same. */
static PyObject *find_shared(State *state, const Handle *what, PyObject *key, PyObject *live,
    PyObject *loading, int *other)
{
    OWNED PyObject *shared = PyObject_GetAttr(live, NAME(_shared));
    OWNED PyObject *reference = NULL, *root = NULL, *record = NULL, *block = NULL, *mode = NULL;
    OWNED PyObject *known = NULL, *slot = NULL, *nonce = NULL, *entry = NULL;
    PyObject *read_only;
    int ended, marked;

    *other = 1;
    if (shared == NULL)
        return NULL;
    reference = Py_XNewRef(PyDict_GetItemWithError(shared, key));
    if (reference == NULL) {
        *other = PyErr_Occurred() != NULL;
        return NULL;
    }
    root = PyObject_CallNoArgs(reference);
    if (root == NULL || root == Py_None || loading == Py_None)
        return NULL;
    record = PyObject_GetAttr(reference, NAME(record));
    ended = record == NULL ? -1 : is_field(record, NAME(ended), Py_True);
    marked = ended ? -1 : is_field(record, NAME(read_only), Py_True);
    mode = marked < 0 ? NULL : PyObject_GetAttr(record, NAME(mode));
    if (mode == NULL)
        return NULL;
    read_only = marked || mode == state->held[READ_ONLY] ? Py_True : Py_False;
    block = new_block(state, record, root, read_only);
    known = PyObject_GetAttr(loading, NAME(_known));
    slot = PyLong_FromUnsignedLongLong(what->slot);
    nonce = PyLong_FromUnsignedLongLong(what->nonce);
    if (block == NULL || known == NULL || slot == NULL || nonce == NULL)
        return NULL;
    entry = PyTuple_Pack(3, block, slot, nonce);
    if (entry == NULL || PyList_Append(known, entry) < 0)
        return NULL;
    return Py_NewRef(block);
}

/* Where a block is, for who takes it over. */
typedef struct {
    PyObject *segment, *mapping, *slot, *number, *generation;
    uint64_t address;
} Place;

static PyObject *new_record(State *state, const Handle *what, const Place *place, PyObject *live,
    PyObject *forks, PyObject *key)
{
    OWNED PyObject *record = new_object(state, state->held[RECORD]);
    OWNED PyObject *nbytes = PyLong_FromUnsignedLongLong(what->nbytes);
    OWNED PyObject *address = PyLong_FromUnsignedLongLong(place->address);
    OWNED PyObject *cutting = PyDict_New();
    const Field fields[] = {
        {NAME(live), live}, {NAME(segment), place->segment}, {NAME(block), place->number},
        {NAME(generation), place->generation}, {NAME(nbytes), nbytes},
        {NAME(mapping), place->mapping}, {NAME(address), address},
        {NAME(shared), what->shared ? Py_True : Py_False},
        {NAME(mode), state->held[READ_WRITE + what->mode]}, {NAME(slot), place->slot},
        {NAME(heap), Py_None}, {NAME(private), Py_False},
        {NAME(read_only), what->mode ? Py_True : Py_False}, {NAME(in_place), Py_False},
        {NAME(ended), Py_False}, {NAME(cutting), cutting}, {NAME(birth), forks},
        {NAME(death), forks}, {NAME(written), Py_None}, {NAME(key), key},
    };

    if (record == NULL || SET_FIELDS(record, fields) < 0)
        return NULL;
    return Py_NewRef(record);
}

/* Return a reference to a root that ends the record's hold when the root dies. */
static PyObject *new_reference(State *state, PyObject *root, PyObject *record, PyObject *identity)
{
    OWNED PyObject *made = PyObject_CallFunctionObjArgs(
        state->held[ROOT_REFERENCE], root, state->held[ROOT_DIED], NULL);
    const Field fields[] = {{NAME(record), record}, {NAME(identity), identity}};

    if (made == NULL || SET_FIELDS(made, fields) < 0)
        return NULL;
    return Py_NewRef(made);
}

/* Make a message a hold, if that is done in one step. */
static int claim(State *state, const Handle *what, const Place *place, Tables *tables)
{
    OWNED PyObject *quick = PyObject_GetAttr(place->segment, NAME(_quick));
    OWNED PyObject *fd = PyObject_GetAttr(place->segment, NAME(lock_fd));
    OWNED PyObject *word = PyLong_FromUnsignedLongLong(message_word(what->nonce));

    if (quick == NULL || fd == NULL || word == NULL)
        return -1;
    return is_true(PyObject_CallMethodObjArgs(quick, NAME(claim_alone), fd, place->number,
        place->slot, word, place->generation, tables->importer, NULL));
}

/* Undo a claim that could not be noted. */
static PyObject *unclaim(State *state, const Handle *what, const Place *place, PyObject *holds,
    PyObject *roots, PyObject *identity, PyObject *shared, PyObject *key)
{
    PyObject *kind, *value, *trace;
    OWNED PyObject *nonce = NULL, *done = NULL;

    PyErr_Fetch(&kind, &value, &trace);
    if (take_out(holds, place->slot) < 0 || take_out(roots, identity) < 0
        || (what->shared && take_out(shared, key) < 0))
        PyErr_Clear();
    nonce = PyLong_FromUnsignedLongLong(what->nonce);
    if (nonce != NULL)
        done = PyObject_CallMethodObjArgs(place->segment, NAME(unclaim), place->number,
            place->slot, nonce, place->slot, NULL);
    PyErr_Clear();
    PyErr_Restore(kind, value, trace);
    return NULL;
}

static PyObject *take_over(State *state, PyObject *handle, const Handle *what, Tables *tables,
    Place *place, PyObject *live, PyObject *directory, PyObject *token, PyObject *loading,
    PyObject *key)
{
    uint64_t offset, capacity, from, address;
    OWNED PyObject *mapping = PyObject_GetAttr(place->segment, NAME(import_mapping));
    OWNED PyObject *pages = NULL, *roots = NULL, *shared = NULL, *claims = NULL;
    OWNED PyObject *number = NULL, *generation = NULL, *slot = NULL, *forks = NULL;
    OWNED PyObject *identity = NULL, *entry = NULL, *record = NULL, *root = NULL;
    OWNED PyObject *reference = NULL, *block = NULL;
    int there;

    if (mapping == NULL || mapping == Py_None)
        return NULL;
    pages = PyObject_GetAttr(mapping, NAME(pages));
    if (pages == NULL || get_u64(mapping, NAME(offset), &from) < 0
        || get_u64(mapping, NAME(address), &address) < 0)
        return NULL;
    offset = LOAD(tables->offsets[what->block]);
    capacity = LOAD(tables->capacities[what->block]);
    /* Of a block with a message they stay the same; there is one if it is claimed below. */
    if (offset < tables->data_offset || offset < from || offset > tables->size
        || capacity > tables->size - offset || what->nbytes > capacity)
        return NULL;
    place->mapping = mapping;
    place->address = address + offset - from;
    place->number = number = PyLong_FromUnsignedLongLong(what->block);
    place->generation = generation = PyLong_FromUnsignedLongLong(what->generation);
    place->slot = slot = PyLong_FromUnsignedLongLong(what->slot);
    roots = PyObject_GetAttr(live, NAME(_roots));
    shared = PyObject_GetAttr(live, NAME(_shared));
    claims = loading == Py_None ? Py_NewRef(loading) : PyObject_GetAttr(loading, NAME(_claims));
    if (!number || !generation || !slot || !roots || !shared || !claims)
        return NULL;
    forks = forks_so_far(state, live);
    if (forks == NULL)
        return NULL;
    root = new_root(state, pages, offset - from, capacity);
    identity = root == NULL ? NULL : PyLong_FromVoidPtr(root);
    record = identity == NULL ? NULL : new_record(state, what, place, live, forks, key);
    block = record == NULL ? NULL
        : new_block(state, record, root, what->mode ? Py_True : Py_False);
    entry = block == NULL ? NULL : PyTuple_Pack(2, block, handle);
    reference = entry == NULL ? NULL : new_reference(state, root, record, identity);
    if (reference == NULL)
        return NULL;
    /* From here on nothing is made that the garbage collector knows of. */
    there = has_item(directory, token, place->segment);
    if (there > 0)
        there = is_unforked(state, live, forks);
    if (there > 0)
        there = claim(state, what, place, tables);
    if (there <= 0) {
        /* It must not tell of the death of this root. */
        Py_CLEAR(reference);
        return NULL;
    }
    if (PyDict_SetItem(tables->holds, slot, record) < 0
        || PyDict_SetItem(roots, identity, reference) < 0
        || (what->shared && PyDict_SetItem(shared, key, reference) < 0)
        || (claims != Py_None && PyList_Append(claims, entry) < 0)) {
        unclaim(state, what, place, tables->holds, roots, identity, shared, key);
        Py_CLEAR(reference);
        return NULL;
    }
    return Py_NewRef(block);
}

static PyObject *find_or_take_over(State *state, PyObject *handle, PyObject *live,
    PyObject *attachments, PyObject *loading)
{
    OWNED PyObject *boot = NULL, *directory = NULL, *token = NULL, *segment = NULL, *key = NULL;
    OWNED PyObject *known = NULL, *tables = NULL;
    Place place = {0};
    Handle what;
    int owner, other;

    if (!read_handle(handle, &what))
        return NULL;
    boot = PyObject_GetAttr(attachments, NAME(boot));
    directory = PyObject_GetAttr(attachments, NAME(directory));
    token = PyBytes_FromStringAndSize((const char *)what.data + FROM_KEY, 16);
    if (boot == NULL || directory == NULL || token == NULL)
        return NULL;
    if (PyBytes_Size(boot) != 16 || memcmp(PyBytes_AsString(boot), what.data + FROM_REST, 16) != 0)
        return NULL;
    if (what.shared) {
        key = PyBytes_FromStringAndSize((const char *)what.data + FROM_KEY, FROM_REST - FROM_KEY);
        if (key == NULL)
            return NULL;
        known = find_shared(state, &what, key, live, loading, &other);
        if (known != NULL || other)
            return Py_XNewRef(known);
    } else
        key = Py_NewRef(Py_None);
    segment = Py_XNewRef(PyDict_GetItemWithError(directory, token));
    tables = segment == NULL ? NULL : (PyObject *)tables_of(state, segment);
    if (tables == NULL || ((Tables *)tables)->shared != what.shared
        || what.block >= ((Tables *)tables)->blocks || what.slot >= ((Tables *)tables)->slots)
        return NULL;
    if (!what.shared && PyDict_Size(directory) > state->few) {
        /* It may be one too many. */
        owner = is_field(segment, NAME(owner), Py_True);
        if (owner <= 0)
            return NULL;
    }
    place.segment = segment;
    return take_over(state, handle, &what, (Tables *)tables, &place, live, directory, token,
        loading, key);
}

/* None for what was declined. */
static PyObject *answer(PyObject *found)
{
    return found == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : found;
}

/* Whether the classes are known whose objects are made. */
static int is_configured(PyObject *module)
{
    return ((State *)PyModule_GetState(module))->held[BLOCK] != NULL;
}

static int takes(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, %zd were given", wanted, given);
    return 0;
}

static PyObject *import_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 4))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(
        find_or_take_over(PyModule_GetState(module), given[0], given[1], given[2], given[3]));
}

/* Ending: LiveBlocks._died() of blocks.py. */

/* `left` gets another process's segment of which nothing is held here any more. */
static int end_quickly(State *state, PyObject *reference, PyObject *record, PyObject *live,
    PyObject **left)
{
    OWNED PyObject *slot = PyObject_GetAttr(record, NAME(slot));
    OWNED PyObject *ledger = PyObject_GetAttr(live, NAME(ledger));
    OWNED PyObject *forks = NULL, *birth = NULL, *segment = NULL, *quick = NULL, *fd = NULL;
    OWNED PyObject *number = NULL, *roots = NULL, *identity = NULL, *key = NULL, *shared = NULL;
    OWNED PyObject *tables = NULL;
    Tables *its;
    int ended, in_place, same, owner;

    if (slot == NULL || ledger == NULL)
        return -1;
    if (slot == Py_None)
        return 0;
    ended = is_field(record, NAME(ended), Py_False);
    in_place = ended <= 0 ? ended : is_field(record, NAME(in_place), Py_False);
    if (in_place <= 0)
        return in_place;
    forks = PyObject_GetAttr(ledger, NAME(forks));
    birth = forks == NULL ? NULL : PyObject_GetAttr(record, NAME(birth));
    same = birth == NULL ? -1 : PyObject_RichCompareBool(birth, forks, Py_EQ);
    if (same <= 0)
        return same;
    segment = PyObject_GetAttr(record, NAME(segment));
    tables = segment == NULL ? NULL : (PyObject *)tables_of(state, segment);
    if (tables == NULL)
        return PyErr_Occurred() ? -1 : 0;
    its = (Tables *)tables;
    quick = PyObject_GetAttr(segment, NAME(_quick));
    fd = quick == NULL ? NULL : PyObject_GetAttr(segment, NAME(lock_fd));
    number = fd == NULL ? NULL : PyObject_GetAttr(record, NAME(block));
    key = number == NULL ? NULL : PyObject_GetAttr(record, NAME(key));
    identity = key == NULL ? NULL : PyObject_GetAttr(reference, NAME(identity));
    roots = identity == NULL ? NULL : PyObject_GetAttr(live, NAME(_roots));
    shared = roots == NULL ? NULL : PyObject_GetAttr(live, NAME(_shared));
    owner = shared == NULL ? -1 : is_field(segment, NAME(owner), Py_True);
    if (owner < 0)
        return -1;
    same = is_true(PyObject_CallMethodObjArgs(
        quick, NAME(release), fd, number, slot, its->importer, NULL));
    if (same <= 0)
        return same;
    /* Nothing below asks for memory. */
    if (PyObject_SetAttr(record, NAME(ended), Py_True) < 0
        || PyObject_SetAttr(record, NAME(death), forks) < 0)
        return -1;
    if (has_item(roots, identity, reference) > 0 && PyDict_DelItem(roots, identity) < 0)
        return -1;
    if (key != Py_None && has_item(shared, key, reference) > 0 && PyDict_DelItem(shared, key) < 0)
        return -1;
    if (has_item(its->holds, slot, record) > 0
        && (PyDict_DelItem(its->holds, slot) < 0 || take_out(its->passing, slot) < 0))
        return -1;
    if (PyErr_Occurred())
        return -1;
    if (!owner && PyDict_Size(its->holds) == 0)
        *left = Py_NewRef(segment);
    return 1;
}

/* What a reference to a root calls when the root has died. */
static PyObject *root_died(PyObject *module, PyObject *reference)
{
    State *state = PyModule_GetState(module);
    OWNED PyObject *record = PyObject_GetAttr(reference, NAME(record));
    OWNED PyObject *live = record == NULL ? NULL : PyObject_GetAttr(record, NAME(live));
    OWNED PyObject *left = NULL;
    int current = live == NULL ? -1 : is_field(live, NAME(current), Py_True);

    if (current < 0)
        return NULL;
    if (!current)
        return Py_NewRef(Py_None);
    if (end_quickly(state, reference, record, live, &left) <= 0) {
        /* For want of memory, perhaps: there it is put off. */
        PyErr_Clear();
        return PyObject_CallMethodObjArgs(live, NAME(_died), reference, NULL);
    }
    if (left != NULL)
        return PyObject_CallMethodObjArgs(live, NAME(on_unused), left, NULL);
    return Py_NewRef(Py_None);
}

/* Sending: Message.allocate() and Message.refer() of message.py. */

/* Free a block of which somebody has let go, as try_free() of owned_segment.py does for a
 * block by value, and put it where take_block() looks. */
static int free_block(PyObject *warm, PyObject *segment, Tables *tables,
    uint64_t block)
{
    OWNED PyObject *number = PyLong_FromUnsignedLongLong(block);
    OWNED PyObject *size = PyLong_FromUnsignedLongLong(LOAD(tables->capacities[block]));
    OWNED PyObject *entry = NULL, *stack = NULL, *since = NULL;
    int there, seen;

    if (number == NULL || size == NULL)
        return -1;
    entry = PyTuple_Pack(2, segment, number);
    stack = entry == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(warm, size));
    if (entry != NULL && stack == NULL && !PyErr_Occurred()) {
        stack = PyList_New(0);
        if (stack != NULL && PyDict_SetItem(warm, size, stack) < 0)
            return -1;
    }
    if (stack == NULL)
        return -1;
    /* From here on nothing is made that the garbage collector knows of. */
    since = Py_XNewRef(PyDict_GetItemWithError(tables->out, number));
    there = since == NULL ? (PyErr_Occurred() ? -1 : 0) : 1;
    seen = there <= 0 ? there : PyDict_Contains(tables->records, number);
    if (there <= 0 || seen < 0)
        return seen < 0 ? -1 : there;
    if (seen || LOAD(tables->heads[block]))
        return 0;
    if (PyDict_DelItem(tables->out, number) < 0)
        return -1;
    if (PyList_Append(stack, entry) < 0) {
        /* It is looked at again. */
        STORE(tables->hints[block], (uint8_t)1);
        PyDict_SetItem(tables->out, number, since);
        return -1;
    }
    STORE(tables->generations[block], tables->generations[block] + 1);
    return 1;
}

/* Free the blocks that others have let go of, as Heap.collect() does; -1 for an error, 0 if
 * there is a segment that only Python knows. */
static int collect(State *state, PyObject *heap, PyObject *warm)
{
    OWNED PyObject *segments = PyObject_GetAttr(heap, NAME(segments));

    if (segments == NULL)
        return -1;
    for (Py_ssize_t place = 0; place < PyList_Size(segments); place++) {
        OWNED PyObject *segment = Py_NewRef(PyList_GetItem(segments, place));
        OWNED PyObject *tables = (PyObject *)tables_of(state, segment);
        Tables *its = (Tables *)tables;
        uint64_t unused;
        uint8_t *end, *hint;

        if (tables == NULL || its->out == NULL || its->small == NULL)
            return PyErr_Occurred() ? -1 : 0;
        if (get_u64(segment, NAME(unused), &unused) < 0)
            return -1;
        end = its->hints + (unused < its->blocks ? unused : its->blocks);
        hint = memchr(its->hints, 1, (size_t)(end - its->hints));
        while (hint != NULL) {
            /* Cleared, for all to see, before the chain is looked at: a release that comes
             * later sets it again. */
            __atomic_exchange_n(hint, (uint8_t)0, __ATOMIC_SEQ_CST);
            if (free_block(warm, segment, its, (uint64_t)(hint - its->hints)) < 0)
                return -1;
            hint++;
            hint = hint < end ? memchr(hint, 1, (size_t)(end - hint)) : NULL;
        }
    }
    return 1;
}

/* As size_class() of size_classes.py, for whole pages. */
static uint64_t size_class(uint64_t page, uint64_t nbytes)
{
    uint64_t step = page;
    int bits = 0;

    for (uint64_t left = (nbytes ? nbytes : 1) - 1; left; left >>= 1)
        bits++;
    if (bits > 4 && (uint64_t)1 << (bits - 4) > step)
        step = (uint64_t)1 << (bits - 4);
    nbytes = (nbytes + step - 1) / step * step;
    return nbytes > page ? nbytes : page;
}

static PyObject *last_of(PyObject *list)
{
    Py_ssize_t size = PyList_Check(list) ? PyList_Size(list) : 0;

    return size > 0 ? PyList_GetItem(list, size - 1) : NULL;
}

/* Return the bytes of a block that are asked for. */
static PyObject *view_of(PyObject *root, uint64_t nbytes)
{
    OWNED PyObject *whole = PyMemoryView_FromObject(root);

    if (whole == NULL)
        return NULL;
    if ((uint64_t)((Root *)root)->size == nbytes)
        return Py_NewRef(whole);
    return PySequence_GetSlice(whole, 0, (Py_ssize_t)nbytes);
}

/* Return the handle of a block that is given out for the first time; what comes from the
 * segment is in `rest`, but for the number of bytes. */
static PyObject *handle_of(Tables *tables, PyObject *token, uint64_t block, uint64_t nbytes,
    uint64_t slot, uint64_t nonce)
{
    size_t size = (size_t)PyBytes_Size(tables->rest), key = FROM_REST - FROM_KEY;
    uint8_t constant[4096];

    if (size < SHORTEST - FROM_REST || size > sizeof constant - key || PyBytes_Size(token) != 16)
        return NULL;
    memcpy(constant, PyBytes_AsString(token), 16);
    put_number(constant + 16, 4, block);
    put_number(constant + 20, 8, LOAD(tables->generations[block]));
    memcpy(constant + key, PyBytes_AsString(tables->rest), size);
    put_number(constant + FROM_NBYTES - FROM_KEY, 8, nbytes);
    return make_handle(slot, nonce, constant, key + size);
}

/* A message's lease; see Lease of message.py. Its segment's pins get it when it is given out. */
static int fill_lease(State *state, PyObject *lease, PyObject *segment, PyObject *number,
    PyObject *generation, PyObject *nonce, PyObject *slot, PyObject *filling)
{
    const Field fields[] = {
        {NAME(segment), segment}, {NAME(block), number}, {NAME(generation), generation},
        {NAME(nonce), nonce}, {NAME(slot), slot}, {NAME(filling), filling},
        {NAME(ended), Py_False},
    };

    return SET_FIELDS(lease, fields);
}

/* What take_block() has found and made, before it changes anything. */
typedef struct {
    PyObject *heap, *live, *taken, *stack, *item, *segment, *number, *slot, *lease, *filling;
    PyObject *generation, *nonce, *fillings;
    Tables *tables;
} Taking;

static int note_taking(State *state, const Taking *of)
{
    OWNED PyObject *now = PyFloat_FromDouble(seconds_now());

    return now == NULL || PyDict_SetItem(of->tables->out, of->number, now) < 0
            || PyDict_SetItem(of->tables->records, of->number, of->filling) < 0
            || PyDict_SetItem(of->fillings, of->filling, Py_None) < 0
            || PyDict_SetItem(of->tables->pins, of->lease, Py_None) < 0
            || PyList_Append(of->taken, of->lease) < 0
            || PyObject_SetAttr(of->heap, NAME(last_used), now) < 0
        ? -1 : 0;
}

/* Undo a taking that could not be noted. */
static void untake(State *state, const Taking *of)
{
    PyObject *kind, *value, *trace;
    OWNED PyObject *done = NULL;

    PyErr_Fetch(&kind, &value, &trace);
    if (last_of(of->taken) == of->lease && pop_last(of->taken) < 0)
        PyErr_Clear();
    if (take_out(of->tables->pins, of->lease) < 0 || take_out(of->fillings, of->filling) < 0)
        PyErr_Clear();
    done = PyObject_CallMethodObjArgs(of->segment, NAME(consume), of->number, of->generation,
        of->slot, of->nonce, NULL);
    /* It may still be there, where the list could not shrink: twice, and it would be given out
     * twice. What cannot be put back is not used again. */
    if (done == NULL || take_out(of->tables->records, of->number) < 0
        || take_out(of->tables->out, of->number) < 0
        || (last_of(of->stack) != of->item && PyList_Append(of->stack, of->item) < 0))
        PyErr_Clear();
    PyErr_Restore(kind, value, trace);
}

static PyObject *take(State *state, PyObject *heap, PyObject *live, PyObject *nbytes,
    PyObject *nonce, PyObject *taken)
{
    uint64_t size = PyLong_AsUnsignedLongLong(nbytes), secret, block, from, place;
    OWNED PyObject *lease = NULL, *filling = NULL, *warm = NULL, *length = NULL, *stack = NULL;
    OWNED PyObject *item = NULL, *slot = NULL, *mapping = NULL, *pages = NULL;
    OWNED PyObject *root = NULL, *view = NULL, *handle = NULL, *token = NULL, *forks = NULL;
    OWNED PyObject *fillings = NULL, *quick = NULL, *generation = NULL, *word = NULL;
    OWNED PyObject *tables = NULL, *result = NULL;
    PyObject *segment, *number;
    Tables *its;
    int there;

    if (size >> 62) {
        PyErr_Clear();
        return NULL;
    }
    secret = PyLong_AsUnsignedLongLong(nonce);
    warm = PyObject_GetAttr(heap, NAME(warm));
    if (warm == NULL || PyErr_Occurred() || collect(state, heap, warm) <= 0)
        return NULL;
    lease = new_object(state, state->held[LEASE]);
    filling = new_object(state, state->held[FILLING]);
    length = PyLong_FromUnsignedLongLong(size_class(state->page_size, size));
    stack = length == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(warm, length));
    item = stack == NULL ? NULL : Py_XNewRef(last_of(stack));
    if (lease == NULL || filling == NULL || item == NULL)
        return NULL;
    segment = PyTuple_GetItem(item, 0);
    number = PyTuple_GetItem(item, 1);
    if (segment == NULL || number == NULL)
        return NULL;
    tables = (PyObject *)tables_of(state, segment);
    its = (Tables *)tables;
    block = PyLong_AsUnsignedLongLong(number);
    if (tables == NULL || its->rest == NULL || !PyBytes_Check(its->rest) || block >= its->blocks
        || its->out == NULL || its->small == NULL || PyDict_Contains(its->small, number) != 0)
        return NULL;
    slot = peek_slot(its, &place);
    mapping = slot == NULL ? NULL : PyObject_GetAttr(segment, NAME(data));
    pages = mapping == NULL ? NULL : PyObject_GetAttr(mapping, NAME(pages));
    if (pages == NULL || get_u64(mapping, NAME(offset), &from) < 0)
        return NULL;
    root = new_root(state, pages, its->offsets[block] - from, its->capacities[block]);
    view = root == NULL ? NULL : view_of(root, size);
    token = view == NULL ? NULL : PyObject_GetAttr(segment, NAME(token));
    handle = token == NULL ? NULL : handle_of(its, token, block, size, place, secret);
    result = handle == NULL ? NULL : PyTuple_Pack(2, view, handle);
    forks = result == NULL ? NULL : forks_so_far(state, live);
    generation = PyLong_FromUnsignedLongLong(LOAD(its->generations[block]));
    word = PyLong_FromUnsignedLongLong(message_word(secret));
    fillings = PyObject_GetAttr(live, NAME(fillings));
    quick = PyObject_GetAttr(segment, NAME(_quick));
    if (!forks || !generation || !word || !fillings || !quick)
        return NULL;
    {
        const Field fields[] = {
            {NAME(_live), live}, {NAME(_heap), heap}, {NAME(_segment), segment},
            {NAME(_block), number}, {NAME(_nbytes), nbytes}, {NAME(_birth), forks},
            {NAME(root), root},
        };
        const Taking taking = {
            heap, live, taken, stack, item, segment, number, slot, lease, filling, generation,
            nonce, fillings, its,
        };

        if (SET_FIELDS(filling, fields) < 0
            || fill_lease(state, lease, segment, number, generation, nonce, slot, filling) < 0)
            return NULL;
        /* From here on nothing is made that the garbage collector knows of. What was found
         * may have been taken meanwhile. */
        there = last_of(stack) == item && is_last_slot(its, slot, place);
        if (there > 0)
            there = is_unforked(state, live, forks);
        if (there > 0)
            there = is_true(
                PyObject_CallMethodObjArgs(quick, NAME(start), number, slot, word, NULL));
        if (there <= 0)
            return NULL;
        if (pop_last(stack) < 0 || take_slot(its, slot) < 0
            || note_taking(state, &taking) < 0) {
            untake(state, &taking);
            return NULL;
        }
    }
    return Py_NewRef(result);
}

static PyObject *take_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 5))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(take(
        PyModule_GetState(module), given[0], given[1], given[2], given[3], given[4]));
}

/* Name a block that somebody here has in one more message. */
static PyObject *lend(State *state, PyObject *segment, PyObject *number, PyObject *generation,
    PyObject *nonce, PyObject *constant, PyObject *taken)
{
    OWNED PyObject *lease = new_object(state, state->held[LEASE]);
    OWNED PyObject *tables = (PyObject *)tables_of(state, segment);
    OWNED PyObject *slot = NULL, *quick = NULL, *fd = NULL, *word = NULL;
    OWNED PyObject *handle = NULL, *result = NULL;
    uint64_t place, secret = PyLong_AsUnsignedLongLong(nonce);
    Tables *its;
    int there;

    if (lease == NULL || tables == NULL || PyErr_Occurred() || !PyBytes_Check(constant))
        return NULL;
    its = (Tables *)tables;
    slot = peek_slot(its, &place);
    quick = slot == NULL ? NULL : PyObject_GetAttr(segment, NAME(_quick));
    fd = quick == NULL ? NULL : PyObject_GetAttr(segment, NAME(lock_fd));
    word = fd == NULL ? NULL : PyLong_FromUnsignedLongLong(message_word(secret));
    handle = word == NULL ? NULL : make_handle(place, secret,
        (const uint8_t *)PyBytes_AsString(constant), (size_t)PyBytes_Size(constant));
    result = handle == NULL ? NULL : PyTuple_Pack(2, handle, lease);
    if (result == NULL
        || fill_lease(state, lease, segment, number, generation, nonce, slot, Py_None) < 0)
        return NULL;
    /* From here on nothing is made that the garbage collector knows of. */
    there = is_last_slot(its, slot, place);
    if (there > 0)
        there = is_true(PyObject_CallMethodObjArgs(
            quick, NAME(add), fd, number, slot, word, generation, NULL));
    if (there <= 0)
        return NULL;
    if (take_slot(its, slot) < 0 || PyDict_SetItem(its->pins, lease, Py_None) < 0
        || PyList_Append(taken, lease) < 0) {
        PyObject *kind, *value, *trace;
        OWNED PyObject *done = NULL;

        PyErr_Fetch(&kind, &value, &trace);
        done = PyObject_CallMethodObjArgs(
            segment, NAME(consume), number, generation, slot, nonce, NULL);
        if (take_out(its->pins, lease) < 0)
            PyErr_Clear();
        PyErr_Restore(kind, value, trace);
        return NULL;
    }
    return Py_NewRef(result);
}

static PyObject *lend_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 6))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(lend(PyModule_GetState(module), given[0], given[1], given[2], given[3],
        given[4], given[5]));
}

/* What becomes of a message that is complete: Message.commit() of message.py. */

/* As Filling.end(), of one that nobody refers to and no forked child has seen. */
static int end_filling(State *state, PyObject *filling)
{
    OWNED PyObject *segment = PyObject_GetAttr(filling, NAME(_segment));
    OWNED PyObject *number = PyObject_GetAttr(filling, NAME(_block));
    OWNED PyObject *live = PyObject_GetAttr(filling, NAME(_live));
    OWNED PyObject *birth = PyObject_GetAttr(filling, NAME(_birth));
    OWNED PyObject *root = PyObject_GetAttr(filling, NAME(root));
    OWNED PyObject *fillings = NULL, *forks = NULL, *references = NULL, *tables = NULL;
    Tables *its;
    uint64_t block;
    int same;

    if (!segment || !number || !live || !birth || !root)
        return -1;
    tables = (PyObject *)tables_of(state, segment);
    forks = tables == NULL ? NULL : forks_so_far(state, live);
    its = (Tables *)tables;
    fillings = forks == NULL ? NULL : PyObject_GetAttr(live, NAME(fillings));
    if (fillings == NULL)
        return PyErr_Occurred() ? -1 : 0;
    block = PyLong_AsUnsignedLongLong(number);
    references = PyObject_CallFunctionObjArgs(state->held[COUNT_REFERENCES], root, NULL);
    if (references == NULL || PyErr_Occurred())
        return -1;
    if (PyLong_AsLong(references) != state->unshared || block >= its->blocks
        || !LOAD(its->heads[block]))
        return 0;
    same = has_item(its->records, number, filling);
    if (same > 0)
        same = PyObject_RichCompareBool(birth, forks, Py_EQ);
    if (same <= 0)
        return same;
    if (PyDict_DelItem(its->records, number) < 0
        || PyObject_SetAttr(filling, NAME(root), Py_None) < 0 || take_out(fillings, filling) < 0)
        return -1;
    return 1;
}

static int commit_lease(State *state, PyObject *lease, PyObject *now, PyObject *child)
{
    newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    OWNED PyObject *segment = PyObject_GetAttr(lease, NAME(segment));
    OWNED PyObject *slot = PyObject_GetAttr(lease, NAME(slot));
    OWNED PyObject *nonce = PyObject_GetAttr(lease, NAME(nonce));
    OWNED PyObject *number = PyObject_GetAttr(lease, NAME(block));
    OWNED PyObject *generation = PyObject_GetAttr(lease, NAME(generation));
    OWNED PyObject *filling = PyObject_GetAttr(lease, NAME(filling));
    OWNED PyObject *tables = segment == NULL ? NULL : (PyObject *)tables_of(state, segment);
    Tables *its = (Tables *)tables;
    OWNED PyObject *fields = NULL, *wrapped = NULL, *sent = NULL, *done = NULL;
    uint64_t most;
    int ended;

    if (!slot || !nonce || !number || !generation || !filling)
        return -1;
    if (tables == NULL)
        return PyErr_Occurred() ? -1 : 0;
    fields = PyTuple_Pack(6, slot, nonce, number, generation, now, child);
    wrapped = fields == NULL ? NULL : PyTuple_Pack(1, fields);
    sent = wrapped == NULL ? NULL : make((PyTypeObject *)state->held[SENT], wrapped, NULL);
    if (sent == NULL || PyDict_SetItem(its->outbox, nonce, sent) < 0
        || get_u64(segment, NAME(_prune_at), &most) < 0)
        return -1;
    if ((uint64_t)PyDict_Size(its->outbox) > most) {
        done = PyObject_CallMethodObjArgs(segment, NAME(prune), NULL);
        if (done == NULL)
            return -1;
    }
    /* From here on the unread message keeps the segment open. */
    if (filling != Py_None) {
        ended = end_filling(state, filling);
        if (ended == 0) {
            OWNED PyObject *by_hand = PyObject_CallMethodObjArgs(filling, NAME(end), NULL);

            if (by_hand == NULL)
                return -1;
        } else if (ended < 0)
            return -1;
    }
    return take_out(its->pins, lease) < 0 ? -1 : 1;
}

static PyObject *commit(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    OWNED PyObject *now = PyFloat_FromDouble(seconds_now());
    Py_ssize_t place = 0;

    if (now == NULL || !takes(count, 2))
        return NULL;
    while (is_configured(module) && place < PyList_Size(given[0])) {
        OWNED PyObject *lease = Py_NewRef(PyList_GetItem(given[0], place));
        int done = commit_lease(PyModule_GetState(module), lease, now, given[1]);

        if (done < 0)
            return NULL;
        if (!done)
            break;
        place++;
    }
    return PyLong_FromSsize_t(place);
}

static PyObject *make_root(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    uint64_t offset, size;

    if (!takes(count, 3))
        return NULL;
    offset = PyLong_AsUnsignedLongLong(given[1]);
    size = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(given[2]);
    if (PyErr_Occurred())
        return NULL;
    return new_root(PyModule_GetState(module), given[0], offset, size);
}

/* The module. */

/* Find out how a root that nobody but its filling has is told from others. */
static int count_unshared(State *state)
{
    OWNED PyObject *filling = new_object(state, state->held[FILLING]);
    OWNED PyObject *root = PyDict_New();
    OWNED PyObject *found = NULL, *references = NULL;
    PyObject *mine = root;

    if (filling == NULL || root == NULL || PyObject_SetAttr(filling, NAME(root), root) < 0)
        return -1;
    root = NULL;
    Py_DECREF(mine);
    found = PyObject_GetAttr(filling, NAME(root));
    references = found == NULL ? NULL
        : PyObject_CallFunctionObjArgs(state->held[COUNT_REFERENCES], found, NULL);
    if (references == NULL)
        return -1;
    state->unshared = PyLong_AsLong(references);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *configure(PyObject *module, PyObject *arguments)
{
    State *state = PyModule_GetState(module);
    PyObject *given[GIVEN];
    unsigned long long page_size;
    Py_ssize_t few;

    if (!PyArg_ParseTuple(arguments, "OOOOOOKn", &given[BLOCK], &given[FILLING], &given[LEASE],
            &given[RECORD], &given[ROOT_REFERENCE], &given[SENT], &page_size, &few))
        return NULL;
    for (int place = 0; place < GIVEN; place++) {
        Py_XDECREF(state->held[place]);
        state->held[place] = Py_NewRef(given[place]);
    }
    state->page_size = page_size;
    state->few = few;
    return count_unshared(state) < 0 ? NULL : Py_NewRef(Py_None);
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}

static PyMethodDef methods[] = {
    METHOD(import_block, "import_block(handle, live, attachments, loading): the block, or None."),
    METHOD(take_block, "take_block(heap, live, nbytes, nonce, taken): view and handle, or None."),
    METHOD(lend_block, "lend_block(segment, block, generation, nonce, constant, taken):"
        " handle and lease, or None."),
    METHOD(commit, "commit(taken, child): keep what was given out, so far as that many."),
    METHOD(make_root, "make_root(pages, offset, nbytes): the object at the bottom of all views."),
    {"root_died", root_died, METH_O, "root_died(reference): end the hold of a root's block."},
    {"configure", configure, METH_VARARGS,
        "configure(Block, Filling, Lease, Record, RootReference, Sent, page_size, few)"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    State *state = PyModule_GetState(module);
    OWNED PyObject *system = PyImport_ImportModule("sys");

    memset(state, 0, sizeof *state);
    fill_checksums();
    for (int place = 0; place < NAMES_COUNT; place++) {
        state->names.each[place] = PyUnicode_InternFromString(texts[place]);
        if (state->names.each[place] == NULL)
            return -1;
    }
    state->held[COUNT_REFERENCES] =
        system == NULL ? NULL : PyObject_GetAttrString(system, "getrefcount");
    state->held[ROOT] = PyType_FromModuleAndSpec(module, &root_spec, NULL);
    state->held[TABLES] = PyType_FromModuleAndSpec(module, &tables_spec, NULL);
    state->held[ROOT_DIED] = PyObject_GetAttrString(module, "root_died");
    state->held[NOTHING] = PyTuple_New(0);
    state->held[READ_WRITE] = PyUnicode_InternFromString("rw");
    state->held[READ_ONLY] = PyUnicode_InternFromString("ro");
    for (int place = COUNT_REFERENCES; place < HELD; place++)
        if (state->held[place] == NULL)
            return -1;
    if (PyModule_AddType(module, (PyTypeObject *)state->held[TABLES]) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "VERSION", SHMREDUCE_VERSION);
}

static void release_state(void *module)
{
    State *state = PyModule_GetState(module);

    if (state == NULL)
        return;
    for (int place = 0; place < HELD; place++)
        Py_CLEAR(state->held[place]);
    for (int place = 0; place < NAMES_COUNT; place++)
        Py_CLEAR(state->names.each[place]);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_quick_blocks",
    .m_doc = "What a message costs in blocks, each step of it by one call.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = module_slots,
    .m_free = release_state,
};

PyMODINIT_FUNC PyInit__quick_blocks(void)
{
    return PyModuleDef_Init(&module);
}
