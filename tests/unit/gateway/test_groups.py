"""The flags that a batch's tokens get when it is read."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from gateway.feed.groups import GroupReader
from gateway.sections import StalenessSettings
from gateway.types import TokenFlag


@pytest.mark.parametrize(
    ("rule", "of_late", "late"),
    [("staleflow", "cancel", True), ("areal", "cancel", False), ("areal", "mask", True)],
)
def test_a_token_is_late_only_where_every_token_is_bounded(rule: str, of_late: str, late: bool) -> None:
    staleness = StalenessSettings.model_validate({"rule": rule, "eta": 1, "late": of_late})
    marks = GroupReader("m", staleness, lambda: [3])._marks()
    flags = marks.flags(np.array([1, 2, 3], np.int32), np.zeros(3, np.uint8), 3)
    assert flags.tolist() == [TokenFlag.LATE if late else 0, 0, TokenFlag.ORPHANED]


@pytest.mark.parametrize(("rule", "late"), [("verl", "drop"), ("roll", "mask"), ("slime", "drop")])
def test_a_rule_without_such_late_groups_says_so(rule: str, late: str) -> None:
    with pytest.raises(ValidationError, match=f"late = '{late}' is for rule = staleflow.*, not '{rule}'"):
        StalenessSettings.model_validate({"rule": rule, "late": late})
