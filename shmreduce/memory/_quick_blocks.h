/* Declarations that the files of _quick_blocks share; _quick_blocks.c lists the files. */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#include "_tables.h"

/* Names of attributes and methods. */
#define NAMES(_) \
    _(_birth) _(_block) _(_claims) _(_died) _(_heap) _(_known) _(_live) _(_nbytes) \
    _(_prune_at) _(_quick) _(_read_only) _(_record) _(_root) _(_roots) _(_segment) \
    _(_shared) _(add) _(address) _(birth) _(block) _(block_tables) _(boot) _(claim_alone) \
    _(claim_shared) _(consume) _(current) _(cutting) _(data) _(death) _(directory) _(end) _(ended) \
    _(filling) _(fillings) _(forks) _(generation) _(heap) _(identity) _(import_mapping) \
    _(in_place) _(keep) _(key) _(last_used) _(ledger) _(live) _(lock_fd) _(mapping) _(mode) \
    _(nbytes) _(nonce) _(offset) _(on_unused) _(owner) _(pages) _(pending) _(private) \
    _(prune) _(read_only) _(record) _(release) _(root) _(segment) _(segments) _(shared) \
    _(slot) _(start) _(token) _(unclaim) _(unused) _(warm) _(written)

#define AS_MEMBER(name) PyObject *name;
#define AS_COUNT(name) +1
enum { NAMES_COUNT = 0 NAMES(AS_COUNT) };

/* Other objects: first the classes, in the order in which configure() gets them. */
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
    long unshared; /* the reference count of a root to which only its filling refers */
} State;

#define NAME(name) (state->names.name)

static inline void drop(PyObject **object)
{
    Py_XDECREF(*object);
}

/* A reference that is dropped when its variable goes out of scope, the last declared first. */
#define OWNED __attribute__((cleanup(drop)))

/* The object to which all views of a block refer; see make_root() of mapping.py. */
typedef struct {
    PyObject_HEAD
    PyObject *references;
    Py_buffer pages;
    char *start;
    Py_ssize_t size;
} Root;

/* A segment's tables of its blocks, and this process's dictionaries about them. */
typedef struct {
    PyObject_HEAD
    Py_buffer tables;
    uint64_t blocks, slots, size, data_offset;
    int shared;
    uint64_t *generations, *offsets, *capacities, *words;
    uint32_t *heads;
    uint8_t *hints;
    /* The segment's attributes with these names, which are never replaced. */
    PyObject *importer, *holds, *passing, *pins, *outbox, *records, *slots_left, *listed;
    PyObject *out, *small; /* only of a segment that this process has made */
    PyObject *rest; /* the last part of this process's handles of its blocks */
} Tables;

/* The mark at the beginning of a handle, and the offsets of its fields. */
#define MARK "shmreduce\0hdl\x02\n"
enum {
    FROM_CHECKSUM = sizeof MARK - 1,
    FROM_LEASE = FROM_CHECKSUM + 4,
    FROM_KEY = FROM_LEASE + 4 + 8,
    FROM_REST = FROM_KEY + 16 + 4 + 8,
    FROM_NBYTES = FROM_REST + 16,
    FROM_SHARED = FROM_NBYTES + 8 + 4,
    SHORTEST = FROM_SHARED + 1 + 1 + 2 + 2,
    MODES = 2, /* of three: a cow block gets a mapping of its own, by the long way */
};

/* The fields of a handle that are read here. */
typedef struct {
    const uint8_t *data;
    uint64_t slot, nonce, block, generation, nbytes;
    int shared, mode;
} Handle;

/* An attribute's name and the value for it. */
typedef struct {
    PyObject *name, *value;
} Field;
#define SET_FIELDS(object, fields) set_fields(object, fields, sizeof fields / sizeof fields[0])

/* _quick_blocks_objects.c */
PyObject *new_root(State *state, PyObject *pages, uint64_t offset, uint64_t size);
Tables *tables_of(State *state, PyObject *segment);
extern PyType_Spec root_spec, tables_spec;

/* _quick_blocks_handles.c */
void fill_checksums(void);
void put_number(uint8_t *data, int size, uint64_t number);
int read_handle(PyObject *given, Handle *found);
PyObject *make_handle(uint64_t slot, uint64_t nonce, const uint8_t *constant, size_t size);
uint64_t message_word(uint64_t nonce);

/* _quick_blocks_steps.c */
PyObject *new_object(State *state, PyObject *type);
int set_fields(PyObject *object, const Field *fields, size_t count);
int get_u64(PyObject *object, PyObject *name, uint64_t *number);
int is_field(PyObject *object, PyObject *name, PyObject *wanted);
int has_item(PyObject *table, PyObject *key, PyObject *wanted);
int take_out(PyObject *table, PyObject *key);
int is_true(PyObject *found);
PyObject *forks_so_far(State *state, PyObject *live);
int is_unforked(State *state, PyObject *live, PyObject *forks);
double seconds_now(void);
int pop_last(PyObject *list);
PyObject *peek_slot(Tables *tables, uint64_t *number);
int take_slot(Tables *tables, PyObject *slot);
int is_last_slot(Tables *tables, PyObject *slot, uint64_t number);
PyObject *answer(PyObject *found);
int is_configured(PyObject *module);
int takes(Py_ssize_t given, Py_ssize_t wanted);

/* _quick_blocks_receiving.c */
PyObject *import_block(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *root_died(PyObject *module, PyObject *reference);

/* _quick_blocks_taking.c */
PyObject *take_block(PyObject *module, PyObject *const *given, Py_ssize_t count);
int fill_lease(State *state, PyObject *lease, PyObject *segment, PyObject *number,
    PyObject *generation, PyObject *nonce, PyObject *slot, PyObject *filling);

/* _quick_blocks_giving.c */
PyObject *lend_block(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *give_shared(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *commit(PyObject *module, PyObject *const *given, Py_ssize_t count);
