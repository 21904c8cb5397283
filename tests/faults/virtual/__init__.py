"""State machines against the parts that several processes share, under reordered, lost and repeated messages.

Everything runs on a virtual clock, one step at a time, so a failing run repeats. The examples are the same in every run; with
`HEADGATE_MACHINES=20` there are twenty times as many, and others each time. `HEADGATE_SHRINK=1` lets Hypothesis make a failing
one small, which can take minutes.
"""
