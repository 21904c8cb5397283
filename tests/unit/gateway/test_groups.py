"""The flags that a batch's tokens get when it is read."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.feed.groups import GroupReader
from gateway.sections import StalenessSettings
from gateway.types import TokenFlag


@pytest.mark.parametrize(("rule", "late"), [("staleflow", True), ("areal", False)])
def test_a_token_is_late_only_under_the_rule_that_bounds_every_token(rule: str, late: bool) -> None:
    staleness = StalenessSettings.model_validate({"rule": rule, "eta": 1})
    marks = GroupReader("m", staleness, lambda: [3])._marks()
    flags = marks.flags(np.array([1, 2, 3], np.int32), np.zeros(3, np.uint8), 3)
    assert flags.tolist() == [TokenFlag.LATE if late else 0, 0, TokenFlag.ORPHANED]
