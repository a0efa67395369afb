/* Gives out a block that this process has, and commits the leases of a complete message, as
 * Message.refer() and Message.commit() of message.py do. */
#include "_quick_blocks.h"

/* Add a message's lease on a block that this process has. */
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
    /* From here on no object is made that the garbage collector tracks. */
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

PyObject *lend_block(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 6))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(lend(PyModule_GetState(module), given[0], given[1], given[2], given[3],
        given[4], given[5]));
}

/* Whether receivers of a block share its pages; a `cow` block gets pages of its own there. */
static int is_in_place(State *state, PyObject *record)
{
    OWNED PyObject *mode = NULL;
    int shared = is_field(record, NAME(shared), Py_True);

    if (shared <= 0)
        return shared;
    mode = PyObject_GetAttr(record, NAME(mode));
    if (mode == NULL || !PyUnicode_Check(mode))
        return mode == NULL ? -1 : 0;
    /* Compared by value: it may be the caller's own string. */
    return PyUnicode_Compare(mode, state->held[READ_WRITE]) == 0
        || PyUnicode_Compare(mode, state->held[READ_ONLY]) == 0;
}

/* Add a message's lease on the shared block of a root, if the message has all of the block. */
static PyObject *give(State *state, PyObject *live, PyObject *root, PyObject *nbytes,
    PyObject *nonce, PyObject *taken)
{
    OWNED PyObject *roots = PyObject_GetAttr(live, NAME(_roots));
    OWNED PyObject *identity = PyLong_FromVoidPtr(root);
    OWNED PyObject *reference = NULL, *alive = NULL, *record = NULL, *size = NULL;
    OWNED PyObject *constant = NULL, *segment = NULL, *number = NULL, *generation = NULL;
    int same;

    if (roots == NULL || identity == NULL)
        return NULL;
    reference = Py_XNewRef(PyDict_GetItemWithError(roots, identity));
    alive = reference == NULL ? NULL : PyObject_CallNoArgs(reference);
    if (alive != root)
        return NULL;
    record = PyObject_GetAttr(reference, NAME(record));
    size = record == NULL ? NULL : PyObject_GetAttr(record, NAME(nbytes));
    same = size == NULL ? -1 : PyObject_RichCompareBool(size, nbytes, Py_EQ);
    if (same > 0)
        same = is_in_place(state, record);
    if (same <= 0)
        return NULL;
    constant = PyObject_GetAttr(record, NAME(written));
    segment = PyObject_GetAttr(record, NAME(segment));
    number = PyObject_GetAttr(record, NAME(block));
    generation = PyObject_GetAttr(record, NAME(generation));
    if (constant == NULL || segment == NULL || number == NULL || generation == NULL)
        return NULL;
    return lend(state, segment, number, generation, nonce, constant, taken);
}

PyObject *give_shared(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    if (!takes(count, 5))
        return NULL;
    if (!is_configured(module))
        return Py_NewRef(Py_None);
    return answer(
        give(PyModule_GetState(module), given[0], given[1], given[2], given[3], given[4]));
}

/* As Filling.end(), if nothing refers to the root and no forked child has seen the block. */
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

PyObject *commit(PyObject *module, PyObject *const *given, Py_ssize_t count)
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
