/* Ranks as threads over one window, without Python: reductions of every kind, for the thread sanitizer.
 *
 * Prints nothing and exits with 0 if all sums are right.
 */

#define KERNEL_ALONE
#include "../../../collectives/native/kernel.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 3, MOST = 6, ELEMENTS = 3001, CHUNK = 512, SLOT = 1 << 17, PIPE = 1 << 16, ROUNDS = 60 };
enum { WORD_BYTES = RANKS * WORDS * 8, MEMORY = WORD_BYTES + RANKS * 2 * SLOT + RANKS * 2 * PIPE };

static char *memory;
static float result[ELEMENTS]; /* of kinds that all ranks write together */
static pthread_barrier_t everybody;
static int wrong;

typedef struct {
    int first, stop;
} Node;

/* Append the additions that make up a node, and return the number of its value. */
static int add_node(Node node, const Node *given, int count, Step *steps, int *made, int row) {
    for (int number = 0; number < count; number++)
        if (given[number].first == node.first && given[number].stop == node.stop) return number;
    int half = 1;
    while (2 * half < node.stop - node.first) half *= 2;
    const int middle = node.first + half;
    const int left = add_node((Node){node.first, middle}, given, count, steps, made, row);
    const int right = add_node((Node){middle, node.stop}, given, count, steps, made, row + (left >= count));
    steps[*made] = (Step){left, right, row};
    return count + (*made)++;
}

static Order order_of(const Node *given, int count, Step *steps) {
    int made = 0;
    add_node((Node){given[0].first, given[count - 1].stop}, given, count, steps, &made, 0);
    return (Order){count, made, steps};
}

static void let_go(void *context) { (void)context; }

/* Wait again: `await_rank` gave up after a millisecond. */
static int be_patient(void *context, int index, uint64_t value) {
    const Waiter *w = context;
    while (!has_reached((Word *)w->memory + index, (int64_t)value)) sched_yield();
    return 0;
}

typedef struct {
    Kind kind;
    int is_private, each; /* each: contributions of a rank, 1 or 2, which make up one node */
} Case;

static const Case CASES[] = {{INLINE, 1, 1}, {INLINE, 1, 2}, {STAGED, 0, 1},  {STAGED, 0, 2},
                             {CHUNKED, 0, 2}, {CHUNKED, 1, 1}, {CHUNKED, 1, 2}};

static void check(const float *out, int each, int round) {
    for (int i = 0; i < ELEMENTS; i++) {
        float expected = 0;
        for (int replica = 0; replica < RANKS * each; replica++) expected += (float)(replica + round + i % 5);
        if (out[i] != expected) __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
    }
}

static void run_case(const Waiter *w, Case it, uint64_t *sequence, int64_t *chunks) {
    const int rank = w->rank, each = it.each;
    int64_t counts[RANKS], bounds[RANKS + 1], slots[2 * RANKS], pipes[RANKS], nodes[RANKS];
    uint64_t nbytes[RANKS];
    const int64_t share = it.kind == STAGED ? ELEMENTS / RANKS + 1 : ELEMENTS / RANKS + 7;
    for (int other = 0; other < RANKS; other++) {
        counts[other] = each;
        nodes[other] = 1;
        nbytes[other] = it.kind == INLINE ? ELEMENTS * 4 * each : 0;
        bounds[other] = other * share;
        slots[other] = WORD_BYTES + other * 2 * SLOT;
        slots[RANKS + other] = slots[other] + SLOT;
        pipes[other] = WORD_BYTES + RANKS * 2 * SLOT + other * 2 * PIPE;
    }
    bounds[RANKS] = ELEMENTS;
    Step own[1] = {{0, 1, 0}}, of_whole[MOST], of_leaves[MOST];
    Node known[MOST], leaves[MOST];
    int seen = 0;
    for (int other = 0; other < RANKS; other++)
        if (other != rank) known[seen++] = (Node){other * each, (other + 1) * each};
        else
            for (int number = 0; number < each; number++) known[seen++] = (Node){other * each + number, other * each + number + 1};
    for (int replica = 0; replica < RANKS * each; replica++) leaves[replica] = (Node){replica, replica + 1};
    const Sum sum = {0, {each, each - 1, own}};
    const void *sources[MOST], *part[MOST];
    const size_t chunk = it.kind == CHUNKED ? CHUNK : (size_t)share;
    const Plan plan = {
        .kind = it.kind, .is_private = it.is_private, .item = 4, .elements = ELEMENTS, .chunk = chunk,
        .chunks = it.kind == INLINE ? 0 : (int)((share + (int64_t)chunk - 1) / (int64_t)chunk), .fingerprint = 42,
        .mean = NO_MEAN, .counts = counts, .nbytes = nbytes, .bounds = bounds, .slots = slots, .with_sums = it.kind == INLINE && each > 1,
        .pipes = pipes, .nodes = nodes, .pipe_step = PIPE / 2, .results = PIPE, .result_step = PIPE / 2, .sums = &sum,
        .whole = order_of(known, seen, of_whole), .leaves = order_of(leaves, RANKS * each, of_leaves),
        .sources = sources, .part = part,
    };
    float *values = malloc(2 * ELEMENTS * sizeof *values), *alone = malloc(ELEMENTS * sizeof *alone);
    const void *contributions[] = {values, values + ELEMENTS};
    float *out = it.is_private ? alone : result;
    for (int round = 0; round < ROUNDS; round++) {
        for (int number = 0; number < each; number++)
            for (int i = 0; i < ELEMENTS; i++) values[number * ELEMENTS + i] = (float)(rank * each + number + round + i % 5);
        int with_sums;
        ++*sequence;
        const int parity = (int)(*sequence & 1);
        if (send_ahead(w, &plan, contributions, parity, *chunks) || agree(w, &plan, *sequence, &with_sums) != DONE) abort();
        if (it.kind == INLINE) reduce_slots(w, &plan, contributions, (char *)out, parity, with_sums);
        else if (move(w, &plan, contributions, (char *)out, *chunks)) abort();
        *chunks += plan.chunks;
        check(out, each, round);
    }
    free(values);
    free(alone);
    pthread_barrier_wait(&everybody);
}

static void *run_rank(void *argument) {
    Waiter w = {.memory = memory, .rank = (int)(intptr_t)argument, .size = RANKS, .let_go = let_go, .be_patient = be_patient};
    w.context = &w;
    atomic_store(word_at(&w, w.rank, WAKES), w.rank != 1); /* one rank as if it had no kernel */
    uint64_t sequence = 0;
    int64_t chunks = 0;
    for (int spins = 0; spins < 2; spins++) {
        w.spin_ns = spins * 20000;
        for (size_t number = 0; number < sizeof CASES / sizeof *CASES; number++) run_case(&w, CASES[number], &sequence, &chunks);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    memory = aligned_alloc(64, MEMORY);
    memset(memory, 0, MEMORY);
    pthread_barrier_init(&everybody, NULL, RANKS);
    for (intptr_t rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, run_rank, (void *)rank);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    free(memory);
    if (wrong) fputs("a sum is wrong\n", stderr);
    return wrong;
}
