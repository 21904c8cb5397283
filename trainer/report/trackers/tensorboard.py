"""TensorBoard: event files under `[run] dir`, in `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.report.samples import as_markdown, as_table
from trainer.report.trackers.base import About


class TensorBoard:
    """A writer of event files; every start adds one, and TensorBoard shows them as one curve."""

    def __init__(self, about: About) -> None:
        self._directory = about.directory / "tensorboard"
        self._writer: Any = None

    def open(self, run: str | None) -> str:
        """Begin an event file; the folder is the run."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._directory))
        return run or self._directory.name

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Write the figures as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(
            step, at, [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        )

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the calls as a text, which TensorBoard shows as Markdown."""
        self._text("samples", step, at, as_markdown(rows))

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the episodes as a table of Markdown."""
        self._text("episodes", step, at, as_table(rows))

    def _text(self, tag: str, step: int, at: float, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        text = make_tensor_proto([markdown.encode()])
        metadata = create_summary_metadata(display_name=tag, description="")
        self._write(step, at, [Summary.Value(tag=tag, metadata=metadata, tensor=text)])

    def close(self, failed: bool) -> None:
        """End the event file."""
        self._writer.close()

    def _write(self, step: int, at: float, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()
