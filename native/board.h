/* Synchronisation of one group as one rank sees it, and its small collectives. */

#ifndef ECHELON_BOARD_H
#define ECHELON_BOARD_H

#include <stddef.h>
#include <stdint.h>

#include "combine.h"
#include "waiting.h"

enum code { DONE, WAITING, DIFFERS, NOT_SO, CHANGED, TO_COMBINE };
enum { NUM_WORDS = 14 };
/* How an operation ends after the meeting. */
enum act { MEETS_ONLY, REDUCES, RECEIVES, EXCHANGES, PLAYS };

/* Private memory of the rank, made by Python, which fills in the first two groups. All fields have 64 bits. */
struct board {
    /* The group's region, as this rank maps it, and offsets in the part of one rank. Two where they are used in turns. */
    char *region;
    uint64_t rank_bytes, tick, asleep, mark[2], result_mark[2], note[2], result[2], small[2];
    uint64_t rank, num_ranks;
    struct waiter *waiter;
    /* Largest result that one rank combines for others: 0 where each rank has a core. */
    uint64_t result_bytes;

    uint64_t ticks;            /* of this rank; nobody else stores the word */
    uint64_t announced;        /* those before the current operation's announcement */
    uint64_t number;           /* 0 or 1: which of two copies the operation uses */
    uint64_t mark_now;         /* number and signature of the current operation */
    const char *text;          /* its note, ended by a zero */
    uint64_t text_bytes;
    const char *written[2];    /* notes that stand in the region */

    /* The wait that may be interrupted. */
    uint64_t waits_for_words;  /* 1: until all have announced the operation; 0: for ticks alone */
    uint64_t peer, level, num_naps;
    /* Then: how the operation ends. */
    uint64_t act;
    const char *own;           /* this rank's data */
    char *target;
    uint64_t num_bytes, count; /* of the target */
    uint64_t source, is_published;
    combine_function combine;
    const struct plan *plan;
    const struct program *program;
    uint64_t step;             /* the next one of the program */
    uint64_t itemsize;
    uint64_t has_set_out;      /* this step has begun to wait */
    /* Calls like an earlier one, see calls.c. */
    uint64_t is_brief;         /* waits end after the spin */
    uint64_t is_free;          /* the interpreter's lock was let go of */
    uint64_t begun;            /* 1 + code of an operation that was started: whoever starts it next gets this code */
};

/* Part of a reduction: this rank shows `num_shown` bytes of `own`, and reduces `count` elements from byte `begin` on. */
struct reduction {
    const char *own;
    char *target;
    uint64_t num_shown, begin, count, itemsize, is_published;
    combine_function combine;
};

/* Copy of a block of rank `owner`: `from` is an offset in its own memory if it is this rank, else beside its note. */
struct read {
    uint64_t owner, from, to, num_bytes;
};

/* An exchange that was made before: every rank's blocks begin with a header, and the headers were these. */
struct plan {
    uint64_t num_reads, reads;       /* offset of the reads in this plan; the same for headers */
    uint64_t num_writes;             /* at most 2: blocks before and after the one that nobody reads */
    uint64_t write_from[2], write_to[2], write_bytes[2];
    uint64_t heads;                  /* for each rank: offset and length of its header in this plan */
};

/* A large operation as one rank plays it, made by Python: `num_steps` steps, then pairs of owner and offset, which are the
 * sources of reductions. Offsets are in an owner's part of the region, or in this rank's own data. */
enum kind { WAITS_FOR, TICKS, PUTS, GETS, COMBINES };
struct step {
    uint64_t kind;
    union {
        uint64_t needs;                                    /* WAITS_FOR: ticks of this operation by all peers */
        struct { uint64_t to, from, num_bytes; } put;      /* to this rank's part */
        struct { uint64_t owner, from, to, num_bytes; } get;
        struct { uint64_t first_source, to, count; } combine;
    };
};
struct program {
    uint64_t num_steps;
    struct step steps[];
};

/* Each returns a code. After WAITING call `go_on`; after DIFFERS `peer` has announced another operation. */
int meet(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const uint64_t *words, int num_words);
int reduce(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const struct reduction *reduction);
/* CHANGED if a rank has another header than in the plan: nothing was read. */
int exchange(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const struct plan *plan,
             const char *own, char *target, const uint64_t *words, int num_words);
int broadcast(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, void *tensor,
              uint64_t num_bytes, uint64_t source);
/* Plays a program in an operation that all have announced. Lets go of the interpreter's lock. TO_COMBINE: the caller
 * reduces what the step says, adds 1 to `step`, and calls `go_on`; so does a board without `combine`. */
int play(struct board *board, const struct program *program, const char *own, char *target, combine_function combine,
         uint64_t itemsize);
int wait_for_all(struct board *board, uint64_t num_ticks);
/* Waits until the mark of `peer`, which has withdrawn its announcement, is not 0. */
int wait_for_mark(struct board *board);
int go_on(struct board *board);

void tick(struct board *board);

#endif
