/* Small steps that the others share. Those that return int say 1 for yes, 0 for no and -1 for
 * an error. */
#include "_quick_blocks.h"

#include <time.h>

PyObject *new_object(State *state, PyObject *type)
{
    newfunc make = (newfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_new);

    return make((PyTypeObject *)type, state->held[NOTHING], NULL);
}

/* Set attributes. A value of NULL is that of a call that has failed. */
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

/* Whether an attribute is this very object. */
int is_field(PyObject *object, PyObject *name, PyObject *wanted)
{
    OWNED PyObject *found = PyObject_GetAttr(object, name);

    return found == NULL ? -1 : found == wanted;
}

/* Whether a table has this very object under a key. */
int has_item(PyObject *table, PyObject *key, PyObject *wanted)
{
    PyObject *found = PyDict_GetItemWithError(table, key);

    return found == NULL && PyErr_Occurred() ? -1 : found == wanted;
}

/* Take an entry out of a table, if it is there. */
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

/* Return how many forks there were; NULL if another is about to happen, or this is the
 * table of a parent. */
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

/* Whether that is still the same number; objects may have been made since. */
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

/* Take the last item off a list. */
int pop_last(PyObject *list)
{
    Py_ssize_t size = PyList_Size(list);

    return PyList_SetSlice(list, size - 1, size, NULL);
}

/* Return the last of the slots that are free and this process's to take, which it keeps;
 * NULL where one has to be looked for. */
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

/* Take the slot off the list that peek_slot() has found there. */
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

/* None for what was declined. */
PyObject *answer(PyObject *found)
{
    return found == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : found;
}

/* Whether the classes are known whose objects are made. */
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
