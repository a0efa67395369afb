/* The short way of a message's blocks: take one, give one out, take one over, end its hold.
 *
 * This is a Python module, written in the stable interface (PEP 384), so that one
 * library serves every version from 3.11 on.
 *
 * Each function does the usual case of a Python function, which explains it and does
 * all other cases. It either does the usual case completely, or changes nothing and
 * returns None or False. The objects are Python objects; the code here reads and
 * writes their attributes and tables as the Python function would.
 *
 * A call holds the interpreter lock from beginning to end. From the moment when it
 * looks at what it is going to change, it runs no Python code. New objects that the
 * garbage collector tracks are made before that, because before CPython 3.12 making
 * one may start the collector. So no other thread, signal handler or destructor can
 * run in between, and the code here need not guard against them as the Python
 * functions do. If a call in the middle fails for lack of memory, the steps before
 * it are undone.
 *
 * Transitions of lease slots are made by _quick_slots.c, through methods of the
 * segment's object. If it was not compiled, or declines, the code here declines, too.
 *
 * This file defines the module. Its functions are in the other files:
 *   _quick_blocks_objects.c    its types: Root and BlockTables
 *   _quick_blocks_handles.c    reading and writing handles
 *   _quick_blocks_steps.c      small steps on attributes, tables and lists
 *   _quick_blocks_taking.c     taking a new block for a message
 *   _quick_blocks_giving.c     giving out a block that is held here; committing a message
 *   _quick_blocks_receiving.c  taking over a message's block, and ending its hold
 */
#include "_quick_blocks.h"

#define SHMREDUCE_VERSION 10

#define AS_TEXT(name) #name,
static const char *const texts[] = {NAMES(AS_TEXT)};

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

/* Measure the reference count of a root to which only its filling refers. */
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
    METHOD(give_shared, "give_shared(live, root, nbytes, nonce, taken): handle and lease, or None."),
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
