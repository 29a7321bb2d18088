"""A cache of results of runs by digest, within a budget of bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Literal

import attrs

from djinn.hooks import RunOffer, RunResults, RunStrategy, StrategyRun, TemplateFacts

HASHED: Final = 2e9  # bytes of operands without a name that are hashed, for each second of the run; weights once
LEAST: Final = 1 << 20  # bytes that are hashed in any case
FIRST: Final = 8  # runs of a template that are cached without a hit; later ones are cached if their digest was seen
SEEN: Final = 65536  # digests of runs that were not cached
ENTRIES: Final = 16384  # results that are cached at most: small ones fill no budget
LATEST: Final = 64  # results whose first tokens are compared with those of a run
UNKNOWN: Final = 3  # runs without a digest after which a template is left alone


@attrs.frozen
class Settings:
    """Settings of the cache.

    Attributes:
        gib: memory that results may take on each device, in GiB; 0: nothing is cached.
        seconds: runs that take less are not cached.
    """

    gib: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    seconds: float = attrs.field(default=0.05, validator=attrs.validators.ge(0))


@attrs.define(eq=False)
class Entry:
    """Cached results of a run.

    Attributes:
        program: digest of the ops.
        seconds: time that they took.
        priority: the entry with the lowest priority is evicted first.
    """

    program: bytes
    results: RunResults
    seconds: float
    priority: float


@attrs.define
class CacheCounters:
    """Counters of a cache.

    Attributes:
        hits: runs that were given the results of an equal run.
        prefix_hits: runs that computed only the tokens after a common prefix.
        misses: runs with a digest without cached results.
        evictions: results that were evicted to keep to the budget.
    """

    hits: int = 0
    prefix_hits: int = 0
    misses: int = 0
    evictions: int = 0


class Cache:
    """Results by digest. Evicts by GreedyDual-Size: results that took long for their size, or were used recently, stay.

    Attributes:
        counts: counters since the executor began.
        programs: digests of entries by program, the latest last.
        seconds: time of the longest run of each program.
        nbytes: bytes of all entries.
        seen: digests of the latest runs that were not cached.
    """

    def __init__(self, limit: int) -> None:
        self.counts = CacheCounters()
        self.programs: dict[bytes, dict[bytes, None]] = {}
        self.seconds: dict[bytes, float] = {}
        self.seen: dict[bytes, None] = {}
        self.nbytes = 0
        self._limit, self._clock = limit, 0.0
        self._entries: dict[bytes, Entry] = {}

    def find(self, digest: bytes) -> RunResults | None:
        """Return the results of the run with this digest, or None."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if not entry.results.held:  # the executor needed the memory
            self._remove(digest)
            return None
        entry.priority = self._clock + entry.seconds / max(entry.results.nbytes, 1)
        return entry.results

    def latest(self, program: bytes) -> Sequence[RunResults]:
        """Return the latest results of a program."""
        return [self._entries[digest].results for digest in islice(reversed(self.programs.get(program, {})), LATEST)]

    def store(self, digest: bytes, program: bytes, results: RunResults, seconds: float) -> None:
        """Store results, and evict others if the budget requires it.

        Results above half of the budget are not stored.
        """
        if digest in self._entries:
            self._remove(digest)
        if 2 * results.nbytes > self._limit:
            results.drop()
            return
        while self.nbytes + results.nbytes > self._limit or len(self._entries) >= ENTRIES:
            lowest = min(self._entries, key=lambda key: self._entries[key].priority)
            self._clock = self._entries[lowest].priority
            self.counts.evictions += 1
            self._remove(lowest)
        self._entries[digest] = Entry(program, results, seconds, self._clock + seconds / max(results.nbytes, 1))
        self.programs.setdefault(program, {})[digest] = None
        self.seconds[program] = max(seconds, self.seconds.get(program, 0.0))
        self.nbytes += results.nbytes

    def sizes(self) -> Sequence[int]:
        """Return the bytes of each entry that the executor has not dropped."""
        return [entry.results.nbytes for entry in [*self._entries.values()] if entry.results.held]

    def has_seen(self, digest: bytes) -> bool:
        """Return True if a run with this digest was seen before. Record it as seen."""
        known = digest in self.seen
        self.seen[digest] = None
        if len(self.seen) > SEEN:
            del self.seen[next(iter(self.seen))]
        return known

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        entry.results.drop()
        self.nbytes -= entry.results.nbytes
        del self.programs[entry.program][digest]
        if not self.programs[entry.program]:
            del self.programs[entry.program], self.seconds[entry.program]


class CachingOffer(RunOffer):
    """Offer that looks up each run of a template whose results are cached, and caches runs that take long.

    Attributes:
        unused: number of runs that were cached since the last hit.
        unknown: number of consecutive runs without a digest.
    """

    def __init__(self, cache: Cache, program: bytes, seconds: float) -> None:
        self._cache, self._program, self._least = cache, program, seconds
        self.unused = self.unknown = 0

    def stage(self) -> Literal["idle", "ready"]:
        """Return `idle` for templates whose runs have no digest."""
        return "ready" if self.unknown < UNKNOWN else "idle"

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Context manager of a run: use the results of an equal run.

        If there are none, run the ops and cache their results.
        """
        seconds = self._cache.seconds.get(self._program)
        digest = self._digest(run, seconds) if seconds is not None else None
        if seconds is not None and digest is not None:
            found = self._cache.find(digest)
            if found is not None and run.reuse(found):
                self.unused = 0
                self._cache.counts.hits += 1
                return
            if (yield from run.reuse_prefix(self._cache.latest(self._program))):
                self.unused = 0
                self._cache.counts.prefix_hits += 1
                self._keep(run, seconds)
                return
            self._cache.counts.misses += 1
        began = time.perf_counter()
        yield from run.advance()
        seconds = time.perf_counter() - began
        if seconds >= self._least:
            self._keep(run, seconds)

    def _digest(self, run: StrategyRun, seconds: float) -> bytes | None:
        digest = run.digest(int(HASHED * seconds) if self.unused < FIRST else LEAST)
        self.unknown = 0 if digest is not None else self.unknown + 1
        return digest

    def _keep(self, run: StrategyRun, seconds: float) -> None:
        digest = self._digest(run, seconds)
        if digest is None:
            return
        self.unused += 1
        if self.unused > FIRST and not self._cache.has_seen(digest):
            return
        results = run.results()
        if results is not None:
            self._cache.store(digest, self._program, results, seconds)


class ResultCache(RunStrategy):
    """Run strategy that caches results of runs that take long, for equal runs of all sessions of an executor."""

    name = "result_cache"
    caches_results = True

    def __init__(self, settings: Settings) -> None:
        self._seconds, self._cache = settings.seconds, Cache(int(settings.gib * 2**30))

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer if the template has ops whose results may be cached."""
        return CachingOffer(self._cache, template.cacheable, self._seconds) if template.cacheable else None

    def figures(self) -> Mapping[str, float]:
        """Return the counters, and the number and the bytes of cached results."""
        counts = {f"result_cache_{name}": count for name, count in attrs.asdict(self._cache.counts).items()}
        sizes = self._cache.sizes()
        return {**counts, "result_cache_entries": len(sizes), "result_cache_bytes": sum(sizes)}
