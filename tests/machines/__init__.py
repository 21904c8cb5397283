"""State machines against the parts that several processes share, under reordered, lost and repeated messages.

Everything runs on a virtual clock, one step at a time, so a failing run repeats. `HEADGATE_MACHINES=20` runs twenty times as many
examples as usual; `HEADGATE_SHRINK=1` lets Hypothesis make a failing one small, which can take minutes.
"""
