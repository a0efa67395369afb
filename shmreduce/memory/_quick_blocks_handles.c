/* Reads and writes handles, as handle.py does. */
#include "_quick_blocks.h"

static uint32_t checksums[256];

static uint32_t checksum(const uint8_t *data, size_t size)
{
    uint32_t sum = UINT32_MAX;

    for (size_t place = 0; place < size; place++)
        sum = checksums[(sum ^ data[place]) & 0xFF] ^ (sum >> 8);
    return ~sum;
}

void fill_checksums(void)
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

void put_number(uint8_t *data, int size, uint64_t number)
{
    for (int place = 0; place < size; place++, number >>= 8)
        data[place] = (uint8_t)number;
}

/* Whether an object is an undamaged handle of a usual kind. */
int read_handle(PyObject *given, Handle *found)
{
    char *text;
    Py_ssize_t size;
    const uint8_t *data;

    if (!PyBytes_CheckExact(given))
        return 0;
    if (PyBytes_AsStringAndSize(given, &text, &size) < 0)
        return 0;
    data = (const uint8_t *)text;
    if (size < SHORTEST || memcmp(data, MARK, FROM_CHECKSUM) != 0
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

/* Return a handle, from its lease and the constant part of its block's handles. */
PyObject *make_handle(uint64_t slot, uint64_t nonce, const uint8_t *constant, size_t size)
{
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(FROM_KEY + size));
    uint8_t *data;

    if (made == NULL)
        return NULL;
    data = (uint8_t *)PyBytes_AsString(made);
    memcpy(data, MARK, FROM_CHECKSUM);
    put_number(data + FROM_LEASE, 4, slot);
    put_number(data + FROM_LEASE + 4, 8, nonce);
    memcpy(data + FROM_KEY, constant, size);
    put_number(data + FROM_CHECKSUM, 4, checksum(data + FROM_LEASE, FROM_KEY - FROM_LEASE + size));
    return made;
}

uint64_t message_word(uint64_t nonce)
{
    return (uint64_t)1 << 62 | nonce;
}
