"""Messages meet the receives that were posted for them, whichever came first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.memory import bytes_of
from echelon.backends.work import Work
from echelon.errors import CollectiveMismatch, PeerFailed, SizeMismatch, Timeout

TAG = Tag(step=3)
FLOAT = torch.float32


def post(mailbox, src=1, tag=TAG, out=None, note=""):
    work = Work(None, f"receive from {src}")
    mailbox.post(Receive(work, src, tag, out, note))
    return work


def arrive(mailbox, value, src=1, tag=TAG, note="", finish=True):
    """Lets a message of one float arrive; returns the delivery."""
    delivery = mailbox.arrive(src, tag, (1,), FLOAT, note)
    delivery.place()
    if delivery.memory is not None:
        delivery.memory[:] = bytes_of(torch.tensor([float(value)]))
    if finish:
        delivery.finish()
    return delivery


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2), st.integers(0, 1), st.booleans()), max_size=40),
)
def test_messages_meet_receives_in_order_for_each_source_and_tag(events):
    """The n-th receive of a source and tag gets its n-th message, in whatever order all of them come."""
    mailbox = Mailbox()
    works, sent = {}, {}
    for number, (is_message, src, step, with_out) in enumerate(events):
        key = (src, Tag(step=step))
        if is_message:
            arrive(mailbox, number, *key)
            sent.setdefault(key, []).append(float(number))
        else:
            out = torch.zeros(1) if with_out else None
            works.setdefault(key, []).append((post(mailbox, *key, out=out), out))
    unmet = 0
    for key, posted in works.items():
        values = sent.get(key, [])
        unmet += max(0, len(posted) - len(values))
        for (work, out), value in zip(posted, values, strict=False):
            assert work.result().item() == value
            assert out is None or work.result() is out
        for work, _ in posted[len(values) :]:
            assert not work.is_completed()
    assert mailbox.num_posted == unmet


def post_any(mailbox, sources=(1, 2), tag=TAG):
    work = Work(None, "receive from any")
    mailbox.post(Receive(work, ANY, tag, None, "", {src: src * 10 for src in sources}))
    return work


@given(st.lists(st.tuples(st.sampled_from(["message", "one", "any", "withdraw"]), st.integers(1, 3)), max_size=40))
def test_every_message_goes_to_the_first_receive_that_can_take_it(events):
    """Beside a list of receives and messages, in which everything is looked for one by one."""
    mailbox, turn = Mailbox(), 0
    posted, unclaimed, expected = [], [], {}
    for number, (kind, src) in enumerate(events):
        if kind == "message":
            arrive(mailbox, number, src)
            taker = next((entry for entry in posted if src in entry[1]), None)
            if taker is None:
                unclaimed.append((src, number))
            else:
                posted.remove(taker)
                expected[taker[0]] = (src, number)
        elif kind == "withdraw" and posted:
            work, _ = posted.pop(src % len(posted))
            mailbox.withdraw(work, Timeout("late"))
        elif kind in ("one", "any"):
            sources = [src] if kind == "one" else [1, 2]
            work = post(mailbox, src) if kind == "one" else post_any(mailbox)
            waiting = sorted({message[0] for message in unclaimed} & set(sources))
            if not waiting:
                posted.append((work, sources))
                turn = turn if kind == "one" else 0
                continue
            if kind == "any":
                src = turn = next((other for other in waiting if other > turn), waiting[0])
            message = next(message for message in unclaimed if message[0] == src)
            unclaimed.remove(message)
            expected[work] = message
    for work, (src, number) in expected.items():
        result = work.result()
        if not isinstance(result, torch.Tensor):
            assert (result.src, result.tag) == (src * 10, TAG.step)
            result = result.tensor
        assert result.item() == number
    assert mailbox.num_posted == len(posted)
    assert not any(work.is_completed() for work, _ in posted)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("out", "note", "error"),
    [
        (torch.zeros(2), "", SizeMismatch),
        (torch.zeros(1, 1), "", SizeMismatch),
        (torch.zeros(1, dtype=torch.int32), "", SizeMismatch),
        (torch.zeros(()), "", SizeMismatch),
        (None, "barrier", CollectiveMismatch),
    ],
)
def test_a_message_that_does_not_fit_fails_alone(early, out, note, error):
    mailbox = Mailbox()
    if early:
        arrive(mailbox, 1)
    wrong = post(mailbox, out=out, note=note)
    if not early:
        arrive(mailbox, 1)
    with pytest.raises(error):
        wrong.result()
    assert out is None or not out.any()
    right = post(mailbox)
    arrive(mailbox, 2)
    assert right.result().item() == 2


def test_a_disagreement_shows_both_sides():
    mailbox = Mailbox()
    work = post(mailbox, note="all_reduce, #4")
    arrive(mailbox, 1, note="")
    with pytest.raises(CollectiveMismatch, match="rank 1 is in send, this rank in all_reduce, #4: every rank"):
        work.result()


def test_any_note_is_kept_if_none_is_asked_for():
    mailbox = Mailbox()
    early = arrive(mailbox, 1, note="what I am")
    del early
    work = post(mailbox, note=None)
    assert (work.result().item(), work.note) == (1, "what I am")


def test_a_parameter_is_written_without_autograd():
    """From whatever thread, in whatever mode of autograd."""
    place = torch.nn.Parameter(torch.zeros(1))
    mailbox = Mailbox()
    arrive(mailbox, 4)
    assert post(mailbox, out=place).result() is place
    assert place.item() == 4
    assert place.requires_grad
    assert place.is_leaf


def test_the_failure_of_a_peer_ends_its_receives_and_no_others():
    mailbox = Mailbox()
    first, other = post(mailbox), post(mailbox, src=2)
    arrive(mailbox, 9, tag=Tag(step=8))
    cause = mailbox.fail_peer(1, PeerFailed(1, "gone"))
    assert mailbox.fail_peer(1, PeerFailed(1, "told later")) is cause
    assert first.exception() is cause
    assert not other.is_completed()
    assert post(mailbox).exception() is cause
    assert post(mailbox, tag=Tag(step=8)).result().item() == 9, "a message that had arrived was lost"
    assert mailbox.num_posted == 1


def test_the_failure_of_a_context_ends_its_collectives_only():
    mailbox = Mailbox()
    collective, point, other = post(mailbox, tag=Tag(7, 1)), post(mailbox, tag=Tag(7, 0)), post(mailbox, tag=Tag(8, 1))
    cause = mailbox.fail_context(7, PeerFailed(3, "gone"))
    assert mailbox.fail_context(7, PeerFailed(4, "later")) is cause
    assert collective.exception() is cause
    assert not point.is_completed()
    assert not other.is_completed()
    assert mailbox.failures.of(2, Tag(7, 5)) is cause
    assert mailbox.failures.of(2, Tag(7, 0)) is None


def test_a_message_that_is_arriving_for_a_failed_context_is_dropped():
    mailbox = Mailbox()
    place, tag = torch.zeros(1), Tag(7, 1)
    work = post(mailbox, tag=tag, out=place)
    delivery = mailbox.arrive(1, tag, (1,), FLOAT, "")
    cause = mailbox.fail_context(7, PeerFailed(3, "gone"), [delivery])
    assert work.exception() is cause
    assert delivery.memory is None, "it would be written to the tensor of an operation that has failed"
    delivery.finish()
    assert place.item() == 0


def test_messages_for_a_failed_context_are_not_kept():
    mailbox = Mailbox()
    early = Tag(7, 1)
    arrive(mailbox, 1, tag=early)
    cause = mailbox.fail_context(7, PeerFailed(3, "gone"))
    late = mailbox.arrive(1, Tag(7, 2), (1,), FLOAT, "")
    assert late.memory is None
    assert post(mailbox, tag=early).exception() is cause
    assert post(mailbox, tag=Tag(7, 2)).exception() is cause
    assert not list(mailbox.unclaimed)


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_delivery_that_fails_ends_its_receive_whenever_it_comes(posted_first):
    mailbox = Mailbox()
    work = post(mailbox) if posted_first else None
    delivery = arrive(mailbox, 1, finish=False)
    delivery.fail(PeerFailed(1, "gone in mid-message"))
    work = work or post(mailbox)
    with pytest.raises(PeerFailed, match="gone in mid-message"):
        work.result()


@pytest.mark.parametrize("with_out", [True, False])
@pytest.mark.parametrize("others", [0, 1])
def test_a_receive_withdrawn_in_mid_message_gives_it_to_the_next(with_out, others):
    mailbox = Mailbox()
    out = torch.zeros(1) if with_out else None
    withdrawn = post(mailbox, out=out)
    posted = [post(mailbox) for _ in range(others)]
    delivery = arrive(mailbox, 5, finish=False)
    before = None if out is None else out.clone()
    mailbox.withdraw(withdrawn, Timeout("too late"), [delivery])
    delivery.memory[:] = bytes_of(torch.tensor([6.0]))
    delivery.finish()
    assert isinstance(withdrawn.exception(), Timeout)
    assert out is None or torch.equal(out, before)
    assert (posted or [post(mailbox)])[0].result().item() == 6
    assert mailbox.num_posted == 0


def test_a_receive_withdrawn_before_its_message_leaves_it_to_the_next():
    mailbox = Mailbox()
    withdrawn, waiting = post(mailbox), post(mailbox)
    mailbox.withdraw(withdrawn, Timeout("too late"))
    arrive(mailbox, 1)
    assert waiting.result().item() == 1
    with pytest.raises(Timeout):
        withdrawn.result()


def test_one_that_is_done_stays_done():
    mailbox = Mailbox()
    work = post(mailbox)
    arrive(mailbox, 1)
    mailbox.withdraw(work, Timeout("too late"))
    assert work.result().item() == 1


def test_a_message_that_has_arrived_whole_is_taken_without_a_receive():
    mailbox, place = Mailbox(), torch.zeros(1)
    for number in range(4):
        arrive(mailbox, float(number))
    key = (1, TAG)
    assert mailbox.unclaimed.take_whole((2, TAG), None, None) is None
    assert mailbox.unclaimed.take_whole(key, torch.zeros(2), "") is None, "it does not fit"
    assert mailbox.unclaimed.take_whole(key, None, "another note") is None
    assert mailbox.unclaimed.take_whole(key, None, None).tensor.item() == 0
    assert mailbox.unclaimed.take_whole(key, place, "").tensor is place
    assert place.item() == 1
    assert post(mailbox).result().item() == 2
    assert mailbox.unclaimed.take_whole(key, None, "").tensor.item() == 3
    assert list(mailbox.unclaimed) == []
    assert mailbox.unclaimed.num_bytes[1] == 0


def test_a_message_that_is_still_arriving_waits_for_its_receive():
    mailbox = Mailbox()
    delivery = arrive(mailbox, 1.0, finish=False)
    assert mailbox.unclaimed.take_whole((1, TAG), None, None) is None
    delivery.finish()
    assert mailbox.unclaimed.take_whole((1, TAG), None, None).tensor.numel() == 1
