/* Records in the ring between two ranks: put, found, taken.
 *
 * Strategy. Data first, its counter second, by release and acquire. A record goes between the last one and the first
 * that is not taken; where the end of the ring is too short, a record without a header skips it. The writer stores its
 * counter, passes a fence, then reads whether the reader sleeps, and rings its bell. The reader says that it sleeps,
 * passes a fence, then looks at the counters. So either the reader sees the record or the writer sees the sleeper.
 *
 * A peer may write anything: each of its numbers is read once into a local and checked before it is used. */

#include "messages.h"

#include <string.h>

#include "board.h"
#include "shared.h"
#include "waiting.h"

struct prefix {
    uint32_t record_bytes, head_bytes; /* 0 bytes of header: the end of the ring is skipped */
    uint64_t part, part_bytes;         /* of a large message in the arena */
};

_Static_assert(sizeof(struct prefix) == PREFIX_BYTES, "the layout of a record");

static uint64_t up(uint64_t number, uint64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

static uint64_t payload_at(uint64_t head_bytes) { return up(PREFIX_BYTES + head_bytes, PAYLOAD_ALIGNMENT); }

static uint64_t record_bytes(uint64_t head_bytes, uint64_t num_bytes) {
    return up(payload_at(head_bytes) + num_bytes, RECORD_ALIGNMENT);
}

void wake(struct bell *bell) {
    FENCE();
    uint64_t sleep = LOAD(bell->asleep, RELAXED);
    if (sleep & 1 && sleep != bell->rung && bell->fd != NO_FD) {
        bell->rung = sleep;
        RING(bell->fd);
    }
}

/* Both count bytes since the start in 64 bits. True if with `num_bytes` more at most `most` bytes are not taken. */
static bool has_room(struct outlet *outlet, uint64_t num_bytes, uint64_t most) {
    if (outlet->records + num_bytes - outlet->taken <= most)
        return true;
    outlet->taken = LOAD(outlet->taken_word, ACQUIRE);
    return outlet->records + num_bytes - outlet->taken <= most;
}

int put(struct outlet *outlet, const char *head, uint64_t head_bytes, const void *payload, uint64_t num_bytes,
        uint64_t part, uint64_t part_bytes) {
    uint64_t size = record_bytes(head_bytes, part_bytes ? 0 : num_bytes), at = outlet->records % outlet->ring_bytes;
    uint64_t skip = at + size > outlet->ring_bytes ? outlet->ring_bytes - at : 0;
    bool is_small = part_bytes || num_bytes <= outlet->small_bytes;
    if (!has_room(outlet, skip + size, is_small ? outlet->ring_bytes : outlet->ring_bytes / 2))
        return WAITING;
    if (skip) {
        struct prefix skipped = {(uint32_t)skip, 0, 0, 0};
        PUT(outlet->ring + at, &skipped, PREFIX_BYTES);
        at = 0;
    }
    struct prefix prefix = {(uint32_t)size, (uint32_t)head_bytes, part, part_bytes};
    char *record = outlet->ring + at;
    PUT(record, &prefix, PREFIX_BYTES);
    PUT(record + PREFIX_BYTES, head, head_bytes);
    if (!part_bytes && num_bytes)
        PUT(record + payload_at(head_bytes), payload, num_bytes);
    outlet->records += skip + size;
    STORE(outlet->records_word, outlet->records, RELEASE);
    if (!part_bytes) /* else the first piece follows, and rings */
        wake(outlet->bell);
    return DONE;
}

void answer(const struct inlet *inlet) {
    FENCE();
    /* Most answers are awaited by nobody: the check spares the wake-up. */
    if (LOAD(inlet->waiting_word, RELAXED))
        wake(inlet->bell);
}

void release(struct inlet *inlet) {
    inlet->taken += inlet->record_bytes;
    /* Once per quarter of the ring: the store moves a cache line, and the answer passes a fence. */
    if (inlet->taken - inlet->told < inlet->ring_bytes / 4)
        return;
    inlet->told = inlet->taken;
    STORE(inlet->taken_word, inlet->taken, RELEASE);
    answer(inlet);
}

int find(struct inlet *inlet) {
    for (;;) {
        uint64_t available = LOAD(inlet->records_word, ACQUIRE) - inlet->taken;
        if (!available)
            return WAITING;
        uint64_t at = inlet->taken % inlet->ring_bytes, left = inlet->ring_bytes - at;
        struct prefix prefix;
        GET(&prefix, inlet->ring + at, PREFIX_BYTES);
        uint64_t size = prefix.record_bytes, most = size - PREFIX_BYTES;
        inlet->available = available;
        inlet->head = at + PREFIX_BYTES;
        inlet->head_bytes = prefix.head_bytes;
        inlet->payload = at + payload_at(prefix.head_bytes);
        inlet->record_bytes = size;
        inlet->part = prefix.part;
        inlet->part_bytes = prefix.part_bytes;
        if (!size || size % RECORD_ALIGNMENT || size > available || size > left || available > inlet->ring_bytes ||
            prefix.head_bytes > (most < inlet->most_head_bytes ? most : inlet->most_head_bytes) ||
            (!prefix.head_bytes && (!at || size != left))) /* only the end of the ring is skipped, so never twice */
            return DIFFERS;
        if (prefix.head_bytes)
            return DONE;
        release(inlet);
    }
}

int take(struct inlet *inlet, const struct message *message, void *out) {
    int code = find(inlet);
    if (code != DONE)
        return code == WAITING ? WAITING : NOT_SO;
    /* Sizes are those of the message known before, so the peer's bytes are only compared, and then copied. More than
     * half a ring is for the long way, which empties it, so that the writer can go on. */
    if (inlet->available > inlet->ring_bytes / 2 || inlet->part_bytes || inlet->head_bytes != message->head_bytes ||
        inlet->record_bytes != record_bytes(message->head_bytes, message->num_bytes))
        return NOT_SO;
    const char *head = inlet->ring + inlet->head;
    READS(head, message->head_bytes);
    if (memcmp(head, head_of(message), message->head_bytes))
        return NOT_SO;
    if (message->num_bytes)
        GET(out, inlet->ring + inlet->payload, message->num_bytes);
    release(inlet);
    return DONE;
}

bool has_record(const struct inlet *inlet, uint64_t spin) {
    uint64_t taken = inlet->taken; /* once: other threads of this rank take records, too */
    if (LOAD(inlet->records_word, RELAXED) != taken)
        return true;
    uint64_t until = spin ? now() + spin : 0;
    while (until) {
        for (int i = 0; i < LOOKS; i++) {
            PAUSE();
            if (LOAD(inlet->records_word, RELAXED) != taken)
                return true;
        }
        if (now() >= until)
            break;
    }
    return false;
}

int look(const struct inlet *inlet, uint64_t spin, uint64_t nanoseconds) {
    uint64_t taken = inlet->taken; /* once, as above */
    if (has_record(inlet, spin))
        return DONE;
    void *state = LET_GO();
    uint64_t until = now() + nanoseconds;
    int code = WAITING;
    do {
        YIELD();
        if (LOAD(inlet->records_word, RELAXED) != taken)
            code = DONE;
    } while (code == WAITING && now() < until);
    TAKE(state);
    return code;
}
