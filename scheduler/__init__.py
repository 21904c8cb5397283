"""headgate's decisions: pure policies, and the placement of the processes that carry them out."""
