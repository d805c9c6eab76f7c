"""The policy of orders alone, driven through all the sequences of events hypothesis thinks of."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transport.orders import OrderBook, Work

NUM_SLOTS, NUM_ORDERS = 6, 4
OVERDUE_S = 10.0
teachers = st.sampled_from(["a", "b", "c"])


class Ring(RuleBasedStateMachine):
    """Teachers that write when they like, a student that reads in sequence, and the book.

    A teacher here may write any order that it was ever given and has not confirmed, however late:
    that no such write reaches a slot in use is what the book is for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[int, tuple[int, int]] = {}  # what the doorbell of a slot says
        self.book = OrderBook(NUM_SLOTS, 0, self.is_ready)
        self.writable: dict[str, dict[tuple[int, int], int]] = {name: {} for name in "abc"}
        self.late: list[tuple[float, dict[tuple[int, int], int]]] = []  # of dead ones, until then
        self.queued: dict[str, set[tuple[int, int]]] = {name: set() for name in "abc"}
        self.now = 0.0
        self.next_order = self.next_take = 0

    def is_ready(self, work: Work) -> bool:
        return work.slot is not None and self.words.get(work.slot) == (work.sequence, work.attempt)

    def assign(self) -> None:
        for work in self.book.assign(self.now):
            assert work.teacher is not None and work.slot is not None
            assert work.teacher in self.book.teachers
            for slots in [*self.writable.values(), *(late for _, late in self.late)]:
                assert work.slot not in slots.values()
            self.writable[work.teacher][work.sequence, work.attempt] = work.slot
            self.queued[work.teacher].add((work.sequence, work.attempt))

    @rule(name=teachers)
    def join_or_wake(self, name: str) -> None:
        self.book.teachers.add(name)
        self.assign()

    @rule(name=teachers)
    def fall_silent(self, name: str) -> None:
        self.book.suspend(name)
        self.assign()

    @rule(name=teachers)
    def die(self, name: str) -> None:
        """What it had sent may still arrive; nothing after a second."""
        self.late.append((self.now + 1.0, self.writable[name]))
        self.writable[name] = {}
        self.queued[name].clear()
        self.book.suspend(name, until=self.now + 1.0)
        self.assign()

    @rule(name=teachers)
    def leave(self, name: str) -> None:
        self.writable[name].clear()
        self.queued[name].clear()
        self.book.leave(name)
        self.assign()

    @precondition(lambda self: len(self.book.works) < NUM_ORDERS)
    @rule()
    def order(self) -> None:
        self.book.add(Work(self.next_order, 1, 1, (b"", b"", b"")))
        self.next_order += 1
        self.assign()

    @rule(name=teachers, data=st.data())
    def write(self, name: str, data: st.DataObject) -> None:
        """Write something that was ordered, also long after it was given to another."""
        if self.writable[name]:
            item = data.draw(st.sampled_from(sorted(self.writable[name])))
            self.words[self.writable[name].pop(item)] = item
            self.queued[name].discard(item)

    @precondition(lambda self: any(slots for _, slots in self.late))
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        """What a dead one had sent arrives."""
        slots = data.draw(st.sampled_from([slots for _, slots in self.late if slots]))
        item = data.draw(st.sampled_from(sorted(slots)))
        self.words[slots.pop(item)] = item

    @rule(name=teachers, data=st.data())
    def fail(self, name: str, data: st.DataObject) -> None:
        if self.queued[name]:
            item = data.draw(st.sampled_from(sorted(self.queued[name])))
            self.queued[name].discard(item)
            self.writable[name].pop(item, None)
            self.book.failed(name, *item)
            self.assign()

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.late = [(until, slots) for until, slots in self.late if until > self.now]
        for held in self.book.tick(self.now, OVERDUE_S):
            item = (held.sequence, held.attempt)
            self.queued[held.teacher].discard(item)
            self.writable[held.teacher].pop(item, None)
            self.book.cancelled(held.teacher, *item)
        self.assign()

    @precondition(lambda self: self.next_take < self.next_order)
    @rule()
    def take(self) -> None:
        work = self.book.works[self.next_take]
        if self.is_ready(work):
            self.next_take += 1
            self.book.release(work.sequence)
            self.assign()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        used = [work.slot for work in self.book.works.values() if work.slot is not None]
        places = Counter([*used, *self.book.quarantine, *self.book._free])
        assert places == Counter(range(NUM_SLOTS))

    @invariant()
    def no_order_is_lost(self) -> None:
        assert list(self.book.works) == list(range(self.next_take, self.next_order))
        waiting = [work for work in self.book.works.values() if work.slot is None]
        assert not waiting or self.book.obstacle()

    def teardown(self) -> None:
        """With one teacher that works, everything comes to its end."""
        for name in "abc":
            self.leave(name)
        self.join_or_wake("a")
        while self.next_take < self.next_order:
            self.time_passes(20.0)
            for item, slot in self.writable["a"].items():
                self.words[slot] = item
            self.writable["a"].clear()
            self.queued["a"].clear()
            self.take()


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def book() -> OrderBook:
    """A book of four slots and the teachers a and b, in which no answer is ready."""
    book = OrderBook(4, 0, lambda work: False)
    book.teachers |= {"a", "b"}
    return book


def _give(book: OrderBook, count: int, now: float = 0.0) -> list[tuple[int, str | None, int]]:
    first = max(book.works, default=-1) + 1
    for sequence in range(first, first + count):
        book.add(Work(sequence, 1, 10, (b"", b"", b"")))
    return [(work.sequence, work.teacher, work.attempt) for work in book.assign(now)]


def test_orders_are_spread(book: OrderBook) -> None:
    assert _give(book, 4) == [(0, "a", 0), (1, "b", 0), (2, "a", 0), (3, "b", 0)]
    other = OrderBook(4, 1, lambda work: False)
    other.teachers |= {"a", "b"}
    assert _give(other, 1) == [(0, "b", 0)]  # ranks start at different ones


def test_an_overdue_order_goes_to_another_and_is_cancelled(book: OrderBook) -> None:
    assert _give(book, 2) == [(0, "a", 0), (1, "b", 0)]
    assert book.tick(5.0, overdue_s=5.0) == []
    cancels = book.tick(5.1, overdue_s=5.0)
    assert [(c.teacher, c.sequence, c.attempt) for c in cancels] == [("a", 0, 0), ("b", 1, 0)]
    assert [(w.sequence, w.teacher, w.attempt) for w in book.assign(5.1)] == [
        (0, "b", 1),
        (1, "a", 1),
    ]
    assert book.obstacle() is not None and len(book.quarantine) == 2
    book.cancelled("a", 0, 0)
    assert len(book.quarantine) == 1


def test_an_only_teacher_keeps_its_overdue_orders(book: OrderBook) -> None:
    book.teachers.discard("b")
    _give(book, 2)
    assert book.tick(100.0, overdue_s=5.0) == []
    assert not book.quarantine


def test_a_failed_order_avoids_the_teacher_and_gives_up_at_the_second_failure(
    book: OrderBook,
) -> None:
    _give(book, 1)
    assert book.failed("a", 0, 0)
    assert [(w.teacher, w.attempt, w.slot) for w in book.assign(0.0)] == [("b", 1, 1)]
    assert book.failed("a", 0, 0)  # told twice
    assert not book.failed("b", 0, 1)
    assert not book.quarantine
