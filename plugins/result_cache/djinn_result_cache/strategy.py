"""A cache of results of runs by digest, within a memory budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Literal

import attrs

from djinn.hooks import RunOffer, RunResults, RunStrategy, StrategyRun, TemplateFacts

HASHED_BYTES_PER_SECOND: Final = (
    2e9  # maximum bytes of unnamed operands to hash, per second of the run; weights count once
)
MIN_HASHED_BYTES: Final = 1 << 20  # this limit applies to templates without hits
CACHED_WITHOUT_HIT: Final = (
    8  # runs of a template to cache without a hit; later runs are cached if their digest was seen
)
MAX_SEEN: Final = 65536  # digests of runs that were not cached
MAX_ENTRIES: Final = 16384  # small results would not fill the budget
MAX_PREFIX_CANDIDATES: Final = (
    64  # latest results of a program whose first tokens are compared with the tokens of a run
)
MAX_UNKNOWN: Final = 3  # consecutive runs without a digest after which a template is no longer looked up


@attrs.frozen
class Settings:
    """Settings of the cache.

    Attributes:
        gib: memory that cached results may take on each device, in GiB. With 0, nothing is cached.
        seconds: minimum time of a run whose results are cached.
    """

    gib: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    seconds: float = attrs.field(default=0.05, validator=attrs.validators.ge(0))


@attrs.define(eq=False)
class Entry:
    """Cached results of a run.

    Attributes:
        program: digest of the run's ops.
        results: the results.
        seconds: time that the ops took.
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
        hits: number of runs that reused the results of an equal run.
        prefix_hits: number of runs that computed only the tokens after a common prefix.
        misses: number of runs whose digest had no cached results.
        evictions: number of results that were evicted because of the budget.
    """

    hits: int = 0
    prefix_hits: int = 0
    misses: int = 0
    evictions: int = 0


class Cache:
    """Results by digest. Evicts by GreedyDual-Size: results that took long for their size, or were used recently, stay.

    Attributes:
        counters: counters since the executor started.
        programs: digests of entries by program, the latest last.
        seconds: time of the longest run of each program.
        nbytes: bytes of all entries.
        seen: digests of the latest runs that were not cached.
    """

    def __init__(self, limit: int) -> None:
        self.counters = CacheCounters()
        self.programs: dict[bytes, dict[bytes, None]] = {}
        self.seconds: dict[bytes, float] = {}
        self.seen: dict[bytes, None] = {}
        self.nbytes = 0
        self._limit, self._clock = limit, 0.0
        self._entries: dict[bytes, Entry] = {}

    def find(self, digest: bytes) -> RunResults | None:
        """Return the results of the run with this digest, or None. Remove results whose memory the executor took back."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if not entry.results.held:  # the executor needed the memory
            self._remove(digest)
            return None
        entry.priority = self._clock + entry.seconds / max(entry.results.nbytes, 1)
        return entry.results

    def latest(self, program: bytes) -> Sequence[RunResults]:
        """Return up to `MAX_PREFIX_CANDIDATES` results of a program, the latest first."""
        return [
            self._entries[digest].results
            for digest in islice(reversed(self.programs.get(program, {})), MAX_PREFIX_CANDIDATES)
        ]

    def store(self, digest: bytes, program: bytes, results: RunResults, seconds: float) -> None:
        """Store results, and evict other results if a limit requires it. Drop results larger than half of the budget.

        `program`: digest of the ops. `seconds`: time that the ops took.
        """
        if digest in self._entries:
            self._remove(digest)
        if 2 * results.nbytes > self._limit:
            results.drop()
            return
        while self.nbytes + results.nbytes > self._limit or len(self._entries) >= MAX_ENTRIES:
            lowest = min(self._entries, key=lambda key: self._entries[key].priority)
            self._clock = self._entries[lowest].priority
            self.counters.evictions += 1
            self._remove(lowest)
        self._entries[digest] = Entry(program, results, seconds, self._clock + seconds / max(results.nbytes, 1))
        self.programs.setdefault(program, {})[digest] = None
        self.seconds[program] = max(seconds, self.seconds.get(program, 0.0))
        self.nbytes += results.nbytes

    def sizes(self) -> Sequence[int]:
        """Return the bytes of each entry that the executor has not dropped."""
        return [entry.results.nbytes for entry in [*self._entries.values()] if entry.results.held]

    def has_seen(self, digest: bytes) -> bool:
        """Return True if an earlier call had this digest, and remember the digest."""
        was_seen = digest in self.seen
        self.seen[digest] = None
        if len(self.seen) > MAX_SEEN:
            del self.seen[next(iter(self.seen))]
        return was_seen

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        entry.results.drop()
        self.nbytes -= entry.results.nbytes
        del self.programs[entry.program][digest]
        if not self.programs[entry.program]:
            del self.programs[entry.program], self.seconds[entry.program]


class CachingOffer(RunOffer):
    """Offer that reuses cached results for runs of a template, and caches results of runs that take long.

    Attributes:
        cached_since_hit: how often the offer has tried to cache results since the last hit.
        runs_without_digest: number of consecutive runs without a digest.
    """

    def __init__(self, cache: Cache, program: bytes, seconds: float) -> None:
        self._cache, self._program, self._min_seconds = cache, program, seconds
        self.cached_since_hit = self.runs_without_digest = 0

    def stage(self) -> Literal["idle", "ready"]:
        """Return `idle` if the latest runs of the template had no digest, otherwise `ready`."""
        return "ready" if self.runs_without_digest < MAX_UNKNOWN else "idle"

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Reuse results of a run that is equal or has a common prefix, else run the ops. Cache results of long runs."""
        seconds = self._cache.seconds.get(self._program)
        digest = self._digest(run, seconds) if seconds is not None else None
        if seconds is not None and digest is not None:
            results = self._cache.find(digest)
            if results is not None and run.reuse(results):
                self.cached_since_hit = 0
                self._cache.counters.hits += 1
                return
            if (yield from run.reuse_prefix(self._cache.latest(self._program))):
                self.cached_since_hit = 0
                self._cache.counters.prefix_hits += 1
                self._store_results(run, seconds)
                return
            self._cache.counters.misses += 1
        start = time.perf_counter()
        yield from run.advance()
        seconds = time.perf_counter() - start
        if seconds >= self._min_seconds:
            self._store_results(run, seconds)

    def _digest(self, run: StrategyRun, seconds: float) -> bytes | None:
        digest = run.digest(
            int(HASHED_BYTES_PER_SECOND * seconds) if self.cached_since_hit < CACHED_WITHOUT_HIT else MIN_HASHED_BYTES
        )
        self.runs_without_digest = 0 if digest is not None else self.runs_without_digest + 1
        return digest

    def _store_results(self, run: StrategyRun, seconds: float) -> None:
        digest = self._digest(run, seconds)
        if digest is None:
            return
        self.cached_since_hit += 1
        if self.cached_since_hit > CACHED_WITHOUT_HIT and not self._cache.has_seen(digest):
            return
        results = run.results()
        if results is not None:
            self._cache.store(digest, self._program, results, seconds)


class ResultCache(RunStrategy):
    """Run strategy that caches results of long runs, and reuses them for equal runs of all sessions of an executor."""

    name = "result_cache"
    caches_results = True

    def __init__(self, settings: Settings) -> None:
        self._seconds, self._cache = settings.seconds, Cache(int(settings.gib * 2**30))

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer if the template has ops whose results may be cached, otherwise None."""
        return CachingOffer(self._cache, template.cacheable, self._seconds) if template.cacheable else None

    def figures(self) -> Mapping[str, float]:
        """Return the counters, and the number and the bytes of cached results, by metric name."""
        counters = {f"result_cache_{name}": count for name, count in attrs.asdict(self._cache.counters).items()}
        sizes = self._cache.sizes()
        return {**counters, "result_cache_entries": len(sizes), "result_cache_bytes": sum(sizes)}
