"""Who computes which order into which slot: the policy alone, without a wire or a clock.

A slot that a teacher may still write to is never given to anyone else. When a teacher falls silent,
its orders go to others in other slots and its own slots lie in quarantine, until it has confirmed
that it will not touch them, or until what a dead one had sent has arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from transport.messages import Order

MAX_FAILURES = 2
"""An order that has failed so often would fail everywhere."""


@dataclass
class Work:
    """An order that has been given and whose slot has not been released.

    Attributes:
        sequence: number of the order.
        batch: rows of tokens.
        length: tokens of each.
        buffers: token ids, positions, wanted rows.
        attempt: how often it had been given to a teacher before.
        teacher: who computes it, or None while it waits for a teacher or a slot.
        slot: where the answer goes, or None while it waits.
        given: when it was given to this teacher.
        avoid: teachers that failed it or were too slow.
        failures: how often a teacher met an error with it.
    """

    sequence: int
    batch: int
    length: int
    buffers: tuple[bytes, bytes, bytes]
    attempt: int = -1
    teacher: str | None = None
    slot: int | None = None
    given: float = 0.0
    avoid: set[str] = field(default_factory=set)
    failures: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that a teacher computes for it."""
        return self.batch * self.length

    def order(self) -> Order:
        """Return the message that gives it."""
        assert self.slot is not None
        return Order(
            sequence=self.sequence,
            attempt=self.attempt,
            slot=self.slot,
            batch=self.batch,
            length=self.length,
        )


@dataclass(frozen=True)
class Quarantined:
    """A slot that a teacher may still write to.

    Attributes:
        teacher: who.
        sequence: of which order.
        attempt: of which attempt at it.
        until: when nothing can come any more, or None while only the teacher can tell.
    """

    teacher: str
    sequence: int
    attempt: int
    until: float | None = None


class OrderBook:
    """The orders of one student; every method returns at once, and time is what the caller says."""

    def __init__(self, num_slots: int, first: int, is_ready: Callable[[Work], bool]) -> None:
        """Start without orders and without teachers.

        Args:
            num_slots: slots of the ring.
            first: which of the teachers comes first among equals, so that ranks differ in it.
            is_ready: whether an order's answer is complete in its slot.
        """
        self.works: dict[int, Work] = {}
        """By sequence, the next to be taken first."""
        self.quarantine: dict[int, Quarantined] = {}
        """By slot."""
        self.teachers: set[str] = set()
        """Those that can be given orders now."""
        self._free = list(range(num_slots))
        self._first = first
        self._is_ready = is_ready

    def add(self, work: Work) -> None:
        """Accept an order; `assign` gives it to a teacher."""
        self.works[work.sequence] = work

    def release(self, sequence: int) -> None:
        """Forget an order whose answer has been read; its slot is free."""
        work = self.works.pop(sequence)
        assert work.slot is not None
        self._free.append(work.slot)

    def suspend(self, teacher: str, until: float | None = None) -> int:
        """Give a teacher nothing more, and its orders to others; return how many there were.

        Args:
            teacher: one that fell silent, or is gone.
            until: of one that is gone: when nothing can arrive from it any more.
        """
        self.teachers.discard(teacher)
        for slot, held in self.quarantine.items():
            if held.teacher == teacher and until is not None:
                self.quarantine[slot] = Quarantined(teacher, held.sequence, held.attempt, until)
        lost = [work for work in self._under_way() if work.teacher == teacher]
        for work in lost:
            self._isolate(work, until)
        return len(lost)

    def leave(self, teacher: str) -> int:
        """Take back the orders of a teacher that has said that it will write no more."""
        lost = self.suspend(teacher)
        for slot, held in list(self.quarantine.items()):
            if held.teacher == teacher and held.until is None:
                self._free_again(slot)
        return lost

    def cancelled(self, teacher: str, sequence: int, attempt: int) -> None:
        """Note that a teacher will not touch the slot of this attempt any more."""
        work = self._current(teacher, sequence, attempt)
        if work is not None:
            self._isolate(work)
        for slot, held in list(self.quarantine.items()):
            if held == Quarantined(teacher, sequence, attempt):
                self._free_again(slot)

    def failed(self, teacher: str, sequence: int, attempt: int) -> bool:
        """Give an order that a teacher could not serve to another; return False to give up."""
        work = self._current(teacher, sequence, attempt)
        if work is not None:
            work.failures += 1
            work.avoid.add(teacher)
        self.cancelled(teacher, sequence, attempt)
        return work is None or work.failures < MAX_FAILURES

    def assign(self, now: float) -> list[Work]:
        """Give waiting orders to teachers, as far as slots are free; return those to be sent."""
        sent = []
        for work in self.works.values():
            if work.slot is not None:
                continue
            if not self._free or not self.teachers:
                break
            work.teacher = self._least_busy(work.avoid)
            work.slot = self._free.pop(0)
            work.attempt += 1
            work.given = now
            sent.append(work)
        return sent

    def tick(self, now: float, overdue_s: float) -> list[Quarantined]:
        """Do what time alone brings about; return what teachers are to be asked to cancel.

        Slots of dead teachers come back. Orders that a teacher has had for `overdue_s` go to
        another one, if there is one. An idle teacher gets an order of the busiest one.
        """
        for slot, held in list(self.quarantine.items()):
            if held.until is not None and now >= held.until:
                self._free_again(slot)
        for work in self._under_way():
            if now - work.given > overdue_s and self.teachers - {work.teacher}:
                assert work.teacher is not None
                work.avoid.add(work.teacher)
                self._isolate(work)
        self._share()
        return [
            held
            for held in self.quarantine.values()
            if held.until is None and held.teacher in self.teachers
        ]

    def obstacle(self) -> str | None:
        """Return why an order that waits cannot be given to anyone, or None."""
        if not self.teachers:
            return "no teacher is left"
        if not self._free:
            return (
                f"no slot is free, since lost teachers may still write to {len(self.quarantine)} "
                "of them: raise ring.spare_slots"
            )
        return None

    def _under_way(self) -> list[Work]:
        return [w for w in self.works.values() if w.slot is not None and not self._is_ready(w)]

    def _current(self, teacher: str, sequence: int, attempt: int) -> Work | None:
        work = self.works.get(sequence)
        if work is None or (work.teacher, work.attempt) != (teacher, attempt):
            return None
        return None if work.slot is None or self._is_ready(work) else work

    def _isolate(self, work: Work, until: float | None = None) -> None:
        """Put an order's slot into quarantine; the order waits for another."""
        assert work.slot is not None
        self.quarantine[work.slot] = _held(work, until)
        work.slot = work.teacher = None

    def _free_again(self, slot: int) -> None:
        del self.quarantine[slot]
        self._free.append(slot)

    def _share(self) -> None:
        """Take the last order of the busiest teacher for an idle one, if a slot is free for it."""
        queues: dict[str | None, list[Work]] = {}
        for work in self._under_way():
            queues.setdefault(work.teacher, []).append(work)
        longest = max(queues.values(), key=len, default=[])
        if len(longest) > 1 and self._free and self.teachers - queues.keys():
            self._isolate(longest[-1])

    def _least_busy(self, avoid: set[str]) -> str:
        """Return the teacher with the fewest tokens to compute."""
        names = sorted(self.teachers - avoid or self.teachers)
        busy = dict.fromkeys(names, 0)
        for work in self._under_way():
            if work.teacher in busy:
                busy[work.teacher] += work.num_tokens
        first = self._first % len(names)
        return min(names[first:] + names[:first], key=busy.__getitem__)


def _held(work: Work, until: float | None = None) -> Quarantined:
    assert work.teacher is not None
    return Quarantined(work.teacher, work.sequence, work.attempt, until)
