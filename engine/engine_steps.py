"""One step of an engine, for all its requests: plan, launch, read, and what happens if that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property

from .child import Caught
from .collector import Paused, Seldom
from .config import EngineConfig
from .intake import Intake
from .metrics import EngineMetrics
from .output_processor import Family, OutputProcessor
from .parallel.joint_steps import JointSteps
from .parallel.remote_runner import RemoteRunner
from .plan import Plan
from .progress import Progress
from .replica import Replica
from .request import Request
from .routing import Routing
from .runner import Hidden, Runner
from .scheduler import Scheduler
from .stats import StatsLogger
from .step_log import StepLog
from .structured_output import StructuredOutput

POLL_SECONDS = 1e-4  # between looks at what several replicas compute


class EngineSteps:
    """What LLM does of it; LLM sets the fields."""

    config: EngineConfig
    replicas: list[Replica]
    routing: Routing
    processor: OutputProcessor
    structured: StructuredOutput
    stats: StatsLogger | None
    lock: threading.RLock
    max_unread: int  # a replica launches a step more only once its oldest is read
    touched: dict[str, Family]  # queued requests with news that step() has not returned yet

    @cached_property
    def intake(self) -> Intake:
        return Intake(self.processor, self.structured)

    @cached_property
    def joint(self) -> JointSteps | None:
        """The steps of replicas that step together."""
        return JointSteps(self.replicas, self.intake, self.max_unread) if self.config.num_joint > 1 else None

    @property
    def runner(self) -> Runner:
        """That of the first replica, like the scheduler, the metrics and the log below."""
        return self.replicas[0].own_runner

    @property
    def runners(self) -> list[Runner | RemoteRunner]:
        """Of all replicas, each once: replicas that step together have one."""
        return list(dict.fromkeys(r.runner for r in self.replicas))

    @property
    def scheduler(self) -> Scheduler:
        return self.replicas[0].scheduler

    @property
    def metrics(self) -> EngineMetrics | None:
        return self.replicas[0].metrics

    @property
    def step_log(self) -> StepLog | None:
        return self.replicas[0].step_log

    def _run(self, families: Sequence[Family], use_tqdm: bool, pause: Paused | None = None) -> None:
        """Runs steps until these have ended; ends the pause once the first has been launched."""
        left = list(families)
        with Progress(len(families), use_tqdm) as bar, Seldom():
            while left:
                # others may run the steps in which they end
                if left[-1].finished:
                    left.pop()
                    continue
                num_tokens, touched = self._advance()
                if pause:
                    pause.end()
                ended = sum(f.finished for f in touched if not f.queued) if use_tqdm else 0
                bar.advance(num_tokens, ended)

    def _advance(self) -> tuple[int, list[Family]]:
        """Runs one step, for all. Returns how many tokens it brought, and the families that got them.

        If it fails in a replica, that one's requests end, and the error is raised once the others have done theirs.
        """
        with self.lock:
            failures: list[BaseException] = []
            try:
                touched = self._run_step(failures)
                families = self.processor.families_of(touched)
                self.touched |= {family.id: family for family in families if family.queued}
            except BaseException:
                self._abandon(self.replicas)
                raise
            if failures:
                raise failures[0]
            return sum(r.samples and r.error is None for r in touched), families

    def _run_step(self, failures: list[BaseException]) -> list[Request]:
        """Has every replica plan and launch a step before any of them is read.

        Returns the requests that got a token, and those that ended because of their grammar.
        """
        for request in self.structured.take_ready():
            self.replicas[request.replica].scheduler.compiled(request)
        touched = self.joint.run() if self.joint else self._run_each(failures)
        if self.stats:
            self.stats.after_step()
        return touched + self._end_failed()

    def _run_each(self, failures: list[BaseException]) -> list[Request]:
        """The step of replicas that have nothing to do with each other.

        Of each the oldest step is read if `max_unread` are in flight, or nothing could be planned; but not while it is
        still computed and another's is there.
        """
        stuck: set[Replica] = set()  # nothing could be planned
        late: dict[Replica, tuple[Plan, Hidden]] = {}  # the head's mask must wait for tokens that are not read yet
        touched: list[Request] = []

        def launch(replica: Replica) -> None:
            plan, runner = replica.schedule(), replica.runner
            if plan is None:
                stuck.add(replica)
            elif self.structured.is_late(plan):
                late[replica] = plan, runner.launch_forward(plan)
            else:
                replica.unread.append(runner.launch(plan, self.intake.mask(replica, plan)))

        def read(replica: Replica) -> None:
            own = []
            for _ in range(len(replica.unread) if replica in late else 1):
                own += self.intake.read_oldest(replica)
            if replica in late:
                plan, hidden = late[replica]
                replica.unread.append(replica.runner.launch_head(plan, hidden, self.intake.mask(replica, plan)))
            if replica.metrics:
                replica.metrics.read(own)
            touched.extend(own)

        # the first may compute in this very thread: it comes last
        for replica in reversed(self.replicas):
            if len(replica.unread) < self.max_unread:
                self._attempt(launch, replica, failures)
        full = [r for r in self.replicas if r.unread and (r in stuck or len(r.unread) >= self.max_unread)]
        if late:
            full = [r for r in self.replicas if r in late or r in full]
        elif not any(r.unread for r in self.replicas):
            self.structured.wait()
        for replica in full if late else _first_back(full):
            self._attempt(read, replica, failures)
        if failures:
            # what fails elsewhere fails for who asked for it, not in a later call of another
            late.clear()
            for replica in self.replicas:
                while replica.unread:
                    self._attempt(read, replica, failures)
        return touched

    def _attempt(self, work: Callable[[Replica], None], replica: Replica, failures: list[BaseException]) -> None:
        """work(replica). If it fails, nobody can go on there from what it has left, here or on the device."""
        with Caught() as caught:
            try:
                work(replica)
            except BaseException:
                self._abandon([replica])
                raise
        if caught.error is not None:
            failures.append(caught.error)

    def _end_failed(self) -> list[Request]:
        """Ends requests that cannot go on in their grammar, and returns them."""
        failed = self.structured.take_failed()
        for request in failed:
            replica = self.replicas[request.replica]
            if request.finish_reason is None:
                replica.scheduler.finish(request, "error")
            request.finish_reason, request.stop_reason = "error", None
            self.processor.finish(request)
            if replica.metrics:
                replica.metrics.ended([request])
        return failed

    def _abandon(self, replicas: Sequence[Replica]) -> None:
        """Ends all requests of these with "error"; each starts from an empty cache."""
        families = list(self.processor.families.values())
        for replica in replicas:
            replica.unread.clear()
            replica.scheduler.abandon()
            self.routing.forget(replica.index)
            own = [family for family in families if family.members[0].request.replica == replica.index]
            self.touched |= {family.id: family for family in own if family.queued}
            if replica.metrics:
                replica.metrics.ended(m.request for family in own for m in family.members)
        self.structured.forget_ended()
        if self.joint:
            self.joint.in_flight.clear()
        for runner in dict.fromkeys(replica.runner for replica in replicas):
            runner.reset()


def _first_back(replicas: list[Replica]) -> list[Replica]:
    """Those whose oldest step is there, as soon as there is one."""
    while len(replicas) > 1:
        if back := [r for r in replicas if r.unread[0].is_ready()]:
            return back
        time.sleep(POLL_SECONDS)
    return replicas
