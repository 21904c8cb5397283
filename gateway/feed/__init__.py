"""Brings rewarded groups to a trainer.

The stored staleness ledger (`ledger`) and what became of whom (`decision_log`); groups as they are read (`groups`); the leases by
which batches leave (`leases`), and batches that were trained (`batches`).
"""
