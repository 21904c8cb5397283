"""Reactors: fixed topology, logical time, a recording of every run, and its replay (the model: arXiv 2312.04704)."""

from scheduler.reactor.clock import MILLISECOND, SECOND, Clock, Tag, VirtualClock, WallClock
from scheduler.reactor.context import Context
from scheduler.reactor.elements import Input, LogicalAction, Output, PhysicalAction, TopologyError
from scheduler.reactor.reading import BadRecording
from scheduler.reactor.recording import Limit, Recording
from scheduler.reactor.replay import Difference, ReplayReport, RunReport, replay
from scheduler.reactor.runtime import Runtime, drive
from scheduler.reactor.topology import Program, Reactor

__all__ = [
    "MILLISECOND",
    "SECOND",
    "BadRecording",
    "Clock",
    "Context",
    "Difference",
    "Input",
    "Limit",
    "LogicalAction",
    "Output",
    "PhysicalAction",
    "Program",
    "Reactor",
    "Recording",
    "ReplayReport",
    "RunReport",
    "Runtime",
    "Tag",
    "TopologyError",
    "VirtualClock",
    "WallClock",
    "drive",
    "replay",
]
