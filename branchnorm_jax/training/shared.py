"""The start of a run in several processes: process 0 prepares the workdir, the others read it."""

import contextlib
import uuid

from branchnorm_jax.data.prepare import Corpus, prepare
from branchnorm_jax.files import delete_abandoned
from branchnorm_jax.options import Config
from branchnorm_jax.parallel import hosts
from branchnorm_jax.training import logs
from branchnorm_jax.training.finetune import corpus_of
from branchnorm_jax.workdir import Workdir


def shared_corpus(config: Config, workdir: Workdir, stack: contextlib.ExitStack) -> tuple[Corpus, str]:
    """Prepares the workdir and the corpus in process 0, which locks the workdir until `stack` ends.

    The other processes then read what it wrote.

    Returns:
      The corpus, and the mark of this start in the workdir.

    Raises:
      UserError: if another run has locked the workdir, if config or data differ from those of an earlier start, or if
        a process sees another workdir than process 0.
    """
    mark = f"{hosts.gather(uuid.uuid4().hex)[0]}\n"

    def prepare_first() -> Corpus:
        workdir.create()
        stack.enter_context(workdir.locked())
        workdir.agree_on_config(config)  # Before the mark: a mistake must not end a run that goes on in a bucket.
        workdir.set_mark(mark)
        if workdir.bucket:
            workdir.fetch(".")  # The earlier process may have written until it lost its mark.
            workdir.agree_on_config(config)
        delete_abandoned(workdir / "corpus")  # Nothing is written there any more once the corpus is complete.
        corpus = corpus_of(config, workdir)
        workdir.agree_on_data(corpus.identity(), corpus.reports, config)
        workdir.publish()
        return corpus

    def read() -> Corpus:
        workdir.check_mark(mark)
        workdir.fetch(".")
        workdir.fetch("corpus")
        return prepare(config.data, workdir.path, logs.say, keep=True, trust=True)

    corpus = hosts.first_then_others(prepare_first, read, "which prepares the data")
    hosts.agree({f"hash of {name}": value for name, value in corpus.identity().items()})
    return corpus, mark
