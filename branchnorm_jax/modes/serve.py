"""--mode=serve: serves a trained model over HTTP."""

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax

from branchnorm_jax.codes import names
from branchnorm_jax.decoding.engine import UNROLLED, coarse
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError, needs_extra
from branchnorm_jax.modes.common import Trained, load
from branchnorm_jax.options import Config
from branchnorm_jax.serving.messages import answers, parse
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir

LIMITS = "max_lines", "max_characters", "max_terms", "max_term_tokens", "max_body_bytes", "max_waiting"
"""Options of the server that GET /health shows."""


@dataclasses.dataclass
class Start:
    """What the server is doing before it is ready, in a few words."""

    doing: str = "loading the model"


def serve(config: Config, workdir: Workdir) -> None:
    """Answers requests until a signal arrives.

    The server then answers the requests that arrived before the signal, for at most `serve.drain_seconds`, and lets the
    signal take effect.
    """
    with needs_extra("serve", "serve"):
        from branchnorm_jax.serving.access import is_loopback, make_access
        from branchnorm_jax.serving.app import draining, make_app, make_server, starting

    workdir.check_config(config)
    access = make_access(config.serve, logs.say)
    with listening(config.serve.host, config.serve.port) as listener:
        if not access.tokens and not is_loopback(listener.getsockname()[0]):
            logs.say(
                f"{url(listener)} is open to everyone who can reach it; set serve.token_file, or put the server behind "
                "a proxy that authenticates users"
            )
        start = Start()
        with starting(listener, config.serve, access, lambda: start.doing):
            trained = load(config, workdir)
            # A large request must not compile another program than those of `warm_up`.
            decode = dataclasses.replace(config.decode, unroll=config.decode.unroll or UNROLLED)
            translator = dataclasses.replace(trained.translator, rounding=coarse, config=decode)
            languages = Languages(config.data, translator.tokenizer, options="")
            languages.check(config.decode.source_lang, config.decode.target_lang)
            compile_programs(config, trained, translator, languages, start)
        app = make_app(
            functools.partial(
                parse,
                serve=config.serve,
                decode=config.decode,
                languages=languages,
                encode=translator.encoded,
                base=translator.glossary,
            ),
            answers(translator, trained.params, trained.alpha),
            config.serve,
            about(config, trained.step, languages),
            logs.say,
            access,
        )
        logs.say(f"serving at {url(listener)}; press Ctrl-C to stop")
        server = make_server(app, config.serve)
        with draining(server):
            server.run([listener])


def compile_programs(
    config: Config, trained: Trained, translator: Translator, languages: Languages, start: Start
) -> None:
    """Compiles the programs for lines of up to `serve.warm_up_length` tokens, and reports each to `start`."""
    # Caches small programs too, so that the next start compiles nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if longest := min(config.serve.warm_up_length, translator.limit):
        terms = " and for terms of decode.glossary" if config.decode.glossary else ""
        logs.say(f"compiling for lines of up to {longest} tokens (serve.warm_up_length){terms}")
        begin = time.perf_counter()
        tags = translator.tokenizer.tags(config.data, languages.sources[0], languages.targets[0])
        programs = list(translator.programs(trained.params, trained.alpha, longest, tags))
        with logs.progress_bar(len(programs), 0, "shape", "compile") as bar:
            for number, program in enumerate(programs, start=1):
                start.doing = f"compiling program {number} of {len(programs)}"
                program()
                bar.update()
        logs.say(f"compiled in {time.perf_counter() - begin:.1f} s")


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a listening socket.

    Raises:
      UserError: if the socket cannot be created.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address, family=family)  # With the scope of an address such as fe80::1%eth0.
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen at {host}, port {port}: {reason}; choose another serve.host or serve.port"
        ) from error
    with listener:
        yield listener


def url(listener: socket.socket) -> str:
    """Returns the URL of the socket."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def about(config: Config, step: int, languages: Languages) -> dict[str, Any]:
    """Returns the fields of GET /health about the model, the search and the limits of requests."""
    m, s = config.model, config.serve
    return {
        "method": m.method,
        "depth": m.depth,
        "step": step,
        "reads_source_lang": languages.reads_source,
        "source_langs": languages.sources,
        "target_langs": languages.targets,
        "names": names(config.data.languages),
        "decode": {"checkpoint": config.decode.checkpoint, **config.decode.search},
        "serve": {name: getattr(s, name) for name in LIMITS},
    }
