"""The training loop. The order of its parts is a contract: what is saved, evaluated and logged belongs together."""

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.data.batches import BatchPlan, TextBatch, make_plans, prefetch
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.data.prepare import Corpus
from branchnorm_jax.decoding.translate import Translator, make_model
from branchnorm_jax.errors import BranchNormError, DivergedError, Preempted, StorageError, UserError
from branchnorm_jax.evaluation.bleu import corpus_bleu
from branchnorm_jax.model.initializers import get_base
from branchnorm_jax.model.losses import LossSums
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.stack import size_of
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.parallel.mesh import make_mesh, sharding, to_devices
from branchnorm_jax.training import logs, schedules
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.record import OF_THE_PROCESS, Memory, Recorder, note
from branchnorm_jax.training.state import Batch, TrainState, abstract_state, init_state, sha256, state_from
from branchnorm_jax.training.step import Metrics, make_eval_step, make_train_step
from branchnorm_jax.training.trained import corpus_of, parents_parameters
from branchnorm_jax.training.watch import ADVICE, check_finite
from branchnorm_jax.workdir import Workdir, write_atomically

ROLLBACKS = 5
"""So many in one run, and no more."""


def train(config: Config, workdir: Workdir) -> None:
    """Trains until `train.steps`, `train.epochs`, `train.patience` or a signal; resumes what `workdir` holds.

    Raises:
      UserError, DivergedError, StorageError, HostError, Preempted: as their names say, after `status.json` was written.
    """
    check_names(config)
    workdir.create()
    with workdir.locked():
        workdir.agree_on_config(config)
        corpus = corpus_of(config, workdir)
        workdir.agree_on_data(corpus.identity())
        run = Run(config, workdir, corpus)
        try:
            signal_number = run.loop()
        except BaseException as error:
            failure = error
            if isinstance(error, OSError):
                failure = StorageError(f"{workdir.path}: {error.strerror or error}; what was saved before is kept")
            status = failure.status if isinstance(failure, BranchNormError | Preempted) else "failed"
            # A disk that cannot take the results may not take the status either: the first error is the one to tell.
            with contextlib.suppress(OSError):
                run.write_status(status, str(failure) or type(failure).__name__)
            raise failure from error
    if signal_number:
        raise Preempted(f"stopped by signal {signal_number}; the run was complete by then, and is saved", signal_number)


def check_names(config: Config) -> None:
    """Raises `UserError` for what only the rooms know (method, init, optimizer, schedule), before any work."""
    recipe = get_recipe(config.model.method)
    get_base(config.model.init or recipe.init)
    if config.train.update_in_backward and recipe.stream.startswith("combination"):
        raise UserError(f"config: train.update_in_backward: the layers of {config.model.method} depend on all others")
    may_roll_back = "rollback" in (config.train.nonfinite, config.train.spike)
    if may_roll_back and config.train.rollback == "alpha" and recipe.branch.end is None:
        raise UserError(f"config: train.rollback=alpha: {config.model.method} has no alpha; take rollback=batches")
    make_optimizer(config.train)
    schedules.learning_rate(config.train, config.model.width)
    make_mesh(config.parallel, config.data.row_multiple // config.train.accumulation)


class Run:
    """One process's share of one training: everything between start-up and `status.json`."""

    def __init__(self, config: Config, workdir: Workdir, corpus: Corpus) -> None:
        """Builds plans, model and state: restored from the newest good checkpoint, else fresh."""
        self.config, self.workdir, self.corpus = config, workdir, corpus
        train = config.train
        self.mesh = make_mesh(config.parallel, config.data.row_multiple // train.accumulation)
        self.plan, self.valid_plans = make_plans(
            config.data, corpus.train, corpus.valid, train.batch_tokens, train.seed
        )
        self.epoch = self.plan.batches_per_epoch / config.data.tokenisations
        self.total = train.steps or math.ceil(train.epochs * self.epoch)
        self.model = make_model(config.model, corpus.tokenizer)
        self.optimizer = make_optimizer(train)
        self.abstract = abstract_state(self.model, self.optimizer, self.mesh, bool(train.ema_decay))
        self.translator = Translator(self.model, corpus.tokenizer, config.decode)
        self.eval_step = jax.jit(make_eval_step(self.model, config))
        self.compiled: dict[Shape, Any] = {}
        state_bytes = size_of(self.abstract)
        self.checkpoints = Checkpoints(workdir / "checkpoints", train, logs.say)
        if not self.checkpoints.steps():
            workdir.need_space(2 * state_bytes)
        self.alpha = jax.jit(schedules.alpha(config.model))
        self._restore(math.inf)
        if self.step > self.total:
            raise UserError(
                f"{workdir.path}: this run is at step {self.step}, past the {self.total} updates of train.epochs="
                f"{train.epochs:g}; ask for more, or choose another --workdir"
            )
        self.checkpoints.forget_after(self.step)
        self._describe(state_bytes)

    def _restore(self, until: float) -> None:
        """Goes to the newest good checkpoint of at most `until` updates, or to the start if there is none."""
        restored = self.checkpoints.restore_latest(self.abstract, until)
        if restored is None:
            train = self.config.train
            if train.finetune_from:
                params, alpha = parents_parameters(self.config, self.model)
                clock = schedules.clock_at(self.config.model, alpha)
                self.state = state_from(self.model, self.optimizer, self.mesh, params, clock, bool(train.ema_decay))
            else:
                first = Batch(*to_devices(self.mesh, self.plan.batch_at(0)))
                self.state = init_state(self.model, self.optimizer, self.mesh, train.seed, first, bool(train.ema_decay))
            self.memory = Memory()
        else:
            self.state, memory = restored
            self.memory = Memory(**memory)
        self.step = int(self.state.step)
        self.stop = ""
        """Why to stop before the last update, once there is a reason."""

    def loop(self) -> int:
        """Runs the updates that are left; returns the signal that came too late to stop them, or 0.

        Order, at each step: validate if due, on the state as it is; save if due or asked to stop; take the batch;
        dispatch the update; read the metrics of the update before (so the device never waits for the host); poll for
        signals.
        """
        with hosts.Preemption() as preemption:
            while True:
                try:
                    self._loop(preemption)
                    break
                except DivergedError as error:
                    policy = getattr(self.config.train, error.kind, "stop")
                    note(self.workdir, error.step, error.kind, str(error), policy=policy)
                    if policy != "rollback":
                        raise DivergedError(f"diverged: {error}; {ADVICE}", error.step, error.kind) from error
                    self._roll_back(error)
        self.checkpoints.close()
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("done")
        self.write_status("done", self.stop or f"reached {self.total} updates")
        return preemption.signal

    def _roll_back(self, error: DivergedError) -> None:
        """Goes back to a checkpoint of before the trouble, and changes what `train.rollback` says."""
        c, memory = self.config.train, self.memory
        if memory.rollbacks == ROLLBACKS:
            text = f"diverged: {error}; rolled back {ROLLBACKS} times already"
            raise DivergedError(text, error.step, error.kind) from error
        batches = c.rollback == "batches"
        if not batches and error.step <= memory.troubled:
            # The same alphas again would come to the same end.
            text = f"diverged: {error}; alpha stood still, and it came again"
            raise DivergedError(text, error.step, error.kind) from error
        first = max(0, error.step - c.rollback_updates + 1) if batches else error.step
        self.checkpoints.wait()
        del self.state  # Two may not fit.
        # Every checkpoint is of before the trouble; the oldest is better than none.
        self._restore(max(first, min(self.checkpoints.steps(), default=0)))
        self.checkpoints.forget_after(self.step)
        kept = {name: getattr(memory, name) for name in OF_THE_PROCESS}
        self.memory = dataclasses.replace(self.memory, **kept)
        self.memory.rollbacks += 1
        self.memory.troubled = error.step
        if batches:
            self.memory.left_out.append([first, error.step])
            change = f"leaving out the batches of updates {first} to {error.step}"
        else:
            stands = error.step - self.step + c.rollback_updates
            held = jax.device_put(jnp.int32(stands), sharding(self.mesh))
            self.state = dataclasses.replace(self.state, held=held)
            change = f"alpha stands for {stands} updates"
        text = f"rolled back to step {self.step}, {change}"
        logs.say(f"{error}\nstep {error.step}: {text}")
        note(self.workdir, error.step, "rollback", text, to=self.step)

    def _loop(self, preemption: hosts.Preemption) -> None:
        c = self.config.train
        start, signal_number = self.step, 0
        self.write_status("running", "a run that ends writes another status")
        if start < self.total and not self.compiled:
            self._compile()
        self.recorder = Recorder(c, self.workdir, self.memory, start, self.total)
        batches = prefetch(self.plan.batch_at, start, self.total, c.prefetch)
        pending: tuple[int, Metrics, TextBatch] | None = None

        def read() -> None:
            """Waits for the update in flight."""
            nonlocal pending
            if pending is not None:
                done, pending = pending, None
                self.recorder.update(*done)

        try:
            while True:
                at_end = self.step >= self.total or bool(self.stop)
                if _due(self.step, start, c.eval_every) or at_end:
                    read()
                    if self.memory.evaluated != self.step:
                        self.stop = self._validate()
                        at_end = at_end or bool(self.stop)
                best = c.keep_best and self.memory.evaluated == self.step and self.memory.since_best == 0
                if _due(self.step, start, c.checkpoint_every) or at_end or signal_number or best:
                    read()
                    self._save()
                if signal_number and not at_end:
                    self.checkpoints.wait()
                    raise Preempted(f"stopped by signal {signal_number}, saved at step {self.step}", signal_number)
                if at_end:
                    break
                batch = next(batches)
                if any(first <= self.step <= last for first, last in self.memory.left_out):
                    read()
                    self.state = self._leave_out(self.state)
                    self.recorder.left_out()
                else:
                    update = self.compiled[batch.shape]
                    self.state, metrics = update(self.state, Batch(*to_devices(self.mesh, batch)))
                    read()
                    pending = (self.step, metrics, batch)
                self.step += 1
                signal_number = preemption.requested(self.step)
        finally:
            batches.close()
            self.recorder.close()

    def write_status(self, status: str, reason: str) -> None:
        """Writes `status.json`: how the run ended, and what it cost."""
        if not hosts.is_first():
            return
        memory = self.memory
        digest = sha256(self.state) if status in ("done", "preempted") else None
        fields = {
            "status": status,
            "reason": reason,
            "step": self.step,
            "state_sha256": digest,
            "compile_seconds": memory.compile_seconds,
            "compiled_shapes": memory.compiled_shapes,
            "skipped_updates": memory.skipped,
            "spikes": memory.spikes,
            "rollbacks": memory.rollbacks,
            "left_out": memory.left_out,
            "vanishing": memory.vanishing,
            "batch_fill": self.plan.fill,
            "train_seconds": memory.train_seconds,
            "target_tokens_per_second": memory.target_tokens / memory.train_seconds if memory.train_seconds else 0.0,
            "peak_memory_bytes": logs.peak_memory_bytes(),
            **logs.environment(),
        }
        write_atomically(self.workdir / "status.json", json.dumps(fields, indent=2) + "\n")

    def _compile(self) -> None:
        """Compiles the update for every batch shape, before the first one."""
        begin = time.perf_counter()
        train_step = make_train_step(self.model, self.optimizer, self.config)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        update = jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, sharding(self.mesh)))
        split = sharding(self.mesh, "batch")
        for shape in self._shapes():
            source, target = ((shape.rows, length) for length in (shape.source, shape.target))
            tokens: Any = [jax.ShapeDtypeStruct(side, jnp.int32, sharding=split) for side in (source, target)]
            self.compiled[shape] = update.lower(self.abstract, Batch(*tokens)).compile()
        self.memory.compile_seconds, self.memory.compiled_shapes = time.perf_counter() - begin, len(self.compiled)
        logs.say(f"compiled {len(self.compiled)} batch shapes in {self.memory.compile_seconds:.1f} s")

    def _leave_out(self, state: TrainState) -> TrainState:
        """An update that changes nothing: time goes on."""
        clock, held = schedules.advance(state.clock, state.held)
        changed = {"step": state.step + 1, "clock": clock, "held": held}
        return dataclasses.replace(state, **jax.device_put(changed, sharding(self.mesh)))

    def _shapes(self) -> Iterator[Shape]:
        """The shapes that some training sentence needs."""
        return (shape for shape, rows in zip(self.plan.shapes, self.plan.rows, strict=True) if rows)

    def _validate(self) -> str:
        """Validates the current state and remembers the result; returns why to stop, or ""."""
        c = self.config.train
        plans = zip(self.corpus.validated, self.valid_plans, strict=True)
        each = {direction.pair: self._losses(plan) for direction, plan in plans}
        line: dict[str, Any] = {"step": self.step, **per_token(list(each.values()))}
        check_finite(self.step, "validation loss", line["loss"])
        pairs = {pair: per_token([sums]) for pair, sums in each.items()}
        if c.eval_bleu_sentences:
            for direction in self.corpus.validated:
                pairs[direction.pair]["bleu"] = self._bleu(direction, c.eval_bleu_sentences)
            line["bleu"] = statistics.mean(found["bleu"] for found in pairs.values())
        if self.config.data.pairs:
            line["pairs"] = pairs
        memory = self.memory
        memory.evaluated = self.step
        memory.score = line["bleu"] if c.best_metric == "bleu" else -line["loss"]
        # Of equal validations the latest is the best: it has seen more, and its checkpoint is the one that is kept.
        if memory.best_score is None or memory.score >= memory.best_score:
            memory.best_score, memory.since_best = memory.score, 0
        else:
            memory.since_best += 1
        if c.schedule == "val_decay":
            memory.recent_scores = [*memory.recent_scores, memory.score][-1 - c.decay_patience :]
            if schedules.val_decay(memory.recent_scores, c.decay_patience):
                scale = float(self.state.rate_scale) * c.decay_factor
                rate_scale = jax.device_put(jnp.float32(scale), sharding(self.mesh))
                self.state = dataclasses.replace(self.state, rate_scale=rate_scale)
                logs.say(f"step {self.step}: learning rate x {scale:.3g}")
        self.recorder.validation(line, best=memory.since_best == 0)
        if c.patience and memory.since_best >= c.patience:
            return f"no better validation {c.best_metric} in the last {memory.since_best} validations"
        return ""

    def _losses(self, plan: BatchPlan) -> LossSums:
        """The sums over a validation set."""
        sums = [self.eval_step(self.state, Batch(*to_devices(self.mesh, batch))) for batch in plan.in_order()]
        return jax.tree.map(lambda *parts: float(sum(parts)), *jax.device_get(sums))

    def _bleu(self, direction: DataConfig, count: int) -> float:
        pairs = [pair for pair, _ in zip(read_pairs(direction, "valid"), range(count), strict=False)]
        tags = [self.corpus.tokenizer.tags(self.config.data, direction.target_lang)] * len(pairs)
        alpha = self.alpha(self.state.clock)
        found = self.translator.translate(self.state.eval_params, alpha, [source for source, _ in pairs], tags=tags)
        return corpus_bleu([best[0].text for best in found], [ref for _, ref in pairs], direction.target_lang)

    def _save(self) -> None:
        memory = self.memory
        check_finite(self.step, "norm of the parameters", float(optax.tree.norm(self.state.params)))
        score = memory.score if memory.evaluated == self.step else None
        self.checkpoints.save(self.state, self.alpha(self.state.clock), dataclasses.asdict(memory), score)
        self.recorder.restart_clock()

    def _describe(self, state_bytes: int) -> None:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params))
        c = self.config.model
        logs.say(
            f"{c.method} {c.encoder_layers}L-{c.decoder_layers}L, {count:,} parameters, "
            f"state {state_bytes / 1e6:,.1f} MB, on {jax.device_count()} x {jax.devices()[0].device_kind}"
        )
        pairs = len(self.corpus.train.lengths) // self.config.data.tokenisations
        logs.say(
            f"{pairs:,} sentence pairs, {self.epoch:.0f} updates per epoch, "
            f"batches of {', '.join(f'{rows}x{source}+{target}' for rows, source, target in self._shapes())} positions "
            f"({100 * self.plan.fill:.1f} % real tokens)"
        )
        logs.say(f"from step {self.step} to {self.total}")


def per_token(sums: Sequence[LossSums]) -> dict[str, float]:
    """Loss and nll per target token, over all of them."""
    tokens = sum(found.tokens for found in sums)
    return {name: sum(getattr(found, name) for found in sums) / tokens for name in ("loss", "nll")}


def _due(step: int, start: int, every: int) -> bool:
    """Whether an event of this interval falls on `step`; never on the step that the run starts from."""
    return every > 0 and step % every == 0 and step != start
