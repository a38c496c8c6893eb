/* Rings of records between two ranks: one writes, one reads. `message_layout.py` defines counters and sizes. */

#ifndef ECHELON_MESSAGES_H
#define ECHELON_MESSAGES_H

#include <stdbool.h>
#include <stdint.h>

/* Private memory of the rank, made by Python. All fields have 64 bits, and addresses are those of this process. */

/* Another rank's word that says whether it sleeps, odd while it does, and the eventfd that wakes it. */
struct bell {
    const uint64_t *asleep;
    uint64_t rung;             /* the sleep for which it was rung: one ring is enough, and takes 20 us */
    uint64_t fd;               /* NO_FD once it is closed */
};

/* The end that writes. */
struct outlet {
    char *ring;
    uint64_t ring_bytes;
    uint64_t small_bytes;      /* a longer payload leaves half of the ring free, and else gets a part */
    uint64_t *records_word;    /* counters, of this rank and of the reader */
    const uint64_t *taken_word;
    struct bell *bell;
    /* Written by the library. */
    uint64_t records;          /* bytes of records put so far, also those skipped at the end of the ring */
    uint64_t taken;            /* bytes taken, as far as was looked: the counter is read only when there seems no room */
};

/* The end that reads. */
struct inlet {
    const char *ring;
    uint64_t ring_bytes;
    const uint64_t *records_word;
    uint64_t *taken_word;
    const uint64_t *waiting_word;
    struct bell *bell;
    uint64_t most_head_bytes;
    /* Written by the library. */
    uint64_t taken, told;      /* bytes taken, and the value of the counter */
    uint64_t available;        /* the record that `find` found: bytes in the ring from it on */
    uint64_t head, head_bytes, payload, record_bytes; /* offsets are in the ring */
    uint64_t part, part_bytes;
};

/* Messages of one link with equal headers, prepared once. The sizes of the shape and the header follow. */
struct message {
    uint64_t end;              /* address of the outlet or inlet */
    uint64_t head_bytes, num_bytes;
    uint64_t type, num_dims;   /* of the tensor, as in `struct view` */
    int64_t shape[];
};

/* Messages of one peer and tag with equal headers, as one group makes them; see message_calls.c. Made by Python, which
 * keeps all that it points at. */
enum { NUM_QUEUES = 4 };
struct prepared {
    struct prepared *next;
    const struct message *message;
    int64_t peer, tag;         /* as the program gives them */
    uint64_t is_send;
    uint64_t spin;             /* nanoseconds before a receive is left to Python */
    uint64_t *count;           /* of messages with the peer: Python counts there as well, under the lock */
    struct _object *acquire, *release; /* the lock under which this rank's threads use their ends of links */
    struct _object *progress, *receiver; /* say whether the rank has closed, and whether a message is arriving */
    struct _object *queues[NUM_QUEUES];  /* containers: Python decides unless all are empty */
    struct _object *like, *shape;        /* of a tensor for a receive without `out` */
    struct _object *object;              /* for records */
};

enum { PREFIX_BYTES = 24, RECORD_ALIGNMENT = 64, PAYLOAD_ALIGNMENT = 16 };
#define NO_FD UINT64_MAX

static inline const char *head_of(const struct message *message) {
    return (const char *)(message->shape + message->num_dims);
}

/* DONE, or WAITING: there is no room. A record with a part has its payload in the arena, and wakes nobody. */
int put(struct outlet *outlet, const char *head, uint64_t head_bytes, const void *payload, uint64_t num_bytes,
        uint64_t part, uint64_t part_bytes);
/* DONE: the next record is described in `inlet`. WAITING: there is none. DIFFERS: the peer wrote no record. */
int find(struct inlet *inlet);
/* Releases the record that was found. */
void release(struct inlet *inlet);
/* DONE: the next record is such a message, and was copied. NOT_SO: the long way has to take it. WAITING as above. */
int take(struct inlet *inlet, const struct message *message, void *out);
/* Reads the counter once, and then for `spin` nanoseconds, with the interpreter's lock held. */
bool has_record(const struct inlet *inlet, uint64_t spin);
/* Spins for a record, then yields for `nanoseconds`. WAITING: there is none. */
int look(const struct inlet *inlet, uint64_t spin, uint64_t nanoseconds);
/* Wakes the writer if it waits for answers and sleeps. Called after an answer was stored. */
void answer(const struct inlet *inlet);
/* Wakes a rank if it sleeps. Called after its news were stored. */
void wake(struct bell *bell);

#endif
