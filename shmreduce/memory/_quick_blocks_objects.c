/* The two types of the module: the object to which views refer, and the tables of a segment. */
#include "_quick_blocks.h"

/* The object to which all views of a block refer; see make_root() of mapping.py. */

static int root_buffer(PyObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, self, ((Root *)self)->start, ((Root *)self)->size, 0, flags);
}

static void root_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    /* Called first, because the callbacks of weak references may use the memory. */
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

/* The garbage collector does not track it. Otherwise, when a cycle dies, the collector would
 * call the callbacks of weak references while finalizers may still use the views. */
PyType_Spec root_spec = {
    .name = "shmreduce.memory._quick_blocks.Root",
    .basicsize = sizeof(Root),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = root_slots,
};

PyObject *new_root(State *state, PyObject *pages, uint64_t offset, uint64_t size)
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

/* A segment's tables of its blocks, and this process's dictionaries about them. */

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
    /* In handles, the numbers of blocks and slots have 32 bits. */
    if (blocks > UINT32_MAX || slots > UINT32_MAX
        || !fits(&self->tables, generations, 8, blocks)
        || !fits(&self->tables, offsets, 8, blocks)
        || !fits(&self->tables, capacities, 8, blocks) || !fits(&self->tables, words, 8, slots)
        || !fits(&self->tables, heads, 4, blocks) || !fits(&self->tables, hints, 1, blocks)) {
        Py_DECREF(self);
        return refuse_tables();
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

PyType_Spec tables_spec = {
    .name = "shmreduce.memory._quick_blocks.BlockTables",
    .basicsize = sizeof(Tables),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tables_slots,
};

/* Return a segment's tables. Without tables it returns NULL, with an exception only on error. */
Tables *tables_of(State *state, PyObject *segment)
{
    PyObject *found = PyObject_GetAttr(segment, NAME(block_tables));

    if (found != NULL && !Py_IS_TYPE(found, (PyTypeObject *)state->held[TABLES])) {
        Py_DECREF(found);
        return NULL;
    }
    return (Tables *)found;
}
