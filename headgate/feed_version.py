"""The version of the feed, by which trainers and gateways know whether they understand each other (docs/topics/feed.md). Pure.

It grows when a field or column is removed or changes its meaning. Added ones change nothing: readers ignore those that they do
not know.
"""

from __future__ import annotations

FEED_VERSION = 3
OLDEST_FEED = 2
"""The oldest version that this build works with, on either side."""
FEED_HEADER = "x-headgate-feed"
"""Requests of `headgate.client` and responses of leases have it."""
