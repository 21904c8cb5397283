"""Research: rules and policies of other systems, and the simulator that compares them.

Not in the wheel; no package of the product imports it.
"""
