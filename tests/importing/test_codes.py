"""Files with codes: the formats, and what is wrong with other files."""

from pathlib import Path

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import bart
from branchnorm_jax.importing.codes import make_side, read_codes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#version: 0.2\na b\nab c</w>\n", (["a b", "ab c</w>"], False)),
        ("#version: 0.2\r\na b\r\n# 3</w>\r\n", (["a b", "# 3</w>"], False)),
        ("#version: 0.1\na </w>\nb a</w>\n", (["a </w>", "b a</w>"], True)),
        ("a </w>\nb a</w>\n", (["a </w>", "b a</w>"], True)),
        ("a b\nab c</w>\n", (["a b", "ab c</w>"], False)),
        ("a b 31\nab c</w> 7\n1 2 3\n", (["a b", "ab c</w>", "1 2"], False)),
    ],
)
def test_formats(text: str, expected: tuple[list[str], bool], tmp_path: Path) -> None:
    (tmp_path / "codes").write_bytes(text.encode())
    assert read_codes(tmp_path / "codes") == expected


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "no line ends a word with </w>"),
        (b"#version: 0.2\n", "no line ends a word with </w>"),
        (b"#version: 0.2\n\xc4\xa0 t\nh e\n", "no line ends a word with </w>, so these are not codes"),
        (b"#version: 0.3\na b</w>\n", "#version: 0.3 is not supported, only #version: 0.1 and #version: 0.2"),
        (b"#version: 0.2\na b</w>\nc\n", "line 3: expected two symbols, as in"),
        (b"#version: 0.2\na b</w> 7\n", "line 2: expected two symbols, as in"),
        (b"#version: 0.2\na b</w>\n\nc d\n", "line 3: expected two symbols, as in"),
        (b"a b</w> 12\nc d\n", "line 2: expected two symbols and a count, as in"),
        (b"a b</w> 12\nc d many\n", "line 2: expected two symbols and a count, as in"),
        (b"\x0a\x07\x0a\x05<unk>\xff", "line 3: not valid UTF-8"),
        (b"x y</w>\n", "codes: only 0 of 1 merges are in dict.en.txt: the two do not belong together"),
    ],
)
def test_other_files_are_one_line(content: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "codes").write_bytes(content)
    ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "ab", "c@@"])}
    with pytest.raises(UserError, match=fault) as error:
        make_side(tmp_path / "codes", "en", ids, bart.SPECIAL, {"<s>"})
    assert "\n" not in str(error.value)
