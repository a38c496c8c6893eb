/* Peers that write anything into the memory they share with a rank. Built with the sanitizers of the compiler.
 *
 *     fuzz SEED COUNT [NAME]     calls each function COUNT times, or one; prints how often each code came
 *
 * The fields of the region have poisoned gaps between them, and private memory is exactly as long as it has to be. So
 * an access that is led astray by a peer's bytes ends the program. A peer also writes while the rank copies, yields and
 * sleeps. A function of the library is one function here and a line of the table at the end. */

#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "board.h"
#include "messages.h"
#include "shared.h"

enum { MAX_RANKS = 4, NOTE = 48, RESULT = 256, SMALL = 1536, GAP = 64, RANK_BYTES = 5120, NUM_CODES = 6, PATIENCE = 6 };

static void fail(const char *what, uint64_t number) {
    printf("wrong: %s %llu\n", what, (unsigned long long)number);
    fflush(stdout);
    abort();
}

/* Chance */

static uint64_t state;

static uint64_t number(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1dULL;
}

static uint64_t below(uint64_t limit) { return (number() >> 16) % limit; }

/* A number that does harm: beside the right one, beside a limit, or any. */
static uint64_t odd_number(uint64_t right) {
    switch (below(6)) {
    case 0: return right + below(5) - 2;
    case 1: return UINT64_MAX - below(3);
    case 2: return below(2 * RANK_BYTES);
    case 3: return (uint64_t)1 << below(64);
    case 4: return number();
    default: return right;
    }
}

static void fill(void *to, uint64_t num_bytes) {
    for (uint64_t i = 0; i < num_bytes; i++)
        ((char *)to)[i] = (char)below(256);
}

static void *allocate(uint64_t num_bytes) {
    void *made = malloc(num_bytes);
    if (!made)
        abort();
    fill(made, num_bytes);
    return made;
}

/* The region, and the peers of one rank in it */

static char *region;
static struct board board;
static struct waiter waiter;
static uint64_t mark, note_bytes, num_words, words[NUM_WORDS];
static char *note;
/* Beside the note of each rank: what an honest one shows there, and how much of it. */
static char shown[MAX_RANKS][SMALL];
static uint64_t shown_bytes[MAX_RANKS];

static char *at(uint64_t rank, uint64_t offset) { return region + rank * RANK_BYTES + offset; }

static uint64_t field(uint64_t *end, uint64_t num_bytes) {
    uint64_t begin = *end;
    for (uint64_t rank = 0; rank < MAX_RANKS; rank++)
        ASAN_UNPOISON_MEMORY_REGION(at(rank, begin), num_bytes);
    *end += num_bytes + GAP;
    return begin;
}

static void lay_out(void) {
    uint64_t end = 0;
    region = allocate(MAX_RANKS * RANK_BYTES);
    ASAN_POISON_MEMORY_REGION(region, MAX_RANKS * RANK_BYTES);
    board.region = region;
    board.rank_bytes = RANK_BYTES;
    board.waiter = &waiter;
    board.tick = field(&end, 8);
    board.asleep = field(&end, 8);
    for (int i = 0; i < 2; i++) {
        board.mark[i] = field(&end, 8 * (1 + NUM_WORDS));
        board.result_mark[i] = field(&end, 8);
        board.note[i] = field(&end, NOTE);
        board.result[i] = field(&end, RESULT);
        board.small[i] = field(&end, SMALL);
    }
    if (end > RANK_BYTES)
        fail("layout of bytes", end);
}

static void set(uint64_t rank, uint64_t offset, uint64_t value) { memcpy(at(rank, offset), &value, 8); }

/* A peer writes one of its fields: as it should, or not. */
static void write_field(uint64_t peer, int which, int is_honest) {
    uint64_t copy = mark >> 32 & 1, level = board.ticks + 1;
    char *to;
    switch (which) {
    case 0: set(peer, board.tick, is_honest ? level : odd_number(level)); break;
    case 1: set(peer, board.mark[copy], is_honest ? mark : odd_number(mark)); break;
    case 2:
        to = at(peer, board.note[copy]);
        memcpy(to, note, note_bytes);
        if (!is_honest)
            fill(to + below(NOTE), 1);
        break;
    case 3: set(peer, board.result_mark[copy], is_honest ? 0 : odd_number(mark)); break;
    case 4:
        to = at(peer, board.small[copy]);
        memcpy(to, shown[peer], shown_bytes[peer]);
        if (!is_honest)
            for (uint64_t i = below(4); i < 4; i++)
                set(peer, board.small[copy] + 8 * below(below(2) ? 8 : SMALL / 8), number());
        break;
    case 5: set(peer, board.mark[copy] + 8 + 8 * below(NUM_WORDS), number()); break;
    case 6: fill(at(peer, board.result[copy]), 16); break;
    default: set(peer, board.asleep, below(2)); break;
    }
}

static void write_boards(void) {
    uint64_t peer = below(board.num_ranks);
    if (peer != board.rank)
        write_field(peer, (int)below(8), below(2));
}

/* What peers do while the rank is busy elsewhere. */
static void (*let_peers_write)(void) = write_boards;

static void *copy_and_let_write(void *to, const void *from, size_t num_bytes) {
    uint64_t offset = (uint64_t)((char *)to - region);
    if (offset < MAX_RANKS * RANK_BYTES && offset / RANK_BYTES != board.rank)
        fail("copy into the part of rank", offset / RANK_BYTES);
    if (!below(8))
        let_peers_write();
    return memmove(to, from, num_bytes);
}

void *(*copy_bytes)(void *to, const void *from, size_t num_bytes) = copy_and_let_write;

PyThreadState *PyEval_SaveThread(void) {
    let_peers_write();
    return NULL;
}

void PyEval_RestoreThread(PyThreadState *thread) { (void)thread; }

/* In place of sched_yield and of the futex: see the compiler's command. */
int fuzz_yield(void);
int fuzz_yield(void) {
    let_peers_write();
    return 0;
}

long fuzz_syscall(long call, ...);
long fuzz_syscall(long call, ...) {
    (void)call;
    let_peers_write();
    return 0;
}

/* A new operation, for which peers have announced the same one, or something else. */
static void begin(void) {
    board.num_ranks = 2 + below(MAX_RANKS - 1); /* a group of one does not use the library */
    board.rank = below(board.num_ranks);
    board.ticks = below(4) ? below(1000) : number() >> 1;
    board.result_bytes = below(2) ? RESULT : 0;
    board.written[0] = board.written[1] = NULL;
    board.peer = 0;
    waiter = (struct waiter){below(4), below(4), below(3), 16};
    mark = number();
    note_bytes = 1 + below(NOTE);
    note = allocate(note_bytes);
    num_words = below(NUM_WORDS + 1);
    for (uint64_t i = 0; i < num_words; i++)
        words[i] = number();
    memset(shown_bytes, 0, sizeof shown_bytes);
}

static void let_peers_announce(void) {
    int are_honest = below(4) != 0;
    for (uint64_t peer = 0; peer < board.num_ranks; peer++)
        if (peer != board.rank)
            for (int which = 0; which < 5; which++)
                write_field(peer, which, are_honest || below(2));
}

/* Goes on as the caller in Python does, and gives up after a while. Returns the last code. */
static int finish(int code) {
    for (int i = 0; i < PATIENCE && code == WAITING; i++) {
        let_peers_write();
        code = go_on(&board);
    }
    if (code == DIFFERS && (board.peer >= board.num_ranks || board.peer == board.rank))
        fail("peer that differs", board.peer);
    if (code == DIFFERS)
        wait_for_mark(&board);
    free(note);
    return code;
}

/* The functions of the library, each for any peers */

static int fuzz_meet(void) {
    begin();
    let_peers_announce();
    return finish(meet(&board, mark, note, note_bytes, words, (int)num_words));
}

static int fuzz_ticks(void) {
    begin();
    let_peers_announce();
    meet(&board, mark, note, note_bytes, words, (int)num_words);
    tick(&board);
    let_peers_write();
    return finish(wait_for_all(&board, odd_number(1)));
}

static int reduce_part(int is_all) {
    int op = (int)below(NUM_OPS), dtype = (int)below(NUM_DTYPES);
    combine_function combine = find_combine(op, dtype);
    if (!combine)
        return NOT_SO;
    begin();
    uint64_t itemsize = size_of(dtype), count = below(SMALL / itemsize + 1), part = is_all ? count : below(count + 1);
    char *own = allocate(count * itemsize), *target = is_all ? own : allocate(part * itemsize);
    let_peers_announce();
    struct reduction reduction = {own, target, count * itemsize, below(count - part + 1) * itemsize, part, itemsize,
                                  (uint64_t)is_all, combine};
    int code = finish(reduce(&board, mark, note, note_bytes, &reduction));
    if (!is_all)
        free(target);
    free(own);
    return code;
}

static int fuzz_all_reduce(void) { return reduce_part(1); }

static int fuzz_reduce(void) { return reduce_part(0); }

static int fuzz_broadcast(void) {
    begin();
    uint64_t num_bytes = below(SMALL + 1);
    char *tensor = allocate(num_bytes);
    let_peers_announce();
    int code = finish(broadcast(&board, mark, note, note_bytes, tensor, num_bytes, below(board.num_ranks)));
    free(tensor);
    return code;
}

static int fuzz_exchange(void) {
    enum { MAX_READS = 6, HEAD = 64, TABLE = 2 * MAX_RANKS * 8, READS = MAX_READS * sizeof(struct read) };
    begin();
    char *memory = allocate(sizeof(struct plan) + TABLE + READS + MAX_RANKS * HEAD);
    struct plan *plan = (struct plan *)memory;
    uint64_t head_bytes = 8 * (1 + below(HEAD / 8)), own_bytes = below(SMALL - HEAD + 1), target_bytes = below(SMALL);
    char *own = allocate(own_bytes), *target = allocate(target_bytes);
    plan->heads = sizeof(struct plan);
    plan->reads = plan->heads + TABLE;
    uint64_t heads = plan->reads + READS, *table = (uint64_t *)(memory + plan->heads);
    for (uint64_t rank = 0; rank < MAX_RANKS; rank++) {
        table[2 * rank] = heads + rank * HEAD;
        table[2 * rank + 1] = shown_bytes[rank] = head_bytes;
        memcpy(shown[rank], memory + table[2 * rank], head_bytes);
    }
    plan->num_writes = below(3);
    for (uint64_t i = 0; i < plan->num_writes; i++) {
        plan->write_from[i] = below(own_bytes + 1);
        plan->write_bytes[i] = below(own_bytes - plan->write_from[i] + 1);
        plan->write_to[i] = head_bytes + plan->write_from[i];
    }
    plan->num_reads = below(MAX_READS + 1);
    for (uint64_t i = 0; i < plan->num_reads; i++) {
        struct read *read = (struct read *)(memory + plan->reads) + i;
        read->owner = below(board.num_ranks);
        uint64_t room = read->owner == board.rank ? own_bytes : SMALL - head_bytes;
        read->num_bytes = below((room < target_bytes ? room : target_bytes) + 1);
        read->from = below(room - read->num_bytes + 1) + (read->owner == board.rank ? 0 : head_bytes);
        read->to = below(target_bytes - read->num_bytes + 1);
    }
    let_peers_announce();
    int code = finish(exchange(&board, mark, note, note_bytes, plan, own, target, words, (int)num_words));
    free(target);
    free(own);
    free(memory);
    return code;
}


/* Any steps of a large operation; what they need not be is in an order that makes sense. */
static int fuzz_play(void) {
    enum { MAX_STEPS = 8, ROOM = 256 };
    uint64_t num_steps = below(MAX_STEPS + 1), num_sources = 0;
    int dtype = (int)below(NUM_DTYPES);
    combine_function combine = find_combine(SUM, dtype);
    if (!combine)
        return NOT_SO;
    begin();
    let_peers_announce();
    uint64_t itemsize = size_of(dtype);
    char *own = allocate(ROOM), *target = allocate(ROOM);
    struct program *program = allocate(sizeof(struct program) + num_steps * (sizeof(struct step) + 16 * MAX_RANKS));
    uint64_t *pairs = (uint64_t *)(program->steps + num_steps);
    program->num_steps = num_steps;
    for (uint64_t i = 0; i < num_steps; i++) {
        struct step *step = program->steps + i;
        uint64_t num_bytes = below(ROOM + 1), at_own = below(ROOM - num_bytes + 1), at_target = below(ROOM - num_bytes + 1);
        uint64_t count = num_bytes / itemsize, place = board.small[below(2)] + 8 * below((SMALL - ROOM) / 8);
        step->kind = below(COMBINES + 1);
        if (step->kind == WAITS_FOR)
            step->needs = below(3);
        else if (step->kind == PUTS) {
            step->put.to = place;
            step->put.from = at_own;
            step->put.num_bytes = num_bytes;
        } else if (step->kind == GETS) {
            step->get.owner = below(board.num_ranks);
            step->get.from = place;
            step->get.to = at_target;
            step->get.num_bytes = num_bytes;
        } else if (step->kind == COMBINES) {
            step->combine.first_source = num_sources;
            step->combine.to = itemsize * below(ROOM / itemsize - count + 1);
            step->combine.count = count;
            for (uint64_t rank = 0; rank < board.num_ranks; rank++, num_sources++) {
                pairs[2 * num_sources] = rank;
                pairs[2 * num_sources + 1] = rank == board.rank ? itemsize * below(ROOM / itemsize - count + 1) : place;
            }
        }
    }
    int code = meet(&board, mark, note, note_bytes, words, (int)num_words);
    if (code == DONE)
        code = play(&board, program, own, target, combine, itemsize);
    code = finish(code);
    free(program);
    free(target);
    free(own);
    return code;
}



/* A ring of messages, and the peer at its other end */

enum { RING = 1024, MAX_HEAD = 96 };

static char *ring;
static uint64_t *records_word, *taken_word, *waiting_word, *asleep_word;
static struct bell bell;
static struct inlet inlet;
static struct outlet outlet;
/* The message that is expected, as far as a peer knows it. */
static uint64_t head_bytes, payload_bytes;
static char *head;

static uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static uint64_t size_of_record(void) {
    return round_up(round_up(PREFIX_BYTES + head_bytes, PAYLOAD_ALIGNMENT) + payload_bytes, RECORD_ALIGNMENT);
}

static void set_prefix(uint64_t offset, uint64_t record, uint64_t header, uint64_t part, uint64_t part_bytes) {
    uint32_t sizes[2] = {(uint32_t)record, (uint32_t)header};
    memcpy(ring + offset, sizes, sizeof sizes);
    memcpy(ring + offset + 8, &part, 8);
    memcpy(ring + offset + 16, &part_bytes, 8);
}

/* The record that comes next: the right one, one that skips the end of the ring, or another. */
static void write_record(int is_honest) {
    uint64_t offset = inlet.taken % RING, size = size_of_record(), left = RING - offset;
    if (!is_honest && below(2)) {
        /* The right header in a record of another length, which may pass the end of the ring. */
        uint64_t most = left - PREFIX_BYTES, length = RECORD_ALIGNMENT * (1 + below(8));
        set_prefix(offset, length, head_bytes, 0, 0);
        memcpy(ring + offset + PREFIX_BYTES, head, head_bytes < most ? head_bytes : most);
        *records_word = inlet.taken + length;
        return;
    }
    if (offset + size > RING) {
        set_prefix(offset, is_honest ? RING - offset : odd_number(RING - offset), 0, 0, 0);
        offset = 0;
    }
    if (offset + size > RING)
        return;
    set_prefix(offset, size, head_bytes, 0, 0);
    memcpy(ring + offset + PREFIX_BYTES, head, head_bytes);
    if (is_honest)
        return;
    switch (below(4)) {
    case 0: set_prefix(offset, odd_number(size), head_bytes, 0, 0); break;
    case 1: set_prefix(offset, size, odd_number(head_bytes), 0, 0); break;
    case 2: set_prefix(offset, size, head_bytes, number(), odd_number(0)); break;
    default: fill(ring + below(RING - 8), 8); break;
    }
}

static void write_rings(void) {
    uint64_t right = inlet.taken + (inlet.taken % RING + size_of_record() > RING ? RING - inlet.taken % RING : 0);
    switch (below(5)) {
    case 0: write_record((int)below(2)); break;
    case 1: *records_word = below(2) ? right + size_of_record() : odd_number(right); break;
    case 2: *taken_word = below(2) ? outlet.records : odd_number(outlet.records); break;
    case 3: *waiting_word = number(); break;
    default: *asleep_word = number(); break;
    }
}

static void begin_ring(void) {
    uint64_t begun = RECORD_ALIGNMENT * (below(4) ? below(64) : number() >> 8);
    let_peers_write = write_rings;
    ring = allocate(RING);
    records_word = allocate(8);
    taken_word = allocate(8);
    waiting_word = allocate(8);
    asleep_word = allocate(8);
    head_bytes = 1 + below(MAX_HEAD);
    payload_bytes = below(200);
    head = allocate(head_bytes);
    bell = (struct bell){asleep_word, number(), below(2) ? NO_FD : (uint64_t)open("/dev/null", O_WRONLY)};
    inlet = (struct inlet){.ring = ring, .ring_bytes = RING, .records_word = records_word, .taken_word = taken_word,
                           .waiting_word = waiting_word, .bell = &bell, .most_head_bytes = MAX_HEAD, .taken = begun,
                           .told = begun};
    outlet = (struct outlet){.ring = ring, .ring_bytes = RING, .small_bytes = below(2) ? RING : 64, .bell = &bell,
                             .records_word = records_word, .taken_word = taken_word, .records = begun, .taken = begun};
    *records_word = *taken_word = begun;
}

static int end_ring(int code) {
    if (bell.fd != NO_FD)
        close((int)bell.fd);
    free(head);
    free(asleep_word);
    free(waiting_word);
    free(taken_word);
    free(records_word);
    free(ring);
    let_peers_write = write_boards;
    return code;
}

static void announce_record(void) {
    int is_honest = below(3) != 0;
    write_record(is_honest);
    uint64_t left = RING - inlet.taken % RING, size = size_of_record();
    uint64_t right = inlet.taken + size + (size > left ? left : 0);
    if (is_honest)
        *records_word = right;
    else if (below(2))
        *records_word = odd_number(right);
}

static int fuzz_take(void) {
    begin_ring();
    struct message *message = allocate(sizeof(struct message) + head_bytes);
    *message = (struct message){.head_bytes = head_bytes, .num_bytes = payload_bytes};
    memcpy((char *)message + sizeof(struct message), head, head_bytes);
    char *out = allocate(payload_bytes);
    int code = WAITING;
    for (int i = 0; i < PATIENCE && code != DIFFERS; i++) {
        announce_record();
        code = take(&inlet, message, out);
    }
    free(out);
    free(message);
    return end_ring(code);
}

/* The caller reads the record that was found: all of it is in the ring. */
static int fuzz_find(void) {
    begin_ring();
    int code = WAITING;
    for (int i = 0; i < PATIENCE && code != DIFFERS; i++) {
        announce_record();
        code = find(&inlet);
        if (code != DONE)
            continue;
        if (inlet.head > RING || inlet.head_bytes > MAX_HEAD || inlet.head + inlet.head_bytes > RING)
            fail("header found at", inlet.head);
        if (inlet.head - PREFIX_BYTES + inlet.record_bytes > RING || inlet.available > RING)
            fail("record found of bytes", inlet.record_bytes);
        look(&inlet, below(3), 0);
        release(&inlet);
    }
    return end_ring(code);
}

static int fuzz_put(void) {
    begin_ring();
    char *payload = allocate(payload_bytes);
    int code = DONE;
    for (int i = 0; i < PATIENCE; i++) {
        if (!below(3))
            *taken_word = below(2) ? outlet.records : odd_number(outlet.records);
        code = put(&outlet, head, head_bytes, payload, payload_bytes, number(), below(4) ? 0 : number());
    }
    free(payload);
    return end_ring(code);
}


static const struct {
    const char *name;
    int (*call)(void);
} functions[] = {
    {"meet", fuzz_meet},         {"ticks", fuzz_ticks},         {"all_reduce", fuzz_all_reduce},
    {"reduce", fuzz_reduce},     {"broadcast", fuzz_broadcast}, {"exchange", fuzz_exchange},
    {"play", fuzz_play},
    {"take", fuzz_take},         {"find", fuzz_find},           {"put", fuzz_put},
};

int main(int num_arguments, char **arguments) {
    if (num_arguments < 3)
        return 2;
    uint64_t seed = strtoull(arguments[1], NULL, 10), count = strtoull(arguments[2], NULL, 10);
    lay_out();
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        uint64_t codes[NUM_CODES] = {0};
        if (num_arguments > 3 && strcmp(arguments[3], functions[i].name))
            continue;
        state = (seed + 1) * 0x9e3779b97f4a7c15ULL + i;
        for (uint64_t turn = 0; turn < count; turn++) {
            int code = functions[i].call();
            if (code < 0 || code >= NUM_CODES)
                fail("code", (uint64_t)code);
            codes[code]++;
        }
        printf("%s", functions[i].name);
        for (int code = 0; code < NUM_CODES; code++)
            printf(" %llu", (unsigned long long)codes[code]);
        printf("\n");
    }
    return 0;
}
