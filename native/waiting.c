/* Spin, then yield, then sleep on a futex.
 *
 * Strategy. A peer that is about to store the word does so within microseconds, so it is read for that long first, with
 * the interpreter's lock held: to let go of it may cost a switch interval. The spin is counted in time, because a pause
 * takes 10 to 50 ns. Then the core is yielded: at once where ranks share cores, as the peer may need this one. Then the
 * rank sets its own `asleep` word, passes a fence, reads the word once more, and sleeps on it. The kernel compares the
 * word with that value behind a barrier of its own. A writer stores its word, passes a fence, then reads `asleep` and
 * wakes. So either the sleeper sees the new value or the writer sees the sleeper.
 *
 * One call sleeps once, for 20 ms at most. Its caller then looks for dead peers, and calls again. */

#define _GNU_SOURCE
#include "waiting.h"

#include <time.h>

#include "shared.h"

enum { LONG_YIELD = 500000, FEWEST_WITHOUT_YIELDS = 16, MOST_WITHOUT_YIELDS = 512 };

#ifdef ECHELON_EXPLORE

uint64_t (*explore)(int what, uint64_t address, uint64_t value, int order);

void explored_copy(void *to, const void *from, size_t num_bytes) { __builtin_memcpy(to, from, num_bytes); }

/* A look of 2 ms has a few steps, and no yield is long. */
uint64_t now(void) {
    static uint64_t steps;
    return LONG_YIELD * ++steps;
}

#else

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NAP = 20000000 };

/* Both system calls name the low 32 bits of the word: the library runs on little-endian machines only. */
void sleep_on(const uint64_t *word, uint64_t value) {
    struct timespec limit = {0, NAP};
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)value, &limit, NULL, 0);
}

void wake_all(const uint64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

void ring_eventfd(uint64_t fd) {
    uint64_t one = 1;
    /* It is not blocking, and fails only where it has been rung 2^64 times: then it is readable all the same. */
    if (write((int)fd, &one, sizeof one) < 0)
        return;
}

uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

#endif

/* A yield that takes long shows that others need the core. The next waits then skip yielding, more of them each time. */
static bool yield_until(struct waiter *waiter, const uint64_t *word, uint64_t level) {
    if (waiter->waits_without_yields) {
        waiter->waits_without_yields--;
        return false;
    }
    uint64_t before = now();
    for (uint64_t i = 0; i < waiter->yields; i++) {
        YIELD();
        uint64_t after = now();
        bool is_long = after - before > LONG_YIELD;
        if (LOAD(word, ACQUIRE) >= level) {
            if (!is_long)
                waiter->next_without_yields = FEWEST_WITHOUT_YIELDS;
            return true;
        }
        if (is_long) {
            uint64_t next = waiter->next_without_yields;
            waiter->waits_without_yields = next;
            waiter->next_without_yields = 2 * next < MOST_WITHOUT_YIELDS ? 2 * next : MOST_WITHOUT_YIELDS;
            return false;
        }
        before = after;
    }
    return false;
}

bool spin_for(const struct waiter *waiter, const uint64_t *word, uint64_t level) {
    if (LOAD(word, ACQUIRE) >= level)
        return true;
    uint64_t until = waiter->spin ? now() + waiter->spin : 0;
    while (until) {
        for (int i = 0; i < LOOKS; i++) {
            PAUSE();
            if (LOAD(word, ACQUIRE) >= level)
                return true;
        }
        if (now() >= until)
            break;
    }
    return false;
}

/* Keeps the interpreter's lock, so there is no second yield after a long one. */
bool wait_briefly(struct waiter *waiter, const uint64_t *word, uint64_t level) {
    return spin_for(waiter, word, level) || (!waiter->spin && yield_until(waiter, word, level));
}

/* True if `*word` has come to `level`. False after one sleep: the caller looks around and calls again. */
bool wait_for(struct waiter *waiter, const uint64_t *word, uint64_t level, uint64_t *asleep, uint64_t *num_naps,
              bool has_lock) {
    if (!*num_naps ? spin_for(waiter, word, level) : LOAD(word, ACQUIRE) >= level)
        return true;
    bool has_come = false;
    void *state = has_lock ? LET_GO() : NULL;
    if (!*num_naps)
        has_come = yield_until(waiter, word, level);
    if (!has_come) {
        STORE(asleep, 1, RELAXED);
        FENCE();
        uint64_t value = LOAD(word, RELAXED);
        if (value < level)
            SLEEP(word, value);
        STORE(asleep, 0, RELAXED);
        has_come = LOAD(word, ACQUIRE) >= level;
    }
    if (state)
        TAKE(state);
    *num_naps = has_come ? 0 : *num_naps + 1;
    return has_come;
}
