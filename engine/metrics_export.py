"""The metrics on their way out: values for Python, and what Prometheus reads. Both are read off the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING

from .metrics import Buckets, EngineMetrics
from .metrics_table import ALIASES, PREFIX, metrics_of
from .metrics_table import Metric as Definition

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from .config import EngineConfig
    from .memory_plan import MemoryPlan


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
    """Reads an engine's metrics. Takes no lock: a scrape never waits for a step, and may see half of one."""

    def __init__(self, metrics: EngineMetrics, config: EngineConfig, plan: MemoryPlan):
        self.metrics = metrics
        model = config.model
        self.labels = {"model_name": str(model if isinstance(model, str | PurePath) else model.name)}
        names = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes")
        self.cache_info = {name: str(getattr(config, name)) for name in names} | {
            "num_gpu_blocks": ",".join(map(str, plan.num_blocks)),
            "cache_dtype": plan.dtype,
        }

    def values(self) -> list[Metric]:
        """All metrics under vLLM's names; of one with a label, a Metric for each value of it."""
        found: list[Metric] = [Gauge(f"{PREFIX}cache_config_info", self.labels | self.cache_info, 1.0)]
        for m in metrics_of(self.metrics):
            value, name = m.read(self.metrics), m.full_name
            if isinstance(value, Buckets):
                counts = dict(_cumulative(value))
                found.append(Histogram(name, dict(self.labels), counts["+Inf"], value.total, counts))
            elif m.label is None:
                assert not isinstance(value, Mapping)
                found.append(_number(m.kind, name, dict(self.labels), value))
            else:
                assert isinstance(value, Mapping)
                found += [_number(m.kind, name, self.labels | {m.label: key}, v) for key, v in value.items()]
        return found

    def collect(self) -> Iterator[Family]:
        """The same for prometheus_client, and the names of the tuning guides."""
        from prometheus_client.core import GaugeMetricFamily

        info = self.labels | self.cache_info
        family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "how the cache is set up", labels=list(info))
        family.add_metric(list(info.values()), 1.0)
        yield family
        by_name = {m.name: m for m in metrics_of(self.metrics)}
        for m in by_name.values():
            yield self._family(m.full_name, m)
        for alias, name in ALIASES.items():
            yield self._family(alias, by_name[name])

    def _family(self, name: str, m: Definition) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        value, labels, own = m.read(self.metrics), list(self.labels), list(self.labels.values())
        if isinstance(value, Buckets):
            histogram = HistogramMetricFamily(name, m.doc, labels=labels)
            histogram.add_metric(own, list(_cumulative(value)), value.total)
            return histogram
        kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[m.kind]
        family = kind(name, m.doc, labels=labels if m.label is None else [*labels, m.label])
        for key, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric(own if key is None else [*own, key], number)
        return family

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


def _number(kind: str, name: str, labels: dict[str, str], value: float) -> Metric:
    return Counter(name, labels, int(value)) if kind == "counter" else Gauge(name, labels, float(value))


def _cumulative(b: Buckets) -> Iterator[tuple[str, int]]:
    return zip([*map(repr, b.bounds), "+Inf"], accumulate(b.counts))
