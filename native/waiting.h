/* Wait until a word that another rank stores reaches a level. */

#ifndef ECHELON_WAITING_H
#define ECHELON_WAITING_H

#include <stdbool.h>
#include <stdint.h>

/* How one rank waits. Shared by all its groups, whose threads may write at once: the numbers are hints. */
struct waiter {
    uint64_t spin;                   /* nanoseconds; 0 where ranks share cores */
    uint64_t yields;                 /* of the core, before the rank sleeps */
    uint64_t waits_without_yields;   /* as yielding took long */
    uint64_t next_without_yields;
};

/* Looks at a word while a rank spins, between two looks at the clock, which takes as long as some pauses. */
#ifdef ECHELON_EXPLORE
enum { LOOKS = 1 };
#else
enum { LOOKS = 16 };
#endif

/* True if the word has come to the level within the spin. */
bool spin_for(const struct waiter *waiter, const uint64_t *word, uint64_t level);
/* The same, where each rank has a core. Ranks that share cores yield theirs instead. */
bool wait_briefly(struct waiter *waiter, const uint64_t *word, uint64_t level);
/* `has_lock`: whether the caller holds the interpreter's lock, which is let go of after the spin. */
bool wait_for(struct waiter *waiter, const uint64_t *word, uint64_t level, uint64_t *asleep, uint64_t *num_naps,
              bool has_lock);

/* Nanoseconds of a clock that never goes back. */
uint64_t now(void);

#endif
