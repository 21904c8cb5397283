"""From rewarded groups to a trainer: the stored staleness ledger (`ledger`) and the leases by which batches leave (`leases`)."""
