/* The kernel of the exchange: ordered sums, the words of a window, and whole reductions through a window.
 *
 * The first half knows nothing of Python, so that tests can run it under sanitizers (KERNEL_ALONE). Layouts and orders
 * are decided in Python (`collectives.shared_memory`); everything here exists there too, in NumPy, with the same bits.
 */

#define _GNU_SOURCE
#include <float.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a futex is the low half of a word: the kernel needs a little-endian processor"
#endif

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "the bits of sums must be NumPy's: each operation is rounded once, to its own dtype, and NaN is heeded"
#endif

#ifndef __has_attribute
#define __has_attribute(name) 0
#endif

/* Versions of a loop for several processors need ifunc of glibc, whose resolvers run before a sanitizer has started. */
#if defined(__x86_64__) && defined(__GLIBC__) && __has_attribute(target_clones) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(KERNEL_ALONE)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* An output may be one of the inputs, element by element, and overlaps no input in another way. */
#if defined(__clang__)
#define ELEMENT_BY_ELEMENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENT_BY_ELEMENT _Pragma("GCC ivdep")
#endif

/* ---- ordered sums */

enum { MOST_ROWS = 12, BLOCK_BYTES = 4096 };

typedef struct {
    int32_t left, right, row;
} Step;

/* The additions that combine `sources` values into one; values are numbered, first the sources, then the sums. */
typedef struct {
    int sources, steps;
    const Step *step;
} Order;

typedef enum { AS_IT_IS, MULTIPLIED, DIVIDED } Finish;

typedef struct {
    Finish finish;
    double by;
} Mean;

/* Loops over one dtype. The sum is rounded before the mean is formed: the file is compiled without contraction. */
#define LOOPS(T)                                                                                                       \
    FOR_EACH_PROCESSOR static void T##_add(const T *a, const T *b, T *out, size_t n) {                                 \
        ELEMENT_BY_ELEMENT for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                        \
    }                                                                                                                  \
    FOR_EACH_PROCESSOR static void T##_add_multiplied(const T *a, const T *b, T *out, size_t n, T by) {                \
        ELEMENT_BY_ELEMENT for (size_t i = 0; i < n; i++) out[i] = (a[i] + b[i]) * by;                                 \
    }                                                                                                                  \
    FOR_EACH_PROCESSOR static void T##_add_divided(const T *a, const T *b, T *out, size_t n, T by) {                   \
        ELEMENT_BY_ELEMENT for (size_t i = 0; i < n; i++) out[i] = (a[i] + b[i]) / by;                                 \
    }                                                                                                                  \
    FOR_EACH_PROCESSOR static void T##_multiplied(const T *a, T *out, size_t n, T by) {                                \
        ELEMENT_BY_ELEMENT for (size_t i = 0; i < n; i++) out[i] = a[i] * by;                                          \
    }                                                                                                                  \
    FOR_EACH_PROCESSOR static void T##_divided(const T *a, T *out, size_t n, T by) {                                   \
        ELEMENT_BY_ELEMENT for (size_t i = 0; i < n; i++) out[i] = a[i] / by;                                          \
    }                                                                                                                  \
    static void T##_last(const T *a, const T *b, T *out, size_t n, Mean mean) {                                        \
        if (mean.finish == MULTIPLIED) T##_add_multiplied(a, b, out, n, (T)mean.by);                                   \
        else if (mean.finish == DIVIDED) T##_add_divided(a, b, out, n, (T)mean.by);                                    \
        else T##_add(a, b, out, n);                                                                                    \
    }                                                                                                                  \
    static void T##_single(const T *a, T *out, size_t n, Mean mean) {                                                  \
        if (mean.finish == MULTIPLIED) T##_multiplied(a, out, n, (T)mean.by);                                          \
        else if (mean.finish == DIVIDED) T##_divided(a, out, n, (T)mean.by);                                           \
        else if (a != out) memcpy(out, a, n * sizeof(T));                                                              \
    }                                                                                                                  \
    static const T *T##_value(const void *const *sources, T (*rows)[BLOCK_BYTES / sizeof(T)], const Order *order,      \
                              int number, size_t start) {                                                              \
        if (number < order->sources) return (const T *)sources[number] + start;                                        \
        return rows[order->step[number - order->sources].row];                                                         \
    }                                                                                                                  \
    /* All sources of a block are read before the block of `out` is written, so `out` may be any of them. */           \
    static void T##_combine(const Order *order, const void *const *sources, T *out, size_t n, Mean mean) {             \
        T rows[MOST_ROWS][BLOCK_BYTES / sizeof(T)];                                                                    \
        const size_t block = BLOCK_BYTES / sizeof(T);                                                                  \
        for (size_t start = 0; start < n; start += block) {                                                            \
            const size_t m = n - start < block ? n - start : block;                                                    \
            for (int s = 0; s < order->steps; s++) {                                                                   \
                const T *a = T##_value(sources, rows, order, order->step[s].left, start);                              \
                const T *b = T##_value(sources, rows, order, order->step[s].right, start);                             \
                if (s + 1 < order->steps) T##_add(a, b, rows[order->step[s].row], m);                                  \
                else T##_last(a, b, out + start, m, mean);                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void T##_reduce(const Order *order, const void *const *sources, T *out, size_t n, Mean mean) {              \
        if (!order->steps) T##_single(sources[0], out, n, mean);                                                       \
        else if (order->steps == 1) T##_last(sources[0], sources[1], out, n, mean);                                    \
        else T##_combine(order, sources, out, n, mean);                                                                \
    }

LOOPS(float)
LOOPS(double)

static const Mean NO_MEAN = {AS_IT_IS, 1};

/* Combine arrays of `n` elements of `item` bytes; `out` may be one of the sources and overlaps none otherwise. */
static void reduce(size_t item, const Order *order, const void *const *sources, void *out, size_t n, Mean mean) {
    if (item == sizeof(float)) float_reduce(order, sources, out, n, mean);
    else double_reduce(order, sources, out, n, mean);
}

/* A mean over 2^k contributions is multiplied by 1 / 2^k: the same bits as a division, several times faster. */
static Mean mean_over(long long count) {
    if (count <= 1) return NO_MEAN;
    if ((count & (count - 1)) == 0) return (Mean){MULTIPLIED, 1.0 / (double)count};
    return (Mean){DIVIDED, (double)count};
}

/* Return whether every step names earlier values and a row that exists. */
static int is_sound(const Order *order) {
    if (order->sources < 1 || order->steps != order->sources - 1) return 0;
    for (int s = 0; s < order->steps; s++) {
        const Step *step = &order->step[s];
        const int known = order->sources + s;
        if (step->left < 0 || step->left >= known || step->right < 0 || step->right >= known) return 0;
        if (step->row < 0 || step->row >= MOST_ROWS) return 0;
    }
    return 1;
}

/* ---- words of a window: one writer, many readers, values only grow (`collectives.shared_memory.segment`) */

enum {
    SEQUENCE = 0, FINGERPRINT = 2, COUNT = 4, NBYTES = 6,
    PRODUCED = 8, CONSUMED = 9, REDUCED = 10, FETCHED = 11,
    SLEEPERS = 12, /* number of ranks that sleep until a word of this rank changes */
    WAKES = 13,    /* whether this rank wakes sleepers; a rank without the kernel does not */
    WORDS = 16, DEPTH = 2
};

#define NOT_WOKEN_NS 50000 /* longest sleep if the writer wakes nobody */
#define PATIENCE_NS 1000000 /* then Python takes over: warnings, lost ranks, limits */
#define POLLS 64            /* polls between two looks at the clock */
#define FIRST_POLLS 256     /* polls before a wait lets go of the interpreter: 1 to 2 us */

typedef _Atomic(uint64_t) Word;

typedef struct {
    char *memory;
    int rank, size;
    int64_t spin_ns; /* 0 if ranks share cores */
    /* Called when a wait begins in earnest, and when it has lasted PATIENCE_NS; nonzero ends it with an error. */
    void (*let_go)(void *context);
    int (*be_patient)(void *context, int index, uint64_t value);
    void *context;
} Waiter;

static Word *word_at(const Waiter *w, int rank, int word) { return (Word *)w->memory + rank * WORDS + word; }

static int has_reached(Word *word, int64_t value) {
    return (int64_t)atomic_load_explicit(word, memory_order_acquire) >= value;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int64_t smaller_ns(int64_t a, int64_t b) { return a < b ? a : b; }

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int is_reached_within(Word *word, int64_t value, int polls) {
    for (int poll = 0; poll < polls; poll++) {
        if (has_reached(word, value)) return 1;
        pause_core();
    }
    return 0;
}

/* Sleep until the word changes, is woken for, or the time has passed. */
static void sleep_on(Word *word, uint64_t seen, int64_t ns) {
    const struct timespec limit = {0, ns};
    syscall(SYS_futex, (uint32_t *)(void *)word, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
}

/* Set one of this rank's words after all earlier writes, and wake the ranks that sleep. */
static void announce(const Waiter *w, int word, uint64_t value) {
    Word *own = word_at(w, w->rank, word);
    atomic_store_explicit(own, value, memory_order_seq_cst); /* before the sleepers are read, or one sleeps on */
    if (atomic_load_explicit(word_at(w, w->rank, SLEEPERS), memory_order_seq_cst))
        syscall(SYS_futex, (uint32_t *)(void *)own, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleep until the word has reached the value or the time has passed. */
static void sleep_until(const Waiter *w, int rank, int word, int64_t value, int64_t ns) {
    Word *awaited = word_at(w, rank, word), *sleepers = word_at(w, rank, SLEEPERS);
    const int wakes = atomic_load_explicit(word_at(w, rank, WAKES), memory_order_relaxed) != 0;
    const int64_t longest = wakes ? ns : smaller_ns(ns, NOT_WOKEN_NS);
    int64_t now = now_ns();
    const int64_t end = now + ns;
    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
    for (; now < end; now = now_ns()) {
        const uint64_t seen = atomic_load_explicit(awaited, memory_order_seq_cst);
        if ((int64_t)seen >= value) break;
        sleep_on(awaited, seen, smaller_ns(end - now, longest));
    }
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_seq_cst);
}

/* Spin, then sleep; return whether the word has reached the value within PATIENCE_NS. */
static int wait_briefly(const Waiter *w, int rank, int word, int64_t value) {
    Word *awaited = word_at(w, rank, word);
    const int64_t began = now_ns();
    if (w->spin_ns) {
        while (now_ns() - began < w->spin_ns)
            if (is_reached_within(awaited, value, POLLS)) return 1;
    } else {
        while (now_ns() - began < NOT_WOKEN_NS) {
            sched_yield();
            if (has_reached(awaited, value)) return 1;
        }
    }
    sleep_until(w, rank, word, value, PATIENCE_NS);
    return has_reached(awaited, value);
}

/* Wait until the word of a rank has reached the value; return nonzero after an error. */
static int await_rank(const Waiter *w, int rank, int word, int64_t value) {
    Word *awaited = word_at(w, rank, word);
    if (has_reached(awaited, value)) return 0;
    if (w->spin_ns && is_reached_within(awaited, value, FIRST_POLLS)) return 0;
    w->let_go(w->context);
    if (wait_briefly(w, rank, word, value)) return 0;
    if (w->be_patient(w->context, rank * WORDS + word, (uint64_t)value)) return 1;
    return !has_reached(awaited, value); /* reads the word again, for the order of memory */
}

static int await_all(const Waiter *w, int word, int64_t value) {
    for (int rank = 0; rank < w->size; rank++)
        if (rank != w->rank && await_rank(w, rank, word, value)) return 1;
    return 0;
}

/* ---- reductions through a window (`collectives.shared_memory.reduction`) */

/* Added to the announced size if a rank's sums follow its contributions. Ranks that do not use them need not know. */
#define WITH_SUMS (UINT64_C(1) << 62)

typedef enum { INLINE, STAGED, CHUNKED } Kind;
typedef enum { DIFFERENT_ARRAYS, DONE, DIFFERENT_CALLS, OTHER_COUNTS, FAILED } Outcome;

/* Some neighbouring contributions of this rank that make up one node of the tree. */
typedef struct {
    int first;
    Order order;
} Sum;

/* Everything that is known of a reduction before its arrays. */
typedef struct {
    Kind kind;
    int is_private; /* whether the result is memory of this rank alone, so that others' slices are fetched */
    size_t item, elements, chunk;
    int chunks;
    uint64_t fingerprint;
    Mean mean;
    const int64_t *counts;  /* contributions of each rank */
    const uint64_t *nbytes; /* what each rank announces, apart from WITH_SUMS */
    const int64_t *bounds;  /* slice of each rank */
    const int64_t *slots;   /* INLINE: first slot of each rank in even, then in odd exchanges */
    int with_sums;          /* INLINE: whether a rank's sums follow its contributions */
    const int64_t *pipes;   /* first byte of each rank's pipe */
    const int64_t *nodes;   /* number of sums in each rank's pipe for each other rank */
    int64_t pipe_step, results, result_step; /* distances: between chunks, from a pipe to its results, between these */
    const Sum *sums;        /* this rank's sums for other ranks */
    Order whole;            /* of this rank's contributions and the others' sums */
    Order leaves;           /* INLINE: of all contributions */
    const void **sources;   /* room for the sources of these orders */
    const void **part;      /* room for this rank's contributions */
} Plan;

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t first_of(const Plan *p, int rank, int step) {
    return smaller((size_t)p->bounds[rank] + (size_t)step * p->chunk, (size_t)p->bounds[rank + 1]);
}

static size_t length_of(const Plan *p, int rank, int step) {
    return smaller(p->chunk, (size_t)p->bounds[rank + 1] - first_of(p, rank, step));
}

static char *place_in_pipe(const Waiter *w, const Plan *p, int rank, int owner, int64_t chunk, int64_t node) {
    const int64_t place = (owner - (owner > rank)) * p->nodes[rank] + node;
    return w->memory + p->pipes[rank] + chunk % DEPTH * p->pipe_step + place * (int64_t)(p->chunk * p->item);
}

static char *result_of(const Waiter *w, const Plan *p, int rank, int64_t chunk) {
    return w->memory + p->pipes[rank] + p->results + chunk % DEPTH * p->result_step;
}

/* Write this rank's sums of a chunk for all other ranks into its pipe. */
static void produce(const Waiter *w, const Plan *p, const void *const *own, int step, int64_t chunk) {
    for (int owner = 0; owner < w->size; owner++) {
        const size_t first = first_of(p, owner, step), n = length_of(p, owner, step);
        if (owner == w->rank || !n) continue;
        for (int64_t number = 0; number < p->counts[w->rank]; number++)
            p->part[number] = (const char *)own[number] + first * p->item;
        for (int64_t node = 0; node < p->nodes[w->rank]; node++) {
            const Sum *sum = &p->sums[node];
            char *place = place_in_pipe(w, p, w->rank, owner, chunk, node);
            reduce(p->item, &sum->order, p->part + sum->first, place, n, NO_MEAN);
        }
    }
}

/* Reduce `p->sources` into two places, block by block: the second write reads a block that is in the cache. */
static void reduce_twice(const Plan *p, int sources, char *out, char *copy, size_t n) {
    const size_t block = BLOCK_BYTES / p->item;
    for (size_t start = 0; start < n; start += block) {
        const size_t nbytes = smaller(block, n - start) * p->item;
        reduce(p->item, &p->whole, p->sources, out, nbytes / p->item, p->mean);
        memcpy(copy, out, nbytes);
        for (int number = 0; number < sources; number++) p->sources[number] = (const char *)p->sources[number] + nbytes;
        out += nbytes, copy += nbytes;
    }
}

/* Reduce this rank's slice of a chunk into `out`, and for others into the window if `out` is private. */
static void reduce_chunk(const Waiter *w, const Plan *p, const void *const *own, char *out, int step, int64_t chunk) {
    const size_t first = first_of(p, w->rank, step), n = length_of(p, w->rank, step);
    if (!n) return;
    int known = 0;
    for (int rank = 0; rank < w->size; rank++) {
        if (rank == w->rank)
            for (int64_t number = 0; number < p->counts[rank]; number++)
                p->sources[known++] = (const char *)own[number] + first * p->item;
        else
            for (int64_t node = 0; node < p->nodes[rank]; node++)
                p->sources[known++] = place_in_pipe(w, p, rank, w->rank, chunk, node);
    }
    char *target = out + first * p->item;
    if (p->is_private) reduce_twice(p, known, target, result_of(w, p, w->rank, chunk), n);
    else reduce(p->item, &p->whole, p->sources, target, n, p->mean);
}

static int fetch_chunk(const Waiter *w, const Plan *p, char *out, int step, int64_t chunk) {
    for (int rank = 0; rank < w->size; rank++) {
        const size_t first = first_of(p, rank, step), n = length_of(p, rank, step);
        if (rank == w->rank || !n) continue;
        if (await_rank(w, rank, REDUCED, chunk + 1)) return 1;
        memcpy(out + first * p->item, result_of(w, p, rank, chunk), n * p->item);
    }
    return 0;
}

static int run_chunks(const Waiter *w, const Plan *p, const void *const *own, char *out, int64_t base) {
    for (int step = 0; step < p->chunks; step++) {
        const int64_t chunk = base + step;
        if (await_all(w, CONSUMED, chunk - DEPTH + 1)) return 1;
        produce(w, p, own, step, chunk);
        announce(w, PRODUCED, (uint64_t)chunk + 1);
        if (p->is_private && await_all(w, FETCHED, chunk - DEPTH + 1)) return 1;
        if (await_all(w, PRODUCED, chunk + 1)) return 1;
        reduce_chunk(w, p, own, out, step, chunk);
        announce(w, CONSUMED, (uint64_t)chunk + 1);
        announce(w, REDUCED, (uint64_t)chunk + 1);
        if (p->is_private) {
            if (fetch_chunk(w, p, out, step, chunk)) return 1;
            announce(w, FETCHED, (uint64_t)chunk + 1);
        }
    }
    return 0;
}

/* Set all progress words to the number of passed chunks, `REDUCED` last: others wait for it. */
static void catch_up(const Waiter *w, int64_t chunks) {
    announce(w, PRODUCED, (uint64_t)chunks);
    announce(w, CONSUMED, (uint64_t)chunks);
    announce(w, FETCHED, (uint64_t)chunks);
    announce(w, REDUCED, (uint64_t)chunks);
}

/* Announce this rank's call, wait for the others', and compare them; `with_sums`: whether all ranks sent sums along. */
static Outcome agree(const Waiter *w, const Plan *p, uint64_t sequence, int *with_sums) {
    const int parity = (int)(sequence & 1);
    const uint64_t mark = p->with_sums ? WITH_SUMS : 0;
    const uint64_t own[] = {p->fingerprint, (uint64_t)p->counts[w->rank], p->nbytes[w->rank] | mark};
    for (int word = 0; word < 3; word++)
        atomic_store_explicit(word_at(w, w->rank, FINGERPRINT + 2 * word + parity), own[word], memory_order_relaxed);
    announce(w, SEQUENCE, sequence);
    if (await_all(w, SEQUENCE, (int64_t)sequence)) return FAILED;
    Outcome outcome = DONE;
    *with_sums = p->with_sums;
    for (int rank = 0; rank < w->size; rank++) {
        uint64_t theirs[3];
        for (int word = 0; word < 3; word++)
            theirs[word] = atomic_load_explicit(word_at(w, rank, FINGERPRINT + 2 * word + parity), memory_order_relaxed);
        if (theirs[0] != p->fingerprint) return DIFFERENT_CALLS;
        if (theirs[2] == p->nbytes[rank]) *with_sums = 0;
        else if (theirs[2] != (p->nbytes[rank] | mark)) outcome = OTHER_COUNTS;
        if (theirs[1] != (uint64_t)p->counts[rank]) outcome = OTHER_COUNTS;
    }
    return outcome;
}

/* Put the contributions where the others find them if the calls turn out to be equal. */
static int send_ahead(const Waiter *w, const Plan *p, const void *const *own, int parity, int64_t base) {
    if (p->kind == STAGED) {
        if (await_all(w, CONSUMED, base - DEPTH + 1)) return 1;
        produce(w, p, own, 0, base);
    }
    if (p->kind == INLINE) {
        char *slot = w->memory + p->slots[parity * w->size + w->rank];
        const size_t nbytes = p->elements * p->item;
        for (int64_t number = 0; number < p->counts[w->rank]; number++, slot += nbytes) memcpy(slot, own[number], nbytes);
        for (int64_t node = 0; p->with_sums && node < p->nodes[w->rank]; node++, slot += nbytes)
            reduce(p->item, &p->sums[node].order, own + p->sums[node].first, slot, p->elements, NO_MEAN);
    }
    return 0;
}

/* Add everything that has come with the exchange. This rank's own contributions are in its cache. */
static void reduce_slots(const Waiter *w, const Plan *p, const void *const *own, char *out, int parity, int with_sums) {
    int known = 0;
    for (int rank = 0; rank < w->size; rank++) {
        const char *slot = w->memory + p->slots[parity * w->size + rank];
        const size_t nbytes = p->elements * p->item;
        const int takes_sums = with_sums && rank != w->rank;
        if (takes_sums) slot += (size_t)p->counts[rank] * nbytes;
        const int64_t count = takes_sums ? p->nodes[rank] : p->counts[rank];
        for (int64_t number = 0; number < count; number++)
            p->sources[known++] = rank == w->rank ? own[number] : slot + (size_t)number * nbytes;
    }
    reduce(p->item, with_sums ? &p->whole : &p->leaves, p->sources, out, p->elements, p->mean);
}

/* Move the data of chunked kinds. */
static int move(const Waiter *w, const Plan *p, const void *const *own, char *out, int64_t base) {
    if (p->kind == STAGED) reduce_chunk(w, p, own, out, 0, base);
    else if (run_chunks(w, p, own, out, base)) return 1;
    catch_up(w, base + p->chunks);
    return p->is_private ? 0 : await_all(w, REDUCED, base + p->chunks);
}

/* ---- the module */

#ifndef KERNEL_ALONE

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { GIL_BYTES = 1 << 14 }; /* more bytes take longer than it takes to let go of the interpreter and get it back */

static PyObject *ndarray; /* numpy.ndarray */
static PyObject *window_type, *plan_type;

/* Borrow the memory of a plain, aligned, contiguous array of float32 or float64; return 0 if it is another one. */
static int borrow(PyObject *array, Py_buffer *view, int writable) {
    if ((PyObject *)Py_TYPE(array) != ndarray) return 0;
    if (PyObject_GetBuffer(array, view, PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) {
        PyErr_Clear();
        return 0;
    }
    const char *format = view->format;
    if (format && (format[0] == 'f' || format[0] == 'd') && !format[1] && (uintptr_t)view->buf % (size_t)view->itemsize == 0)
        return 1;
    PyBuffer_Release(view);
    return 0;
}

static void give_back(Py_buffer *views, Py_ssize_t count) {
    while (count--) PyBuffer_Release(&views[count]);
}

/* Borrow `count` arrays of a list and then `out`; return 0, with nothing borrowed, unless an order of sums may run. */
static int borrow_all(PyObject *list, Py_ssize_t count, PyObject *out, Py_buffer *views) {
    if (!borrow(out, &views[count], 1)) return 0;
    const Py_buffer *target = &views[count];
    const char *start = target->buf, *end = start + target->len;
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *array = PyList_Check(list) ? PyList_GetItem(list, number) : PyTuple_GetItem(list, number);
        Py_buffer *view = &views[number];
        int fits = array && borrow(array, view, 0);
        if (fits) {
            const char *own = view->buf;
            fits = view->len == target->len && view->format[0] == target->format[0] &&
                   (own == start || own + view->len <= start || end <= own);
            if (!fits) PyBuffer_Release(view);
        }
        if (!fits) {
            give_back(views, number);
            PyBuffer_Release(&views[count]);
            return 0;
        }
    }
    return 1;
}

static Py_ssize_t length_of_list(PyObject *list) {
    if (PyList_Check(list)) return PyList_Size(list);
    return PyTuple_Check(list) ? PyTuple_Size(list) : -1;
}

static int read_order(PyObject *bytes, Order *order) {
    char *steps;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(bytes, &steps, &length)) return 0;
    *order = (Order){.sources = (int)(length / sizeof(Step)) + 1, .steps = (int)(length / sizeof(Step)), .step = (void *)steps};
    if (length % sizeof(Step) == 0 && is_sound(order)) return 1;
    PyErr_SetString(PyExc_ValueError, "these steps are no order of sums");
    return 0;
}

PyDoc_STRVAR(combine_doc,
             "combine(steps, sources, out, count)\n--\n\n"
             "Add arrays in the order of `steps` into `out`, as a mean over `count` if it is not 0.\n\n"
             "Return False, with nothing changed, if the arrays are no plain ones of float32 or float64.");

static PyObject *combine(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    enum { FEW = 16 };
    if (given != 4) return PyErr_Format(PyExc_TypeError, "combine takes 4 arguments, not %zd", given);
    char *steps;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(args[0], &steps, &length)) return NULL;
    const Order order = {(int)(length / sizeof(Step)) + 1, (int)(length / sizeof(Step)), (const void *)steps};
    const long long count = PyLong_AsLongLong(args[3]);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (length_of_list(args[1]) != order.sources || !is_sound(&order)) Py_RETURN_FALSE;

    Py_buffer few[FEW + 1], *views = few;
    const void *of_few[FEW], **sources = of_few;
    if (order.sources > FEW) {
        views = PyMem_Malloc((size_t)(order.sources + 1) * sizeof *views);
        sources = PyMem_Malloc((size_t)order.sources * sizeof *sources);
    }
    const int fits = views && sources && borrow_all(args[1], order.sources, args[2], views);
    if (fits) {
        const Py_buffer *out = &views[order.sources];
        for (int number = 0; number < order.sources; number++) sources[number] = views[number].buf;
        PyThreadState *saved = out->len > GIL_BYTES ? PyEval_SaveThread() : NULL;
        reduce((size_t)out->itemsize, &order, sources, out->buf, (size_t)(out->len / out->itemsize), mean_over(count));
        if (saved) PyEval_RestoreThread(saved);
        give_back(views, order.sources + 1);
    }
    if (views != few) PyMem_Free(views);
    if (sources != of_few) PyMem_Free(sources);
    return PyBool_FromLong(fits);
}

/* ---- Window */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Waiter waiter;
    PyObject *patient;
} Window;

/* One call from Python that may wait. */
typedef struct {
    Waiter waiter;
    PyObject *window, *patient;
    PyThreadState *saved; /* NULL: this thread has the interpreter */
} Waiting;

static void let_go(void *context) {
    Waiting *waiting = context;
    if (!waiting->saved) waiting->saved = PyEval_SaveThread();
}

static void get_back(Waiting *waiting) {
    if (waiting->saved) PyEval_RestoreThread(waiting->saved);
    waiting->saved = NULL;
}

static int be_patient(void *context, int index, uint64_t value) {
    Waiting *waiting = context;
    get_back(waiting);
    PyObject *result = PyObject_CallFunction(waiting->patient, "OiK", waiting->window, index, (unsigned long long)value);
    Py_XDECREF(result);
    return result == NULL;
}

/* Fill in `waiting` in place: the waiter refers to it. */
static const Waiter *begin(Waiting *waiting, Window *window) {
    *waiting = (Waiting){.waiter = window->waiter, .window = (PyObject *)window, .patient = window->patient};
    waiting->waiter.let_go = let_go;
    waiting->waiter.be_patient = be_patient;
    waiting->waiter.context = waiting;
    return &waiting->waiter;
}

static PyObject *nothing_or_error(Waiting *waiting, int failed) {
    get_back(waiting);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *window_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"memory", "rank", "size", "spin_ns", "patient", NULL};
    PyObject *memory, *patient;
    int rank, size;
    long long spin_ns;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OiiLO", names, &memory, &rank, &size, &spin_ns, &patient)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Window *window = (Window *)allocate(type, 0);
    if (!window) return NULL;
    if (PyObject_GetBuffer(memory, &window->memory, PyBUF_WRITABLE)) {
        Py_DECREF(window);
        return NULL;
    }
    if (rank < 0 || rank >= size || window->memory.len < (Py_ssize_t)size * WORDS * (Py_ssize_t)sizeof(Word)) {
        Py_DECREF(window);
        return PyErr_Format(PyExc_ValueError, "no memory for the words of rank %d of %d", rank, size);
    }
    window->patient = Py_NewRef(patient);
    window->waiter = (Waiter){.memory = window->memory.buf, .rank = rank, .size = size, .spin_ns = spin_ns};
    atomic_store(word_at(&window->waiter, rank, WAKES), 1);
    return (PyObject *)window;
}

static void end_of(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void window_dealloc(PyObject *self) {
    Window *window = (Window *)self;
    if (window->memory.obj) PyBuffer_Release(&window->memory);
    Py_XDECREF(window->patient);
    end_of(self);
}

/* Read whole numbers; return 0 with an error if there are not `wanted` of them. */
static int read_numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, long long *numbers) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments in place of %zd", given, wanted);
        return 0;
    }
    for (Py_ssize_t number = 0; number < wanted; number++) {
        numbers[number] = PyLong_AsLongLong(args[number]);
        if (numbers[number] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

static int is_word(const Window *window, long long rank, long long word) {
    if (0 <= rank && rank < window->waiter.size && 0 <= word && word < WORDS) return 1;
    PyErr_Format(PyExc_IndexError, "rank %lld has no word %lld", rank, word);
    return 0;
}

PyDoc_STRVAR(announce_doc, "announce(word, value)\n--\n\nSet one of this rank's words after all earlier writes.");

static PyObject *window_announce(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    const Window *window = (Window *)self;
    long long numbers[2];
    if (!read_numbers(args, given, 2, numbers) || !is_word(window, window->waiter.rank, numbers[0])) return NULL;
    announce(&window->waiter, (int)numbers[0], (uint64_t)numbers[1]);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(await_all_doc, "await_all(word, value)\n--\n\nWait until the word of every other rank has reached `value`.");

static PyObject *window_await_all(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    Window *window = (Window *)self;
    long long numbers[2];
    if (!read_numbers(args, given, 2, numbers) || !is_word(window, 0, numbers[0])) return NULL;
    Waiting waiting;
    const Waiter *waiter = begin(&waiting, window);
    return nothing_or_error(&waiting, await_all(waiter, (int)numbers[0], numbers[1]));
}

PyDoc_STRVAR(await_rank_doc, "await_rank(rank, word, value)\n--\n\nWait until the word of a rank has reached `value`.");

static PyObject *window_await_rank(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    Window *window = (Window *)self;
    long long numbers[3];
    if (!read_numbers(args, given, 3, numbers) || !is_word(window, numbers[0], numbers[1])) return NULL;
    Waiting waiting;
    const Waiter *waiter = begin(&waiting, window);
    return nothing_or_error(&waiting, await_rank(waiter, (int)numbers[0], (int)numbers[1], numbers[2]));
}

PyDoc_STRVAR(pause_doc,
             "pause(index, value, seconds)\n--\n\n"
             "Sleep until the word at `index` has reached `value`, or the seconds (at most one) have passed.");

static PyObject *window_pause(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    const Window *window = (Window *)self;
    long long numbers[2];
    if (given != 3) return PyErr_Format(PyExc_TypeError, "pause takes 3 arguments, not %zd", given);
    const double seconds = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || !read_numbers(args, 2, 2, numbers)) return NULL;
    const long long rank = numbers[0] / WORDS, word = numbers[0] % WORDS;
    if (!is_word(window, rank, word)) return NULL;
    const int64_t ns = seconds < 0 ? 0 : seconds < 0.999 ? (int64_t)(seconds * 1e9) : 999000000;
    PyThreadState *saved = PyEval_SaveThread();
    sleep_until(&window->waiter, (int)rank, (int)word, numbers[1], ns);
    PyEval_RestoreThread(saved);
    Py_RETURN_NONE;
}

static PyMethodDef window_methods[] = {
    {"pause", (PyCFunction)(void (*)(void))window_pause, METH_FASTCALL, pause_doc},
    {"announce", (PyCFunction)(void (*)(void))window_announce, METH_FASTCALL, announce_doc},
    {"await_all", (PyCFunction)(void (*)(void))window_await_all, METH_FASTCALL, await_all_doc},
    {"await_rank", (PyCFunction)(void (*)(void))window_await_rank, METH_FASTCALL, await_rank_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(window_doc,
             "The words of a window, as one rank announces and awaits them.\n\n"
             "`patient(window, index, value)` takes over a wait that has lasted a millisecond.");

static PyType_Slot window_slots[] = {
    {Py_tp_doc, (void *)window_doc},
    {Py_tp_new, (void *)window_new},
    {Py_tp_dealloc, (void *)window_dealloc},
    {Py_tp_methods, window_methods},
    {0, NULL},
};

static PyType_Spec window_spec = {"collectives.native._kernel.Window", sizeof(Window), 0, Py_TPFLAGS_DEFAULT, window_slots};

/* ---- Plan */

typedef struct {
    PyObject_HEAD
    Plan plan;
    PyObject *window, *tables; /* what `plan` points into is kept alive by these */
    Py_ssize_t *shape;
    int ndim;
    char format;
    Py_buffer *views; /* the arrays of the call that was taken: contributions, then the result */
    const void **own;
    int is_taken;
} PlanObject;

/* Return the content of a bytes object that holds `count` numbers of 8 bytes, or NULL with an error. */
static const void *table(PyObject *bytes, Py_ssize_t count) {
    char *content;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(bytes, &content, &length)) return NULL;
    if (length == count * 8) return content;
    return PyErr_Format(PyExc_ValueError, "a table has %zd bytes in place of %zd", length, count * 8);
}

static int read_shape(PlanObject *self, PyObject *shape) {
    self->ndim = (int)PyTuple_Size(shape);
    self->shape = PyMem_Malloc((size_t)(self->ndim + 1) * sizeof *self->shape);
    if (!self->shape) return 0;
    self->plan.elements = 1;
    for (int axis = 0; axis < self->ndim; axis++) {
        self->shape[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
        self->plan.elements *= (size_t)self->shape[axis];
    }
    return !PyErr_Occurred();
}

/* Read the sums for other ranks, pairs of the first contribution and the steps. */
static int read_sums(PlanObject *self, PyObject *pairs, int64_t own) {
    const Py_ssize_t count = PyTuple_Size(pairs);
    Sum *sums = PyMem_Malloc((size_t)(count + 1) * sizeof *sums);
    if (!sums) return 0;
    self->plan.sums = sums;
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *pair = PyTuple_GetItem(pairs, number), *steps;
        if (!PyArg_ParseTuple(pair, "iS", &sums[number].first, &steps) || !read_order(steps, &sums[number].order)) return 0;
        if (sums[number].first < 0 || sums[number].first + sums[number].order.sources > own) {
            PyErr_SetString(PyExc_ValueError, "a sum of contributions that do not exist");
            return 0;
        }
    }
    return 1;
}

static int make_room(PlanObject *self, int64_t own) {
    self->views = PyMem_Malloc((size_t)(own + 1) * sizeof *self->views);
    self->own = PyMem_Malloc((size_t)own * sizeof *self->own);
    self->plan.part = PyMem_Malloc((size_t)own * sizeof *self->plan.part);
    self->plan.sources = PyMem_Malloc((size_t)self->plan.leaves.sources * sizeof *self->plan.sources);
    return self->views && self->own && self->plan.part && self->plan.sources;
}

static int fill_in(PlanObject *self, PyObject *args, PyObject *named) {
    static char *names[] = {"window",     "kind",    "format",    "shape",       "is_private", "fingerprint", "mean",
                            "counts",     "nbytes",  "bounds",    "slots",       "pipes",      "nodes",       "chunk",
                            "chunks",     "pipe_step", "results", "result_step", "sums",       "whole",       "leaves",      "with_sums", NULL};
    Plan *plan = &self->plan;
    PyObject *window, *shape, *counts, *nbytes, *bounds, *slots, *pipes, *nodes, *sums, *whole, *leaves;
    int kind, format;
    unsigned long long fingerprint;
    long long mean, pipe_step, results, result_step;
    Py_ssize_t chunk;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!iCO!pKLSSSSSSniLLLO!SSp", names, window_type, &window, &kind, &format, &PyTuple_Type,
                                     &shape, &plan->is_private, &fingerprint, &mean, &counts, &nbytes, &bounds, &slots,
                                     &pipes, &nodes, &chunk, &plan->chunks, &pipe_step, &results, &result_step,
                                     &PyTuple_Type, &sums, &whole, &leaves, &plan->with_sums))
        return 0;
    self->tables = PyTuple_Pack(10, window, counts, nbytes, bounds, slots, pipes, nodes, sums, whole, leaves);
    if (!self->tables) return 0;
    self->window = window;
    const Py_ssize_t size = ((Window *)window)->waiter.size;
    plan->counts = table(counts, size);
    plan->nbytes = table(nbytes, size);
    plan->bounds = table(bounds, size + 1);
    plan->slots = table(slots, 2 * size);
    plan->pipes = table(pipes, size);
    plan->nodes = table(nodes, size);
    if (PyErr_Occurred() || !read_order(whole, &plan->whole) || !read_order(leaves, &plan->leaves) || !read_shape(self, shape)) return 0;
    const int64_t own = plan->counts[((Window *)window)->waiter.rank];
    plan->kind = (Kind)kind;
    plan->item = format == 'f' ? sizeof(float) : sizeof(double);
    plan->chunk = (size_t)chunk;
    plan->fingerprint = fingerprint;
    plan->mean = mean_over(mean);
    plan->pipe_step = pipe_step;
    plan->results = results;
    plan->result_step = result_step;
    self->format = (char)format;
    return read_sums(self, sums, own) && make_room(self, own);
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PlanObject *self = (PlanObject *)allocate(type, 0);
    if (self && !fill_in(self, args, named)) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static Py_ssize_t own_count(const PlanObject *self) {
    return (Py_ssize_t)self->plan.counts[((Window *)self->window)->waiter.rank];
}

static void drop(PlanObject *self) {
    if (self->is_taken) give_back(self->views, own_count(self) + 1);
    self->is_taken = 0;
}

static void plan_dealloc(PyObject *object) {
    PlanObject *self = (PlanObject *)object;
    drop(self);
    PyMem_Free(self->shape);
    PyMem_Free((void *)self->plan.sums);
    PyMem_Free((void *)self->plan.part);
    PyMem_Free((void *)self->plan.sources);
    PyMem_Free((void *)self->own);
    PyMem_Free(self->views);
    Py_XDECREF(self->tables);
    end_of(object);
}

static int has_shape(const PlanObject *self, const Py_buffer *view) {
    if (view->format[0] != self->format || view->ndim != self->ndim) return 0;
    return !self->ndim || memcmp(view->shape, self->shape, (size_t)self->ndim * sizeof *self->shape) == 0;
}

PyDoc_STRVAR(take_doc,
             "take(contributions, out)\n--\n\n"
             "Hold the arrays of a call until `run` or `drop`.\n\n"
             "Return False, with nothing held, if they are not as planned, or another call holds arrays.");

static PyObject *plan_take(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    PlanObject *self = (PlanObject *)object;
    if (given != 2) return PyErr_Format(PyExc_TypeError, "take takes 2 arguments, not %zd", given);
    const Py_ssize_t count = own_count(self);
    if (self->is_taken || length_of_list(args[0]) != count || !borrow_all(args[0], count, args[1], self->views))
        Py_RETURN_FALSE;
    for (Py_ssize_t number = 0; number <= count; number++)
        if (!has_shape(self, &self->views[number])) {
            give_back(self->views, count + 1);
            Py_RETURN_FALSE;
        }
    for (Py_ssize_t number = 0; number < count; number++) self->own[number] = self->views[number].buf;
    self->is_taken = 1;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(taken_doc, "taken()\n--\n\nReturn the arrays that were taken: contributions, then the result.");

static PyObject *plan_taken(PyObject *object, PyObject *unused) {
    const PlanObject *self = (PlanObject *)object;
    const Py_ssize_t count = self->is_taken ? own_count(self) + 1 : 0;
    PyObject *arrays = PyList_New(count);
    for (Py_ssize_t number = 0; arrays && number < count; number++)
        PyList_SetItem(arrays, number, Py_NewRef(self->views[number].obj));
    return arrays;
}

PyDoc_STRVAR(is_apart_doc,
             "is_apart(plans)\n--\n\nReturn whether the result shares no memory with arrays that other plans have taken.");

static PyObject *plan_is_apart(PyObject *object, PyObject *plans) {
    const PlanObject *self = (PlanObject *)object;
    if (!self->is_taken || !PyList_Check(plans)) return PyErr_Format(PyExc_ValueError, "give a list of plans; take arrays first");
    const Py_buffer *out = &self->views[own_count(self)];
    const char *start = out->buf, *end = start + out->len;
    for (Py_ssize_t number = 0; number < PyList_Size(plans); number++) {
        PyObject *item = PyList_GetItem(plans, number);
        const PlanObject *other = (PlanObject *)item;
        if ((PyObject *)Py_TYPE(item) != plan_type) return PyErr_Format(PyExc_TypeError, "this is no plan");
        for (Py_ssize_t each = 0; other != self && other->is_taken && each <= own_count(other); each++) {
            const char *taken = other->views[each].buf;
            if (taken < end && start < taken + other->views[each].len) Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(drop_doc, "drop()\n--\n\nRelease the arrays of a call that will not run.");

static PyObject *plan_drop(PyObject *object, PyObject *unused) {
    drop((PlanObject *)object);
    Py_RETURN_NONE;
}

/* Tell an instrument that the data moves; return nonzero after an error. */
static int tell(Waiting *waiting, PyObject *moves, const PlanObject *self) {
    get_back(waiting);
    PyObject *result = PyObject_CallFunction(moves, "n", (Py_ssize_t)(self->plan.elements * self->plan.item));
    Py_XDECREF(result);
    return result == NULL;
}

static Outcome carry_out(Waiting *waiting, PlanObject *self, uint64_t sequence, int64_t base, PyObject *moves) {
    const Waiter *waiter = &waiting->waiter;
    const Plan *plan = &self->plan;
    const int parity = (int)(sequence & 1), is_long = plan->elements * plan->item > GIL_BYTES;
    char *out = self->views[own_count(self)].buf;
    if (is_long) let_go(waiting);
    if (send_ahead(waiter, plan, self->own, parity, base)) return FAILED;
    int with_sums;
    const Outcome outcome = agree(waiter, plan, sequence, &with_sums);
    if (outcome != DONE) return outcome;
    if (moves != Py_None && tell(waiting, moves, self)) return FAILED;
    if (is_long) let_go(waiting);
    if (plan->kind != INLINE) return move(waiter, plan, self->own, out, base) ? FAILED : DONE;
    reduce_slots(waiter, plan, self->own, out, parity, with_sums);
    return DONE;
}

PyDoc_STRVAR(run_doc,
             "run(sequence, chunk, moves)\n--\n\n"
             "Carry out the reduction of the arrays that were taken; a collective call.\n\n"
             "Return DONE; or DIFFERENT_CALLS or OTHER_COUNTS after the exchange alone, with no result written and the\n"
             "arrays still taken.");

static PyObject *plan_run(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    PlanObject *self = (PlanObject *)object;
    long long numbers[2];
    if (given != 3 || !read_numbers(args, 2, 2, numbers)) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "run takes 3 arguments, not %zd", given);
        return NULL;
    }
    if (!self->is_taken) return PyErr_Format(PyExc_ValueError, "take the arrays first");
    Waiting waiting;
    begin(&waiting, (Window *)self->window);
    const Outcome outcome = carry_out(&waiting, self, (uint64_t)numbers[0], numbers[1], args[2]);
    get_back(&waiting);
    if (outcome == DONE || outcome == FAILED) drop(self);
    return outcome == FAILED ? NULL : PyLong_FromLong(outcome);
}

static PyMethodDef plan_methods[] = {
    {"take", (PyCFunction)(void (*)(void))plan_take, METH_FASTCALL, take_doc},
    {"taken", plan_taken, METH_NOARGS, taken_doc},
    {"is_apart", plan_is_apart, METH_O, is_apart_doc},
    {"drop", plan_drop, METH_NOARGS, drop_doc},
    {"run", (PyCFunction)(void (*)(void))plan_run, METH_FASTCALL, run_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(plan_doc, "A reduction through a window of which everything but the arrays is known.");

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)plan_doc},
    {Py_tp_new, (void *)plan_new},
    {Py_tp_dealloc, (void *)plan_dealloc},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

static PyType_Spec plan_spec = {"collectives.native._kernel.Plan", sizeof(PlanObject), 0, Py_TPFLAGS_DEFAULT, plan_slots};

static PyMethodDef methods[] = {
    {"combine", (PyCFunction)(void (*)(void))combine, METH_FASTCALL, combine_doc},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"MOST_ROWS", MOST_ROWS}, {"WAKES", WAKES},       {"WORDS", WORDS},       {"DEPTH", DEPTH},       {"SEQUENCE", SEQUENCE},
    {"FINGERPRINT", FINGERPRINT}, {"COUNT", COUNT},   {"NBYTES", NBYTES},     {"PRODUCED", PRODUCED},
    {"CONSUMED", CONSUMED},   {"REDUCED", REDUCED},   {"FETCHED", FETCHED},   {"INLINE", INLINE},
    {"STAGED", STAGED},       {"CHUNKED", CHUNKED},   {"DONE", DONE},         {"DIFFERENT_CALLS", DIFFERENT_CALLS},
    {"OTHER_COUNTS", OTHER_COUNTS},
};

#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0u /* unknown: a build by hand */
#endif

static int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyObject **type) {
    *type = PyType_FromModuleAndSpec(module, spec, NULL);
    return !*type || PyModule_AddObjectRef(module, name, *type);
}

static int fill_module(PyObject *module) {
    if (ndarray) { /* its types belong to the interpreter that came first, as NumPy's do */
        PyErr_SetString(PyExc_ImportError, "another interpreter of this process has loaded the kernel");
        return -1;
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy) return -1;
    ndarray = PyObject_GetAttrString(numpy, "ndarray");
    Py_DECREF(numpy);
    if (!ndarray || add_type(module, &window_spec, "Window", &window_type)) return -1;
    if (add_type(module, &plan_spec, "Plan", &plan_type)) return -1;
    for (size_t number = 0; number < sizeof constants / sizeof *constants; number++)
        if (PyModule_AddIntConstant(module, constants[number].name, constants[number].value)) return -1;
    return PyModule_AddIntConstant(module, "SOURCE_CRC32", (long)SOURCE_CRC32);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernel",
    .m_doc = "Ordered sums, and reductions through shared memory, without the interpreter.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }

#endif
