"""The decode loop: owns the sequences, the KV pool and the one engine thread.

Each turn ends what is over, takes a snapshot, asks ``scheduler.plan_step`` who runs, who is let in
and who gives way, and makes one token for each running sequence. States change in this loop and in
the fetch tasks only; everybody else leaves a wish (``Sequence.finish``) that the loop acts on
between two steps.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import structlog

from decode_svc.admission import SequenceLimits, check_sequence
from decode_svc.config import DecodeConfig
from decode_svc.errors import FetchCancelled, FetchFailed, SequenceRefused
from decode_svc.handoff import Fetcher, Handoff
from decode_svc.metrics import DecodeMetrics
from decode_svc.outbox import Outbox
from decode_svc.scheduler import SequenceView, num_blocks_for, plan_step
from decode_svc.sequence import End, Sequence, SequenceEvent, SequenceState
from kvengine.engine import Engine
from kvengine.sampler import SamplingParams, sample
from kvengine.span import Span
from kvproto.blocks import BlockPool
from kvproto.errors import ErrorCode
from kvproto.messages import Accepted, Finished, Generate, Renew, Tokens

_SWEEP_INTERVAL_S = 0.1


class Decoder:
    """Sequences in, tokens out. Everything but the engine's forward runs in the event loop."""

    def __init__(
        self,
        engine: Engine,
        blocks: BlockPool,
        fetcher: Fetcher,
        config: DecodeConfig,
        metrics: DecodeMetrics,
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._fetcher = fetcher
        self._config = config
        self._metrics = metrics
        self._limits = SequenceLimits(
            min(engine.facts.max_model_len, engine.num_blocks * config.block_size),
            engine.facts.vocab_size,
        )
        self._sequences: dict[str, Sequence] = {}  # in order of arrival
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._log = structlog.get_logger("decode")
        self.is_draining = False

    # ---- what the server calls

    def submit(self, request: Generate, outbox: Outbox) -> None:
        """Take on a sequence.

        Raises SequenceRefused, checked in this order: draining, table full, too many of this
        peer, repeated id, and what ``check_sequence`` refuses.
        """
        if self.is_draining:
            raise SequenceRefused(ErrorCode.SHUTTING_DOWN, "this decode worker is draining")
        if len(self._sequences) >= self._config.max_sequences:
            raise SequenceRefused(
                ErrorCode.OVERLOADED,
                f"this decode worker already has {len(self._sequences)} sequences (max_sequences)",
            )
        num_of_peer = sum(
            _instance(sequence.outbox) == _instance(outbox) for sequence in self._sequences.values()
        )
        if num_of_peer >= self._config.max_sequences_per_peer:
            raise SequenceRefused(
                ErrorCode.OVERLOADED,
                f"this decode worker already has {num_of_peer} sequences of "
                f"{outbox.peer.remote.instance_id} (max_sequences_per_peer)",
            )
        if request.sequence_id in self._sequences:
            raise SequenceRefused(ErrorCode.MALFORMED, "sequence_id: already in work")
        params = check_sequence(request, self._limits)
        now = time.monotonic()
        eos = () if request.ignore_eos else self._engine.facts.eos_token_ids
        self._sequences[request.sequence_id] = Sequence(
            request=request,
            outbox=outbox,
            arrived_at=now,
            expires_at=now + request.timeout_s,
            params=params,
            stop_token_ids=frozenset(request.stop_token_ids).union(eos),
            tokens=list(request.tokens),
        )
        self._metrics.sequences.inc()
        outbox.put(Accepted(request.sequence_id))
        self._idle.clear()
        self._wake.set()

    def cancel(self, sequence_id: str, outbox: Outbox) -> bool:
        """The router does not want its sequence any more; False if it has none of that name."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.outbox is not outbox:
            return False
        sequence.finish(End("abort", ErrorCode.CANCELLED, "cancelled by the router"))
        self._wake.set()
        return True

    def drop_owner(self, outbox: Outbox) -> None:
        """The router's connection has ended: its sequences have nobody to speak to."""
        for sequence in self._sequences.values():
            if sequence.outbox is outbox:
                sequence.finish(End("abort", ErrorCode.CONNECTION_LOST, "the router is gone"))
        self._wake.set()

    def load(self) -> Renew:
        """What the router is told about this worker."""
        sequences = self._sequences.values()
        running = [s for s in sequences if s.state is SequenceState.RUNNABLE]
        waiting = [s for s in sequences if s.state is not SequenceState.RUNNABLE]
        return Renew(
            instance_id=self._config.instance_id,
            num_running=len(running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(len(s.tokens) for s in waiting),
            num_free_blocks=self._blocks.num_free_blocks,
            draining=self.is_draining,
        )

    def stats(self) -> dict[str, object]:
        """For the health answer."""
        return {
            "num_sequences": len(self._sequences),
            "max_sequences": self._config.max_sequences,
            "max_num_seqs": self._config.max_num_seqs,
            "blocks": self._blocks.stats(),
        }

    async def wait_idle(self) -> None:
        """Return when no sequence is left."""
        await self._idle.wait()

    # ---- the loop

    async def run(self) -> None:
        """Decode until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep_deadlines(), name="decode-deadlines")
                while True:
                    await self._turn(tasks)
        finally:
            self._thread.shutdown(wait=True)

    async def _turn(self, tasks: asyncio.TaskGroup) -> None:
        self._wake.clear()
        self._reap()
        plan = plan_step(
            [_view(sequence) for sequence in self._sequences.values()],
            block_size=self._config.block_size,
            num_free_blocks=self._blocks.num_free_blocks,
            max_num_seqs=self._config.max_num_seqs,
        )
        for sequence_id in plan.preempt:
            self._preempt(self._sequences[sequence_id])
        for sequence_id in plan.grow:
            self._grow(self._sequences[sequence_id])
        for sequence_id in plan.admit:
            self._admit(self._sequences[sequence_id], tasks)
        run = [self._sequences[sequence_id] for sequence_id in plan.run]
        self._observe(len(run))
        if run:
            await self._step(run)
        elif not plan.admit:
            await self._wake.wait()

    def _observe(self, num_running: int) -> None:
        self._metrics.running.set(num_running)
        self._metrics.waiting.set(len(self._sequences) - num_running)
        self._metrics.fetching.set(
            sum(s.state is SequenceState.FETCHING for s in self._sequences.values())
        )
        self._metrics.free_blocks.set(self._blocks.num_free_blocks)

    def _reap(self) -> None:
        """Say goodbye to every sequence that is over and that no prefill worker writes to."""
        for sequence in list(self._sequences.values()):
            if sequence.end is None or sequence.state is SequenceState.FETCHING:
                continue
            sequence.advance(SequenceEvent.ENDED)
            self._free(sequence)
            del self._sequences[sequence.sequence_id]
            end = sequence.end
            self._metrics.outcomes.labels(reason=end.reason).inc()
            sequence.outbox.put(
                Finished(
                    sequence.sequence_id,
                    reason=end.reason,
                    code=end.code,
                    message=end.message,
                    timings=sequence.final_timings(time.monotonic()),
                )
            )
        if not self._sequences:
            self._idle.set()

    def _free(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self._blocks.free(sequence.block_table, sequence.sequence_id)
        sequence.block_table = []
        sequence.num_cached_tokens = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; the KV is computed again from the tokens when there is room."""
        if sequence.state is SequenceState.FETCHING:
            if sequence.handoff is None or sequence.handoff.is_cancelled:
                return
            sequence.handoff.cancel()
        else:
            sequence.advance(SequenceEvent.PREEMPTED)
            self._free(sequence)
        sequence.num_preemptions += 1
        self._metrics.preemptions.inc()
        self._log.info("preempted", sequence_id=sequence.sequence_id)

    def _grow(self, sequence: Sequence) -> None:
        sequence.block_table += self._blocks.allocate(
            sequence.sequence_id, 1, after=sequence.block_table[-1]
        )

    def _admit(self, sequence: Sequence, tasks: asyncio.TaskGroup) -> None:
        now = time.monotonic()
        num_blocks = num_blocks_for(len(sequence.tokens), self._config.block_size)
        sequence.block_table = self._blocks.allocate(sequence.sequence_id, num_blocks)
        if not sequence.admitted_at:
            sequence.admitted_at = now
            self._metrics.queue_s.observe(now - sequence.arrived_at)
        if self._is_local(sequence):
            sequence.advance(SequenceEvent.ADMITTED_LOCAL)
            sequence.become_runnable(now)
            sequence.timings["carrier"] = "local"
            self._metrics.local_prefills.inc()
            self._wake.set()
            return
        sequence.advance(SequenceEvent.ADMITTED_REMOTE)
        # The last token is left off: decode computes it in its first step, which samples.
        sequence.handoff = Handoff(
            sequence_id=sequence.sequence_id,
            tokens=sequence.tokens[:-1],
            block_table=sequence.block_table,
            workers=sequence.request.prefill_workers,
            expires_at=sequence.expires_at,
            sender=sequence.outbox.peer if sequence.request.kv_from_sender else None,
        )
        tasks.create_task(
            self._fetch(sequence, sequence.handoff), name=f"fetch {sequence.sequence_id}"
        )

    def _is_local(self, sequence: Sequence) -> bool:
        """Short prompts are prefilled here; so is what was preempted and has nobody else.

        A client's own KV is used however short it is, but not once output follows it.
        """
        if sequence.request.kv_from_sender and not sequence.num_preemptions:
            return len(sequence.tokens) == 1
        is_short = len(sequence.tokens) <= self._config.local_prefill_tokens
        is_left_alone = sequence.num_preemptions > 0 and not sequence.request.prefill_workers
        return is_short or is_left_alone

    async def _fetch(self, sequence: Sequence, handoff: Handoff) -> None:
        try:
            fetched = await self._fetcher.fetch(handoff)
        except FetchCancelled:
            self._unfetch(sequence)
        except FetchFailed as exc:
            sequence.fail(exc.code, str(exc))
            self._unfetch(sequence)
        except Exception:
            self._log.exception("fetch failed", sequence_id=sequence.sequence_id)
            sequence.fail(ErrorCode.INTERNAL, "the decode worker failed to fetch the KV")
            self._unfetch(sequence)
        else:
            self._metrics.handoffs.inc()
            self._metrics.handoff_s.observe(fetched.total_s)
            self._metrics.handoff_exposed_s.observe(fetched.exposed_s)
            self._metrics.handoff_nbytes.observe(fetched.nbytes)
            self._metrics.wire_error.set(fetched.wire_error)
            sequence.note_fetched(fetched)
            sequence.num_cached_tokens = len(handoff.tokens)
            sequence.become_runnable(time.monotonic())
            sequence.advance(SequenceEvent.LANDED)
        finally:
            sequence.handoff = None
            self._wake.set()

    def _unfetch(self, sequence: Sequence) -> None:
        sequence.advance(SequenceEvent.FETCH_ENDED)
        self._free(sequence)

    async def _step(self, run: list[Sequence]) -> None:
        """Make one token for each sequence of ``run``."""
        began_at = time.monotonic()
        spans = [
            Span(
                sequence.tokens[sequence.num_cached_tokens :],
                sequence.num_cached_tokens,
                sequence.block_table,
                needs_logits=True,
            )
            for sequence in run
        ]
        params = [sequence.params for sequence in run]
        positions = [len(sequence.tokens) for sequence in run]
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(
                self._thread, self._forward, spans, params, positions
            )
        except Exception as exc:
            self._log.exception("step failed", num_sequences=len(run))
            for sequence in run:
                sequence.fail(ErrorCode.INTERNAL, f"decode step failed: {exc}")
            return
        ended_at = time.monotonic()
        self._metrics.step_s.observe(ended_at - began_at)
        self._metrics.batch_size.observe(len(run))
        self._metrics.output_tokens.inc(len(run))
        for sequence, token in zip(run, tokens, strict=True):
            self._append(sequence, token, ended_at)

    def _forward(
        self, spans: list[Span], params: list[SamplingParams], positions: list[int]
    ) -> list[int]:
        logits = self._engine.forward(spans)
        return sample(logits, params, positions)

    def _append(self, sequence: Sequence, token: int, now: float) -> None:
        if sequence.end is not None:
            return  # ended during the step
        sequence.num_cached_tokens = len(sequence.tokens)
        sequence.tokens.append(token)
        if not sequence.first_token_at:
            sequence.first_token_at = now
        sequence.outbox.put(
            Tokens(sequence.sequence_id, first_index=sequence.num_output_tokens - 1, tokens=[token])
        )
        if token in sequence.stop_token_ids:
            sequence.finish(End("stop"))
        elif (
            sequence.num_output_tokens >= sequence.request.max_output_tokens
            or len(sequence.tokens) >= self._limits.max_tokens
        ):
            sequence.finish(End("length"))

    async def _sweep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = time.monotonic()
            for sequence in self._sequences.values():
                if now > sequence.expires_at and sequence.end is None:
                    sequence.fail(
                        ErrorCode.DEADLINE_EXCEEDED,
                        f"not finished in time (state {sequence.state.name.lower()})",
                    )
                    self._wake.set()


def _instance(outbox: Outbox) -> tuple[str, str]:
    """Whose connection it is: one instance may have several."""
    return (outbox.peer.remote.role, outbox.peer.remote.instance_id)


def _view(sequence: Sequence) -> SequenceView:
    return SequenceView(
        sequence.sequence_id,
        num_tokens=len(sequence.tokens),
        num_blocks=len(sequence.block_table),
        is_admitted=sequence.is_admitted,
        is_runnable=sequence.state is SequenceState.RUNNABLE,
    )
