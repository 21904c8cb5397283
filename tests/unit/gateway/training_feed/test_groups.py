"""The flags that a batch's tokens get when it is read."""

from __future__ import annotations

import numpy as np

from gateway.config import StalenessSettings
from gateway.training_feed.groups import GroupReader
from headgate.types import TokenFlag


def test_tokens_beyond_the_bound_and_of_orphaned_versions_are_flagged() -> None:
    staleness = StalenessSettings(eta=1)
    marks = GroupReader("m", staleness, lambda: [3])._marks()
    flags = marks.flags(np.array([1, 2, 3], np.int32), np.zeros(3, np.uint8), 3)
    assert flags.tolist() == [TokenFlag.LATE, 0, TokenFlag.ORPHANED]
