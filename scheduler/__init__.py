"""headgate's decisions: pure policies, the control program that applies them, plans, and the start of clusters."""
