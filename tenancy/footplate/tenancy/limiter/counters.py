"""Counters of one process: a sliding window in buckets, and the set of requests that run at a time.

The script of the Valkey adapter does the same to the same buckets; one suite holds both to one model.
"""

from __future__ import annotations

from footplate.tenancy.limiter.limits import Window


class BucketWindow:
    """How much was taken in each bucket of a window. Amounts are 0 or more, and no call goes back in time."""

    def __init__(self, window: Window) -> None:
        self._window = window
        # Oldest first; only the bucket of now ever grows.
        self._amounts: dict[int, int] = {}
        self._total = 0
        # What others have counted, and until when it may be in the window.
        self._learned, self._learned_until_ms = 0, 0

    def learn(self, amount: int, until_ms: int) -> None:
        """Count what others have counted, until it has left; this replaces what was learned before."""
        self._learned, self._learned_until_ms = amount, until_ms

    def used(self, now_ms: int) -> int:
        """What the window of this moment holds."""
        if self._learned_until_ms <= now_ms:
            self._learned = 0
        while self._amounts:
            oldest = next(iter(self._amounts))
            if self._window.end_ms(oldest) > now_ms:
                break
            self._total -= self._amounts.pop(oldest)
        return self._total + self._learned

    def take(self, amount: int, now_ms: int) -> int:
        """Count an amount, whatever the limit; the bucket it went to."""
        bucket = self._window.bucket_at(now_ms)
        self.used(now_ms)
        if amount:
            self._amounts[bucket] = self._amounts.get(bucket, 0) + amount
            self._total += amount
        return bucket

    def give_back(self, amount: int, bucket: int, now_ms: int) -> None:
        """Undo a taking in its bucket; once that has left the window, nothing is left to undo."""
        self.used(now_ms)
        held = self._amounts.get(bucket, 0)
        amount = min(amount, held)
        self._total -= amount
        if held > amount:
            self._amounts[bucket] = held - amount
        else:
            self._amounts.pop(bucket, None)

    def wait_ms(self, excess: int, now_ms: int) -> int:
        """Until the oldest buckets that hold an excess together have left. There must be as much."""
        self.used(now_ms)
        ends = [(self._window.end_ms(bucket), amount) for bucket, amount in self._amounts.items()]
        if self._learned:
            ends = sorted([*ends, (self._learned_until_ms, self._learned)])
        for end_ms, amount in ends:
            excess -= amount
            if excess <= 0:
                return end_ms - now_ms
        raise AssertionError("more than the window holds")

    def reset_ms(self, now_ms: int) -> int:
        """Until the window is empty, if nothing more is taken."""
        self.used(now_ms)
        end_ms = self._window.end_ms(next(reversed(self._amounts))) if self._amounts else now_ms
        return (max(end_ms, self._learned_until_ms) if self._learned else end_ms) - now_ms


class RunningRequests:
    """The requests that run, by the end of their lease: one that is never ended leaves by itself."""

    def __init__(self) -> None:
        self._ends_ms: dict[str, int] = {}

    def used(self, now_ms: int) -> int:
        """How many run."""
        self._ends_ms = {name: end for name, end in self._ends_ms.items() if end > now_ms}
        return len(self._ends_ms)

    def hold(self, request_id: str, end_ms: int) -> None:
        """Let a request run until its lease ends; again, to extend it."""
        self._ends_ms[request_id] = end_ms

    def drop(self, request_id: str) -> None:
        """It runs no more."""
        self._ends_ms.pop(request_id, None)

    def reset_ms(self, now_ms: int) -> int:
        """Until the last lease ends, if none is extended."""
        return max((end - now_ms for end in self._ends_ms.values() if end > now_ms), default=0)
