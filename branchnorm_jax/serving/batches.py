"""Dynamic batching: requests that wait at the same time are translated together, in one thread."""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving.messages import TranslationRequest

Waiting = tuple[TranslationRequest, asyncio.Future[bytes]]


class Batches:
    """A queue in front of a function that answers several requests at once.

    Only the function runs in another thread. Everything else runs in the event loop and needs no locks.

    Attributes:
      answers: maps requests to their answers; may block and may raise.
      config: limits of the queue and of a batch.
      say: called with the traceback of a failed request.
    """

    def __init__(
        self,
        answers: Callable[[Sequence[TranslationRequest]], list[bytes]],
        config: ServeConfig,
        say: Callable[[str], None],
    ) -> None:
        self.answers, self.config, self.say = answers, config, say
        self._waiting: dict[asyncio.Future[bytes], TranslationRequest] = {}
        """In the order of arrival."""
        self._arrived = asyncio.Event()
        """Set while requests are waiting."""

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    async def answer(self, request: TranslationRequest) -> bytes:
        """Returns the answer to a request, which leaves the queue if the caller is cancelled.

        Raises:
          asyncio.QueueFull: if too many requests are waiting.
          Exception: any exception of the translation.
        """
        if self.waiting >= self.config.max_waiting:
            raise asyncio.QueueFull
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[future] = request
        self._arrived.set()
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def run(self) -> None:
        """Answers requests until cancelled. Does not wait for the batch that is then being translated."""
        device = ThreadPoolExecutor(1, "device")
        try:
            while True:
                await self._arrived.wait()
                if self.waiting == 1:
                    await asyncio.sleep(self.config.batch_wait_ms / 1000)
                if batch := self._next():
                    await self._translate(batch, device)
        finally:
            device.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> list[Waiting]:
        """Takes a batch from the queue: the oldest request and, up to `batch_lines` lines, further ones."""
        batch, lines = list[Waiting](), 0
        while self._waiting and lines < self.config.batch_lines:
            future = next(iter(self._waiting))
            batch.append((self._waiting.pop(future), future))
            lines += len(batch[-1][0].lines)
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _translate(self, batch: list[Waiting], device: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(device, self.answers, [request for request, _ in batch])
        except Exception as error:
            if len(batch) > 1:
                # Either one request is faulty, or the batch was too large: answer the requests one by one.
                for waiting in batch:
                    if not waiting[1].cancelled():
                        await self._translate([waiting], device)
                return
            self.say("".join(traceback.format_exception(error)).rstrip())
            if not batch[0][1].cancelled():
                batch[0][1].set_exception(error)
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.cancelled():
                    future.set_result(answer)
