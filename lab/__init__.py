"""Research: the simulator, and the notes with measurements.

Not in the wheel; no package of the product imports it.
"""
