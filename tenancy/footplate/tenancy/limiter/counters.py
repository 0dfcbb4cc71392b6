"""Counters of one process: a sliding window in buckets, and the set of requests that run at a time.

The script of the Valkey adapter does the same to the same buckets; one suite holds both to one model.
"""

from __future__ import annotations

from footplate.tenancy.limiter.limits import Window


class BucketWindow:
    """How much was taken in each bucket of a window. Amounts are 0 or more.

    A clock that steps back forgets nothing: what is taken meanwhile goes to the newest bucket. Where it lies
    further ahead than the window is long, all of it moves to now, and holds no longer than if taken now.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        # Oldest first; only the newest ever grows.
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
        bucket = self._window.bucket_at(now_ms)
        if self._newest() > bucket + self._window.num_buckets:
            self._amounts = {bucket: self._total}
        while self._amounts:
            oldest = next(iter(self._amounts))
            if self._window.end_ms(oldest) > now_ms:
                break
            self._total -= self._amounts.pop(oldest)
        return self._total + self._learned

    def take(self, amount: int, now_ms: int) -> int:
        """Count an amount, whatever the limit; the bucket it went to."""
        self.used(now_ms)
        bucket = max(self._newest(), self._window.bucket_at(now_ms))
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
        times = [
            (self._window.time_left_ms(bucket, now_ms), amount) for bucket, amount in self._amounts.items()
        ]
        if self._learned:
            times = sorted([*times, (self._learned_until_ms - now_ms, self._learned)])
        for time_ms, amount in times:
            excess -= amount
            if excess <= 0:
                return time_ms
        raise AssertionError("more than the window holds")

    def reset_ms(self, now_ms: int) -> int:
        """Until the window is empty, if nothing more is taken."""
        self.used(now_ms)
        time_ms = self._window.time_left_ms(self._newest(), now_ms) if self._amounts else 0
        return max(time_ms, self._learned_until_ms - now_ms) if self._learned else time_ms

    def _newest(self) -> int:
        """The newest bucket that holds anything; before all time when none does."""
        return next(reversed(self._amounts), -self._window.num_buckets)


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
