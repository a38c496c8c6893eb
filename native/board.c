/* Meetings of a group, and the collectives that take one meeting.
 *
 * Strategy. A rank writes only into its own part of the region. It announces an operation: data and note first, then
 * the mark, then its tick. Every step of the operation is another tick. A rank that sees a tick sees all that was
 * written before it. What a rank wrote for an operation stands until its operation after the next, when every peer has
 * left this one; so all that is written lies twice, and the operations use the copies in turns.
 *
 * Nothing in here waits for longer than one sleep. A wait that goes on is a state of the board. */

#include "board.h"

#include <string.h>

#include "shared.h"

static char *part_of(const struct board *board, uint64_t rank) { return board->region + rank * board->rank_bytes; }

static uint64_t *word_of(const struct board *board, uint64_t rank, uint64_t offset) {
    return (uint64_t *)(part_of(board, rank) + offset);
}

/* Publishes all that was written so far, and wakes the peers that sleep. */
void tick(struct board *board) {
    uint64_t *own = word_of(board, board->rank, board->tick);
    STORE(own, ++board->ticks, RELEASE);
    /* The tick before the read of `asleep`, as a sleeper does the reverse. */
    FENCE();
    for (uint64_t peer = 0; peer < board->num_ranks; peer++)
        if (peer != board->rank && LOAD(word_of(board, peer, board->asleep), RELAXED)) {
            /* One system call wakes all that sleep on this rank's tick, whichever peer's flag was seen. */
            WAKE(own);
            return;
        }
}

static void announce(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const uint64_t *words,
                     int num_words) {
    uint64_t number = board->number = mark >> 32 & 1;
    char *own = part_of(board, board->rank);
    board->text = text;
    board->text_bytes = text_bytes;
    board->mark_now = mark;
    /* The same object is the same note: a repeated call writes its note in its first two operations alone. */
    if (text != board->written[number]) {
        PUT(own + board->note[number], text, text_bytes);
        board->written[number] = text;
    }
    uint64_t *place = word_of(board, board->rank, board->mark[number]);
    for (int i = 0; i < num_words; i++)
        STORE(place + 1 + i, words[i], RELAXED);
    /* The tick publishes all of it, and nobody reads any of it before. */
    STORE(place, mark, RELAXED);
    board->announced = board->ticks;
    tick(board);
    board->peer = 0;
    board->level = board->announced + 1;
    board->num_naps = 0;
    board->waits_for_words = 1;
    board->act = MEETS_ONLY;
}

static int has_same_note(const struct board *board, uint64_t peer) {
    const char *note = part_of(board, peer) + board->note[board->number];
    READS(note, board->text_bytes);
    return !memcmp(note, board->text, board->text_bytes);
}

static int wait_for_peers(struct board *board) {
    uint64_t *asleep = word_of(board, board->rank, board->asleep);
    for (; board->peer < board->num_ranks; board->peer++) {
        uint64_t peer = board->peer;
        if (peer == board->rank)
            continue;
        const uint64_t *ticks = word_of(board, peer, board->tick);
        if (board->is_brief ? !wait_briefly(board->waiter, ticks, board->level)
                            : !wait_for(board->waiter, ticks, board->level, asleep, &board->num_naps,
                                        !board->is_free))
            return WAITING;
        /* Read after the tick, so mark and note are those of the announcement, or the mark says that it is withdrawn. */
        if (board->waits_for_words &&
            (LOAD(word_of(board, peer, board->mark[board->number]), RELAXED) != board->mark_now ||
             !has_same_note(board, peer)))
            return DIFFERS;
    }
    return DONE;
}

/* Whether a peer has combined the operation's result for all; copies it. */
static int took_result(struct board *board) {
    for (uint64_t peer = 0; peer < board->num_ranks; peer++)
        if (peer != board->rank &&
            LOAD(word_of(board, peer, board->result_mark[board->number]), ACQUIRE) == board->mark_now) {
            GET(board->target, part_of(board, peer) + board->result[board->number], board->num_bytes);
            return 1;
        }
    return 0;
}

static char *small_of(const struct board *board, uint64_t peer) {
    return part_of(board, peer) + board->small[board->number];
}

static void reduce_all(struct board *board) {
    if (board->is_published && took_result(board))
        return;
    const void *sources[board->num_ranks];
    for (uint64_t peer = 0; peer < board->num_ranks; peer++) {
        /* This rank's own values are in its cache. `source` is the offset of the part that it reduces. */
        sources[peer] = (peer == board->rank ? board->own : small_of(board, peer)) + board->source;
        if (peer != board->rank)
            READS(sources[peer], board->num_bytes);
    }
    board->combine(board->target, sources, board->num_ranks, board->count);
    if (board->is_published) {
        PUT(part_of(board, board->rank) + board->result[board->number], board->target, board->num_bytes);
        STORE(word_of(board, board->rank, board->result_mark[board->number]), board->mark_now, RELEASE);
    }
}

static int read_blocks(struct board *board) {
    const char *plan = (const char *)board->plan;
    const uint64_t *heads = (const uint64_t *)(plan + board->plan->heads);
    for (uint64_t peer = 0; peer < board->num_ranks; peer++)
        if (peer != board->rank) {
            uint64_t num_bytes = heads[2 * peer + 1];
            READS(small_of(board, peer), num_bytes);
            if (memcmp(small_of(board, peer), plan + heads[2 * peer], num_bytes))
                return CHANGED;
        }
    const struct read *reads = (const struct read *)(plan + board->plan->reads);
    for (uint64_t i = 0; i < board->plan->num_reads; i++) {
        struct read read = reads[i];
        if (read.owner == board->rank)
            memcpy(board->target + read.to, board->own + read.from, read.num_bytes);
        else
            GET(board->target + read.to, small_of(board, read.owner) + read.from, read.num_bytes);
    }
    return DONE;
}

static void combine_parts(const struct board *board, const struct step *step) {
    const uint64_t *pairs = (const uint64_t *)(board->program->steps + board->program->num_steps);
    const void *sources[board->num_ranks];
    pairs += 2 * step->combine.first_source;
    for (uint64_t peer = 0; peer < board->num_ranks; peer++, pairs += 2) {
        sources[peer] = (pairs[0] == board->rank ? board->own : part_of(board, pairs[0])) + pairs[1];
        if (pairs[0] != board->rank)
            READS(sources[peer], step->combine.count * board->itemsize);
    }
    board->combine(board->target + step->combine.to, sources, board->num_ranks, step->combine.count);
}

static int wait_in_step(struct board *board, uint64_t needs) {
    if (!board->has_set_out) {
        board->peer = 0;
        board->level = board->announced + 1 + needs;
        board->num_naps = 0;
        board->has_set_out = 1;
    }
    int code = wait_for_peers(board);
    board->has_set_out = code != DONE;
    return code;
}

static int play_steps(struct board *board) {
    for (; board->step < board->program->num_steps; board->step++) {
        const struct step *step = board->program->steps + board->step;
        char *own_part = part_of(board, board->rank);
        if (step->kind == WAITS_FOR) {
            int code = wait_in_step(board, step->needs);
            if (code != DONE)
                return code;
        } else if (step->kind == TICKS)
            tick(board);
        else if (step->kind == PUTS)
            PUT(own_part + step->put.to, board->own + step->put.from, step->put.num_bytes);
        else if (step->kind == GETS)
            GET(board->target + step->get.to, part_of(board, step->get.owner) + step->get.from, step->get.num_bytes);
        else if (!board->combine)
            return TO_COMBINE;
        else
            combine_parts(board, step);
    }
    return DONE;
}

static int play_on(struct board *board) {
    /* Other threads may run meanwhile: it takes 50 us and more. */
    void *state = LET_GO();
    board->is_free = 1;
    int code = play_steps(board);
    board->is_free = 0;
    TAKE(state);
    return code;
}

int go_on(struct board *board) {
    if (board->act == PLAYS)
        return play_on(board);
    int code = wait_for_peers(board);
    if (code != DONE)
        return code;
    if (board->act == REDUCES)
        reduce_all(board);
    if (board->act == RECEIVES)
        GET(board->target, small_of(board, board->source), board->num_bytes);
    return board->act == EXCHANGES ? read_blocks(board) : DONE;
}

/* Whether Python makes a call that calls.c has begun. Then its code is returned in place of another start. */
static int was_begun(struct board *board, int *code) {
    if (!board->begun)
        return 0;
    *code = (int)board->begun - 1;
    board->begun = 0;
    return 1;
}

int meet(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const uint64_t *words,
         int num_words) {
    int code;
    if (was_begun(board, &code))
        return code;
    announce(board, mark, text, text_bytes, words, num_words);
    return go_on(board);
}

static char *own_small(const struct board *board, uint64_t mark) {
    return part_of(board, board->rank) + board->small[mark >> 32 & 1];
}

int reduce(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes,
           const struct reduction *reduction) {
    int code;
    if (was_begun(board, &code)) {
        board->target = reduction->target; /* a new result of the same size: nothing was written so far */
        return code;
    }
    PUT(own_small(board, mark), reduction->own, reduction->num_shown);
    announce(board, mark, text, text_bytes, NULL, 0);
    board->act = reduction->count ? REDUCES : MEETS_ONLY;
    board->own = reduction->own;
    board->target = reduction->target;
    board->source = reduction->begin;
    board->count = reduction->count;
    board->num_bytes = reduction->count * reduction->itemsize;
    board->is_published = reduction->is_published && board->num_bytes <= board->result_bytes;
    board->combine = reduction->combine;
    return go_on(board);
}

int broadcast(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, void *tensor,
              uint64_t num_bytes, uint64_t source) {
    int code;
    if (was_begun(board, &code))
        return code;
    int is_source = source == board->rank;
    if (is_source)
        PUT(own_small(board, mark), tensor, num_bytes);
    announce(board, mark, text, text_bytes, NULL, 0);
    board->act = is_source ? MEETS_ONLY : RECEIVES;
    board->target = tensor;
    board->num_bytes = num_bytes;
    board->source = source;
    return go_on(board);
}

int exchange(struct board *board, uint64_t mark, const char *text, uint64_t text_bytes, const struct plan *plan,
             const char *own, char *target, const uint64_t *words, int num_words) {
    int code;
    if (was_begun(board, &code)) {
        board->target = target; /* as in `reduce` */
        return code;
    }
    const uint64_t *heads = (const uint64_t *)((const char *)plan + plan->heads);
    char *small = own_small(board, mark);
    PUT(small, (const char *)plan + heads[2 * board->rank], heads[2 * board->rank + 1]);
    for (uint64_t i = 0; i < plan->num_writes; i++)
        PUT(small + plan->write_to[i], own + plan->write_from[i], plan->write_bytes[i]);
    announce(board, mark, text, text_bytes, words, num_words);
    board->act = EXCHANGES;
    board->plan = plan;
    board->own = own;
    board->target = target;
    return go_on(board);
}

int play(struct board *board, const struct program *program, const char *own, char *target, combine_function combine,
         uint64_t itemsize) {
    board->program = program;
    board->step = 0;
    board->has_set_out = 0;
    board->waits_for_words = 0;
    board->act = PLAYS;
    board->own = own;
    board->target = target;
    board->combine = combine;
    board->itemsize = itemsize;
    return go_on(board);
}

int wait_for_all(struct board *board, uint64_t num_ticks) {
    board->peer = 0;
    board->level = board->announced + 1 + num_ticks;
    board->num_naps = 0;
    board->waits_for_words = 0;
    board->act = MEETS_ONLY;
    return go_on(board);
}

int wait_for_mark(struct board *board) {
    uint64_t *mark = word_of(board, board->peer, board->mark[board->number]);
    uint64_t *asleep = word_of(board, board->rank, board->asleep);
    return wait_for(board->waiter, mark, 1, asleep, &board->num_naps, true) ? DONE : WAITING;
}
