"""State machines against the parts that several processes share, under reordered, lost and repeated messages.

Everything runs in one thread on a virtual clock: a failing run repeats, and Hypothesis makes it small. `HEADGATE_MACHINES=20` runs
twenty times as many examples as usual.
"""
