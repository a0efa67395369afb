/* Takes a message's block over and ends its hold, as import_block() of loading.py and
 * LiveBlocks._died() of blocks.py do. */
#include "_quick_blocks.h"

enum { MOST_ATTEMPTS = 10 };

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

/* Return a shared block that is alive here already, as find_shared() of blocks.py does, and note
 * that its message ends with the load. `other` is set if it returns NULL but the long way may
 * find the block. */
static PyObject *find_shared(State *state, const Handle *what, PyObject *key, PyObject *live,
    PyObject *loading, int *other)
{
    OWNED PyObject *shared = PyObject_GetAttr(live, NAME(_shared));
    OWNED PyObject *reference = NULL, *root = NULL, *record = NULL, *block = NULL, *mode = NULL;
    OWNED PyObject *known = NULL, *slot = NULL, *nonce = NULL, *entry = NULL;
    PyObject *read_only;
    int ended, marked, same;

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
    /* Compared by value: the mode of a block that was made here is the caller's own string. */
    same = PyUnicode_Check(mode) ? PyUnicode_Compare(mode, state->held[READ_ONLY]) == 0 : 0;
    read_only = marked || same ? Py_True : Py_False;
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

/* Where the block is that is taken over. */
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
        {NAME(keep), Py_None},
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

/* Turn a message into a hold, if the compiled transition can do it. */
static int claim(State *state, const Handle *what, const Place *place, Tables *tables)
{
    OWNED PyObject *quick = PyObject_GetAttr(place->segment, NAME(_quick));
    OWNED PyObject *fd = PyObject_GetAttr(place->segment, NAME(lock_fd));
    OWNED PyObject *word = PyLong_FromUnsignedLongLong(message_word(what->nonce));

    if (quick == NULL || fd == NULL || word == NULL)
        return -1;
    return is_true(PyObject_CallMethodObjArgs(quick,
        what->shared ? NAME(claim_shared) : NAME(claim_alone), fd, place->number, place->slot,
        word, place->generation, tables->importer, NULL));
}

/* Undo a claim that could not be recorded. */
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
    OWNED PyObject *reference = NULL, *block = NULL, *noted = NULL;
    int there;

    if (mapping == NULL || mapping == Py_None)
        return NULL;
    pages = PyObject_GetAttr(mapping, NAME(pages));
    if (pages == NULL || get_u64(mapping, NAME(offset), &from) < 0
        || get_u64(mapping, NAME(address), &address) < 0)
        return NULL;
    offset = LOAD(tables->offsets[what->block]);
    capacity = LOAD(tables->capacities[what->block]);
    /* They do not change while the block has a message, and the claim below fails if it has
     * none. */
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
    /* Another one, as in Loading.claimed(). */
    noted = block == NULL ? NULL
        : new_block(state, record, root, what->mode ? Py_True : Py_False);
    entry = noted == NULL ? NULL : PyTuple_Pack(2, noted, handle);
    reference = entry == NULL ? NULL : new_reference(state, root, record, identity);
    if (reference == NULL)
        return NULL;
    /* From here on no object is made that the garbage collector tracks. */
    there = has_item(directory, token, place->segment);
    if (there > 0)
        there = is_unforked(state, live, forks);
    if (there > 0)
        there = claim(state, what, place, tables);
    if (there <= 0) {
        /* Dropped before the root, so that its callback is not called when the root dies. */
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
        /* This segment may be one too many, which the long way finds out. */
        owner = is_field(segment, NAME(owner), Py_True);
        if (owner <= 0)
            return NULL;
    }
    place.segment = segment;
    return take_over(state, handle, &what, (Tables *)tables, &place, live, directory, token,
        loading, key);
}

PyObject *import_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 4))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(
        find_or_take_over(PyModule_GetState(module), given[0], given[1], given[2], given[3]));
}

/* `left` gets the segment if it is another process's and the last hold in it has ended. */
static int end_quickly(State *state, PyObject *reference, PyObject *record, PyObject *live,
    PyObject **left)
{
    OWNED PyObject *slot = PyObject_GetAttr(record, NAME(slot));
    OWNED PyObject *forks = NULL, *birth = NULL, *segment = NULL, *quick = NULL, *fd = NULL;
    OWNED PyObject *number = NULL, *roots = NULL, *identity = NULL, *key = NULL, *shared = NULL;
    OWNED PyObject *tables = NULL;
    Tables *its;
    int ended, in_place, same, owner, kept;

    if (slot == NULL)
        return -1;
    if (slot == Py_None)
        return 0;
    ended = is_field(record, NAME(ended), Py_False);
    in_place = ended <= 0 ? ended : is_field(record, NAME(in_place), Py_False);
    kept = in_place <= 0 ? in_place : is_field(record, NAME(keep), Py_None);
    if (kept <= 0)
        return kept;
    forks = forks_so_far(state, live);
    if (forks == NULL)
        return PyErr_Occurred() ? -1 : 0;
    birth = PyObject_GetAttr(record, NAME(birth));
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
    /* Nothing below allocates memory. */
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

/* End a hold by LiveBlocks._died(). A signal handler may raise when that function is entered, so
 * that it does nothing. Nobody else will call it for this reference, so it is called again as
 * long as the reference is in the table. */
static PyObject *end_by_hand(State *state, PyObject *reference, PyObject *live)
{
    OWNED PyObject *roots = NULL, *identity = NULL;
    PyObject *done = PyObject_CallMethodObjArgs(live, NAME(_died), reference, NULL);
    PyObject *kind, *value, *trace;

    if (done != NULL)
        return done;
    PyErr_Fetch(&kind, &value, &trace);
    roots = PyObject_GetAttr(live, NAME(_roots));
    identity = roots == NULL ? NULL : PyObject_GetAttr(reference, NAME(identity));
    for (int left = MOST_ATTEMPTS; left && identity != NULL
        && has_item(roots, identity, reference) > 0; left--) {
        done = PyObject_CallMethodObjArgs(live, NAME(_died), reference, NULL);
        Py_XDECREF(done);
        PyErr_Clear();
    }
    /* The interpreter prints the exception. */
    PyErr_Restore(kind, value, trace);
    return NULL;
}

/* The callback of a reference to a root, called when the root has died. */
PyObject *root_died(PyObject *module, PyObject *reference)
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
        /* Perhaps there was no memory. The long way tries again later. */
        PyErr_Clear();
        return end_by_hand(state, reference, live);
    }
    if (left != NULL)
        return PyObject_CallMethodObjArgs(live, NAME(on_unused), left, NULL);
    return Py_NewRef(Py_None);
}
