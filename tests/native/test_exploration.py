"""The native library's protocol in many orders, with loads that are late and stores that are seen late.

The C itself runs, compiled with a call at every access to shared memory. Each mutation of its text is found.
"""

import faulthandler
import gc
import itertools
import os
import random
import re
import shutil
import signal
import traceback
from typing import NamedTuple

import pytest
import torch

from echelon.errors import EchelonError
from tests.helpers import native_explorer, native_scenarios, shared_memory_scenarios
from tests.helpers.native_explorer import FOLDER, MARK, compile_explored
from tests.helpers.task_host import Chance, Interruptions

SEEDS = range(60)
_MOST_SEEDS = 400
_MOST_PAIRS = 4000
_OF_MESSAGES = "m: "


@pytest.mark.parametrize("name", native_scenarios.ALL)
def test_all_goes_well_in_orders_by_chance(explored, name):
    assert sum(native_scenarios.play(explored, name, seed).host.num_sleeps for seed in SEEDS) > len(SEEDS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 4 == 1 else pytest.mark.slow)
        for number, name in enumerate(native_scenarios.ALL)
    ],
)
def test_all_goes_well_wherever_a_rank_is_stopped_once(explored, name):
    without = Interruptions(())
    native_scenarios.play(explored, name, 1, without)
    assert without.num_points > 50
    for at in range(1, without.num_points + 1):
        native_scenarios.play(explored, name, 1, Interruptions((at,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", native_scenarios.ALL)
def test_all_goes_well_wherever_ranks_are_stopped_twice(explored, name):
    without = Interruptions(())
    native_scenarios.play(explored, name, 1, without)
    pairs = list(itertools.combinations(range(1, without.num_points + 1), 2))
    if len(pairs) > _MOST_PAIRS:
        pairs = random.Random(name).sample(pairs, _MOST_PAIRS)
    for pair in pairs:
        native_scenarios.play(explored, name, sum(pair), Interruptions(pair))


def test_every_function_of_the_protocol_is_explored(tmp_path):
    folder = tmp_path / "native"
    shutil.copytree(FOLDER, folder)
    names = []

    def mark(match):
        names.append(match[1])
        return f"{match[0]}\n    explore({MARK + len(names) - 1}, 0, 0, 0);"

    for file in ("board.c", "waiting.c", "calls.c", "messages.c"):
        text = (folder / file).read_text()
        begin = text.index("#endif\n") if file == "waiting.c" else 0
        marked = re.sub(r"^\w[^\n;]*?(\w+)\([^;{]*\) \{$", mark, text[begin:], flags=re.MULTILINE)
        (folder / file).write_text(text[:begin] + marked)
    path = compile_explored(tmp_path, folder)
    seen = set()
    for name in native_scenarios.ALL:
        for seed in range(30):
            seen |= native_scenarios.play(path, name, seed).marks
    for name in ("stream, with cores", "flood", "long notes"):
        for seed in range(10):
            seen |= shared_memory_scenarios.play(path, name, Chance(seed), seed).marks
    assert len(names) > 45
    assert [name for number, name in enumerate(names) if MARK + number not in seen] == []


class Mutation(NamedTuple):
    """Text of a source and what it becomes; the scenario in which that is found."""

    what: str
    file: str
    old: str
    new: str
    scenario: str
    also_old: str = ""
    also_new: str = ""


_TICK = "STORE(own, ++board->ticks, RELEASE);"
_PUT_DATA = "    PUT(own_small(board, mark), reduction->own, reduction->num_shown);\n"
_ANNOUNCE = "    announce(board, mark, text, text_bytes, NULL, 0);\n"
_FENCED_SLEEP = "STORE(asleep, 1, RELAXED);\n        FENCE();\n"
_PUBLISHED = "PUT(part_of(board, board->rank) + board->result[board->number], board->target, board->num_bytes);"
_RESULT_MARK = "STORE(word_of(board, board->rank, board->result_mark[board->number]), board->mark_now, RELEASE);"
_PEER_ASLEEP = "if (peer != board->rank && LOAD(word_of(board, peer, board->asleep), RELAXED))"
_RECORDS = "    STORE(outlet->records_word, outlet->records, RELEASE);\n"
_WAKE = "    if (!part_bytes) /* else the first piece follows, and rings */\n        wake(outlet->bell);\n"
_PAYLOAD = "        PUT(record + payload_at(head_bytes), payload, num_bytes);\n"
_HEADER = "    PUT(record + PREFIX_BYTES, head, head_bytes);\n"
_PREFIX = "    PUT(record, &prefix, PREFIX_BYTES);\n"
_TAKEN = "    STORE(inlet->taken_word, inlet->taken, RELEASE);\n"
_ASLEEP = "    uint64_t sleep = LOAD(bell->asleep, RELAXED);\n"
_NOTE = "PUT(own + board->note[number], text, text_bytes);"

MUTATIONS = [
    # memory order, which an x86 processor keeps whatever is asked for
    Mutation("a tick stored relaxed", "board.c", _TICK, _TICK.replace("RELEASE", "RELAXED"), "all-reduces"),
    Mutation(
        "a tick loaded relaxed at once",
        "waiting.c",
        "level) {\n    if (LOAD(word, ACQUIRE) >= level)\n        return true;",
        "level) {\n    if (LOAD(word, RELAXED) >= level)\n        return true;",
        "all-reduces",
    ),
    Mutation(
        "a tick loaded relaxed while spinning",
        "waiting.c",
        "PAUSE();\n            if (LOAD(word, ACQUIRE) >= level)",
        "PAUSE();\n            if (LOAD(word, RELAXED) >= level)",
        "all-reduces",
    ),
    Mutation(
        "a tick loaded relaxed after a yield",
        "waiting.c",
        "LOAD(word, ACQUIRE) >= level) {",
        "LOAD(word, RELAXED) >= level) {",
        "all-reduces",
    ),
    Mutation(
        "a tick loaded relaxed after a sleep",
        "waiting.c",
        "has_come = LOAD(word, ACQUIRE) >= level;",
        "has_come = LOAD(word, RELAXED) >= level;",
        "all-reduces",
    ),
    Mutation("no fence behind a tick", "board.c", "    FENCE();\n", "", "all-reduces"),
    Mutation("no fence before a sleep", "waiting.c", _FENCED_SLEEP, "STORE(asleep, 1, RELAXED);\n", "all-reduces"),
    Mutation(
        "a result's mark stored relaxed",
        "board.c",
        _RESULT_MARK,
        _RESULT_MARK.replace("RELEASE", "RELAXED"),
        "all-reduces, crowded",
    ),
    Mutation(
        "a result's mark loaded relaxed",
        "board.c",
        "board->result_mark[board->number]), ACQUIRE)",
        "board->result_mark[board->number]), RELAXED)",
        "all-reduces, crowded",
    ),
    # the order of steps
    Mutation(
        "a tick before the data",
        "board.c",
        _PUT_DATA + _ANNOUNCE,
        _ANNOUNCE + _PUT_DATA,
        "all-reduces",
    ),
    Mutation(
        "a tick before the header of blocks",
        "board.c",
        "    PUT(small, (const char *)plan + heads[2 * board->rank], heads[2 * board->rank + 1]);\n",
        "    PUT(small, text, 1);\n",
        "exchanges",
    ),
    Mutation(
        "a tick before the blocks",
        "board.c",
        "    for (uint64_t i = 0; i < plan->num_writes; i++)\n"
        "        PUT(small + plan->write_to[i], own + plan->write_from[i], plan->write_bytes[i]);\n"
        "    announce(board, mark, text, text_bytes, words, num_words);\n",
        "    announce(board, mark, text, text_bytes, words, num_words);\n"
        "    for (uint64_t i = 0; i < plan->num_writes; i++)\n"
        "        PUT(small + plan->write_to[i], own + plan->write_from[i], plan->write_bytes[i]);\n",
        "exchanges",
    ),
    Mutation(
        "headers that are not compared",
        "board.c",
        "if (memcmp(small_of(board, peer), plan + heads[2 * peer], num_bytes))",
        "if (0)",
        "exchanges",
    ),
    Mutation(
        "a part of other elements",
        "board.c",
        "small_of(board, peer)) + board->source;",
        "small_of(board, peer));",
        "reductions",
    ),
    Mutation("a tick before the note", "board.c", _NOTE, f"tick(board);\n{_NOTE}\nboard->ticks--;", "all-reduces"),
    Mutation(
        "a result's mark before the result", "board.c", _PUBLISHED, _RESULT_MARK + _PUBLISHED, "all-reduces, crowded"
    ),
    Mutation(
        "a sleep announced after the look",
        "waiting.c",
        _FENCED_SLEEP + "        uint64_t value = LOAD(word, RELAXED);\n",
        "uint64_t value = LOAD(word, RELAXED);\n        STORE(asleep, 1, RELAXED);\n        value = value;\n",
        "all-reduces",
        "SLEEP(word, value);",
        "SLEEP(word, LOAD(word, RELAXED));",
    ),
    Mutation("a sleep on any value", "waiting.c", "SLEEP(word, value);", "SLEEP(word, LOAD(word, RELAXED));", "ticks"),
    # what is left out
    Mutation("a sleep that is not announced", "waiting.c", "STORE(asleep, 1, RELAXED);", "", "all-reduces"),
    Mutation("no wake-up", "board.c", "WAKE(own);", "", "all-reduces"),
    Mutation(
        "a wake-up before the tick",
        "board.c",
        f"    {_TICK}\n",
        "    uint64_t now = ++board->ticks;\n",
        "all-reduces",
        "            WAKE(own);\n            return;\n        }\n",
        "            WAKE(own);\n            break;\n        }\n    STORE(own, now, RELEASE);\n",
    ),
    Mutation(
        "a sleeper that is not looked for",
        "board.c",
        _PEER_ASLEEP,
        f"{_PEER_ASLEEP[:-1]} && peer != 2)",
        "all-reduces of three",
    ),
    Mutation(
        "a peer that is not waited for",
        "board.c",
        "if (peer == board->rank)\n            continue;",
        "if (peer == board->rank || peer == 2)\n            continue;",
        "all-reduces of three",
    ),
    Mutation(
        "one copy of the data",
        "board.c",
        "board->small[mark >> 32 & 1]",
        "board->small[0]",
        "all-reduces",
        "part_of(board, peer) + board->small[board->number]",
        "part_of(board, peer) + board->small[0]",
    ),
    Mutation(
        "a result of another operation",
        "board.c",
        "ACQUIRE) == board->mark_now) {",
        "ACQUIRE)) {",
        "all-reduces, crowded",
    ),
    Mutation(
        "a wait for one tick less",
        "board.c",
        "board->level = board->announced + 1 + num_ticks;",
        "board->level = board->announced + num_ticks;",
        "ticks",
    ),
    Mutation(
        "an announcement that is not waited for",
        "board.c",
        "board->level = board->announced + 1;",
        "board->level = board->announced;",
        "all-reduces",
    ),
    Mutation(
        "a note that is not written again",
        "board.c",
        "text != board->written[number]",
        "!board->written[number]",
        "all-reduces",
    ),
    Mutation("a mark that is not compared", "board.c", "!= board->mark_now ||", "== 1 ||", "disagreements"),
    Mutation("a note that is not compared", "board.c", "!has_same_note(board, peer)", "0", "disagreements"),
    Mutation(
        "an announcement that is not compared", "board.c", "if (board->waits_for_words &&", "if (0 &&", "disagreements"
    ),
    # large operations
    Mutation("a wait left out of a program", "board.c", "if (step->kind == WAITS_FOR) {", "if (0) {", "programs"),
    Mutation("a wait of a program that is one tick too short", "board.c", "1 + needs;", "needs;", "programs"),
    Mutation(
        "a step that is made twice",
        "board.c",
        "            if (code != DONE)\n                return code;\n        } else if (step->kind == TICKS)",
        "            if (code != DONE) {\n                board->step--;\n                return code;\n            }\n"
        "        } else if (step->kind == TICKS)",
        "programs",
    ),
    Mutation(
        "values of other elements",
        "board.c",
        "part_of(board, pairs[0])) + pairs[1];",
        "part_of(board, pairs[0]));",
        "programs",
    ),
    Mutation(
        "a peer left out in a step",
        "board.c",
        "        board->peer = 0;\n        board->level = board->announced + 1 + needs;",
        "        board->level = board->announced + 1 + needs;",
        "programs of three",
    ),
    # calls like an earlier one
    Mutation("an operation that is begun twice", "board.c", "if (!board->begun)", "if (1)", "known calls"),
    Mutation("a begun operation that is begun for ever", "board.c", "    board->begun = 0;\n", "", "known calls"),
    Mutation(
        "a begun operation with its first target",
        "board.c",
        "        board->target = target; /* as in `reduce` */\n",
        "",
        "known calls",
    ),
    Mutation("a begun operation that counts as done", "calls.c", "if (outcome != DONE) {", "if (0) {", "known calls"),
    Mutation("an end that is not told", "calls.c", "    calls->left = flight.sequence;\n", "", "known calls"),
    Mutation("a number that is used twice", "calls.c", "++calls->sequence", "calls->sequence + 1", "known calls"),
    Mutation(
        "a signature of one call alone", "calls.c", "calls->signature * MULTIPLIER +", "0 * MULTIPLIER +", "known calls"
    ),
    Mutation("a call that overtakes marks", "calls.c", " && !calls->num_marks", "", "known calls"),
    Mutation("a tensor of another shape", "calls.c", "key->num_dims != view->num_dims", "0", "known calls"),
    Mutation("a call of another kind", "calls.c", "known->kind == kind &&", "", "known calls"),
    Mutation("a record of another call", "calls.c", "flights->count++", "flights->count", "known calls"),
    Mutation("the last call of a group forgotten", "calls.c", "if (flight.sequence)", "if (0)", "known calls"),
    Mutation(
        "a broadcast read before the meeting",
        "board.c",
        "    board->source = source;\n",
        "    board->source = source;\n    if (!is_source)\n        GET(tensor, small_of(board, source), num_bytes), "
        "board->act = MEETS_ONLY;\n",
        "broadcasts",
    ),
    # messages: memory order
    Mutation(
        "a record's counter stored relaxed", "messages.c", _RECORDS, _RECORDS.replace("RELEASE", "RELAXED"), "m: stream"
    ),
    Mutation(
        "a record's counter loaded relaxed",
        "messages.c",
        "LOAD(inlet->records_word, ACQUIRE)",
        "LOAD(inlet->records_word, RELAXED)",
        "m: stream",
    ),
    Mutation("room told by a relaxed store", "messages.c", _TAKEN, _TAKEN.replace("RELEASE", "RELAXED"), "m: flood"),
    Mutation(
        "room seen by a relaxed load",
        "messages.c",
        "LOAD(outlet->taken_word, ACQUIRE)",
        "LOAD(outlet->taken_word, RELAXED)",
        "m: flood",
    ),
    Mutation("no fence before the look for a sleeper", "messages.c", f"    FENCE();\n{_ASLEEP}", _ASLEEP, "m: stream"),
    Mutation(
        "no fence before the look for who waits for answers",
        "messages.c",
        "    FENCE();\n    /* Most answers",
        "    /* Most answers",
        "m: long notes",
    ),
    # messages: the order of steps, and what is left out
    Mutation(
        "a record counted before its prefix",
        "messages.c",
        _PREFIX,
        "    STORE(outlet->records_word, outlet->records + skip + size, RELEASE);\n" + _PREFIX,
        "m: stream",
    ),
    Mutation(
        "a record counted before its header",
        "messages.c",
        _HEADER,
        "    STORE(outlet->records_word, outlet->records + skip + size, RELEASE);\n" + _HEADER,
        "m: stream",
    ),
    Mutation(
        "a record counted before its payload",
        "messages.c",
        f"    if (!part_bytes && num_bytes)\n{_PAYLOAD}",
        "",
        "m: stream",
        _RECORDS,
        f"{_RECORDS}    if (!part_bytes && num_bytes)\n{_PAYLOAD}",
    ),
    Mutation(
        "the end of the ring skipped after the count",
        "messages.c",
        "        PUT(outlet->ring + at, &skipped, PREFIX_BYTES);\n",
        "        STORE(outlet->records_word, outlet->records + skip, RELEASE);\n"
        "        PUT(outlet->ring + at, &skipped, PREFIX_BYTES);\n",
        "m: flood",
    ),
    Mutation("no bell for a record", "messages.c", _WAKE, "", "m: stream"),
    Mutation("the bell rung before the count", "messages.c", _RECORDS + _WAKE, _WAKE + _RECORDS, "m: stream"),
    Mutation("a sleep taken for the one before", "messages.c", "sleep != bell->rung", "!bell->rung", "m: stream"),
    Mutation("a sleeper not looked for", "messages.c", "sleep & 1 &&", "0 &&", "m: stream"),
    Mutation(
        "a record where others are that were not taken",
        "messages.c",
        "outlet->taken = LOAD(outlet->taken_word, ACQUIRE);",
        "outlet->taken = LOAD(outlet->taken_word, ACQUIRE) + 256;",
        "m: flood",
    ),
    Mutation(
        "a record beyond the end of the ring",
        "messages.c",
        "at + size > outlet->ring_bytes ?",
        "at >= outlet->ring_bytes ?",
        "m: flood",
    ),
    Mutation(
        "a record taken out of the ring before it was received at once",
        "messages.c",
        "    if (message->num_bytes)\n        GET(",
        "    STORE(inlet->taken_word, inlet->taken + inlet->record_bytes, RELEASE);\n"
        "    if (message->num_bytes)\n        GET(",
        "m: flood",
    ),
    Mutation(
        "a header that is not compared",
        "messages.c",
        "if (memcmp(head, head_of(message), message->head_bytes))",
        "if (0)",
        "m: unclaimed",
    ),
    Mutation("no bell for room in the ring", "messages.c", f"{_TAKEN}    answer(inlet);\n", _TAKEN, "m: long notes"),
    Mutation(
        "the bell for room in the ring rung before it is told",
        "messages.c",
        f"{_TAKEN}    answer(inlet);\n",
        f"    answer(inlet);\n{_TAKEN}",
        "m: long notes",
    ),
    Mutation(
        "a message in one call before others that wait",
        "message_calls.c",
        "if (is_true(prepared->queues[i]))",
        "if (0)",
        "m: stream",
    ),
    Mutation(
        "a message in one call while another thread is at the link",
        "message_calls.c",
        "if (!try_lock(prepared->acquire))",
        "if (0)",
        "m: two threads each",
    ),
    Mutation(
        "a message in one call with the header of another tag",
        "message_calls.c",
        "each->peer == peer && each->tag == tag",
        "each->peer == peer",
        "m: unclaimed",
    ),
    Mutation(
        "a message in one call with the header of another shape",
        "message_calls.c",
        "(!view || has_layout(view, each->message))",
        "(!view || view->type == each->message->type)",
        "m: both ways",
    ),
]


def test_the_mutations_fit_the_source():
    """Most of them are compiled and played by the slow tests alone."""
    for mutation in MUTATIONS:
        mutated((FOLDER / mutation.file).read_text(), mutation)


def mutated(text, mutation):
    for old, new in ((mutation.old, mutation.new), (mutation.also_old, mutation.also_new)):
        assert not old or text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {mutation.file}"
        text = text.replace(old, new) if old else text
    return text


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.what, marks=() if number % 6 == 0 else pytest.mark.slow)
        for number, mutation in enumerate(MUTATIONS)
    ],
)
def test_each_mutation_is_found(mutation, tmp_path):
    folder = tmp_path / "native"
    shutil.copytree(FOLDER, folder)
    (folder / mutation.file).write_text(mutated((folder / mutation.file).read_text(), mutation))
    path = compile_explored(tmp_path, folder)
    exit_code = in_child(lambda: any(fails(path, mutation.scenario, seed) for seed in range(_MOST_SEEDS)))
    assert exit_code != NOT_FOUND, "nothing goes wrong"
    assert exit_code == FOUND or -exit_code in CRASHES, f"the child ended with {exit_code}"


FOUND, NOT_FOUND, ERROR = range(3)
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
"""Signals that end a process whose memory a mutation has spoilt. That finds it, too."""


def in_child(find):
    """Calls a function in a forked process, so that this one keeps its memory. Returns the exit code."""
    pid = os.fork()
    if not pid:
        exit_code = ERROR
        try:
            faulthandler.disable()
            gc.freeze()  # garbage of the parent may join threads that are not here
            torch.set_num_threads(1)  # the threads of OpenMP stayed in the parent
            exit_code = FOUND if find() else NOT_FOUND
        except BaseException:
            traceback.print_exc()
        os._exit(exit_code)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:  # a test that takes too long
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def fails(path, scenario, seed):
    """Says whether ranks sleep for ever, race, or get other values. Any other error is one of the test."""
    try:
        if scenario.startswith(_OF_MESSAGES):
            shared_memory_scenarios.play(path, scenario.removeprefix(_OF_MESSAGES), Chance(seed), seed)
        else:
            native_scenarios.play(path, scenario, seed)
    except (native_explorer.Race, *native_scenarios.WRONG, EchelonError):
        return True
    return False
