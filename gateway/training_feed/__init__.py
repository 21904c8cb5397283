"""Brings rewarded groups to a trainer.

The stored staleness ledger (`ledger`) and its decisions about groups (`decision_log`, `explain`); reading groups (`groups`);
leasing batches (`leases`) and trained batches (`batches`).
"""
