"""Hostile input and requests: the trials repeat, and their verdicts can fail."""

import random
from pathlib import Path

import pytest

from branchnorm_jax.data.formats import pairs_in
from branchnorm_jax.errors import UserError
from branchnorm_jax.serving.access import Access
from faults import hostile, inputs, requests
from faults.inputs import Command, verdict
from faults.processes import Finished


@pytest.mark.parametrize("seed", range(20))
def test_hostile_lines_are_determined_by_the_seed_and_as_many_as_requested(seed: int) -> None:
    content = hostile.lines(random.Random(seed), 50, seed % 2 == 0)
    assert content == hostile.lines(random.Random(seed), 50, seed % 2 == 0)
    assert len(hostile.plain(content)) == 50


def test_invalid_lines_are_found() -> None:
    for invalid in hostile.INVALID:
        assert hostile.first_invalid(b"a\nb" + invalid + b"\xff\nc\xff") == 2
    assert hostile.first_invalid("".join(hostile.SPECIAL).encode()) == 0


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_damage_is_not_between_frames(suffix: str) -> None:
    rng = random.Random(0)
    frames = hostile.compressed(b"text\n" * 100, suffix, rng)
    whole = b"".join(frames)
    for _ in range(100):
        damaged = hostile.damaged(frames, rng)
        assert damaged != whole
        assert damaged not in (whole[: sum(map(len, frames[:count]))] for count in range(len(frames)))


@pytest.mark.parametrize("number", range(6))
def test_readers_lose_nothing(number: int, tmp_path: Path) -> None:
    outcome = inputs.read_files(random.Random(number), tmp_path)
    assert (outcome.lost, outcome.wrong) == ("", "")


def test_readers_that_lose_a_text_or_refuse_it_without_a_reason_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise UserError("no")

    def fails(*_: object) -> None:
        raise KeyError("x")

    def changed(path: Path, languages: tuple[str, str]) -> list[tuple[str, str]]:
        return [("a", "b") for _ in pairs_in(path, languages)]

    parts = {lambda *_: [("a", "b")]: "left out instead of", refuses: "", fails: "KeyError", changed: "was changed"}
    for broken, part in parts.items():
        monkeypatch.setattr(inputs, "pairs_in", broken)
        monkeypatch.setattr(inputs, "text_lines", broken)
        outcome = inputs.read_files(random.Random(1), tmp_path)
        assert outcome.lost or outcome.wrong
        assert part in outcome.lost + outcome.wrong


REFUSED, TWO_LINES = Command([], place="a"), Command([], lines=2)


@pytest.mark.parametrize(
    ("command", "done", "right"),
    [
        (REFUSED, Finished(2, "", "UserError: a: no such file\n"), True),
        (REFUSED, Finished(2, "", "some lines\nUserError: a: no such file\n"), True),
        (REFUSED, Finished(2, "", "UserError: a\nb: no such file\n"), False),
        (REFUSED, Finished(2, "", "UserError: no such file\n"), False),
        (REFUSED, Finished(3, "", "DivergedError: a\n"), False),
        (REFUSED, Finished(0, "", ""), False),
        (REFUSED, Finished(1, "", "Traceback (most recent call last)\nKeyError: 'x'\n"), False),
        (REFUSED, Finished(-9, "", ""), False),
        (TWO_LINES, Finished(0, "a\nb\n", ""), True),
        (TWO_LINES, Finished(0, "a\n", ""), False),
        (TWO_LINES, Finished(2, "", "UserError: no\n"), False),
    ],
)
def test_verdicts_of_commands(command: Command, done: Finished, right: bool) -> None:
    assert (verdict(command, done) == ("", "")) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx: nosniff\r\n\r\n{"translations": ["a"]}', True),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx: nosniff\r\n\r\n{"translations": ["b"]}', False),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"translations": ["a"]}', False),
        (b'HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n{"translations": ["a"]}', False),
        (b"HTTP/1.1 500 Error\r\n\r\n", False),
        (b"", False),
    ],
)
def test_verdicts_of_answers(answer: bytes, right: bool) -> None:
    attempt = requests.Attempt("good", [], (200,), ["a"])
    assert (requests.fault_of(attempt, answer) == "") == right


def test_servers_that_mix_up_answers_or_accept_any_token_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BURSTS", (20,))
    trial = [requests.burst(random.Random(number), Path()).wrong for number in range(3)]
    assert trial[1:] == ["", ""]  # the first one may open what the process keeps open
    with monkeypatch.context() as patch:
        patch.setattr(requests, "echo", lambda batch: [requests.to_json({"translations": ["x"]}) for _ in batch])
        assert requests.burst(random.Random(1), Path()).wrong
    with monkeypatch.context() as patch:
        patch.setattr(Access, "check_token", lambda *_: None)
        patch.setattr(Access, "check_site", lambda *_: None)
        patch.setattr(requests, "KINDS", (requests.unwelcome,))
        assert "status 200 instead of" in requests.burst(random.Random(2), Path()).wrong
