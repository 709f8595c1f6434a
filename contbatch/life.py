"""What is known of a request while it lives: when its tokens came, where it sits, what it holds."""

from dataclasses import dataclass, field

NAN = float("nan")


@dataclass(slots=True)
class TokenTimes:
    """When a request's output tokens were made, in seconds: all of them if `each` is a list, and what rows need."""

    each: list[float] | None
    count: int = 0
    first_s: float = NAN
    last_s: float = NAN
    longest_gap_s: float = 0.0

    def add(self, times: list[float], longest_gap_s: float) -> None:
        """Note tokens made at `times` (one or more, rising), with the longest gap between two of them."""
        if not self.count:
            self.first_s = times[0]
        elif times[0] - self.last_s > longest_gap_s:
            longest_gap_s = times[0] - self.last_s
        if longest_gap_s > self.longest_gap_s:
            self.longest_gap_s = longest_gap_s
        self.last_s = times[-1]
        self.count += len(times)
        if self.each is not None:
            self.each += times


@dataclass(slots=True)
class Life:
    """What is known of a request since it was first granted something."""

    admitted_s: float
    made: TokenTimes
    kind: str = ""
    """Of the segment it is in, "" while it has no seat."""
    seat: int | None = None
    start_step: int = 0
    start_s: float = 0.0
    holds: list[tuple[int, int]] = field(default_factory=list)
    """(step, pages): how many pages it has held since when, since it took its seat."""
    stored: int = 0
    """Most tokens whose K/V it has had in them."""
    carried_since: int | None = None
    """Place among the `StepEnds` from which on it has made a token in each step, not noted yet."""

    def hold(self, step: int, pages: int, stored: int) -> None:
        """Note so many pages from a step on, and tokens stored in them."""
        if not self.holds or self.holds[-1][1] != pages:
            self.holds.append((step, pages))
        if stored > self.stored:
            self.stored = stored
