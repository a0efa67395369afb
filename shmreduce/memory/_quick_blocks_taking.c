/* Takes a block for a message, as Message.allocate() of message.py does. */
#include "_quick_blocks.h"

/* Return a new reference to the list of free blocks of a size that has had none. */
static PyObject *new_stack(PyObject *warm, PyObject *size)
{
    OWNED PyObject *made = PyList_New(0), *there = NULL;

    if (made == NULL)
        return NULL;
    /* Up to CPython 3.11 making the list may start the garbage collector, and a finalizer may
     * free a block of this size. The list that it has put there must not be replaced. */
    there = Py_XNewRef(PyDict_GetItemWithError(warm, size));
    if (there != NULL)
        return Py_NewRef(there);
    if (PyErr_Occurred() || PyDict_SetItem(warm, size, made) < 0)
        return NULL;
    return Py_NewRef(made);
}

/* Free a by-value block that others have released, as try_free() of owned_segment.py does, and
 * put it where take_block() looks. */
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
        stack = new_stack(warm, size);
    }
    if (stack == NULL)
        return -1;
    /* From here on no object is made that the garbage collector tracks. */
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
        /* With the hint, the next collection looks at the block again. */
        STORE(tables->hints[block], (uint8_t)1);
        PyDict_SetItem(tables->out, number, since);
        return -1;
    }
    STORE(tables->generations[block], tables->generations[block] + 1);
    return 1;
}

/* Free the blocks that others have released, as Heap.collect() does. Returns -1 for an error, 0
 * if a segment has no compiled tables. */
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
            /* Cleared, visibly to other processes, before the chain is looked at: a release
             * after that sets the hint again. */
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

/* Return a view of the first `nbytes` of a block. */
static PyObject *view_of(PyObject *root, uint64_t nbytes)
{
    OWNED PyObject *whole = PyMemoryView_FromObject(root);

    if (whole == NULL)
        return NULL;
    if ((uint64_t)((Root *)root)->size == nbytes)
        return Py_NewRef(whole);
    return PySequence_GetSlice(whole, 0, (Py_ssize_t)nbytes);
}

/* Return the handle of a block that is given out for the first time. `rest` has the part that
 * depends on the segment only, apart from the number of bytes. */
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

/* Fill in a message's lease; see lease.py. The caller adds it to the segment's pins. */
int fill_lease(State *state, PyObject *lease, PyObject *segment, PyObject *number,
    PyObject *generation, PyObject *nonce, PyObject *slot, PyObject *filling)
{
    const Field fields[] = {
        {NAME(segment), segment}, {NAME(block), number}, {NAME(generation), generation},
        {NAME(nonce), nonce}, {NAME(slot), slot}, {NAME(filling), filling},
        {NAME(ended), Py_False},
    };

    return SET_FIELDS(lease, fields);
}

/* What take() has found and made before it changes anything. */
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

/* Undo a taking that could not be recorded. */
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
    /* If the list could not be shrunk, the block is still in it. It must not be in it twice, or
     * it would be given out twice. If it cannot be put back, it is never used again. */
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
        /* From here on no object is made that the garbage collector tracks. But other code may
         * have run before, so check that block and slot are still free. */
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

PyObject *take_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 5))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(take(
        PyModule_GetState(module), given[0], given[1], given[2], given[3], given[4]));
}
