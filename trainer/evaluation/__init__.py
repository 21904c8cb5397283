"""Evaluation: episodes outside of training (`episodes`), the figures of their outcomes (`figures`), and both as a process
(`child`)."""
