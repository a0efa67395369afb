/* The allocator: memory for arrays that an array library allocates itself.
 *
 * The functions at the end of this file that take a context are those of NEP 49
 * (https://numpy.org/neps/nep-0049.html). They never call Python, because the array
 * library may call them at any instant, even while the interpreter handles Ctrl-C, and
 * after it has ended. Python supplies the memory that they use and takes it back,
 * through the functions above them.
 *
 * Large requests get blocks of shared memory. All others, and those for which there is
 * no block, get memory from the C library. Each block that this file owns has an entry
 * in a table:
 *
 *   IDLE       nobody uses it; it is on the stack of its size
 *   LIVE       an array lives in it
 *   FREED      the array was freed, and Python must decide about the block
 *   INHERITED  an array of the parent process lives in it; this is a forked child
 *
 * A freed block is used again at once only if nobody else can have seen it: no message
 * named it (SENT), and there was no fork while the array lived. Python, which knows about
 * leases and children, decides about all others.
 *
 * New blocks are carved from one region of untouched pages, which Python lends, up to
 * an allowance of bytes. Their pages are allocated before they are given out, so that
 * touching them cannot fail.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SHMREDUCE_ALLOCATOR_VERSION 4

#define MOST_ENTRIES 16384
#define MOST_RANGES 64
#define MOST_CLASSES 512
#define PATIENCE 100 /* the most attempts at a system call that signals interrupt */

/* As in shmreduce.memory.mapping. */
#define HUGE_PAGE ((uint64_t)2 << 20)
#define COLLAPSED_AT_ONCE (16 * HUGE_PAGE)
#define LONGEST_COLLAPSE 0.1 /* seconds */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum state { EMPTY, IDLE, LIVE, FREED, INHERITED };

enum flag {
    SENT = 1,    /* a message has named the block since the array was allocated */
    PRIVATE = 2, /* a fork has made this process's pages private */
    ZEROED = 4,  /* nobody has written to the pages yet */
    KNOWN = 8,   /* Python has recorded the block */
    EXPOSED = 16 /* a fork could not make the pages private */
};

struct entry {
    uint64_t address;
    uint64_t capacity;
    uint64_t size; /* as requested for the array */
    uint64_t birth, death; /* the number of forks at that time */
    uint32_t range, block;
    uint32_t next; /* on its stack, where 0 ends the stack */
    uint16_t state, flags;
};

/* A mapped range of a segment's data. */
struct range {
    uint64_t address, size;
    uint64_t offset; /* in the file */
    uint32_t *entries; /* the entry's number by page, 0 if there is none */
    uint32_t used;
    int fd;
    int inherited;
    int retired; /* no more arrays are to be born in it */
    dev_t device; /* with the inode: identifies the file of the descriptor */
    ino_t inode;
};

struct region {
    uint64_t next, end;
    uint32_t range;
    uint32_t position, count;
    uint32_t zeroed, lent;
    uint32_t blocks[MOST_ENTRIES];
};

struct status {
    uint64_t forks;
    uint64_t idle_bytes;
    uint64_t carved_bytes; /* since the last allowance */
    uint64_t largest; /* largest request since the last allowance */
    uint64_t missed; /* largest request that the region could not serve */
    uint64_t exposed; /* blocks that a forked child can write to */
    uint64_t served; /* requests that got a block */
    uint32_t unknown; /* entries that Python has not recorded */
    uint32_t freed; /* entries on the stack of freed ones */
    uint32_t forking; /* forks that are under way */
};

static struct entry entries[MOST_ENTRIES + 1];
static struct range ranges[MOST_RANGES];
static struct region region;
static struct status status;

static uint32_t stacks[MOST_CLASSES];
static uint32_t freed, spare, unused = 1;
static uint32_t unknown[MOST_ENTRIES];

static uint64_t threshold = UINT64_MAX, allowance;
static uint64_t lowest = UINT64_MAX, highest;
static int enabled, ended;
/* How many of the forks under way are this thread's. */
static _Thread_local uint32_t depth;
static int collapses = 1; /* whether it is worth asking the kernel for huge pages */
static unsigned page_bits;

/* Python and NumPy call all these functions with the interpreter lock held. This lock is for
 * callers that do not hold it. */
static atomic_flag busy = ATOMIC_FLAG_INIT;

static int try_enter(void) { return !atomic_flag_test_and_set(&busy); }

static void enter(void)
{
    while (!try_enter())
        sched_yield();
}

static void leave(void) { atomic_flag_clear(&busy); }

/* Sizes: as shmreduce.memory.size_classes.size_class() for whole pages. */

static unsigned bits(uint64_t number)
{
    return number ? 64 - (unsigned)__builtin_clzll(number) : 0;
}

static uint64_t size_class(uint64_t size)
{
    uint64_t page = (uint64_t)1 << page_bits;
    unsigned width = bits((size ? size : 1) - 1);
    uint64_t step = width > 4 ? (uint64_t)1 << (width - 4) : 1;
    if (step < page)
        step = page;
    return size ? (size + step - 1) / step * step : page;
}

static unsigned class_of(uint64_t capacity)
{
    unsigned width = bits(capacity - 1);
    return width * 8 + (unsigned)(((capacity - 1) >> (width > 4 ? width - 4 : 0)) & 7);
}

/* Entries */

static uint32_t new_entry(void)
{
    uint32_t number = spare;
    if (number)
        spare = entries[number].next;
    else if (unused <= MOST_ENTRIES)
        number = unused++;
    return number;
}

static void drop_entry(uint32_t number)
{
    struct entry *entry = &entries[number];
    struct range *range = &ranges[entry->range];
    range->entries[(entry->address - range->address) >> page_bits] = 0;
    range->used--;
    memset(entry, 0, sizeof *entry);
    entry->next = spare;
    spare = number;
}

static uint32_t fill_entry(uint32_t range, uint32_t block, uint64_t address, uint64_t capacity,
                           unsigned flags)
{
    uint32_t number = new_entry();
    if (!number)
        return 0;
    struct entry *entry = &entries[number];
    memset(entry, 0, sizeof *entry);
    entry->address = address;
    entry->capacity = capacity;
    entry->range = range;
    entry->block = block;
    entry->flags = (uint16_t)flags;
    ranges[range].entries[(address - ranges[range].address) >> page_bits] = number;
    ranges[range].used++;
    return number;
}

static uint32_t entry_at(const void *pointer)
{
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    if (address < lowest || address >= highest)
        return 0;
    for (uint32_t number = 0; number < MOST_RANGES; number++) {
        const struct range *range = &ranges[number];
        if (range->size && address - range->address < range->size) {
            uint32_t found = range->entries[(address - range->address) >> page_bits];
            return found && entries[found].address == address ? found : 0;
        }
    }
    return 0;
}

static void push_idle(uint32_t number)
{
    struct entry *entry = &entries[number];
    uint32_t *stack = &stacks[class_of(entry->capacity)];
    entry->state = IDLE;
    entry->flags &= (uint16_t)~(SENT | PRIVATE);
    entry->next = *stack;
    *stack = number;
    status.idle_bytes += entry->capacity;
}

static uint32_t pop_idle(unsigned class)
{
    uint32_t number = stacks[class];
    if (number) {
        stacks[class] = entries[number].next;
        status.idle_bytes -= entries[number].capacity;
    }
    return number;
}

/* Free the copies of pages that were made when private pages were written. */
static void drop_private_pages(const struct entry *entry)
{
    madvise((void *)(uintptr_t)entry->address, entry->capacity, MADV_DONTNEED);
}

static void push_freed(uint32_t number)
{
    struct entry *entry = &entries[number];
    /* If a message has named the array, its bytes may still have to be copied. */
    if (entry->flags & PRIVATE && !(entry->flags & SENT))
        drop_private_pages(entry);
    entry->state = FREED;
    entry->death = status.forks;
    entry->next = freed;
    freed = number;
    status.freed++;
}

/* Pages */

/* Daemons close all descriptors that they find, and other files get the numbers. Using such a
 * number would show another file's bytes in arrays, or destroy them. */
static int is_open(const struct range *range)
{
    struct stat found;
    return fstat(range->fd, &found) == 0 && found.st_dev == range->device &&
           found.st_ino == range->inode;
}

static void punch(const struct range *range, uint64_t offset, uint64_t size)
{
    if (is_open(range))
        fallocate(range->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                  (off_t)size);
}

static double now(void)
{
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    return (double)clock.tv_sec + (double)clock.tv_nsec / 1e9;
}

/* Allocate huge pages where there are none, while the kernel can do so quickly. */
static void make_huge(uint64_t address, uint64_t size)
{
    uint64_t place = (address + HUGE_PAGE - 1) & -HUGE_PAGE;
    uint64_t end = (address + size) & -HUGE_PAGE;
    while (collapses && place < end) {
        uint64_t length = end - place < COLLAPSED_AT_ONCE ? end - place : COLLAPSED_AT_ONCE;
        double began;
        /* The kernel makes a huge page only where there is at least one page. */
        for (uint64_t each = place; each < place + length; each += HUGE_PAGE)
            if (madvise((void *)(uintptr_t)each, 1, MADV_POPULATE_WRITE))
                return;
        began = now();
        if (madvise((void *)(uintptr_t)place, length, MADV_COLLAPSE)) {
            collapses = errno != EINVAL;
            return;
        }
        if (now() - began > LONGEST_COLLAPSE)
            return; /* Memory is fragmented, and the kernel moves pages. */
        place += length;
    }
}

static int allocate_pages(const struct range *range, uint64_t address, uint64_t size)
{
    uint64_t offset = address - range->address + range->offset;
    int failed = 0;
    make_huge(address, size);
    if (madvise((void *)(uintptr_t)address, size, MADV_POPULATE_WRITE) == 0)
        return 1;
    failed = errno;
    if ((failed == EINVAL || failed == ENOSYS || failed == EINTR || failed == EAGAIN) &&
        is_open(range)) {
        /* An older kernel, or a signal has interrupted the call. */
        for (int attempt = 0; attempt < PATIENCE; attempt++) {
            failed = posix_fallocate(range->fd, (off_t)offset, (off_t)size);
            if (failed != EINTR)
                break;
        }
        if (!failed)
            return 1;
    }
    punch(range, offset, size);
    return 0;
}

static int cover(const struct entry *entry, int flags)
{
    const struct range *range = &ranges[entry->range];
    void *address = (void *)(uintptr_t)entry->address;
    off_t offset = (off_t)(entry->address - range->address + range->offset);
    if (!is_open(range))
        return 0;
    if (mmap(address, entry->capacity, PROT_READ | PROT_WRITE, MAP_FIXED | flags, range->fd,
             offset) == address)
        return 1;
    /* Before Linux 6.12 the old pages are gone by now if the kernel refuses to charge for private
     * ones (vm.overcommit_memory=2). It does not charge for shared ones. */
    if (flags == MAP_PRIVATE)
        mmap(address, entry->capacity, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED, range->fd,
             offset);
    return 0;
}

static uint32_t carve(uint64_t capacity)
{
    uint32_t number;
    uint64_t place = region.next;
    if (!region.lent)
        return 0;
    if (capacity >= HUGE_PAGE)
        /* The gap costs only addresses. */
        place = (place + HUGE_PAGE - 1) & -HUGE_PAGE;
    if (region.position == region.count || place > region.end || capacity > region.end - place) {
        if (capacity > status.missed)
            status.missed = capacity;
        return 0;
    }
    if (capacity > allowance || status.carved_bytes > allowance - capacity)
        return 0;
    if (!allocate_pages(&ranges[region.range], place, capacity))
        return 0;
    number = fill_entry(region.range, region.blocks[region.position], place, capacity,
                        region.zeroed ? ZEROED : 0);
    if (!number)
        return 0;
    region.position++;
    region.next = place + capacity;
    status.carved_bytes += capacity;
    unknown[status.unknown++] = number;
    return number;
}

static void *take(uint64_t size, int *zeroed)
{
    uint64_t capacity;
    uint32_t number = 0;
    if (!enabled || status.forking || size < threshold || size > UINT64_MAX / 4 || !try_enter())
        return NULL;
    capacity = size_class(size);
    if (size > status.largest)
        status.largest = size;
    /* From 64 KiB on, all blocks of a class have one size. Below, the top one may have another. */
    number = stacks[class_of(capacity)];
    number = number && entries[number].capacity == capacity ? pop_idle(class_of(capacity)) : 0;
    if (!number)
        number = carve(capacity);
    if (number) {
        struct entry *entry = &entries[number];
        entry->state = LIVE;
        entry->size = size;
        entry->birth = status.forks;
        status.served++;
        *zeroed = (entry->flags & ZEROED) != 0;
        entry->flags &= (uint16_t)~ZEROED;
    }
    leave();
    return number ? (void *)(uintptr_t)entries[number].address : NULL;
}

/* Functions that Python calls */

#define EXPORT __attribute__((visibility("default")))

EXPORT int shmreduce_version(void) { return SHMREDUCE_ALLOCATOR_VERSION; }
EXPORT void *shmreduce_entries(void) { return entries; }
EXPORT void *shmreduce_status(void) { return &status; }
EXPORT uint64_t shmreduce_size_class(uint64_t size) { return size_class(size); }

EXPORT void shmreduce_start(uint32_t page_size) { page_bits = bits(page_size) - 1; }
EXPORT void shmreduce_enable(int yes) { enabled = yes && !ended; }

/* Set how many bytes may be carved from now on, and the smallest size that gets a block. */
EXPORT void shmreduce_allow(uint64_t from, uint64_t bytes)
{
    enter();
    threshold = from;
    allowance = bytes;
    status.carved_bytes = status.largest = status.missed = 0;
    leave();
}

static size_t table_bytes(uint64_t size) { return (size >> page_bits) * sizeof(uint32_t) + 1; }

static void forget_range(struct range *range)
{
    munmap(range->entries, table_bytes(range->size));
    memset(range, 0, sizeof *range);
}

/* Ctrl-C may come when a range has been added, before Python notes its number. Then Python adds
 * the range again; or it closes the segment, and another one gets the addresses. No two ranges may
 * have an address in common: entry_at() finds the arrays of only one of them. */
static int32_t known_range(const struct range *added)
{
    for (int32_t number = 0; number < MOST_RANGES; number++) {
        struct range *range = &ranges[number];
        if (!range->size || range->address >= added->address + added->size ||
            added->address >= range->address + range->size)
            continue;
        if (range->address == added->address && range->size == added->size &&
            range->device == added->device && range->inode == added->inode)
            return number;
        if (!range->used)
            forget_range(range);
    }
    return -1;
}

/* Add a range, unless it is there; return its number, or -1 if there is no room for it. */
EXPORT int32_t shmreduce_add_range(uint64_t address, uint64_t size, int fd, uint64_t offset)
{
    int32_t found;
    int known;
    struct stat file;
    void *table;
    if (fstat(fd, &file))
        return -1;
    table = mmap(NULL, table_bytes(size), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED)
        return -1;
    struct range range = {address, size, offset, table, 0, fd, 0, 0, file.st_dev, file.st_ino};
    enter();
    found = known_range(&range);
    known = found != -1;
    for (int32_t number = 0; number < MOST_RANGES && found == -1; number++) {
        if (!ranges[number].size) {
            ranges[number] = range;
            found = number;
        }
    }
    if (found != -1) {
        if (address < lowest)
            lowest = address;
        if (address + size > highest)
            highest = address + size;
    }
    leave();
    if (known || found == -1)
        munmap(table, table_bytes(size));
    return found;
}

/* Drop a range if it is not used; return whether it was dropped. */
EXPORT int shmreduce_drop_range(uint32_t number)
{
    int done = 0;
    enter();
    if (!ranges[number].used && !(region.lent && region.range == number)) {
        forget_range(&ranges[number]);
        done = 1;
    }
    leave();
    return done;
}

/* Let arrays that are freed in a range leave their blocks to Python, not to the next arrays. */
EXPORT void shmreduce_retire(uint32_t number, int yes)
{
    enter();
    ranges[number].retired = yes;
    leave();
}

/* Lend a block with pages, for requests of its size; return 0 if there is no room for it. */
EXPORT uint32_t shmreduce_lend(uint32_t range, uint32_t block, uint64_t address, uint64_t capacity)
{
    uint32_t number = 0;
    enter();
    if (ranges[range].size)
        number = fill_entry(range, block, address, capacity, KNOWN);
    if (number)
        push_idle(number);
    leave();
    return number;
}

/* Lend untouched pages to carve blocks from, and numbers for the blocks. */
EXPORT void shmreduce_lend_region(uint32_t range, uint64_t address, uint64_t size, int zeroed,
                                  const uint32_t *blocks, uint32_t count)
{
    enter();
    if (!ranges[range].size) {
        leave();
        return;
    }
    region.range = range;
    region.next = address;
    region.end = address + size;
    region.zeroed = (uint32_t)zeroed;
    region.position = 0;
    region.count = count < MOST_ENTRIES ? count : MOST_ENTRIES;
    memcpy(region.blocks, blocks, region.count * sizeof *blocks);
    region.lent = 1;
    leave();
}

EXPORT uint64_t shmreduce_region_left(void)
{
    return region.lent && region.position < region.count ? region.end - region.next : 0;
}

/* Take the region back: return its range, what is left of it, and how many numbers were used. */
EXPORT int shmreduce_take_region(uint32_t *range, uint64_t *next, uint64_t *end, uint32_t *used)
{
    int lent;
    enter();
    lent = (int)region.lent;
    *range = region.range;
    *next = region.next;
    *end = region.end;
    *used = region.position;
    region.lent = 0;
    leave();
    return lent;
}

/* Return an entry that Python has not recorded, 0 if there is none. It is returned again until
 * Python has called shmreduce_known(). */
EXPORT uint32_t shmreduce_unknown(void)
{
    return status.unknown ? unknown[status.unknown - 1] : 0;
}

/* Mark an entry as recorded; return whether this call did it. */
EXPORT int shmreduce_known(uint32_t number)
{
    int first = 0;
    enter();
    for (uint32_t place = 0; place < status.unknown && !first; place++) {
        if (unknown[place] == number) {
            unknown[place] = unknown[--status.unknown];
            entries[number].flags |= KNOWN;
            first = 1;
        }
    }
    leave();
    return first;
}

EXPORT uint32_t shmreduce_take_freed(void)
{
    uint32_t number;
    enter();
    number = freed;
    if (number) {
        freed = entries[number].next;
        status.freed--;
    }
    leave();
    return number;
}

/* Take back an idle block, large ones first. It belongs to Python then, like a freed one. */
EXPORT uint32_t shmreduce_take_idle(void)
{
    uint32_t number = 0;
    enter();
    for (unsigned class = MOST_CLASSES; class-- > 0 && !number;)
        number = pop_idle(class);
    if (number) {
        entries[number].state = FREED;
        entries[number].birth = entries[number].death = status.forks;
    }
    leave();
    return number;
}

/* Drop the entry of a freed block that Python has taken. */
EXPORT void shmreduce_release(uint32_t number)
{
    enter();
    if (entries[number].state == FREED)
        drop_entry(number);
    leave();
}

/* Make the pages show the file again; return whether that was possible. */
EXPORT int shmreduce_restore(uint32_t number)
{
    int done;
    enter();
    done = cover(&entries[number], MAP_SHARED);
    if (done)
        entries[number].flags &= (uint16_t)~PRIVATE;
    leave();
    return done;
}

/* Mark the array at an address as named in a message, and return its entry. Returns 0 if no
 * array of this allocator begins there, or if it must not be named. When it is freed, Python
 * gets the block. */
EXPORT uint32_t shmreduce_send(uint64_t address)
{
    uint32_t number;
    enter();
    number = entry_at((const void *)(uintptr_t)address);
    if (number &&
        (entries[number].state != LIVE || entries[number].flags & (SENT | PRIVATE | EXPOSED)))
        number = 0;
    if (number)
        entries[number].flags |= SENT;
    leave();
    return number;
}

/* Unmark it: no message names it any more, and none has reached a receiver. */
EXPORT void shmreduce_unsend(uint32_t number)
{
    enter();
    if (entries[number].state == LIVE)
        entries[number].flags &= (uint16_t)~SENT;
    leave();
}

/* Before a fork: make the arrays' pages private, so that parent and child keep them apart. */
EXPORT void shmreduce_before_fork(void)
{
    enter();
    depth++;
    status.forking++;
    status.forks++;
    for (uint32_t number = 1; number < unused; number++) {
        struct entry *entry = &entries[number];
        if (entry->state == LIVE && !(entry->flags & PRIVATE)) {
            if (cover(entry, MAP_PRIVATE)) {
                entry->flags |= PRIVATE;
            } else {
                entry->flags |= EXPOSED;
                status.exposed++;
            }
        }
    }
    leave();
}

/* The same for a thread that has prepared for `others` forks and is about to make another, if
 * the fork began before its list of hooks had the function above. */
EXPORT void shmreduce_prepare_fork(uint32_t others)
{
    if (depth <= others)
        shmreduce_before_fork();
}

EXPORT void shmreduce_after_fork_in_parent(void)
{
    enter();
    /* Otherwise nothing was prepared for this fork, and the number is another thread's. */
    if (depth) {
        depth--;
        status.forking--;
    }
    leave();
}

/* In the child: only the parent may use its blocks again. */
EXPORT void shmreduce_after_fork_in_child(void)
{
    atomic_flag_clear(&busy);
    depth = 0;
    freed = 0;
    memset(stacks, 0, sizeof stacks);
    memset(&status, 0, sizeof status);
    region.lent = 0;
    allowance = 0;
    for (uint32_t number = 1; number < unused; number++) {
        struct entry *entry = &entries[number];
        if (entry->state == LIVE)
            entry->state = INHERITED;
        else if (entry->state == IDLE || entry->state == FREED)
            drop_entry(number);
    }
    for (uint32_t number = 0; number < MOST_RANGES; number++) {
        ranges[number].inherited = 1;
        if (ranges[number].size && !ranges[number].used)
            forget_range(&ranges[number]);
    }
}

/* The process is about to end: no blocks are given out any more. */
EXPORT void shmreduce_end(void)
{
    ended = 1;
    enabled = 0;
}

/* Functions that the array library calls */

EXPORT void shmreduce_free(void *context, void *pointer, size_t size)
{
    uint32_t number;
    (void)context;
    (void)size;
    if (!pointer)
        return;
    enter();
    number = entry_at(pointer);
    if (number) {
        struct entry *entry = &entries[number];
        if (entry->state == INHERITED) {
            struct range *range = &ranges[entry->range];
            drop_private_pages(entry);
            drop_entry(number);
            if (range->inherited && !range->used)
                forget_range(range);
        } else if (entry->state == LIVE && !(entry->flags & (SENT | PRIVATE | EXPOSED)) &&
                   !status.forking && entry->birth == status.forks &&
                   !ranges[entry->range].retired) {
            push_idle(number);
        } else if (entry->state == LIVE) {
            push_freed(number);
        }
    }
    leave();
    if (!number)
        free(pointer);
}

EXPORT void *shmreduce_malloc(void *context, size_t size)
{
    int zeroed;
    void *found = take(size, &zeroed);
    (void)context;
    return found ? found : malloc(size);
}

EXPORT void *shmreduce_calloc(void *context, size_t count, size_t size)
{
    int zeroed = 0;
    uint64_t bytes;
    void *found = NULL;
    (void)context;
    if (!__builtin_mul_overflow((uint64_t)count, (uint64_t)size, &bytes))
        found = take(bytes, &zeroed);
    if (!found)
        return calloc(count, size);
    if (!zeroed)
        memset(found, 0, bytes);
    return found;
}

EXPORT void *shmreduce_realloc(void *context, void *pointer, size_t size)
{
    uint32_t number;
    uint64_t held = 0;
    int fits = 0;
    void *moved;
    if (!pointer)
        return shmreduce_malloc(context, size);
    enter();
    number = entry_at(pointer);
    if (number) {
        struct entry *entry = &entries[number];
        held = entry->size < entry->capacity ? entry->size : entry->capacity;
        /* A message tells the array's size, so it must not change. */
        fits = size <= entry->capacity && !(entry->flags & SENT);
        if (fits)
            entry->size = size;
    }
    leave();
    if (!number)
        return realloc(pointer, size);
    if (fits)
        return pointer;
    moved = shmreduce_malloc(context, size);
    if (moved) {
        memcpy(moved, pointer, held < size ? held : size);
        shmreduce_free(context, pointer, held);
    }
    return moved;
}
