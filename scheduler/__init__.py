"""headgate's decisions: pure policies, the control program that applies them, lengths, plans, and the start of clusters."""
