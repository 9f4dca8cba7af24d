"""The queue of requests in front of the device."""

import asyncio
import threading
from collections.abc import Sequence

from branchnorm_jax.data.tokenizer import NO_TAGS
from branchnorm_jax.options import ServeConfig
from branchnorm_jax.serving.batches import Batches
from branchnorm_jax.serving.messages import TranslationRequest, to_json


def request_of(text: str) -> TranslationRequest:
    return TranslationRequest((text,), (NO_TAGS,), ("",), nbest=1, alignments=False)


def test_a_failed_batch_is_repeated_only_for_callers_that_are_still_there() -> None:
    began, fail, seen = threading.Event(), threading.Event(), list[list[str]]()

    def answers(requests: Sequence[TranslationRequest]) -> list[bytes]:
        seen.append([line for request in requests for line in request.lines])
        began.set()
        assert fail.wait(60)
        if any("bad" in request.lines for request in requests):
            raise MemoryError("too much")
        return [to_json({"lines": request.lines}) for request in requests]

    async def scenario() -> list[object]:
        batches = Batches(answers, ServeConfig(), lambda line: None)
        callers = [asyncio.create_task(batches.answer(request_of(text))) for text in ("good", "left", "bad")]
        running = asyncio.create_task(batches.run())
        await asyncio.to_thread(began.wait, 60)
        callers[1].cancel()
        await asyncio.wait([callers[1]])
        fail.set()
        results: list[object] = [*await asyncio.gather(callers[0], callers[2], return_exceptions=True)]
        running.cancel()
        return results

    good, bad = asyncio.run(scenario())
    assert good == b'{"lines": ["good"]}'
    assert isinstance(bad, MemoryError)
    assert seen == [["good", "left", "bad"], ["good"], ["bad"]]


def test_requests_leave_the_queue_with_their_callers() -> None:
    async def scenario() -> list[int]:
        batches = Batches(lambda requests: [], ServeConfig(max_waiting=2), lambda line: None)
        callers = [asyncio.create_task(batches.answer(request_of("one"))) for _ in range(2)]
        await asyncio.sleep(0)
        counts = [batches.waiting]
        try:
            await batches.answer(request_of("one too many"))
        except asyncio.QueueFull:
            callers[0].cancel()
        await asyncio.wait([callers[0]])
        counts.append(batches.waiting)
        callers[1].cancel()
        return counts

    assert asyncio.run(scenario()) == [2, 1]
