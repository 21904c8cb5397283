"""Spans of calls by OpenTelemetry: the seam is `base.py`, the real part `otel.py`, which alone imports the SDK."""
