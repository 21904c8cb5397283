"""Brings rewarded groups to a trainer.

The stored staleness ledger (`ledger`) and its decisions about groups (`decision_log`, `full`); reading groups (`groups`);
leasing batches (`leases`), trained batches (`batches`), and the export to Parquet (`export`).
"""
