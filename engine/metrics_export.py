"""The metrics on their way out: values for Python, and what Prometheus reads. Both are read off the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .metrics import Buckets, EngineMetrics
from .metrics_table import ALIASES, EXPERT_METRICS, METRICS, POOL_METRICS, PREFIX
from .metrics_table import Metric as Definition
from .tokenizer_pool import TokenizerPool

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from .config import EngineConfig
    from .memory_plan import MemoryPlan


# of a table: what gives the object that its metrics are read from, for each value of a label "engine"; None: no label
Source = tuple[Sequence[Definition], Mapping[str | None, Callable[[], Any]]]
Sample = tuple[dict[str, str], Any]  # labels and value
CACHE_INFO = f"{PREFIX}cache_config_info"


@dataclass(frozen=True)
class Metric:
    """One value of a metric, as it was when it was read. Picklable."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """It goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """`buckets`: how many values were at most each bound, "+Inf" the last."""

    count: int
    sum: float
    buckets: dict[str, int] = field(repr=False)

    def quantile(self, q: float) -> float | None:
        """The value that a part q of all are at most, interpolated in its bucket as Prometheus does; None: no values.

        Beyond the last bound, that bound.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile {q!r} is not from 0 to 1")
        low, below, rank = 0.0, 0, q * self.count
        for bound, upto in self.buckets.items():
            high = float(bound)
            if upto and upto >= rank:
                return low if high == float("inf") else low + (high - low) * (rank - below) / max(upto - below, 1)
            low, below = high, upto
        return None


class Exporter:
    """Reads metrics where they are kept. Takes no lock: a scrape never waits for a step, and may see half of one.

    `info`: labels of cache_config_info, if there is a cache.
    """

    def __init__(self, model: Any, sources: Sequence[Source], info: dict[str, str] | None = None):
        self.labels = {"model_name": str(model if isinstance(model, str | PurePath) else model.name)}
        self.sources, self.info = list(sources), info

    def values(self) -> list[Metric]:
        """All metrics under vLLM's names; of one with a label, a Metric for each value of it."""
        found: list[Metric] = []
        if self.info is not None:
            found.append(Gauge(CACHE_INFO, self.labels | self.info, 1.0))
        for m, samples in self._read():
            name = m.full_name
            for labels, value in samples:
                if isinstance(value, Buckets):
                    counts = dict(_cumulative(value))
                    found.append(Histogram(name, labels, counts["+Inf"], value.total, counts))
                elif m.label is None:
                    found.append(_number(m.kind, name, labels, value))
                else:
                    found += [_number(m.kind, name, labels | {m.label: key}, v) for key, v in value.items()]
        return found

    def collect(self) -> Iterator[Family]:
        """The same for prometheus_client, and the names of the tuning guides."""
        from prometheus_client.core import GaugeMetricFamily

        if self.info is not None:
            info = self.labels | self.info
            family = GaugeMetricFamily(CACHE_INFO, "how the cache is set up", labels=list(info))
            family.add_metric(list(info.values()), 1.0)
            yield family
        for m, samples in self._read():
            for name in (m.full_name, *(alias for alias, of in ALIASES.items() if of == m.name)):
                yield _family(name, m, samples)

    def _read(self) -> Iterator[tuple[Definition, list[Sample]]]:
        for table, sources in self.sources:
            now = [(self.labels | ({"engine": i} if i else {}), source()) for i, source in sources.items()]
            for m in table:
                yield m, [(labels, m.read(x)) for labels, x in now]

    def describe(self) -> Iterator[Family]:
        """Lets a registry refuse a second engine, whose samples could not be told from this one's."""
        return self.collect()

    @cached_property
    def registry(self) -> CollectorRegistry:
        """A registry of this engine alone."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def text(self) -> str:
        """The exposition that Prometheus scrapes."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()


def engine_exporter(
    metrics: Sequence[EngineMetrics], pool: TokenizerPool, config: EngineConfig, plan: MemoryPlan
) -> Exporter:
    """Of an engine with these replicas, and its tokenizer pool, if it has one."""
    names = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes")
    info = {name: str(getattr(config, name)) for name in names} | {
        "num_gpu_blocks": ",".join(map(str, plan.num_blocks)),
        "cache_dtype": plan.dtype,
    }
    each: dict[str | None, Callable[[], Any]] = {str(i): lambda m=m: m for i, m in enumerate(metrics)}
    sources: list[Source] = [(METRICS, each), *_pool_sources(pool)]
    loads = {str(i): m.expert_load for i, m in enumerate(metrics) if m.expert_load}
    if loads:
        sources.append((EXPERT_METRICS, {i: lambda load=load: load for i, load in loads.items()}))
    return Exporter(config.model, sources, info)


def pool_exporter(pool: TokenizerPool, model: Any) -> Exporter:
    """Of a tokenizer pool whose engine is in another process."""
    return Exporter(model, _pool_sources(pool))


def _pool_sources(pool: TokenizerPool) -> list[Source]:
    # without processes nothing ever waits
    return [(POOL_METRICS, {None: lambda: pool.stats})] if pool.size else []


def _family(name: str, m: Definition, samples: Sequence[Sample]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = list(samples[0][0])
    if isinstance(samples[0][1], Buckets):
        histogram = HistogramMetricFamily(name, m.doc, labels=names)
        for labels, value in samples:
            histogram.add_metric(list(labels.values()), list(_cumulative(value)), value.total)
        return histogram
    kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[m.kind]
    family = kind(name, m.doc, labels=names if m.label is None else [*names, m.label])
    for labels, value in samples:
        for key, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric([*labels.values(), *([] if key is None else [key])], number)
    return family


def _number(kind: str, name: str, labels: dict[str, str], value: float) -> Metric:
    return Counter(name, labels, int(value)) if kind == "counter" else Gauge(name, labels, float(value))


def _cumulative(b: Buckets) -> Iterator[tuple[str, int]]:
    return zip([*map(repr, b.bounds), "+Inf"], accumulate(b.counts))
