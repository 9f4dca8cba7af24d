"""Cases of parametrised tests, most of which only `make test-all` tests."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest


def quick_and_slow(cases: Sequence[Any] | Mapping[str, Any], quick: Collection[Any]) -> list[Any]:
    """Returns test parameters; those that are not in `quick` are marked slow.

    Args:
      cases: the values, or their names and the values.
      quick: values, or names if `cases` has them.
    """
    named = cases if isinstance(cases, Mapping) else None
    return [
        pytest.param(
            named[case] if named else case, id=case if named else None, marks=[pytest.mark.slow] * (case not in quick)
        )
        for case in cases
    ]
