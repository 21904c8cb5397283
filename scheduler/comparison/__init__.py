"""Staleness rules of other systems, to compare StaleFlow's with: a file each, and a line in `scheduler/policies/rules.py`.

B is `batch`. A group's staleness is the batch it is trained in less the version it started under. *Live* groups run, or wait to
be trained. The bounds hold whatever happens.

| rule | eta is | staleness | live groups | who waits for a long group |
|---|---|---|---|---|
| staleflow | the bound | <= eta | <= (eta + 1) * (B + spare_groups) | its own batch |
| synchronous | ignored, 0 | 0 | <= B | everybody |
| one_step | ignored, 1 | <= 1 | <= 2 B | everybody, when the batch before it is trained |
| slime | update_weights_interval, >= 1 | <= eta | <= 2 B; < 3 B if groups fail | as one_step |
| roll | async_generation_ratio | <= eta | <= (eta + 1) B | every younger group |
| areal | max_staleness | not bounded | <= (eta + 1) B | nobody |
| verl | staleness_threshold, in batches | not bounded | <= (eta + 1) B | nobody |

Under areal and verl, `[staleness] late = "mask"` has the gateway mask tokens older than eta, so that what is trained is bounded
token by token.

With eta = 0, areal, verl and roll are synchronous in what may start, as long as version numbers are not skipped. The
competitors refuse `Unstick` and ignore the settings that are staleflow's own (gateway/settings.py refuses those for them). What
they have in common is in `queue.py`.
"""
