"""The training loop.

The order of the operations in the loop matters: it guarantees that the checkpoint, the validation and the log line of a
step describe the same state. See `Run.loop`.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from branchnorm_jax.data.batches import TextBatch, make_plans, prefetch
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.data.prepare import Corpus
from branchnorm_jax.errors import BranchNormError, DivergedError, Preempted, StorageError, UserError, count
from branchnorm_jax.model import growth
from branchnorm_jax.model.initializers import get_base
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.stack import size_of
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.parallel import ending, hosts
from branchnorm_jax.parallel.mesh import describe_shardings, from_processes, make_mesh, mesh_sizes, replicated
from branchnorm_jax.parallel.rows import Rows
from branchnorm_jax.parallel.watchdog import Watchdog
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training import logs, schedules, trouble
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.digests import sha256
from branchnorm_jax.training.finetune import first_parameters
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.lower import allocated_bytes, lower_update
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.record import Recorder, write_event, write_status
from branchnorm_jax.training.shared import shared_corpus
from branchnorm_jax.training.state import Batch, TrainState, abstract_state, init_state, state_from
from branchnorm_jax.training.step import Metrics
from branchnorm_jax.training.trouble import Decision
from branchnorm_jax.training.validation import Validator, per_token
from branchnorm_jax.training.watch import collapsed, vanishing
from branchnorm_jax.workdir import Workdir


def train(
    config: Config,
    workdir: Workdir,
    fitted: ModelConfig | None = None,
    warning: Callable[[float], str] = lambda needed: "",
) -> None:
    """Trains a model in `workdir`, and resumes from the newest checkpoint if there is one.

    Training ends at a limit of the options `train` (steps, epochs, patience, min_learning_rate) or at a signal.

    Args:
      config: the run, as it is saved.
      workdir: its folder.
      fitted: the options of the model with `remat`, `group` and `unroll` for these devices; None means `config.model`.
        They are not saved, because the run may go on with other devices.
      warning: returns what to say about the memory in bytes that an update needs on each device; "" is nothing.

    Raises:
      UserError: if the config, the data or the workdir is unsuitable.
      DivergedError: if training diverges and the run cannot continue.
      StorageError: if a file cannot be written.
      HostError: if another process of the run is missing or does not respond.
      Preempted: if a signal stops the run.

    Errors during the loop are raised after `status.json` is written.
    """
    check_names(config)
    with contextlib.ExitStack() as stack:
        corpus, mark = shared_corpus(config, workdir, stack)
        mesh = make_mesh(config.parallel)
        stack.enter_context(jax.set_mesh(mesh))
        run = Run(dataclasses.replace(config, model=fitted or config.model), workdir, mark, corpus, mesh, warning)
        try:
            with ending.reported_to(lambda reason: run.write_status("failed", reason)), hosts.blame_lost_process():
                signal_number = run.loop()
        except BaseException as error:
            failure = error
            if isinstance(error, OSError):
                failure = StorageError(f"{workdir.path}: {error.strerror or error}; earlier checkpoints are kept")
            if isinstance(failure, StorageError):
                run.check_workdir()
            status = failure.status if isinstance(failure, BranchNormError | Preempted) else "failed"
            # If the disk is full or the bucket fails, writing the status may fail, too. Report the first error.
            with contextlib.suppress(OSError, BranchNormError):
                run.write_status(status, str(failure) or type(failure).__name__)
            raise failure from error
    if signal_number:
        raise Preempted(
            f"stopped by signal {signal_number} after the last update; the run is complete and saved", signal_number
        )


def check_names(config: Config, elsewhere: int = 0) -> None:
    """Checks the names and combinations of options that the subpackages define, before any work starts.

    It checks the method, initialisation, optimiser, schedule, growth of alpha and device mesh.

    Args:
      config: the run.
      elsewhere: number of devices of a run that is planned for others than those of this machine.

    Raises:
      UserError: if an option is unknown, or two options exclude each other.
    """
    recipe = get_recipe(config.model.method)
    get_base(config.model.init or recipe.init)
    if config.train.update_in_backward and recipe.combines:
        raise UserError(
            f"config: train.update_in_backward does not support {config.model.method}: its layers depend on all "
            "earlier layers"
        )
    alpha = growth.alpha(config.model)
    if config.train.may_roll_back and config.train.rollback == "alpha":
        first, last = (alpha(jnp.int32(clock)) for clock in (0, config.model.alpha_steps))
        if not recipe.grows or all(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, last))):
            raise UserError(
                f"config: train.rollback=alpha: alpha does not grow with {config.model.method} and these options; use "
                "train.rollback=batches"
            )
    schedules.check_frozen(config)
    make_optimizer(config.train, config.model)
    schedules.learning_rate(config.train, config.model.width)
    schedules.with_end(config.train, config.train.steps)
    if elsewhere:
        mesh_sizes(config.parallel, elsewhere)
    else:
        make_mesh(config.parallel)


UNFINISHED = "the run has not written its final status"
"""The reason in the status of a running or killed run."""


class Halted(Exception):
    """Raised inside the loop when a decision stops the run or rolls it back."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class Run:
    """The training run in one process, from start-up to `status.json`."""

    def __init__(
        self, config: Config, workdir: Workdir, mark: str, corpus: Corpus, mesh: Mesh, warning: Callable[[float], str]
    ) -> None:
        """Builds the batch plans, the model and the state.

        The state comes from the newest intact checkpoint. Without a checkpoint it is initialised.
        """
        self.workdir, self.mark, self.corpus, self.mesh, self.warning = workdir, mark, corpus, mesh, warning
        train = config.train
        self.rows = Rows(mesh, train.accumulation)
        self.plan, valid_plans = make_plans(config.data, corpus.train, corpus.valid, train.batch_tokens, train.seed)
        self.epoch = self.plan.batches_per_epoch / config.data.tokenisations
        self.total = schedules.run_length(train, self.epoch)
        train = schedules.with_end(train, self.total)
        self.config = config = dataclasses.replace(config, train=train)
        self.model = make_model(config.model, corpus.tokenizer)
        self.optimizer = make_optimizer(train, config.model)
        self.abstract = abstract_state(self.model, self.optimizer, self.mesh, bool(train.ema_decay))
        self.validator = Validator(config, self.model, self.rows, corpus, valid_plans)
        self.compiled: dict[Shape, Any] = {}
        self.checkpoints = Checkpoints(workdir.stored("checkpoints"), train, logs.say)
        if not self.checkpoints.steps():
            workdir.need_space(2 * size_of(self.abstract))
        self.alpha = jax.jit(growth.alpha(config.model))
        self.rate = jax.jit(schedules.learning_rate(train, config.model.width))
        self.state, self.loop_state = self._restored(math.inf)
        self.step = int(self.state.step)
        self.watchdog = Watchdog(train.step_timeout, hosts.end_stuck)
        self.stop_reason = self._reason_to_stop() if self.loop_state.evaluated == self.step < self.total else ""
        """Reason to stop before the last update; "" means that the run continues."""
        if self.step > self.total:
            raise UserError(
                f"{workdir.path}: this run is at step {self.step}, past the {self.total} updates of train.epochs="
                f"{train.epochs:g}; raise train.epochs or choose another --workdir"
            )
        self.checkpoints.forget_after(self.step)
        self._describe()

    def _restored(self, until: float) -> tuple[TrainState, LoopState]:
        """Restores the newest intact checkpoint of at most `until` updates, or initialises the state."""
        restored = self.checkpoints.restore_latest(self.abstract, until)
        if restored is not None:
            state, saved = restored
            return state, LoopState(**saved)
        train = self.config.train
        if train.parent:
            params, clock = first_parameters(self.config, self.model, self.mesh)
            state = state_from(self.model, self.optimizer, self.mesh, params, clock, bool(train.ema_decay))
        else:
            first = self._first_batch()
            state = init_state(self.model, self.optimizer, self.mesh, train.seed, first, bool(train.ema_decay))
        return state, LoopState()

    def _first_batch(self) -> Batch:
        """Returns the first batch without empty rows, which would change the statistics of `profile`."""
        batch = self.plan.batch_at(0)
        full = (batch.target != PAD).any(axis=1)
        if full.all() and len(full) == self.rows.total(len(full)):
            return Batch(*self.rows.put(self.rows.take(batch)))
        return Batch(*jax.device_put(tuple(side[full] for side in batch), replicated(self.mesh)))

    def loop(self) -> int:
        """Runs the remaining updates.

        The order of the operations at each step is:

        1. Validate the current state, if a validation is due. A signal leaves it out, or ends it; the resumed run makes
           it.
        2. Save a checkpoint, if one is due or a signal has arrived.
        3. Take the next batch.
        4. Dispatch the update.
        5. Read the metrics of the previous update. This order keeps the device from waiting for the host.
        6. Poll for signals.

        Returns:
          The number of a signal that arrived after the last update, or 0.
        """
        resumed = True
        with hosts.Preemption() as preemption, self.watchdog:
            while True:
                try:
                    self._run_updates(preemption, resumed)
                    break
                except Halted as halted:
                    decision = halted.decision
                    write_event(self.workdir, decision.step, decision.kind, decision.reason, policy=decision.policy)
                    if decision.action == "stop":
                        self._finish_save()  # Its state is from before the trouble.
                        text = f"diverged: {decision.reason}; {trouble.ADVICE}"
                        raise DivergedError(text, decision.step, decision.kind) from None
                    self._roll_back(decision)
                    resumed = False
            self.watchdog.begin("the save", f"at step {self.step}")
            self.checkpoints.close()
            self.write_status("done", self.stop_reason or f"reached {self.total} updates")
        return max(map(int, hosts.gather(str(preemption.signal))))

    def _roll_back(self, decision: Decision) -> None:
        """Restores a checkpoint from before the trouble, then leaves out batches or holds alpha.

        The option `train.rollback` selects the change.
        """
        train, before = self.config.train, self.loop_state
        self.watchdog.begin("the rollback")
        with self._tolerating(True):
            self.checkpoints.wait()
        rollback = trouble.plan_rollback(decision, train, before)
        del self.state  # The device memory may be too small for two states.
        # If all checkpoints are newer than `until`, restore the oldest one.
        until = max(rollback.until, min(self.checkpoints.steps(), default=0))
        self.state, restored = self._restored(until)
        self.step, self.stop_reason = int(self.state.step), ""
        self.checkpoints.forget_after(self.step)
        self.loop_state = restored.rolled_back(before, decision.step)
        if rollback.left_out:
            first, last = rollback.left_out
            first = max(first, self.step)  # Updates before the oldest checkpoint cannot be left out.
            if first > last:
                text = f"diverged: {decision.reason}; there is no checkpoint from before the trouble"
                raise DivergedError(text, decision.step, decision.kind)
            self.loop_state.left_out.append([first, last])
            change = f"leaving out the batches of updates {first} to {last}"
        else:
            updates = decision.step - self.step + train.rollback_updates
            self._replace_in_state(hold_steps=jnp.maximum(self.state.hold_steps, updates))
            change = f"holding alpha for {updates} updates"
        text = f"rolled back to step {self.step}, {change}"
        logs.say(f"{decision.reason}\nstep {decision.step}: {text}")
        write_event(self.workdir, decision.step, "rollback", text, to=self.step)

    def _finish_save(self) -> None:
        """Waits for the save in flight. A failure is reported, and no more."""
        self.watchdog.begin("the save", f"at step {self.step}")
        try:
            self.checkpoints.wait()
        except StorageError as error:
            logs.say(f"StorageError: {error}")

    def _run_updates(self, preemption: hosts.Preemption, resumed: bool) -> None:
        """Runs the loop to its end. Raises `Halted` if a decision stops the run or rolls it back."""
        start = self.step
        self.watchdog.begin("")
        self.write_status("running", UNFINISHED)
        if start < self.total and not self.stop_reason and not self.compiled:
            self._compile(preemption)
        recorder = Recorder(self.workdir, self.loop_state.evaluated, start, self.total, resumed)
        batches = prefetch(functools.partial(self.plan.batch_at, select_rows=self.rows.indices), start, self.total)
        with contextlib.closing(recorder), contextlib.closing(batches):
            self._advance(start, batches, recorder, preemption)

    def _advance(
        self, start: int, batches: Iterator[TextBatch], recorder: Recorder, preemption: hosts.Preemption
    ) -> None:
        c, signal_number = self.config.train, 0
        in_flight: tuple[int, Metrics] | None = None
        # The largest signal of all processes at the last update, which may be in flight, and at the one before.
        latest: jax.Array | None = None
        largest: jax.Array | None = None

        def read() -> None:
            """Waits for the update in flight, if any, and reads its metrics."""
            nonlocal in_flight
            if in_flight is not None:
                dispatched, in_flight = in_flight, None
                self._read(recorder, *dispatched)

        while True:
            late = False
            at_end = self.step >= self.total or bool(self.stop_reason)
            if at_end or (_due(self.step, 0, c.eval_every) and not signal_number):
                read()
                if self.loop_state.evaluated != self.step:
                    self.watchdog.begin("the validation", f"at step {self.step}")
                    try:
                        with preemption.excusing():
                            self._validate(recorder, preemption)
                        late = self.step == start  # A signal had left it out; the checkpoint here lacks its score.
                        self.stop_reason = "" if at_end else self._reason_to_stop()
                        if self.stop_reason:
                            at_end = True
                            logs.say(f"step {self.step}: stopped early: {self.stop_reason}")
                    except Preempted as stopped:
                        signal_number, at_end = stopped.signal_number, False
            best = c.keep_best and self.loop_state.evaluated == self.step and self.loop_state.is_best
            if _due(self.step, start, c.checkpoint_every) or at_end or signal_number or best or late:
                read()
                self.watchdog.begin("the save", f"at step {self.step}")
                self._save(recorder, last=at_end or bool(signal_number))
            if signal_number and not at_end:
                self.watchdog.begin("the save", f"at step {self.step}")
                self.checkpoints.wait()
                raise Preempted(f"stopped by signal {signal_number}, saved at step {self.step}", signal_number)
            if at_end:
                return
            self.watchdog.begin("update", f"{self.step}")
            batch = next(batches)
            if self.loop_state.leaves_out(self.step):
                read()
                self._leave_out()
                recorder.show_left_out()
            else:
                update = self.compiled[batch.shape]
                tokens, signals = Batch(*self.rows.put(batch)), from_processes(self.mesh, preemption.signal)
                largest, (self.state, metrics, latest) = latest, update(self.state, tokens, signals)
                read()
                in_flight = (self.step, metrics)
            self.step += 1
            signal_number = preemption.requested(largest)

    def _read(self, recorder: Recorder, step: int, metrics: Metrics) -> None:
        """Waits for the metrics of an update, logs them and acts on trouble."""
        c, loop_state, layers = self.config.train, self.loop_state, metrics.layers
        metrics = jax.tree.map(float, jax.device_get(metrics._replace(layers={})))
        seconds = recorder.lap()
        decision = trouble.decide(step, metrics, layers, c)
        skipped = decision.action == "skip"
        loop_state.count_update(seconds, int(metrics.target_tokens), decision.kind, skipped)
        always = step == self.total - 1 or bool(decision.kind)
        if c.log_every and (step % c.log_every == 0 or always):
            recorder.log_update(step, metrics, self.plan.digest_at(step), seconds)
        if c.watch_every and (step % c.watch_every == 0 or always):
            layers = jax.device_get(layers)
            recorder.log_layers(step, layers)
            self._watch(step, layers)
        self._halt_if_needed(decision)
        if decision.kind:
            write_event(self.workdir, step, decision.kind, decision.reason, policy=decision.policy)
            logs.say(f"step {step}: {decision.reason}" + (": update skipped" if skipped else ""))
        self._halt_if_needed(trouble.decide_about_skips(step, loop_state.skipped_in_a_row, layers))
        recorder.show_progress(metrics, seconds)

    def _watch(self, step: int, layers: dict[str, dict[str, Any]]) -> None:
        """Records where gradients vanish and which stacks collapse. Reports each problem when it begins."""
        loop_state = self.loop_state
        alpha = {stack: values.get("alpha", 1.0) for stack, values in layers.items()}
        weak = vanishing({stack: values["gradient"] for stack, values in layers.items()}, alpha)
        if weak and not loop_state.vanishing:
            logs.say(f"step {step}: the gradient vanishes in {weak}; these layers learn almost nothing")
        loop_state.vanishing = weak
        stacks = collapsed(layers)
        if stacks and not loop_state.collapsed:
            logs.say(
                f"step {step}: all tokens of a {self.config.model.sequence} are nearly the same vector after {stacks}; "
                "attention cannot distinguish them"
            )
        loop_state.collapsed = stacks

    def _halt_if_needed(self, decision: Decision) -> None:
        if decision.ends:
            raise Halted(decision)

    def write_status(self, status: str, reason: str) -> None:
        """Writes `status.json`: how the run ended, and its resource use. Raises the error of `check_workdir`."""
        # All processes compute the digest together.
        digest = sha256(self.state) if status in ("done", "preempted") else None
        self.check_workdir()
        fields = {"status": status, "reason": reason, "step": self.step, "state_sha256": digest}
        write_status(self.workdir, fields | {"batch_fill": self.plan.fill}, self.loop_state)

    def _compile(self, preemption: hosts.Preemption) -> None:
        """Compiles the update for every batch shape. Raises `Preempted` if a signal arrives before the first update."""
        begin, when = time.perf_counter(), " before the first update"

        def heed() -> None:
            preemption.heed(together=True, when=when, what="which compiles the update")

        for shape in self._shapes():
            heed()
            whole = shape._replace(rows=self.rows.total(shape.rows))
            own = shape._replace(rows=len(self.rows.indices(shape.rows)))
            lowered = lower_update(self.config, self.model, self.optimizer, self.mesh, self.abstract, whole)
            with preemption.excusing(when):
                self.compiled[own] = lowered.compile()
        heed()  # This also waits for the others: in an update, a process does not wait long for the first message.
        seconds = time.perf_counter() - begin
        self.loop_state.compile_seconds, self.loop_state.compiled_shapes = seconds, len(self.compiled)
        logs.say(f"compiled {count(len(self.compiled), 'batch shape')} in {seconds:.1f} s")
        if line := self.warning(max(map(allocated_bytes, self.compiled.values()))):
            logs.say(line)

    def _replace_in_state(self, **values: jax.Array) -> None:
        """Replaces small fields of the state. Every device gets a full copy of the new values."""
        self.state = dataclasses.replace(self.state, **jax.device_put(values, replicated(self.mesh)))

    def _leave_out(self) -> None:
        """Advances the step and the clock of the state without changing the parameters."""
        clock, hold_steps = schedules.advance(self.state.clock, self.state.hold_steps)
        self._replace_in_state(step=self.state.step + 1, clock=clock, hold_steps=hold_steps)

    def _shapes(self) -> Iterator[Shape]:
        """Yields the batch shapes that at least one training sentence needs."""
        return (shape for shape, rows in zip(self.plan.shapes, self.plan.rows, strict=True) if rows)

    def _validate(self, recorder: Recorder, preemption: hosts.Preemption) -> None:
        """Validates the current state and records the result. A signal raises `Preempted`; nothing is recorded."""
        c, loop_state = self.config.train, self.loop_state
        preemption.heed(together=True)
        sums = self.validator.losses(self.state, preemption.heed)
        preemption.heed(together=True)
        line: dict[str, Any] = {"step": self.step, **per_token(list(sums.values()))}
        self._halt_if_needed(trouble.decide_about_state(self.step, "validation loss", line["loss"], c))
        if self.config.model.family == "decoder":
            line["bits_per_byte"] = self.validator.bits_per_byte(sums)
        else:
            line["source_gain"] = self.validator.source_gain(self.state)
        pairs = {pair: per_token([part]) for pair, part in sums.items()}
        if c.eval_bleu_sentences:
            by_pair = self.validator.scores(self.state, c.eval_bleu_sentences, preemption.heed)
            for pair, scores in by_pair.items():
                pairs[pair] |= scores
            for name in next(iter(by_pair.values())):
                line[name] = statistics.mean(scores[name] for scores in by_pair.values())
        if self.config.data.pairs:
            line["pairs"] = pairs
        score = -line["loss"] if c.best_metric == "loss" else line[c.best_metric]
        loop_state.add_score(self.step, score, c.decay_patience if c.schedule == "val_decay" else 0)
        warm = self.step >= c.warmup_steps
        if warm and c.schedule == "val_decay" and schedules.val_decay(loop_state.recent_scores, c.decay_patience):
            scale = float(self.state.rate_scale) * c.decay_factor
            self._replace_in_state(rate_scale=jnp.float32(scale))
            logs.say(f"step {self.step}: learning rate x {scale:.3g}")
        recorder.log_validation(line, loop_state.is_best)

    def _reason_to_stop(self) -> str:
        """Returns why the run ends after its last validation, or "". A restarted run stops for the same reason."""
        c, loop_state = self.config.train, self.loop_state
        rate = float(self.rate(self.state.step) * self.state.rate_scale)
        if self.step >= c.warmup_steps and rate < c.min_learning_rate:
            return f"the learning rate, {rate:.3g}, is below train.min_learning_rate={c.min_learning_rate:g}"
        if c.patience and loop_state.since_best >= c.patience:
            return f"no better validation {c.best_metric} in train.patience={c.patience} validations"
        return ""

    def _save(self, recorder: Recorder, last: bool) -> None:
        """Starts to save the state. A failure of the `last` save of a run always ends it."""
        norm = float(parameter_norm(self.state.params))
        self._halt_if_needed(trouble.decide_about_state(self.step, "norm of the parameters", norm, self.config.train))
        score = self.loop_state.score if self.loop_state.evaluated == self.step else None
        with self._tolerating(True):
            self.checkpoints.wait()
        saved = dataclasses.asdict(self.loop_state)
        with self._tolerating(not last):
            self.write_status("running", UNFINISHED)
            self.checkpoints.save(self.state, self.alpha(self.state.clock), saved, score)
        recorder.restart_clock()

    def check_workdir(self) -> None:
        """Raises `UserError` in process 0 if the run has lost its folder. It must not write there any more."""
        if hosts.is_first() and self.workdir.is_lost(self.mark):
            raise UserError(
                f"{self.workdir.path}: while this run trained, its workdir was deleted or moved, or another process "
                f"began to train in it; it ends at step {self.step}, and the updates since its last checkpoint are "
                "lost"
            )

    @contextlib.contextmanager
    def _tolerating(self, tolerant: bool) -> Iterator[None]:
        """Reports a failed save, counts it and goes on, if `tolerant` and `train.on_save_failure` say so."""
        try:
            yield
        except StorageError as error:
            # If only one of several processes failed, the others would wait for it.
            if not tolerant or self.config.train.on_save_failure == "stop" or jax.process_count() > 1:
                raise
            self.loop_state.failed_saves += 1
            logs.say(f"{error}; training goes on (train.on_save_failure=warn)")

    def _describe(self) -> None:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params))
        c = self.config.model
        logs.say(
            f"{c.method} {c.depth}, {count:,} parameters, "
            f"state {size_of(self.abstract) / 1e6:,.1f} MB, on {jax.device_count()} x {jax.devices()[0].device_kind}"
        )
        if self.mesh.size > 1:
            logs.say(describe_shardings(self.mesh, self.abstract))
        items = len(self.corpus.train.lengths) // self.config.data.tokenisations
        one_side = c.family == "decoder"
        what = "rows or parts of rows" if one_side else "sentence pairs"
        shapes = (f"{rows}x{target if one_side else f'{source}+{target}'}" for rows, source, target in self._shapes())
        logs.say(
            f"{items:,} {what}, {self.epoch:.0f} updates per epoch, "
            f"batches of {', '.join(shapes)} positions "
            f"({100 * self.plan.fill:.1f} % real tokens)"
        )
        if self.step == self.total:
            option = "train.steps" if self.config.train.steps else "train.epochs"
            logs.say(f"this run is finished: it has made its {self.total:,} updates; to train longer, raise {option}")
            return
        if self.stop_reason:
            logs.say(f"this run stopped early, at step {self.step}: {self.stop_reason}; change the option to train on")
            return
        rate = float(self.rate(self.state.step) * self.state.rate_scale)
        logs.say(f"training from step {self.step} to {self.total}; the learning rate is {rate:.2e} now")
        for line in schedules.doubts(self.config, self.total, self.step, int(self.state.clock)):
            logs.say(line)


# One program: the sums of sharded leaves, dispatched one by one, can overlap and wait for each other across processes.
parameter_norm = jax.jit(optax.tree.norm)


def _due(step: int, start: int, every: int) -> bool:
    """Returns whether an event with interval `every` is due at `step`; never at the first step `start`."""
    return every > 0 and step % every == 0 and step != start
