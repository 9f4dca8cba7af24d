"""Requests that wait at the same time are answered together, by the one thread that owns the device."""

import asyncio
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving.messages import Asked

Waiting = tuple[Asked, asyncio.Future[bytes]]


class Batches:
    """A queue before a function that answers several requests at once.

    Everything but the function runs in the event loop, so nothing needs a lock.

    Attributes:
      answers: requests -> one answer to each; may take long, may fail.
      config: how many may wait, and are answered at once.
      say: is told of what failed.
    """

    def __init__(
        self, answers: Callable[[Sequence[Asked]], list[bytes]], config: ServeConfig, say: Callable[[str], None]
    ) -> None:
        self.answers, self.config, self.say = answers, config, say
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(config.max_waiting)

    @property
    def waiting(self) -> int:
        """Requests that no batch has taken yet."""
        return self._queue.qsize()

    async def answer(self, asked: Asked) -> bytes:
        """The answer to a request. Raises `asyncio.QueueFull`, or what its translation raised."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((asked, future))
        return await future

    async def run(self) -> None:
        """Answers until it is cancelled: the first that waits and, up to `batch_lines`, those that came meanwhile."""
        with ThreadPoolExecutor(1, "device") as device:
            while True:
                batch = [await self._queue.get()]
                if self._queue.empty():
                    await asyncio.sleep(self.config.batch_wait_ms / 1000)
                lines = len(batch[0][0].lines)
                while lines < self.config.batch_lines and not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                    lines += len(batch[-1][0].lines)
                await self._translate(batch, device)

    async def _translate(self, batch: list[Waiting], device: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(device, self.answers, [asked for asked, _ in batch])
        except Exception as error:
            if len(batch) > 1:
                # One of them is to blame, or all were too much at once.
                for waiting in batch:
                    await self._translate([waiting], device)
                return
            self.say("".join(traceback.format_exception(error)).rstrip())
            if not batch[0][1].cancelled():
                batch[0][1].set_exception(error)
        else:
            for (_, future), found in zip(batch, answers, strict=True):
                if not future.cancelled():
                    future.set_result(found)
