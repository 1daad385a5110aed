"""The prefill loop: owns the jobs, the KV pool and the one engine thread.

Each turn takes a snapshot, asks ``scheduler.plan_step`` what to compute, runs the engine in its
thread, and queues every layer for its decode worker the moment the layer's K and V are in the pool,
while the next layer is being computed. Deadlines are swept by a timer that does not depend on
traffic.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from kvengine.engine import Engine
from kvengine.span import Span
from kvproto.blocks import BlockPool
from kvproto.errors import ErrorCode
from kvproto.messages import Prefill, Renew
from kvproto.tcp_link import Link
from prefill_svc.admission import PromptLimits, check_prompt
from prefill_svc.config import PrefillConfig
from prefill_svc.errors import PromptRefused
from prefill_svc.job import Job, JobEvent, JobState
from prefill_svc.metrics import PrefillMetrics
from prefill_svc.push import Beat, Begin, Finish, GiveUp, LayerWrite, Pusher
from prefill_svc.scheduler import Chunk, PromptView, plan_step
from prefill_svc.transfer import Transfer

_SWEEP_INTERVAL_S = 0.1


class Prefiller:
    """Jobs in, KV out. Everything but the engine's forward runs in the event loop."""

    def __init__(self, engine: Engine, config: PrefillConfig, metrics: PrefillMetrics) -> None:
        self._engine = engine
        self._geometry = engine.facts.geometry
        self._config = config
        self._metrics = metrics
        self._limits = PromptLimits(
            min(engine.facts.max_model_len, engine.num_blocks * config.block_size),
            engine.facts.vocab_size,
        )
        self._blocks = BlockPool(engine.num_blocks)
        self._jobs: dict[tuple[Link, str, int], Job] = {}  # in order of arrival
        self._pushers: dict[Link, Pusher] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._log = structlog.get_logger("prefill")
        self.is_draining = False
        metrics.waiting.set_function(partial(self._num_jobs, _is_unbegun))
        metrics.running.set_function(partial(self._num_jobs, _is_half_computed))
        metrics.pushing.set_function(partial(self._num_jobs, _is_leaving))
        metrics.free_blocks.set_function(lambda: self._blocks.num_free_blocks)

    # ---- what the server calls

    def add_pusher(self, pusher: Pusher) -> None:
        """A decode worker has connected."""
        self._pushers[pusher.peer] = pusher

    def remove_pusher(self, pusher: Pusher) -> None:
        """The connection has ended: nobody is left to write to, all its prompts are dropped."""
        for job in [job for job in self._jobs.values() if job.peer is pusher.peer]:
            self._end(job, JobEvent.GIVEN_UP, "connection_lost")
        pusher.discard()
        del self._pushers[pusher.peer]

    def submit(self, request: Prefill, peer: Link, transfer: Transfer) -> None:
        """Take on a prompt, whose KV leaves by ``transfer``.

        Raises PromptRefused, checked in this order: draining, table full, too many of this peer,
        repeated id, and what ``check_prompt`` refuses.
        """
        key = (peer, request.sequence_id, request.generation)
        if self.is_draining:
            raise PromptRefused(ErrorCode.SHUTTING_DOWN, "this prefill worker is draining")
        if len(self._jobs) >= self._config.max_prompts:
            raise PromptRefused(
                ErrorCode.OVERLOADED,
                f"this prefill worker already has {len(self._jobs)} prompts (max_prompts)",
            )
        num_of_peer = sum(_instance(job.peer) == _instance(peer) for job in self._jobs.values())
        if num_of_peer >= self._config.max_prompts_per_peer:
            raise PromptRefused(
                ErrorCode.OVERLOADED,
                f"this prefill worker already has {num_of_peer} prompts of "
                f"{peer.remote.instance_id} (max_prompts_per_peer)",
            )
        if key in self._jobs:
            raise PromptRefused(
                ErrorCode.MALFORMED, "this sequence and generation are already in work"
            )
        check_prompt(request, self._limits)
        now = time.monotonic()
        self._jobs[key] = Job(
            request=request,
            peer=peer,
            arrived_at=now,
            expires_at=now + request.timeout_s,
            transfer=transfer,
            on_release=self._release,
        )
        self._metrics.prompts.inc()
        self._metrics.prompt_tokens.inc(len(request.tokens))
        self._idle.clear()
        self._wake.set()

    def cancel(self, peer: Link, sequence_id: str, generation: int) -> bool:
        """The decode worker aborts; False if the prompt is not known (any more)."""
        job = self._jobs.get((peer, sequence_id, generation))
        if job is None or job.is_over:
            return False
        job.is_cancelled_by_peer = True
        self._give_up(job, ErrorCode.CANCELLED, "cancelled by the decode worker")
        return True

    def acknowledge(self, peer: Link, sequence_id: str, generation: int) -> None:
        """COMMIT_ACK: the decode worker has verified everything. Unknown ids are ignored."""
        job = self._jobs.get((peer, sequence_id, generation))
        if job is not None and job.state is JobState.COMMITTED:
            self._metrics.handoff_s.observe(time.monotonic() - job.first_write_at)
            self._metrics.handoff_nbytes.observe(job.transfer.nbytes)
            self._end(job, JobEvent.ACKNOWLEDGED, "done")

    def load(self) -> Renew:
        """What the router is told about this worker."""
        jobs = list(self._jobs.values())
        waiting = [job for job in jobs if job.state is JobState.WAITING]
        return Renew(
            instance_id=self._config.instance_id,
            num_running=len(jobs) - len(waiting),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(job.num_tokens - job.num_computed_tokens for job in jobs),
            num_free_blocks=self._blocks.num_free_blocks,
            draining=self.is_draining,
        )

    def stats(self) -> dict[str, object]:
        """For the health answer."""
        return {
            "num_prompts": len(self._jobs),
            "max_prompts": self._config.max_prompts,
            "blocks": self._blocks.stats(),
            "decode_workers": {p.peer.name: p.stats() for p in self._pushers.values()},
        }

    def _num_jobs(self, is_counted: Callable[[Job], bool]) -> int:
        return sum(is_counted(job) for job in self._jobs.values())

    async def wait_idle(self) -> None:
        """Return when no prompt is left."""
        await self._idle.wait()

    # ---- the loop

    async def run(self) -> None:
        """Compute until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep_deadlines(), name="prefill-deadlines")
                while True:
                    self._wake.clear()
                    plan = plan_step(
                        self._views(),
                        max_step_tokens=self._config.max_step_tokens,
                        max_step_prompts=self._config.max_step_prompts,
                        num_free_blocks=self._blocks.num_free_blocks,
                    )
                    by_id = {job.unique_id: job for job in self._jobs.values()}
                    for unique_id in plan.admit:
                        self._admit(by_id[unique_id])
                    if plan.chunks:
                        await self._step([(by_id[c.sequence_id], c) for c in plan.chunks])
                    else:
                        await self._wake.wait()
        finally:
            self._thread.shutdown(wait=True)

    def _views(self) -> list[PromptView]:
        return [
            PromptView(
                job.unique_id,
                job.num_tokens,
                job.num_computed_tokens,
                0 if job.block_table else self._num_blocks_for(job.num_tokens),
                self._pushers[job.peer].is_stalled,
            )
            for job in self._jobs.values()
            if job.state in (JobState.WAITING, JobState.COMPUTING)
        ]

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _admit(self, job: Job) -> None:
        job.block_table = self._blocks.allocate(job.unique_id, self._num_blocks_for(job.num_tokens))
        job.advance(JobEvent.ADMITTED)

    async def _step(self, work: list[tuple[Job, Chunk]]) -> None:
        """One forward over all chunks; each finished layer is queued at once."""
        now = time.monotonic()
        for job, _ in work:
            job.hold()
            if not job.started_at:
                job.started_at = now
                self._metrics.queue_s.observe(now - job.arrived_at)
                self._pushers[job.peer].put_nowait(Begin(job))
        loop = asyncio.get_running_loop()

        def on_layer(layer: int) -> None:
            loop.call_soon_threadsafe(self._push_layer, work, layer)

        spans = [
            Span(
                job.request.tokens[chunk.first_token : chunk.first_token + chunk.num_tokens],
                chunk.first_token,
                job.block_table,
                needs_logits=False,
            )
            for job, chunk in work
        ]
        try:
            await loop.run_in_executor(self._thread, self._forward, spans, on_layer)
        except Exception as exc:
            self._log.exception("step failed", num_prompts=len(work))
            for job, _ in work:
                self._give_up(job, ErrorCode.INTERNAL, f"prefill step failed: {exc}")
            return
        finally:
            for job, _ in work:
                job.drop()
        self._metrics.step_s.observe(time.monotonic() - now)
        self._metrics.step_tokens.inc(sum(chunk.num_tokens for _, chunk in work))
        for job, chunk in work:
            self._after_step(job, chunk)

    def _forward(self, spans: list[Span], on_layer: Callable[[int], None]) -> None:
        self._engine.forward(spans, on_layer)

    def _push_layer(self, work: list[tuple[Job, Chunk]], layer: int) -> None:
        for job, chunk in work:
            if job.is_over:
                continue
            first_needed = self._geometry.layers[layer].first_needed_token(job.num_tokens)
            first_token = max(chunk.first_token, first_needed)
            num_tokens = chunk.first_token + chunk.num_tokens - first_token
            if num_tokens <= 0:
                continue  # behind the window of this layer: nobody will look at these tokens
            buffers = self._engine.kv_pool.buffers(layer, job.block_table, first_token, num_tokens)
            self._pushers[job.peer].put_nowait(
                LayerWrite(job, layer, first_token, num_tokens, tuple(buffers))
            )

    def _after_step(self, job: Job, chunk: Chunk) -> None:
        if job.is_over:
            return
        job.num_computed_tokens += chunk.num_tokens
        if job.num_computed_tokens == job.num_tokens:
            job.computed_at = time.monotonic()
            job.advance(JobEvent.COMPUTED)
            self._metrics.prefill_s.observe(job.computed_at - job.started_at)
            self._pushers[job.peer].put_nowait(Finish(job))

    # ---- endings

    async def _sweep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = time.monotonic()
            for job in list(self._jobs.values()):
                if not job.is_over and now > job.expires_at:
                    self._give_up(
                        job,
                        ErrorCode.DEADLINE_EXCEEDED,
                        f"prefill did not finish in time (state {job.state.name.lower()})",
                    )
                elif job.is_beat_due(now):
                    job.beat_at, job.has_beat_queued = now, True
                    self._pushers[job.peer].put_nowait(Beat(job))

    def fail_transfer(self, job: Job, code: ErrorCode, reason: str) -> None:
        """The KV cannot leave: not in the form that was asked for, or its carrier broke."""
        self._give_up(job, code, reason)

    def _give_up(self, job: Job, code: ErrorCode, reason: str) -> None:
        """End a prompt early and have the decode worker told, in order, by the pusher."""
        if job.is_over:
            return
        job.give_up_code = code
        job.give_up_reason = reason
        self._pushers[job.peer].put_nowait(GiveUp(job))
        self._end(job, JobEvent.GIVEN_UP, code.name.lower())

    def _end(self, job: Job, event: JobEvent, outcome: str) -> None:
        if job.is_over:
            return
        job.advance(event)
        job.transfer.end()
        self._metrics.outcomes.labels(outcome=outcome).inc()
        job.release_if_idle()

    def _release(self, job: Job) -> None:
        """Nobody reads the blocks any more."""
        if job.block_table:
            self._blocks.free(job.block_table, job.unique_id)
        del self._jobs[job.peer, *job.key]
        if not self._jobs:
            self._idle.set()
        self._wake.set()

    def wake(self) -> None:
        """A stalled connection has caught up."""
        self._wake.set()


def _is_unbegun(job: Job) -> bool:
    return not job.is_over and not job.started_at


def _is_half_computed(job: Job) -> bool:
    return job.state is JobState.COMPUTING and job.started_at > 0


def _is_leaving(job: Job) -> bool:
    return job.state in (JobState.PUSHING, JobState.COMMITTED)


def _instance(peer: Link) -> tuple[str, str]:
    """Whose connection it is: one instance may have several."""
    return (peer.remote.role, peer.remote.instance_id)
