/* Small steps that the other files share. A function that answers a question returns 1 for yes,
 * 0 for no and -1 for an error; the others return 0, or -1 for an error. */
#include "_quick_blocks.h"

#include <time.h>

PyObject *new_object(State *state, PyObject *type)
{
    newfunc make = (newfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_new);

    return make((PyTypeObject *)type, state->held[NOTHING], NULL);
}

/* Set attributes. A value of NULL means that the call that should return it has failed. */
int set_fields(PyObject *object, const Field *fields, size_t count)
{
    for (size_t place = 0; place < count; place++)
        if (fields[place].value == NULL
            || PyObject_SetAttr(object, fields[place].name, fields[place].value) < 0)
            return -1;
    return 0;
}

int get_u64(PyObject *object, PyObject *name, uint64_t *number)
{
    OWNED PyObject *found = PyObject_GetAttr(object, name);

    if (found == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(found);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether an attribute is exactly this object. */
int is_field(PyObject *object, PyObject *name, PyObject *wanted)
{
    OWNED PyObject *found = PyObject_GetAttr(object, name);

    return found == NULL ? -1 : found == wanted;
}

/* Whether a table has exactly this object under a key. */
int has_item(PyObject *table, PyObject *key, PyObject *wanted)
{
    PyObject *found = PyDict_GetItemWithError(table, key);

    return found == NULL && PyErr_Occurred() ? -1 : found == wanted;
}

/* Remove a table's entry if it is there. */
int take_out(PyObject *table, PyObject *key)
{
    int there = PyDict_Contains(table, key);

    return there > 0 ? PyDict_DelItem(table, key) : there;
}

int is_true(PyObject *found)
{
    int answer = found == NULL ? -1 : found == Py_True;

    Py_XDECREF(found);
    return answer;
}

/* Return the number of forks so far. NULL if another fork is about to happen, or if this is the
 * table that a forked child inherited. */
PyObject *forks_so_far(State *state, PyObject *live)
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

/* Whether the number is still the same: making objects may have run other code since. */
int is_unforked(State *state, PyObject *live, PyObject *forks)
{
    OWNED PyObject *now = forks_so_far(state, live);

    if (now == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return PyObject_RichCompareBool(now, forks, Py_EQ);
}

double seconds_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Remove the last item of a list. */
int pop_last(PyObject *list)
{
    Py_ssize_t size = PyList_Size(list);

    return PyList_SetSlice(list, size - 1, size, NULL);
}

/* Return the last slot of the list of free ones that this process may take. It stays in the list.
 * NULL if the list is empty, so that the long way must look for free slots. */
PyObject *peek_slot(Tables *tables, uint64_t *number)
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

/* Remove from the list the slot that peek_slot() has found. */
int take_slot(Tables *tables, PyObject *slot)
{
    return pop_last(tables->slots_left) < 0 ? -1 : take_out(tables->listed, slot);
}

/* Whether peek_slot() would find the same slot again. */
int is_last_slot(Tables *tables, PyObject *slot, uint64_t number)
{
    Py_ssize_t size = PyList_Size(tables->slots_left);

    return size > 0 && PyList_GetItem(tables->slots_left, size - 1) == slot
        && !LOAD(tables->words[number]);
}

/* Return None instead of NULL, if NULL means that the function has declined. */
PyObject *answer(PyObject *found)
{
    return found == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : found;
}

/* Whether configure() has set the classes. */
int is_configured(PyObject *module)
{
    return ((State *)PyModule_GetState(module))->held[BLOCK] != NULL;
}

int takes(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, %zd were given", wanted, given);
    return 0;
}
